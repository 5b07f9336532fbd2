import pytest
import torch
from toys import noisy_head, random_target

from data.prepared.packing import PackedDataset
from data.templates.record_encoder import Sample
from eval.decode.engine import decode
from eval.measure.acceptance_stats import PromptSteps, compute_tau_interval, tau
from eval.measure.target_answers import LocalAnswerSource
from heads.decoding.tree import Tree
from heads.medusa import MedusaDrafter
from train.loop.evaluation import (
    MAX_REPLAY_TOKENS,
    format_figures,
    make_heldout_replay,
    select_heldout_prompts,
)


def test_prompts_end_where_the_first_learnt_token_is() -> None:
    chat = Sample([5, 6, 7, 8, 9], [False, False, True, True, False])
    text = Sample(list(range(10, 50)), [True] * 40)
    heldout = PackedDataset([chat, text], 64, seed=0)
    assert sorted(select_heldout_prompts(heldout, 8)) == [[5, 6], list(range(10, 42))]
    assert len(select_heldout_prompts(heldout, 1)) == 1


def test_the_replayed_tau_is_that_of_decoding(capsys: pytest.CaptureFixture[str]) -> None:
    target = random_target()
    head = noisy_head(target)
    prompts = [[5, 17, 40, 8], [61, 23, 77]]
    replayed = make_heldout_replay(LocalAnswerSource(target), prompts, 3, head.taps)(head)
    steps = [
        decode(target, MedusaDrafter(head, Tree.make_chain(3)), prompt, MAX_REPLAY_TOKENS).steps
        for prompt in prompts
    ]
    prompts_steps = [PromptSteps("all", each, dialogue=n) for n, each in enumerate(steps)]
    assert replayed["tau"] == tau(prompts_steps)
    assert replayed["tau_prompts"] == 2
    assert (replayed["tau_low"], replayed["tau_high"]) == compute_tau_interval(prompts_steps, 0)
    depths = {"greedy_alpha_d1", "greedy_alpha_d2", "greedy_alpha_d3"}
    assert set(replayed) == {"tau", "tau_prompts", "tau_low", "tau_high", *depths}
    said = capsys.readouterr().err
    assert ("target's own text: 100%" in said, "held-out tau: 100%" in said) == (True, True)


def test_a_line_of_figures_says_what_tau_rests_on() -> None:
    figures = {
        "eval/loss": 2.5,
        "eval/0-1k/top1_d1": 0.5,
        "eval/tau": 1.26,
        "eval/tau_prompts": 1.0,
    }
    assert format_figures(figures) == "loss 2.500, tau 1.260 (1 prompt)"
    more = {"eval/tau_prompts": 16.0, "eval/tau_low": 1.1, "eval/tau_high": 1.4, "eval/tau_b": 3.0}
    assert format_figures(figures | more) == (
        "loss 2.500, tau 1.260 (16 prompts, 95% interval 1.10-1.40), tau_b 3.000"
    )


def test_training_the_head_does_not_change_the_answers() -> None:
    target = random_target()
    head = noisy_head(target)
    replay = make_heldout_replay(LocalAnswerSource(target), [[5, 17, 40]], 3, head.taps)
    replay(head)
    first = replay.answers[0][0]
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    assert replay(head)["tau"] == 1.0  # drafts nothing but token 0
    assert replay.answers[0][0] is first
