"""Reader of exported DSpark heads. See `eval/parity/blocks.py`.

Letters: S rows, W drafted ids, H hidden, V vocabulary, r rank.
"""

import torch
from torch import Tensor

from eval.parity.blocks import BlockConfigReader, BlockShape, ServedBlocks
from eval.parity.decoder import Shapes
from eval.parity.export_files import Export, ReferenceLogits

FORMATS = {"dspark": ("vllm", "sglang", "speculators", "original")}
ARCHITECTURES = dict.fromkeys(FORMATS["dspark"], "Qwen3DSparkModel") | {
    "speculators": "DSparkDraftModel"
}
FIRST, SECOND = "markov_head.markov_w1", "markov_head.markov_w2"
GATE, JOINT = "markov_head.gate_proj", "markov_head.joint_proj"
CONFIDENCE = "confidence_head.proj"


class ServedDSpark(ServedBlocks):
    """Exported DSpark head.

    Args:
        export, golden, shape: as in `ServedBlocks`.
        markov: type of its Markov head.
        rank: rank r of the Markov head.
        confidence_size: input width of its confidence head; 0 without one.
    """

    def __init__(
        self, export: Export, golden: ReferenceLogits, shape: BlockShape, *, markov: str, rank: int,
        confidence_size: int,
    ) -> None:  # fmt: skip
        self._markov = markov
        hidden = shape.hidden_size
        more: Shapes = {
            f"{FIRST}.weight": (shape.vocab_size, rank),
            f"{SECOND}.weight": (shape.draft_vocab_size, rank),
        }
        if markov == "gated":
            more |= {f"{GATE}.weight": (rank, hidden + rank), f"{GATE}.bias": (rank,)}
        if markov == "rnn":
            size = 3 * rank, 2 * rank + hidden
            more |= {f"{JOINT}.weight": size, f"{JOINT}.bias": size[:1]}
        if confidence_size:
            more |= {f"{CONFIDENCE}.weight": (1, confidence_size), f"{CONFIDENCE}.bias": (1,)}
        super().__init__(export, golden, shape, more)

    def compute_slot_logits(
        self, base: Tensor, outputs: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [S, W] of a slot, with those of the Markov head added."""
        memory = self.weights[f"{FIRST}.weight"][before]
        if self._markov == "gated":
            memory = memory * self.apply_linear(torch.cat([outputs, memory], -1), GATE).sigmoid()
        elif self._markov == "rnn":
            state = torch.zeros_like(memory) if state is None else state
            joint = self.apply_linear(torch.cat([state, memory, outputs], -1), JOINT)
            gate, candidate, output = joint.chunk(3, -1)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            memory = output.tanh()
        return base + self.apply_linear(memory, SECOND), state


def build_head(export: Export, golden: ReferenceLogits) -> ServedDSpark:
    """See `eval.parity.parity_check.Reader`."""
    reader = BlockConfigReader(export, golden, ARCHITECTURES)
    root, guesses = reader.root, "guesses, and vLLM not as speculators does"
    anchored = root.require_key("sample_from_anchor", bool, guesses)
    causal = (
        reader.parse_speculators_causal()
        if reader.is_speculators
        else reader.parse_causal(root, "is_causal")
    )
    shape = reader.parse_shape(root, anchored=anchored, causal=causal)
    markov = root.require_key("markov_head_type", str, "takes vanilla")
    served = ("vanilla",) if export.format == "vllm" else ("vanilla", "gated", "rnn")
    root.check_allowed("markov_head_type", *served)
    rank = root.require_key("markov_rank", int, "takes 256 or none")
    with_markov = root.require_key("confidence_head_with_markov", bool, "takes false, or true")
    has_confidence = root.require_key("enable_confidence_head", bool, "takes false, or true")
    return ServedDSpark(
        export, golden, shape, markov=markov, rank=rank,
        confidence_size=shape.hidden_size + rank * with_markov if has_confidence else 0,
    )  # fmt: skip
