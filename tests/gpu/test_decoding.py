"""Decoding on a GPU: beside a CPU, captured and not, one text and several at a time."""

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from devices import DEVICE, on_cuda, on_device
from feature_heads import fresh, settings_of
from toys import noisy_head, random_model, stream
from transformers import GenerationConfig

from conf.settings.eagle import EagleConfig
from data.features.store_writer import HostCopier
from eval.decode.cuda_graphs import CaptureError, CudaGraph, GraphDecoder, compute_num_slots
from eval.decode.drafters.lookup import PromptLookup
from eval.decode.engine import NoDraft, Request, decode, decode_batch, decode_many
from eval.measure.replay import replay_response
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import GREEDY, Sampling, drafter_seeds
from heads.decoding.tree import DynamicShape, Tree, make_static_tree
from heads.eagle.eagle import EagleHead
from heads.eagle.network import EagleDrafter
from heads.medusa import MedusaDrafter
from heads.target_model.check import check_target_support
from heads.target_model.model import Target
from heads.vocab import DraftVocab

pytestmark = pytest.mark.gpu
PROMPT = [5, 17, 40, 8, 77, 23, 61]
SAMPLED = Sampling(temperature=1.0, top_k=20, top_p=0.9)
Draft = Callable[[Any, Sampling, list[int]], Drafter]
"""Makes a drafter of a head, for texts with these seeds."""


@on_cuda
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_decoding_on_cuda_is_lossless_and_replayed_exactly(family: str) -> None:
    target = Target(random_model(family).to("cuda"), None, family)
    target.model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT], device="cuda")
    settings = GenerationConfig(do_sample=False, max_new_tokens=40, pad_token_id=0)
    expected = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=settings
    )[0, len(PROMPT) :].tolist()
    assert decode(target, NoDraft(), PROMPT, 40).token_ids == expected
    head = noisy_head(target)
    for tree in (Tree.make_chain(3), make_static_tree(3, 32)):
        drafted = decode(target, MedusaDrafter(head, tree), PROMPT, 40)
        assert drafted.token_ids == expected
        assert replay_response(target, head, tree, PROMPT, expected) == drafted.steps


@on_cuda
@pytest.mark.parametrize(
    "name",
    ["eagle1", "eagle3", "dflash, causal in a window", "dflash2", "dspark, rnn", "peagle"],
)
def test_heads_on_cuda_are_lossless_and_replayed_exactly(name: str) -> None:
    target = Target(random_model(num_hidden_layers=4).to("cuda"), None, "llama")
    target.model.generation_config.eos_token_id = None
    head = fresh(target, settings_of(name)).eval()
    expected = decode(target, NoDraft(), PROMPT, 40).token_ids
    chain = decode(target, head.drafter(head, 4), PROMPT, 40)
    assert chain.token_ids == expected
    assert replay_response(target, head, Tree.make_chain(4), PROMPT, expected) == chain.steps
    tree = head.drafter(head, DynamicShape(4, 4, 16))
    assert decode(target, tree, PROMPT, 40).token_ids == expected
    sampling = Sampling(temperature=1.0, top_k=1)
    sampled = decode(target, head.drafter(head, 4, sampling), PROMPT, 40, sampling)
    assert sampled.token_ids == expected


@on_cuda
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox"])
def test_bfloat16_targets_pass_the_check(family: str) -> None:
    check_target_support(Target(random_model(family).to("cuda", torch.bfloat16), None, family))


@on_cuda
def test_a_batch_on_cuda_compiled_or_not_equals_its_texts_alone() -> None:
    target = Target(random_model(num_hidden_layers=4).to("cuda"), None, "llama")
    target.model.generation_config.eos_token_id = None
    prompts = [PROMPT, PROMPT[:2], PROMPT[::-1]]
    head = noisy_head(target)

    def drafter() -> MedusaDrafter:
        return MedusaDrafter(head, make_static_tree(3, 16))

    alone = [decode(target, drafter(), prompt, 40).token_ids for prompt in prompts]
    assert [g.token_ids for g in decode_batch(target, drafter(), prompts, 40)] == alone
    target.compile(128)
    assert [g.token_ids for g in decode_batch(target, drafter(), prompts, 40)] == alone


def captured_kinds() -> list[Any]:
    """Ways to draft whose steps are captured: a head of a target, and its drafter."""

    def untrained(name: str) -> Callable[[Target], Any]:
        return lambda target: fresh(target, settings_of(name)).eval()

    def chain(head: Any, how: Sampling, seeds: list[int]) -> Drafter:
        return head.drafter(head, 4, how, drafter_seeds(seeds))

    def tree(head: Any, _how: Sampling, _seeds: list[int]) -> Drafter:
        return head.drafter(head, DynamicShape(4, 4, 16))

    kinds: dict[str, tuple[Callable[[Target], Any], Draft]] = {
        "vanilla": (lambda _: None, lambda *_: NoDraft()),
        "prompt_lookup": (lambda _: None, lambda *_: PromptLookup(4)),
        "medusa_tree": (noisy_head, lambda head, *_: MedusaDrafter(head, make_static_tree(3, 32))),
        "eagle_chain": (untrained("eagle1"), chain),
        "eagle_tree": (untrained("eagle3"), tree),
        "dflash_tree": (untrained("dflash"), tree),
        "dflash2_tree": (untrained("dflash2"), tree),
        "dspark_chain": (untrained("dspark, rnn"), chain),
        "peagle_tree": (untrained("peagle"), tree),
    }
    return [pytest.param(*kind, id=name) for name, kind in kinds.items()]


def target_on(device: str, stop: int | None = None) -> Target:
    target = Target(random_model(num_hidden_layers=4).to(device), None, "llama")
    target.model.generation_config.eos_token_id = stop
    return target


REQUESTS = [Request(PROMPT, 3), Request(PROMPT[:2], 4), Request(PROMPT[::-1], 5)]


@cache
def texts_of_the_cpu(how: Sampling, stop: int | None) -> list[list[int]]:
    """Texts of plain decoding."""
    found = decode_many(target_on("cpu", stop), lambda _: NoDraft(), REQUESTS, 40, 1, how)
    return [generation.token_ids for generation in found]


# `scripts/bench/gpu.py` picks a kind by the end of an id; what compiles comes last.
@on_device
@pytest.mark.parametrize(("make_head", "draft"), captured_kinds())
@pytest.mark.parametrize(
    ("compiled", "how"),
    [(False, GREEDY), (False, SAMPLED), (True, GREEDY)],
    ids=["greedy", "sampled", "compiled"],
)
def test_captured_steps_are_those_that_are_not_and_write_the_text_of_the_cpu(
    make_head: Callable[[Target], Any],
    draft: Draft,
    compiled: bool,
    how: Sampling,
    record_property: Callable[[str, object], None],
) -> None:
    """Draws hash seeds alike on every device, so a text that is sampled is known as well."""
    stop = texts_of_the_cpu(how, None)[1][11]
    target = target_on(DEVICE, stop)
    make = partial(draft, make_head(target), how)
    expected = decode_many(target, make, REQUESTS, 40, 1, how)
    texts, of_cpu = [g.token_ids for g in expected], texts_of_the_cpu(how, stop)
    record_property(
        "equal", sum(mine == theirs for mine, theirs in zip(texts, of_cpu, strict=True))
    )
    record_property("accepted", sum(step.num_accepted for g in expected for step in g.steps))
    if compiled:
        target.compile(compute_num_slots(60, 64))
    for batch_size in (1, 2, 3):
        way = GraphDecoder(target, make, 40, how) if DEVICE == "cuda" else None
        for _ in range(2):
            if way is None:
                found = decode_many(target, make, REQUESTS, 40, batch_size, how)
            else:
                found = way.decode_requests(REQUESTS, batch_size)
            assert [g.token_ids for g in found] == texts
            assert [g.steps for g in found] == [g.steps for g in expected]
    # Drafts are accepted by draws of their own, so with them a sampled text is another one.
    if how.is_greedy or isinstance(make([0]), NoDraft):
        assert texts == of_cpu


@on_cuda
def test_a_capture_that_fails_leaves_nothing_behind() -> None:
    before, numbers = torch.cuda.current_stream(), torch.zeros(4, device="cuda")

    def add_one() -> None:
        numbers.add_(1)

    with pytest.raises(CaptureError, match="captur") as failed:
        CudaGraph(lambda: numbers.add_(1).tolist() and None, torch.cuda.graph_pool_handle())
    assert "previous error" not in str(failed.value)
    assert torch.cuda.current_stream() == before
    torch.randn(4, device="cuda")
    numbers.zero_()
    graph = CudaGraph(add_one, torch.cuda.graph_pool_handle())
    graph.launch_graph()
    assert numbers.tolist() == [1.0] * 4


@on_cuda
def test_a_step_on_cuda_waits_once() -> None:
    target = Target(random_model(num_hidden_layers=4).to("cuda"), None, "llama")
    target.model.generation_config.eos_token_id = None
    head = EagleHead.from_settings(
        target, EagleConfig(), DraftVocab.make_full(target.vocab_size), seed=0
    )
    steps = stream(target, EagleDrafter(head, DynamicShape(3, 3, 8)), [PROMPT, PROMPT[:3]], 40)
    next(steps), next(steps)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            next(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in found if "synchroniz" in str(w.message)]) == 1


@on_cuda
def test_copies_to_the_host_hold_what_was_computed_before_them() -> None:
    copies, taken = HostCopier(torch.device("cuda"), 1, 50 * 3 * 2048**2), []
    for number in range(50):
        ones = torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16)
        # Late, and in memory that the next round would like to have.
        states = (ones @ ones @ ones).mul_(0).add_(number)
        taken.append(copies.start_copy({"states": states, "int8": states[1:].to(torch.int8)}))
    for number, copied in enumerate(taken):
        found = copied()
        assert found["states"].is_pinned()
        assert found["states"].eq(number).all()
        assert found["int8"].eq(number).all()
        assert found["int8"].shape == (2047, 2048)
