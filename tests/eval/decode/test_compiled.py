"""A compiled target writes what it writes without, whoever drafts."""

from collections.abc import Callable, Iterator

import pytest
import torch
from toys import endless_target, noisy_head

from conf.settings.eagle import EagleConfig
from eval.decode.drafters.lookup import PromptLookup
from eval.decode.drafters.self_speculation import SelfDraft, list_skipped_layers
from eval.decode.engine import NoDraft, Step, decode_batch
from eval.decode.hf_generate import hf_generate
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import DynamicShape, Tree, make_static_tree
from heads.eagle.eagle import EagleHead
from heads.eagle.network import EagleDrafter
from heads.medusa import MedusaDrafter
from heads.target_model.model import Target
from heads.vocab import DraftVocab

PROMPTS = [[5, 17, 40, 8, 77, 23, 61], [5, 17], [61, 9, 30, 9]]
SEEDS = [0, 1, 2]
COUNTERS = torch._dynamo.utils.counters


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    COUNTERS.clear()
    yield
    assert not COUNTERS["graph_break"]
    torch._dynamo.reset()


def target_of(family: str = "llama", num_layers: int = 2) -> Target:
    return endless_target(family, num_hidden_layers=num_layers)


def drafters(target: Target) -> dict[str, Callable[[], Drafter]]:
    """Drafters that read no layers and some that do, of the same draft length."""
    vocab = DraftVocab.make_full(target.vocab_size)
    eagle = EagleHead.from_settings(target, EagleConfig(layers=[0, 1, 2]), vocab, seed=0)
    medusa = noisy_head(target)
    skip = list_skipped_layers(target, 1)
    length = medusa.num_heads
    return {
        "none": NoDraft,
        "medusa": lambda: MedusaDrafter(medusa, make_static_tree(length, 8)),
        "medusa chain": lambda: MedusaDrafter(medusa, Tree.make_chain(length)),
        "eagle chain": lambda: EagleDrafter(eagle, length, GREEDY, SEEDS),
        "eagle": lambda: EagleDrafter(eagle, DynamicShape(3, 3, 8)),
        "lookup": lambda: PromptLookup(4),
        "early exit": lambda: SelfDraft(target, skip, 2, GREEDY, SEEDS),
    }


Written = list[tuple[list[int], list[Step]]]


def written(target: Target, make: Callable[[], Drafter], num_texts: int) -> Written:
    found = decode_batch(target, make(), PROMPTS[:num_texts], 20)
    return [(text.token_ids, text.steps) for text in found]


@pytest.mark.slow
@pytest.mark.parametrize("num_texts", [1, 3])
def test_heads_join_a_compiled_target_in_any_order(num_texts: int) -> None:
    target = target_of()
    makes = drafters(target)
    expected = {name: written(target, make, num_texts) for name, make in makes.items()}
    # Another one, whose layers nobody has read before it is compiled.
    target = target_of()
    target.compile(64, backend="eager")
    for name, make in drafters(target).items():
        assert written(target, make, num_texts) == expected[name], name


def test_on_a_cpu_one_graph_is_for_drafts_and_texts_of_any_length() -> None:
    target = target_of(num_layers=1)
    target.compile(64, backend="eager")

    def graphs(num_tokens: int, length: int) -> int:
        decode_batch(target, PromptLookup(num_tokens, 1), [[7, 8, 9] * 9], length)
        return COUNTERS["stats"]["unique_graphs"]

    assert graphs(2, 12) > 0
    # A draft that is accepted may be the first for which entries move.
    known = graphs(5, 60)
    assert [graphs(7, 90), graphs(3, 40)] == [known, known]


@pytest.mark.slow
def test_a_target_that_needs_masks_is_compiled_with_them() -> None:
    target = target_of(num_layers=1)
    expected = written(target, NoDraft, 3)
    target.needs_masks = "a test"
    target.compile(64, backend="eager")
    assert written(target, NoDraft, 3) == expected
    assert COUNTERS["stats"]["unique_graphs"]


@pytest.mark.slow
def test_generate_is_compiled_beside_it_over_a_static_cache(monkeypatch) -> None:
    target = target_of(num_layers=1)
    expected = [text.token_ids for text in hf_generate(target, PROMPTS, 20, GREEDY, 0)]
    seen = {}
    usual = target.model.generate

    def generate(*args, **kwargs):
        seen.update(kwargs["generation_config"].to_dict())
        kwargs["generation_config"].compile_config.backend = "eager"
        return usual(*args, **kwargs)

    target.compile(64)
    monkeypatch.setattr(target.model, "generate", generate)
    found = hf_generate(target, PROMPTS, 20, GREEDY, 0)
    assert [text.token_ids for text in found] == expected
    assert (seen["cache_implementation"], seen["max_cache_len"]) == ("static", 64)
    assert COUNTERS["stats"]["unique_graphs"]
    times = found[0].times
    assert 0 < times.prefill < times.total / 2


@pytest.mark.slow
def test_generated_code_changes_nothing() -> None:
    target = target_of("gemma2")
    makes = drafters(target)
    chosen = ("none", "eagle")
    expected = {name: written(target, makes[name], 2) for name in chosen}
    target.compile(64)
    for name in chosen:
        assert written(target, makes[name], 2) == expected[name], name
    assert COUNTERS["stats"]["unique_graphs"] >= 2
