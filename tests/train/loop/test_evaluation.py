import torch
from toys import noisy_head, random_target

from data.prepared.packing import PackedDataset
from data.templates.record_encoder import Sample
from eval.decode.engine import decode
from eval.measure.acceptance_stats import PromptSteps, tau
from eval.measure.target_answers import LocalAnswerSource
from heads.decoding.tree import Tree
from heads.medusa import MedusaDrafter
from train.loop.evaluation import MAX_REPLAY_TOKENS, HeldoutReplay, select_heldout_prompts


def test_prompts_end_where_the_first_learnt_token_is() -> None:
    chat = Sample([5, 6, 7, 8, 9], [False, False, True, True, False])
    text = Sample(list(range(10, 50)), [True] * 40)
    heldout = PackedDataset([chat, text], 64, seed=0)
    assert sorted(select_heldout_prompts(heldout, 8)) == [[5, 6], list(range(10, 42))]
    assert len(select_heldout_prompts(heldout, 1)) == 1


def test_the_replayed_tau_is_that_of_decoding() -> None:
    target = random_target()
    head = noisy_head(target)
    prompts = [[5, 17, 40, 8], [61, 23, 77]]
    replayed = HeldoutReplay(LocalAnswerSource(target), prompts, 3, head.taps)(head)
    steps = [
        decode(target, MedusaDrafter(head, Tree.make_chain(3)), prompt, MAX_REPLAY_TOKENS).steps
        for prompt in prompts
    ]
    assert replayed["tau"] == tau([PromptSteps("all", each) for each in steps])
    assert set(replayed) == {"tau", "greedy_alpha_d1", "greedy_alpha_d2", "greedy_alpha_d3"}


def test_training_the_head_does_not_change_the_answers() -> None:
    target = random_target()
    head = noisy_head(target)
    replay = HeldoutReplay(LocalAnswerSource(target), [[5, 17, 40]], 3, head.taps)
    replay(head)
    first = replay.answers[0][0]
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    assert replay(head)["tau"] == 1.0  # drafts nothing but token 0
    assert replay.answers[0][0] is first
