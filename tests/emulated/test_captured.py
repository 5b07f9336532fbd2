"""Steps as CUDA graphs on an emulated device: texts and steps are those of the CPU."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from emulated import graphs, kernels
from emulated.device import counted, off
from emulated.test_decoding import KINDS, NUM_TOKENS, counted_steps, random_target
from feature_heads import feature_head, fresh, settings_of
from torch import Tensor
from toys import texts

from eval.compare.methods import PromptDecoder
from eval.decode import cuda_graphs as captured
from eval.decode.cuda_graphs import (
    CapturedPasses,
    CaptureError,
    CudaGraph,
    GraphDecoder,
    PassBatch,
    PassShape,
    find_capture_obstacle,
)
from eval.decode.drafters.lookup import PromptLookup
from eval.decode.drafters.suffix import HybridDrafter, SuffixDrafter, SuffixTree
from eval.decode.engine import DecodingBatch, Generation, NoDraft, Request, decode_many
from eval.tune import step_costs
from heads.decoding import cache as tree_cache
from heads.decoding.drafting import PAD, Draft, Drafter, Roots
from heads.decoding.sampling import GREEDY, Sampling, Typical, drafter_seeds
from heads.decoding.tree import DynamicShape, Tree
from heads.draft_head import DraftHead
from heads.target_model import attention
from heads.target_model.model import Target

LENGTHS = [7, 4, 5, 12, 4]
WITHOUT_HEADS = ("vanilla", "medusa_chain", "medusa_tree", "recycling", "early_exit", "skip_layers")
FEATURES: dict[str, Any] = {"layers": [0, 1], "num_layers": 1}
SHAPE = DynamicShape(3, 3, 8)


def chain(head: Any, how: Sampling, seeds: list[int]) -> Drafter:
    return head.drafter(head, 3, how, seeds)


def tree(head: Any, _how: Sampling, _seeds: list[int]) -> Drafter:
    return head.drafter(head, SHAPE)


LEARNT: dict[str, tuple[str, Callable[..., Drafter], dict[str, Any]]] = {
    "eagle_chain, EAGLE-1": ("eagle1", chain, {}),
    "eagle_tree, EAGLE-3": ("eagle3", tree, {"layers": [0, 1, 2], "fc_norm": True}),
    "dflash_tree": ("dflash", tree, FEATURES),
    "dflash2_chain": ("dflash2", chain, FEATURES),
    "dspark_chain": ("dspark, rnn", chain, FEATURES),
    "peagle_chain": ("peagle", chain, FEATURES),
    "peagle_tree": ("peagle", tree, FEATURES),
}
"""Kind, drafter and settings of heads that learn: only then steps show what they draft from."""
STATIC = [*WITHOUT_HEADS, *LEARNT]


@cache
def prompts() -> list[list[int]]:
    """Prompts of several lengths, out of the texts from which heads learn."""
    with off():
        target = random_target("cpu")
        target.model.generation_config.eos_token_id = []
        found = texts(target, 6, 40)
    return [text[:length] for text, length in zip(found, LENGTHS, strict=False)]


@cache
def on_cpu(name: str) -> tuple[Target, DraftHead]:
    """A target and what has learnt from it."""
    target = random_target("cpu")
    target.model.generation_config.eos_token_id = []
    kind, _, settings = LEARNT[name]
    return target, feature_head(target, kind, 40, 5, **settings)


def prepared(
    device: str, name: str, how: Sampling = GREEDY
) -> tuple[Target, Callable[[list[int]], Drafter]]:
    """A target, and what makes its drafter."""
    if name == "eagle_suffix":
        target, make = prepared(device, "eagle_tree, EAGLE-3")
        return target, lambda seeds: HybridDrafter(make(seeds), SuffixDrafter(SuffixTree(8)), 0.5)
    target = random_target(device)
    if name not in LEARNT:
        return target, lambda seeds: KINDS[name].make(target, how, drafter_seeds(seeds))
    kind, drafter, settings = LEARNT[name]
    with off():
        weights = on_cpu(name)[1].state_dict()
    head = fresh(target, settings_of(kind, **settings))
    head.load_state_dict({key: each.to(device) for key, each in weights.items()})
    return target, lambda seeds: drafter(head.eval(), how, drafter_seeds(seeds))


def decoded(
    device: str, name: str, batch_size: int, stops: list[int], how: Sampling
) -> list[Generation]:
    target, make = prepared(device, name, how)
    target.model.generation_config.eos_token_id = stops
    # Texts that repeat themselves, so that what is copied is right.
    times = 2 if name in HOST and how.is_greedy else 1
    requests = [Request(ids * times, 3 + number) for number, ids in enumerate(prompts())]
    length = 40 if name == "eagle_suffix" else NUM_TOKENS
    if device == "cpu":
        return decode_many(target, make, requests, length, batch_size, how)
    way = GraphDecoder(target, make, length, how)
    assert way.what == ("verify pass" if name in HOST else "step")
    if batch_size > 1:
        return way.decode_requests(requests, batch_size)
    return [text for each in requests for text in way.decode_requests([each], 1)]


def told(found: list[Generation]) -> list[Any]:
    return [(each.token_ids, each.steps, each.paths, each.drafted) for each in found]


HOST = (
    "prompt_lookup", "suffix", "medusa_suffix", "eagle_suffix", "lookahead", "draft_tree",
    "draft_chain, by what was accepted", "draft_chain, other tokenizer",
)  # fmt: skip
"""Draft on the host, so that passes alone are captured."""
# Many launches of one graph, beside rows that are free; graphs that are launched again after others
# for more slots; hardly two steps of a graph.
SIZES = [(3, 512), (1, 16), (2, 8)]
SAMPLED = Sampling(temperature=1.0, top_k=40, top_p=0.9)
# Batch sizes by method, greedy and drawn: the rest is slow.
OFTEN = {
    "vanilla": (1, 2), "medusa_tree": (3, 1), "eagle_tree, EAGLE-3": (3,), "dspark_chain": (2,),
    "prompt_lookup": (1,), "eagle_suffix": (3,), "lookahead": (2,),
}  # fmt: skip
DRAWN = {
    "vanilla": (2,), "medusa_tree": (1,), "medusa_typical": (3,), "eagle_chain, EAGLE-1": (3,),
    "eagle_tree, EAGLE-3": (), "dspark_chain": (1,), "early_exit": (2,), "prompt_lookup": (1,),
    "draft_chain, by what was accepted": (1, 3), "draft_tree": (2,),
}  # fmt: skip


def cases() -> Iterator[Any]:
    for names, often, how in (((*STATIC, *HOST), OFTEN, GREEDY), (DRAWN, DRAWN, SAMPLED)):
        for name in names:
            for size in SIZES:
                marks = [] if size[0] in often.get(name, ()) else [pytest.mark.slow]
                yield pytest.param(name, how, *size, marks=marks)


@pytest.mark.parametrize(("name", "how", "batch_size", "width"), cases())
def test_what_is_captured_writes_the_texts_of_the_cpu_in_its_steps(
    name: str, how: Sampling, batch_size: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "WIDTH", width)
    monkeypatch.setattr(tree_cache, "ROUND_TO", 1)
    how = replace(how, typical=Typical() if name == "medusa_typical" else None)
    with off():
        whole = [each.token_ids for each in decoded("cpu", name, 1, [], how)]
        stop = next(token for token in whole[1][3:] if token not in whole[0])
        expected = decoded("cpu", name, batch_size, [stop], how)
    texts = [text[: [*text, stop].index(stop) + 1] for text in whole]
    assert [each.token_ids for each in expected] == texts
    assert len(set(map(len, texts))) > 1
    accepted = sum(step.num_accepted for each in expected for step in each.steps)
    seldom_right = (*WITHOUT_HEADS, *HOST) if how.is_greedy else ("vanilla", "prompt_lookup")
    assert accepted > 2 or name in seldom_right
    found = decoded("cuda", name, batch_size, [stop], how)
    # What is recycled was learnt from rows that go on, unread, too.
    if name != "recycling":
        assert told(found) == told(expected)
    assert [each.token_ids for each in found] == texts


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, GREEDY, id=name, marks=[] if name in OFTEN else [pytest.mark.slow])
        for name in STATIC
    ]
    + [
        pytest.param(
            name,
            SAMPLED,
            id=f"{name}, sampled",
            marks=[] if name == "dspark_chain" else [pytest.mark.slow],
        )
        for name in DRAWN
        if name not in HOST
    ],
)
def test_a_step_is_one_launch_and_one_copy_and_waits_for_the_one_before(
    name: str, how: Sampling
) -> None:
    target, make = prepared("cuda", name, how)
    target.model.generation_config.eos_token_id = []
    requests = list(map(Request, prompts()[:2]))
    batch = captured.StepBatch(target, make, requests, 60, 2, how)
    steps = batch.stream_tokens()
    # Of the first step the host learns when the second is under way.
    assert [len(next(steps)) for _ in range(3)] == [2, 0, 2]
    found = [counts for _, counts in counted_steps(steps)]
    alone = [each for each in found if each.operations == {"graph": 1, "copy_": 1}]
    assert len(alone) > len(found) / 2
    for each in alone:
        assert (each.num_up, each.num_down, each.num_waits) == (0, 1, 1), str(each)
        assert each.waits.keys() == {("event", next(iter(each.waits))[1])}


def test_rows_of_texts_that_have_ended_stay_within_their_slots_until_half_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured, "WIDTH", 8)
    target = random_target("cuda")
    requests = [Request(ids) for ids in ([5, 17, 40, 8] * 10, [9, 77], [31])]

    def rows_at_end(stops: list[int]) -> int:
        target.model.generation_config.eos_token_id = stops
        batch = captured.StepBatch(target, lambda _: NoDraft(), requests, 40, 3)
        found = batch.decode_all()
        ends = [[place for place, token in enumerate(ids) if token in stops] for ids in whole]
        cut = [ids[: 1 + min(end, default=40)] for ids, end in zip(whole, ends, strict=True)]
        assert [each.token_ids for each in found] == cut
        return len(batch.rows)

    with off():
        plain = random_target("cpu")
        plain.model.generation_config.eos_token_id = []
        alone = decode_many(plain, lambda _: NoDraft(), requests, 40, 1)
    whole = [each.token_ids for each in alone]
    # The longest text ends first, and the others go on for as long as it is longer.
    others = [whole[0][0], *whole[1], *whole[2]]
    first = next(token for token in whole[0][1:] if token not in others)
    assert rows_at_end([first]) == 3
    second = next(token for token in whole[1][1:] if token not in (whole[1][0], *whole[2]))
    assert rows_at_end([first, second]) == 1


def test_what_cannot_be_captured_says_why() -> None:
    target = random_target("cuda")
    assert find_capture_obstacle(target) == ""
    target.logits_processing = {"repetition_penalty": 1.1}
    assert "generation config" in find_capture_obstacle(target)
    target.model.lm_head.to("cuda:1")
    assert "several devices" in find_capture_obstacle(target)


class Asking(NoDraft):
    """Waits for the device in every step."""

    def propose(self, roots: Roots) -> Draft:
        roots.tokens.tolist()
        return super().propose(roots)


def test_a_step_that_waits_is_not_captured_and_leaves_nothing_behind() -> None:
    target, before = random_target("cuda"), torch.cuda.current_stream()
    with pytest.raises(CaptureError, match=r"not permitted .*: device to host") as failed:
        GraphDecoder(target, lambda _: Asking(), 9).decode_requests([Request([5, 17])], 1)
    assert "not permitted" in str(failed.value.__cause__)
    assert torch.cuda.current_stream() is before
    assert not graphs.open_pools
    assert not torch.cuda.default_generators[0].state.capturing
    [text] = GraphDecoder(target, lambda _: NoDraft(), 9).decode_requests([Request([5, 17])], 1)
    assert text.times.step > 0


def test_who_stops_a_capture_stops_it_whole() -> None:
    before = torch.cuda.current_stream()

    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CudaGraph(stopped, torch.cuda.graph_pool_handle())
    assert torch.cuda.current_stream() is before
    assert not graphs.open_pools


def test_what_cannot_be_captured_is_launched_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    target = random_target("cuda")
    target.model.generation_config.eos_token_id = []
    for make, capture, told, how in (
        (NoDraft, True, "step", GREEDY), (NoDraft, True, "step", SAMPLED),
        (NoDraft, False, "no: cuda_graphs=false", GREEDY), (Asking, True, "permitted", GREEDY),
        (lambda: PromptLookup(4), True, "verify pass", GREEDY),
    ):  # fmt: skip
        [expected] = decode_many(target, lambda _: NoDraft(), [Request([5, 17], 3)], 9, 1, how)
        run = PromptDecoder(target, lambda _, make=make: make(), 9, how, capture)
        for _ in range(2):
            [found] = run([[5, 17]], [3], 1)
            assert found.token_ids == expected.token_ids
            assert (found.times.step > 0) == (told == "step")
            assert told in ("step", "verify pass") or not found.times.num_captures
        assert told in run.settings["captured"]
        assert ("cannot capture" in capsys.readouterr().err) == (make is Asking)


@pytest.mark.parametrize("make", [NoDraft, lambda: PromptLookup(4)], ids=["step", "pass"])
def test_what_capturing_takes_is_counted_and_in_no_other_figure(
    make: Callable[[], Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    late, now = [0.0], time.perf_counter

    class Slow(CudaGraph):
        def __init__(self, call: Callable[[], None], pool: Any) -> None:
            super().__init__(call, pool)
            late[0] += 1000

    monkeypatch.setattr(time, "perf_counter", lambda: now() + late[0])
    monkeypatch.setattr(captured, "CudaGraph", Slow)
    target = random_target("cuda")
    target.model.generation_config.eos_token_id = []
    way = GraphDecoder(target, lambda _: make(), NUM_TOKENS)
    [text] = way.decode_requests([Request(prompts()[0])], 1)
    assert late[0] > 0
    assert text.times.num_captures == late[0] / 1000 == text.times.capture // 1000
    assert text.times.total < 1000
    assert max(text.arrivals) < 1000


@pytest.mark.parametrize("what", ["verify pass", "step"])
def test_a_text_longer_than_the_one_before_it_is_drafted_for_as_if_it_were_the_first(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "WIDTH", 16)
    short, long = Request(prompts()[1]), Request(prompts()[0] * 16)

    def found(device: str) -> list[Generation]:
        target, head = prepared(device, "eagle_tree, EAGLE-3")
        target.model.generation_config.eos_token_id = []

        def make(seeds: list[int]) -> Drafter:
            # Of which the head drafts first.
            mixed = HybridDrafter(head(seeds), SuffixDrafter(SuffixTree(8)), 50.0)
            return mixed if what == "verify pass" else head(seeds)

        if device == "cpu":
            return decode_many(target, make, [short, long], NUM_TOKENS, 1)
        way = GraphDecoder(target, make, NUM_TOKENS)
        assert way.what == what
        # The longest first, so that what lasts has room for it.
        return [way.decode_requests([each], 1)[0] for each in (long, short, long)][1:]

    with off():
        expected = found("cpu")
    assert sum(step.num_accepted for step in expected[1].steps) > 3
    assert told(found("cuda")) == told(expected)


def test_a_captured_pass_is_one_launch_beside_what_the_host_drafts() -> None:
    target = random_target("cuda")
    target.model.generation_config.eos_token_id = []
    batch = PassBatch(target, lambda _: PromptLookup(4), [Request(prompts()[0] * 2)], 60, 1)
    found = [counts for _, counts in counted_steps(batch.stream_tokens())]
    alone = [each for each in found if each.operations["graph"] and each.operations.total() < 20]
    assert len(alone) > len(found) / 2
    for each in alone:
        assert (each.num_up, each.num_down, each.num_waits) == (1, 1, 1), str(each)


# --- Slots that captured passes keep for drafts: as many as are drafted.


class Growing(PromptLookup):
    """Drafts more with every step, up to a dozen tokens."""

    def __init__(self) -> None:
        super().__init__(4)
        self.size = 0

    def propose(self, roots: Roots) -> Draft:
        self.size = min(self.size + 1, 12)
        tokens = roots.tokens.unsqueeze(1).expand(-1, self.size).contiguous()
        return Draft(Tree.make_chain(self.size), tokens, self.size)


def in_turn(way: GraphDecoder) -> list[Generation]:
    """Texts one after the other, the longest first."""
    way.target.model.generation_config.eos_token_id = []
    return [text for ids in prompts()[:2] for text in way.decode_requests([Request(ids)], 1)]


def test_passes_have_room_for_what_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "WIDTH", 8)
    monkeypatch.setattr(tree_cache, "ROUND_TO", 1)
    with off():
        target = random_target("cpu")
        target.model.generation_config.eos_token_id = []
        requests = [[Request(ids)] for ids in prompts()[:2]]
        texts = [decode_many(target, lambda _: Growing(), each, NUM_TOKENS, 1) for each in requests]
    way = GraphDecoder(random_target("cuda"), lambda _: Growing(), NUM_TOKENS)
    assert told(in_turn(way)) == told([text for [text] in texts])
    assert way.last_captured is not None
    assert way.last_captured.capacity == captured.compute_num_slots(LENGTHS[0] + NUM_TOKENS, 13)
    assert way.last_captured.graphs.captured


def test_drawn_chains_of_one_size_share_a_graph() -> None:
    tokens, probs = torch.tensor([[5, 6, 7]]), torch.rand(1, 3, 9)
    draft = Draft.from_tree(Tree.make_chain(3), tokens, probs)
    shape = PassShape.from_draft(draft)
    assert shape == PassShape.from_draft(
        Draft.from_tree(Tree.make_chain(4), tokens[:, [0, 1, 2, 2]], probs[:, [0] * 4])
    )
    assert shape != PassShape.from_draft(Draft.from_tree(Tree.make_chain(3), tokens))
    padded = shape.pad_draft(draft)
    assert padded.tokens.tolist() == [[5, 6, 7, PAD]]
    assert padded.draft_probs is not None
    assert padded.draft_probs.tolist() == [[*probs[0].tolist(), [0.0] * 9]]


@pytest.mark.parametrize("num_nodes", [13, 9])
def test_a_compiled_target_needs_room_for_what_is_drafted(
    num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "WIDTH", 1)
    target, made = random_target("cuda"), list[CapturedPasses]()
    usual = CapturedPasses.__init__

    def noted(passes: CapturedPasses, *given: Any) -> None:
        made.append(passes)
        usual(passes, *given)

    monkeypatch.setattr(CapturedPasses, "__init__", noted)
    target.capacity = captured.compute_num_slots(LENGTHS[0] + NUM_TOKENS, num_nodes)
    way = GraphDecoder(target, lambda _: Growing(), NUM_TOKENS)
    if num_nodes == 13:
        in_turn(way)
        assert len(made) == 1  # whose graphs serve the second text too
        return
    with pytest.raises(CaptureError, match=r"12 draft tokens .* compiled target's \d+ slots"):
        in_turn(way)


# --- Attention while texts are decoded: which kernels, in which shapes; what timing it launches.


def noted_calls(patch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any]]:
    """Calls of attention kernels: name, arguments and options."""
    calls: list[tuple[str, Any, Any]] = []

    def noted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            calls.append((name, args, options))
            return kernel(*args, **options)

        return run

    for name in ("_flash_attention_forward", "_scaled_dot_product_efficient_attention"):
        operator = getattr(torch.ops.aten, name).default
        patch.setitem(kernels.KERNELS, operator, noted(name, kernels.KERNELS[operator]))
    return calls


@pytest.mark.parametrize(("name", "num_nodes"), [("vanilla", 0), ("recycling", 7)])
def test_halves_attend_without_masks_over_their_texts_in_few_shapes(
    name: str, num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "WIDTH", 32)
    monkeypatch.setattr(attention, "LONG", 0)
    calls = noted_calls(monkeypatch)
    target = random_target("cuda")
    target.model.to(torch.bfloat16)
    target.model.generation_config.eos_token_id = []
    requests = list(map(Request, prompts()[:2]))
    texts = []
    for kind in (captured.StepBatch, DecodingBatch):
        batch = kind(target, lambda seeds: KINDS[name].make(target, GREEDY, seeds), requests, 40, 2)
        steps = batch.stream_tokens()
        for _ in range(3):
            next(steps)
        calls.clear()
        with counted() as counts:
            for _ in steps:
                pass
        shapes = {
            (kernel, *(tuple(each.shape) for each in args if isinstance(each, Tensor)))
            for kernel, args, _ in calls
        }
        assert 0 < len(shapes) <= 8
        biases = {args[3].shape[-1] for kernel, args, _ in calls if "efficient" in kernel}
        assert biases == ({num_nodes} if num_nodes else set())
        # One query without a window: PyTorch's flash kernel divides its keys among blocks.
        sides = ("window_size_left", "window_size_right")
        of_flash = [
            (args[5], *map(more.get, sides)) for kernel, args, more in calls if "flash" in kernel
        ]
        assert set(of_flash) <= {(1, -1, -1)}
        assert not {"constant_pad_nd", "scatter"} & counts.operations.keys()
        texts.append([each.token_ids for each in batch.generations])
    assert texts[0] == texts[1]


def test_what_is_timed_is_launched_as_decoding_launches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_costs, "NUM_ROUNDS", 2)
    target, make = prepared("cuda", "medusa_chain")
    drafters: dict[str, Drafter] = {"head": make([7]), "host": PromptLookup(4)}
    with counted() as counts:
        curve, drafts = step_costs.measure_step_costs(target, drafters, prompts()[0], 1, (2, 4))
    # Of a round, passes over one token in a row, and over each size; drafts of the head alone.
    of_round = 2 * (step_costs.NUM_PLAIN + 2) + 2
    assert counts.operations["graph"] == 2 * of_round
    assert (curve.sizes, drafts.keys()) == ([1, 2, 4], drafters.keys())
