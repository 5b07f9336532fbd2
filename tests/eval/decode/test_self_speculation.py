import copy
from inspect import signature

import pytest
import torch
from torch import nn
from toys import FAMILIES, random_model
from transformers import DynamicCache

from eval.decode.drafters.self_speculation import ReplayText, SelfDraft, list_skipped_layers
from eval.decode.engine import NoDraft, decode, decode_batch
from eval.measure.replay import replay_response
from heads.decoding.drafting import CommittedTokens, Roots
from heads.decoding.tree import Tree
from heads.target_model.decoder import find_cache_argument, find_decoder
from heads.target_model.model import FeatureLayers, Target

PROMPT = [5, 17, 40, 8, 77, 23, 61]
NUM_LAYERS = 6


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


def test_texts_are_the_targets_and_replay_equals_decoding(each) -> None:
    prompts, num_accepted = [PROMPT, PROMPT[:2], [9]], 0
    texts = [decode(each, NoDraft(), prompt, 9).token_ids for prompt in prompts]
    for skip in kinds(each):
        drafted = decode_batch(each, SelfDraft(each, skip, 3, seeds=range(3)), prompts, 9)
        for prompt, text, found in zip(prompts, texts, drafted, strict=True):
            replay = SelfReplay(each, skip)
            assert found.token_ids == text
            assert replay_response(each, replay, Tree.make_chain(3), prompt, text) == found.steps
            num_accepted += sum(step.num_accepted for step in found.steps)
    assert num_accepted > 0


def proposed(
    target: Target, skip: tuple[int, ...], num_tokens: int, text: list[int] = PROMPT
) -> torch.Tensor:
    """[K] drafted behind a text, whose last token is the root."""
    cache = target.new_cache(1)
    ids = torch.tensor([text[:-1]])
    places = torch.arange(ids.shape[1])
    output = target.run_pending(cache, ids, (places[:, None] >= places)[None], places[None])
    cache.commit([places.tolist()])
    drafter = SelfDraft(target, skip, num_tokens)
    drafter.observe(CommittedTokens([text[:-1]], output, cache))
    return drafter.propose(Roots.from_ids(text[-1:])).tokens[0]


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
        name = find_cache_argument(signature(model.forward).parameters)
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
