"""Taps exported DFlash-2 heads as their engine would; see `eval/parity/blocks.py`.

Letters: S rows of a text, R of a block, H hidden, G groups of channels, V vocabulary, r rank.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from eval.parity.block_shape import BlockReader, BlockShape
from eval.parity.blocks import ServedBlocks
from eval.parity.files import Export, Golden
from eval.parity.readers.dflash import shape_of

FORMATS = {"dflash2": ("vllm", "sglang", "speculators", "original")}
ARCHITECTURES = dict.fromkeys(FORMATS["dflash2"], "DFlash2DraftModel")
SELECTOR = "candidate_selector."
SCALES = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}
"""Keys that may be absent, and what engines take then."""


class ServedDFlash2(ServedBlocks):
    """An exported DFlash-2 head.

    Args:
        export, golden, shape: as of `ServedBlocks`.
        sizes: of a convolution's taps and groups, of the selector's rank and candidates.
        scales: of embeddings and logits, and the cap of these; 0 without.

    Raises:
        InputError: as of `ServedBlocks`.
    """

    def __init__(
        self, export: Export, golden: Golden, shape: BlockShape, sizes: tuple[int, int, int, int],
        scales: tuple[float, float, float],
    ) -> None:  # fmt: skip
        taps, group, rank, self._top_k = sizes
        self._input, self._output, self._cap = scales
        self._taps, self._groups, hidden = taps, shape.hidden_size // group, shape.hidden_size
        more: dict[str, tuple[int, ...]] = {
            f"{SELECTOR}predecessor_codebook": (shape.vocab_size, rank),
            f"{SELECTOR}successor_codebook": (shape.vocab_size, rank),
            f"{SELECTOR}hidden_projection.weight": (rank, hidden),
        }
        for number in range(shape.num_layers):
            for name in ("attention_conv", "mlp_conv"):
                conv = f"layers.{number}.{name}."
                more[f"{conv}base_kernel"] = (2, taps, hidden)
                more[f"{conv}kernel_projection.weight"] = (2 * taps * self._groups, hidden)
        super().__init__(export, golden, shape, more)

    def around(self, name: str, inputs: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """[R, H] of a sublayer between two convolutions."""
        base = self.weights[f"{name}_conv.base_kernel"]
        change = self.linear(inputs, f"{name}_conv.kernel_projection")
        change = change.view(len(inputs), 2, self._taps, self._groups)
        return self._mixed(
            sublayer(self._mixed(inputs, base[0], change[:, 0])), base[1], change[:, 1]
        )

    def _mixed(self, rows: Tensor, base: Tensor, change: Tensor) -> Tensor:
        """[R, H] row by row: each a sum of those before it."""
        size, found = rows.shape[1] // self._groups, []
        for row in range(len(rows)):
            mixed = torch.zeros(rows.shape[1])
            for tap in range(min(self._taps, row + 1)):
                kernel = base[tap] + change[row, tap].repeat_interleave(size)
                mixed = mixed + kernel * rows[row - tap]
            found.append(mixed)
        return torch.stack(found)

    def step(
        self, base: Tensor, outputs: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[S, V] of each row's candidates, by the token before; -inf for the others."""
        first, second = (
            self.weights[f"{SELECTOR}{n}_codebook"] for n in ("predecessor", "successor")
        )
        asked = first[before] * self.linear(outputs, f"{SELECTOR}hidden_projection")
        least = base.topk(min(self._top_k, base.shape[-1])).values[:, -1:]
        unary = base * self._output
        unary = torch.tanh(unary / self._cap) * self._cap if self._cap > 0 else unary
        return (unary + asked @ second.T).masked_fill(base < least, -torch.inf), state

    def _own_rows(self, states: Tensor, row: int) -> Tensor:
        return super()._own_rows(states, row) * self._input


def read(export: Export, golden: Golden) -> ServedDFlash2:
    """See `eval.parity.gate.Reader`."""
    reader = BlockReader(export, golden, ARCHITECTURES)
    shape = shape_of(reader)
    block = reader.root if reader.nested else reader.root.part("dflash_config")
    # Rows of a block see each other.
    block.only("causal", False)
    block.only("sliding_window_non_causal", True)
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    taps, group, rank, top_k = (block.need(name, int, "refuses the head") for name in names)
    first, last, cap = (
        block.need(name, float, "scales nothing") if block.has(name) else usual
        for name, usual in SCALES.items()
    )
    return ServedDFlash2(export, golden, shape, (taps, group, rank, top_k), (first, last, cap))
