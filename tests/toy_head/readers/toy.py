"""Taps an exported toy head as its engine would."""

from collections.abc import Iterator

from torch import Tensor

from eval.parity.files import Export, Golden

FORMATS = {"toy": ("original",)}


class ServedToy:
    def __init__(self, export: Export, golden: Golden) -> None:
        self.weight, self.golden = export.tensors["out.weight"].float(), golden
        self.lines = ["a toy"]

    def logits(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        states = self.golden.need(f"hidden_states.{self.golden.num_layers}", (None, None))
        yield states @ self.weight[self.golden.need("ids", (None,))].T, None


def read(export: Export, golden: Golden) -> ServedToy:
    return ServedToy(export, golden)
