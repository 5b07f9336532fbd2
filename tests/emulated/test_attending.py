"""Attention while texts are decoded: which kernels, in which shapes; what timing it launches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from emulated import kernels
from emulated.device import counted
from emulated.test_captured import prepared, prompts
from emulated.test_decoding import KINDS, random_target
from torch import Tensor

from eval.decode import cuda_graphs as captured
from eval.decode.drafters.lookup import PromptLookup
from eval.decode.engine import DecodingBatch, Request
from eval.tune import step_costs as cost
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import GREEDY
from heads.target_model import attention


class Attended(NamedTuple):
    """An attention kernel that has run.

    Attributes:
        name: of the operator.
        shapes: of the tensors that it was given.
        divided: whether PyTorch's flash kernel divides keys among blocks, as far as it is asked.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    divided: bool


class Shapes:
    """Shapes of the attention kernels that have run."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.found: set[Attended] = set()
        for name in ("_flash_attention_forward", "_scaled_dot_product_efficient_attention"):
            kernel = getattr(torch.ops.aten, name).default
            patch.setitem(kernels.KERNELS, kernel, self._noted(name, kernels.KERNELS[kernel]))

    def _noted(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            shapes = tuple(tuple(each.shape) for each in args if isinstance(each, Tensor))
            divided = "flash" in name and (
                args[5], options["window_size_left"], options["window_size_right"]
            ) == (1, -1, -1)  # fmt: skip
            self.found.add(Attended(name, shapes, divided))
            return kernel(*args, **options)

        return run


@pytest.mark.parametrize(("name", "num_nodes"), [("vanilla", 0), ("recycling", 7)])
def test_halves_attend_without_masks_over_their_texts_in_few_shapes(
    name: str, num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "WIDTH", 32)
    monkeypatch.setattr(attention, "LONG", 0)
    shapes = Shapes(monkeypatch)
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
        shapes.found.clear()
        with counted() as counts:
            for _ in steps:
                pass
        assert 0 < len(shapes.found) <= 8
        biases = [each.shapes[-1] for each in shapes.found if "efficient" in each.name]
        assert {bias[-1] for bias in biases} == ({num_nodes} if num_nodes else set())
        assert all(each.divided for each in shapes.found if "flash" in each.name)
        assert not {"constant_pad_nd", "scatter"} & counts.operations.keys()
        texts.append([each.token_ids for each in batch.generations])
    assert texts[0] == texts[1]


def test_what_is_timed_is_launched_as_decoding_launches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "NUM_ROUNDS", 2)
    target, make = prepared("cuda", "medusa_chain")
    drafters: dict[str, Drafter] = {"head": make([7]), "host": PromptLookup(4)}
    with counted() as counts:
        curve, drafts = cost.measure_step_costs(target, drafters, prompts()[0], 1, (2, 4))
    # Of a round, passes over one token in a row, and over each size; drafts of the head alone.
    of_round = 2 * (cost.NUM_PLAIN + 2) + 2
    assert counts.operations["graph"] == 2 * of_round
    assert (curve.sizes, drafts.keys()) == ([1, 2, 4], drafters.keys())
