"""Taps exported DSpark heads as their engine would; see `eval/parity/blocks.py`.

Letters: S rows, W drafted ids, H hidden, V vocabulary, r rank.
"""

import torch
from torch import Tensor
from torch.nn import functional

from eval.parity.block_shape import BlockReader, BlockShape
from eval.parity.blocks import ServedBlocks
from eval.parity.files import Export, Golden

FORMATS = {"dspark": ("vllm", "sglang", "speculators", "original")}
ARCHITECTURES = dict.fromkeys(FORMATS["dspark"], "Qwen3DSparkModel") | {
    "speculators": "DSparkDraftModel"
}
FIRST, SECOND = "markov_head.markov_w1", "markov_head.markov_w2"
GATE, JOINT = "markov_head.gate_proj", "markov_head.joint_proj"
SURE = "confidence_head.proj"


class ServedDSpark(ServedBlocks):
    """An exported DSpark head.

    Args:
        export, golden, shape: as of `ServedBlocks`.
        kind: of its Markov head.
        rank: r.
        confidence: what its confidence head reads; 0 without one.

    Raises:
        InputError: as of `ServedBlocks`.
    """

    def __init__(
        self, export: Export, golden: Golden, shape: BlockShape, kind: str, rank: int,
        confidence: int,
    ) -> None:  # fmt: skip
        self._kind = kind
        hidden = shape.hidden_size
        more: dict[str, tuple[int, ...]] = {
            f"{FIRST}.weight": (shape.vocab_size, rank),
            f"{SECOND}.weight": (shape.draft_vocab_size, rank),
        }
        if kind == "gated":
            more |= {f"{GATE}.weight": (rank, hidden + rank), f"{GATE}.bias": (rank,)}
        if kind == "rnn":
            size = 3 * rank, 2 * rank + hidden
            more |= {f"{JOINT}.weight": size, f"{JOINT}.bias": size[:1]}
        if confidence:
            more |= {f"{SURE}.weight": (1, confidence), f"{SURE}.bias": (1,)}
        super().__init__(export, golden, shape, more)

    def step(
        self, base: Tensor, outputs: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [S, W] of a slot, with what the tokens before add."""
        told = self.weights[f"{FIRST}.weight"][before]
        if self._kind == "gated":
            told = told * self._biased(torch.cat([outputs, told], -1), GATE).sigmoid()
        elif self._kind == "rnn":
            state = torch.zeros_like(told) if state is None else state
            joint = self._biased(torch.cat([state, told, outputs], -1), JOINT)
            gate, candidate, output = joint.chunk(3, -1)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            told = output.tanh()
        return base + self.linear(told, SECOND), state

    def _biased(self, inputs: Tensor, name: str) -> Tensor:
        return functional.linear(inputs, *(self.weights[f"{name}.{n}"] for n in ("weight", "bias")))


def read(export: Export, golden: Golden) -> ServedDSpark:
    """See `eval.parity.gate.Reader`."""
    reader = BlockReader(export, golden, ARCHITECTURES)
    root, guesses = reader.root, "guesses, and vLLM not as speculators does"
    anchored = root.need("sample_from_anchor", bool, guesses)
    causal = reader.non_causal() if reader.nested else reader.causal(root, "is_causal")
    shape = reader.shape(root, anchored=anchored, causal=causal)
    kinds = ("vanilla",) if export.format == "vllm" else ("vanilla", "gated", "rnn")
    kind = root.need("markov_head_type", str, "takes vanilla")
    root.only("markov_head_type", *kinds)
    rank = root.need("markov_rank", int, "takes 256 or none")
    with_markov = root.need("confidence_head_with_markov", bool, "takes false, or true")
    sure = root.need("enable_confidence_head", bool, "takes false, or true")
    read_by = shape.hidden_size + rank * with_markov if sure else 0
    return ServedDSpark(export, golden, shape, kind, rank, read_by)
