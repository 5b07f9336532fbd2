"""Reader of exported DFlash-2 heads. See `eval/parity/blocks.py`.

Letters: S rows of a text, R of a block, H hidden, G groups of channels, V vocabulary, r rank.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from eval.parity.blocks import BlockConfigReader, BlockShape, ServedBlocks
from eval.parity.decoder import Shapes
from eval.parity.export_files import Export, ReferenceLogits
from eval.parity.readers.dflash import shape_of

FORMATS = {"dflash2": ("vllm", "sglang", "speculators", "original")}
ARCHITECTURES = dict.fromkeys(FORMATS["dflash2"], "DFlash2DraftModel")
SELECTOR = "candidate_selector."


@dataclass(frozen=True)
class DFlash2Settings:
    """Settings of a DFlash-2 head beyond DFlash's.

    Attributes:
        conv_kernel_size: taps of each convolution.
        conv_group_size: channels that share a change of its kernel.
        selector_rank: rank r of the selector.
        selector_top_k: candidates of the selector.
        input_embedding_scale, output_multiplier: factors of embeddings and logits.
        final_logit_softcapping: soft cap of the logits; 0 without one.
    """

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0


class ServedDFlash2(ServedBlocks):
    """Exported DFlash-2 head.

    Args:
        export, golden, shape: as in `ServedBlocks`.
        settings: settings beyond DFlash's.
    """

    def __init__(
        self, export: Export, golden: ReferenceLogits, shape: BlockShape, settings: DFlash2Settings
    ) -> None:
        self._settings, hidden = settings, shape.hidden_size
        self._groups = hidden // settings.conv_group_size
        taps, rank = settings.conv_kernel_size, settings.selector_rank
        more: Shapes = {
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

    def apply_sublayer(
        self, name: str, inputs: Tensor, sublayer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """[R, H] output of a sublayer between two convolutions."""
        base = self.weights[f"{name}_conv.base_kernel"]
        change = self.apply_linear(inputs, f"{name}_conv.kernel_projection")
        change = change.view(len(inputs), 2, self._settings.conv_kernel_size, self._groups)
        return self._convolve_rows(
            sublayer(self._convolve_rows(inputs, base[0], change[:, 0])), base[1], change[:, 1]
        )

    def _convolve_rows(self, rows: Tensor, base: Tensor, change: Tensor) -> Tensor:
        """[R, H] computed row by row, each a sum over earlier rows."""
        size, outputs = rows.shape[1] // self._groups, []
        for row in range(len(rows)):
            mixed = torch.zeros(rows.shape[1])
            for tap in range(min(self._settings.conv_kernel_size, row + 1)):
                kernel = base[tap] + change[row, tap].repeat_interleave(size)
                mixed = mixed + kernel * rows[row - tap]
            outputs.append(mixed)
        return torch.stack(outputs)

    def compute_slot_logits(
        self, base: Tensor, outputs: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[S, V] logits of each row's candidates, by the previous token; -inf for the others."""
        first, second = (
            self.weights[f"{SELECTOR}{n}_codebook"] for n in ("predecessor", "successor")
        )
        asked = first[before] * self.apply_linear(outputs, f"{SELECTOR}hidden_projection")
        least = base.topk(min(self._settings.selector_top_k, base.shape[-1])).values[:, -1:]
        unary = base * self._settings.output_multiplier
        cap = self._settings.final_logit_softcapping
        unary = torch.tanh(unary / cap) * cap if cap > 0 else unary
        return (unary + asked @ second.T).masked_fill(base < least, -torch.inf), state

    def embed_block(self, row: int) -> Tensor:
        """[R, H] scaled embeddings of the block after a row."""
        return super().embed_block(row) * self._settings.input_embedding_scale


def build_head(export: Export, golden: ReferenceLogits) -> ServedDFlash2:
    """See `eval.parity.parity_check.Reader`."""
    reader = BlockConfigReader(export, golden, ARCHITECTURES)
    shape = shape_of(reader)
    block = reader.root if reader.is_speculators else reader.root.get_section("dflash_config")
    # Rows of a block see each other.
    block.check_allowed("causal", False)
    block.check_allowed("sliding_window_non_causal", True)
    values: dict[str, Any] = {
        field.name: block.require_key(field.name, int, "refuses the head")
        if field.default is MISSING
        else block.require_key(field.name, float, "scales nothing")
        for field in fields(DFlash2Settings)
        if field.default is MISSING or block.has_key(field.name)
    }
    return ServedDFlash2(export, golden, shape, DFlash2Settings(**values))
