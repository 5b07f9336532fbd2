import copy

import pytest
import torch
from torch import nn
from toys import FAMILIES, random_model
from transformers import DynamicCache

from eval.decode.drafters.self_speculation import ReplayText, SelfDraft, list_skipped_layers
from eval.decode.engine import NoDraft, decode, decode_batch
from eval.measure.replay import replay_response
from heads.decoding.drafting import CommittedTokens, Roots
from heads.decoding.sampling import GREEDY, Sampling
from heads.decoding.tree import Tree
from heads.target_model.decoder import find_decoder
from heads.target_model.model import FeatureLayers, Target

PROMPT = [5, 17, 40, 8, 77, 23, 61]
NUM_LAYERS = 6
SAMPLED = Sampling(temperature=0.7, top_p=0.9)


class SelfReplay:
    """Drafts of `SelfDraft` along a text, for `eval.measure.replay`."""

    taps = FeatureLayers()

    def __init__(self, target: Target, skip: tuple[int, ...]) -> None:
        self.target, self.skip = target, skip

    def compute_candidates(
        self, output, token_ids, first: int, depth: int, width: int
    ) -> torch.Tensor:
        return ReplayText(self.target, token_ids, first + 1).draft_all_places(self.skip, depth)


def agreeing_target(family: str = "llama") -> Target:
    """Layers add little to what the embedding says, so that some can be missed, not for nothing."""
    model = random_model(family, num_hidden_layers=NUM_LAYERS)
    for name, parameter in find_decoder(model).layers.named_parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(0.6)
        elif "post_" in name and "feedforward" in name:
            parameter.data.sub_(0.7)
    model.get_output_embeddings().weight.data.mul_(6)  # sometimes sure
    model.generation_config.eos_token_id = None
    return Target(model, None, family)


QUICK = {"gemma2", "lfm2", "llama"}
FITTING = sorted(set(FAMILIES) - {"gemma4_text"})  # whose layers use keys of each other
EACH = [pytest.param(f, marks=[] if f in QUICK else pytest.mark.slow) for f in FITTING]


@pytest.fixture(scope="module", params=EACH)
def each(request) -> Target:
    return agreeing_target(request.param)


@pytest.fixture(scope="module")
def target() -> Target:
    return agreeing_target()


def kinds(target: Target) -> list[tuple[int, ...]]:
    """Early exit, a layer in the middle, and all layers of each kind that is not alone."""
    types = getattr(target.config, "layer_types", None) or []
    same = [tuple(i for i, t in enumerate(types) if t == kind) for kind in sorted(set(types))]
    mixed = same if len(same) > 1 else []
    return [list_skipped_layers(target, 4), (2,), *mixed]


def test_early_exit_leaves_out_the_last_layers(target) -> None:
    assert list_skipped_layers(target, 4) == (4, 5)
    assert list_skipped_layers(target, NUM_LAYERS) == ()


def test_the_text_is_the_targets_and_replay_equals_decoding(each) -> None:
    text = decode(each, NoDraft(), PROMPT, 24).token_ids
    num_accepted = 0
    for skip in kinds(each):
        drafted = decode(each, SelfDraft(each, skip, 3), PROMPT, 24)
        assert drafted.token_ids == text
        assert (
            replay_response(each, SelfReplay(each, skip), Tree.make_chain(3), PROMPT, text)
            == drafted.steps
        )
        num_accepted += sum(step.num_accepted for step in drafted.steps)
    assert num_accepted > 0


def test_a_batch_gives_every_text_that_it_gives_alone(each) -> None:
    prompts = [PROMPT, PROMPT[:2], PROMPT[::-1] * 2, [9]]
    text = decode(each, NoDraft(), prompts[1], 7).token_ids
    each.model.generation_config.eos_token_id = [text[6]]
    try:
        check_batch(each, prompts)
    finally:
        each.model.generation_config.eos_token_id = None


def check_batch(target: Target, prompts: list[list[int]]) -> None:
    for sampling in (GREEDY, SAMPLED):

        def drafter(*seeds: int, sampling: Sampling = sampling) -> SelfDraft:
            return SelfDraft(target, list_skipped_layers(target, 4), 3, sampling, seeds)

        together = decode_batch(target, drafter(10, 11, 12, 13), prompts, 16, sampling, range(4))
        for row, (prompt, found) in enumerate(zip(prompts, together, strict=True)):
            alone = decode(target, drafter(10 + row), prompt, 16, sampling, row)
            assert (found.token_ids, found.steps) == (alone.token_ids, alone.steps)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_with_all_layers_everything_is_accepted(target, sampling: Sampling) -> None:
    drafted = decode(target, SelfDraft(target, (), 3, sampling=sampling), PROMPT, 41, sampling)
    assert [(step.num_accepted, step.num_emitted) for step in drafted.steps] == [(3, 4)] * 10


def proposed(target: Target, skip: tuple[int, ...], num_tokens: int) -> torch.Tensor:
    """[K] drafted behind PROMPT, whose last token is the root."""
    cache = target.new_cache(1)
    ids = torch.tensor([PROMPT[:-1]])
    places = torch.arange(ids.shape[1])
    output = target.run_pending(cache, ids, (places[:, None] >= places)[None], places[None])
    cache.commit([places.tolist()])
    drafter = SelfDraft(target, skip, num_tokens)
    drafter.observe(CommittedTokens([PROMPT[:-1]], output, cache))
    return drafter.propose(Roots.from_ids(PROMPT[-1:])).tokens[0]


@torch.no_grad()
def test_an_early_exit_drafts_what_a_smaller_model_writes(each) -> None:
    """With its first layers alone, a model keeps the same keys and values as with all."""
    smaller = copy.deepcopy(each.model)
    decoder = find_decoder(smaller)
    decoder.layers = nn.ModuleList(decoder.layers[:3])
    decoder.config.num_hidden_layers = 3
    ids = list(PROMPT)
    for _ in range(4):
        ids.append(smaller(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
    assert proposed(each, list_skipped_layers(each, 3), 4).tolist() == ids[len(PROMPT) :]


@torch.no_grad()
def test_other_layers_are_left_out_of_the_drafts_alone(each) -> None:
    """By transformers' own cache: the text read with all layers, the drafts without some."""
    for skip in kinds(each)[1:]:
        model = copy.deepcopy(each.model)
        past = DynamicCache(config=model.config)
        name = "cache_params" if model.config.model_type == "mamba2" else "past_key_values"
        model(torch.tensor([PROMPT[:-1]]), use_cache=True, **{name: past})
        for layer in skip:
            find_decoder(model).layers[layer].register_forward_hook(hand_on)
        tokens = PROMPT[-1:]
        for _ in range(4):
            output = model(torch.tensor([tokens[-1:]]), use_cache=True, **{name: past})
            tokens.append(output.logits[0, -1].argmax().item())
        assert proposed(each, skip, 4).tolist() == tokens[1:]


def hand_on(_module: nn.Module, inputs: tuple, output: object) -> object:
    return (inputs[0], *output[1:]) if isinstance(output, tuple) else inputs[0]


@torch.no_grad()
def test_sampled_drafts_keep_the_targets_distribution(target) -> None:
    """Frequencies of the second and third token, against exact probabilities of the target."""
    hot = Sampling(temperature=1.0, top_k=4)
    draws, counts, num_accepted = 900, {}, 0
    skip = list_skipped_layers(target, 4)
    for start in range(0, draws, 100):
        seeds = range(start, start + 100)
        drafter = SelfDraft(target, skip, 2, hot, [seed + (1 << 32) for seed in seeds])
        for text in decode_batch(target, drafter, [PROMPT] * 100, 3, hot, seeds):
            num_accepted += sum(step.num_accepted for step in text.steps)
            counts[tuple(text.token_ids)] = counts.get(tuple(text.token_ids), 0) + 1
    exact = {(): 1.0}
    for _ in range(3):
        exact = {
            (*path, token): before * p
            for path, before in exact.items()
            for token, p in enumerate(after(target, [*PROMPT, *path], hot))
            if p > 0
        }
    assert set(counts) <= set(exact)
    distance = 0.5 * sum(abs(counts.get(path, 0) / draws - p) for path, p in exact.items())
    # E|count/n - p| <= sqrt(p (1 - p) / n): twice the sum of that bounds the distance by far.
    assert distance < sum((p * (1 - p) / draws) ** 0.5 for p in exact.values())
    assert num_accepted > 50


def after(target: Target, ids: list[int], how: Sampling) -> list[float]:
    return how.compute_probabilities(
        target.compute_logits(target.encode_text(ids).hidden_states[0, -1])
    ).tolist()


def test_what_is_skipped_is_back_afterwards(target) -> None:
    before = target.encode_text(PROMPT).hidden_states
    decode(target, SelfDraft(target, list_skipped_layers(target, 1), 2), PROMPT, 8)
    assert torch.equal(target.encode_text(PROMPT).hidden_states, before)
