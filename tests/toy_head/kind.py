"""The head, how it drafts and how it is exported."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from conf.settings.export import ExportFormat
from heads.decoding.chains import Calibration, ChainSampler
from heads.decoding.drafting import Committed, Draft, Roots
from heads.decoding.sampling import GREEDY, Generators, Sampling
from heads.decoding.tree import Shape, Tree
from heads.folders import PROVENANCE
from heads.kind import Drafted, DraftHead, Files, HeadFacts, Kind
from heads.layers.projection import Projection
from heads.storage import load_tensors, save_head
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.target_model.model import Taps, Target, TargetOutput
from heads.vocab import DraftVocab

WEIGHTS = "toy.safetensors"


@dataclass(frozen=True)
class ToyConfig:
    hidden_size: int
    vocab_size: int
    target: str


class ToyHead(DraftHead):
    """Says the token after the next from the last hidden state."""

    taps = Taps()

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab = DraftVocab.everything(config.vocab_size)
        self.out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @classmethod
    def from_target(cls, target: EmbeddingsAndHead) -> "ToyHead":
        head = cls(ToyConfig(target.hidden_size, target.vocab_size, target.name))
        head.out.weight.data.copy_(target.output_head.weight)
        return head.attach(target)

    def attach(self, target: EmbeddingsAndHead, dtype: torch.dtype | None = None) -> "ToyHead":
        self.vocab = self.vocab.to(target.device)
        return self.to(target.device, dtype)

    def candidates(
        self, output: TargetOutput, token_ids: list[int], first: int, depth: int, width: int
    ) -> Tensor:
        return self.out(output.hidden_states[0, first:]).topk(width).indices[None]

    # Three that training's loss asks of Medusa heads.
    num_heads = 1

    def states(self, k: int, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def projection(self, k: int) -> Projection:
        return Projection(self.out.weight)

    def output_heads(self) -> list[Tensor]:
        return [self.out.weight]

    def pruned(self, vocab: DraftVocab) -> "ToyHead":
        raise AssertionError("refused before")

    def tensors(self) -> dict[str, Tensor]:
        return {name: each.detach() for name, each in self.named_parameters()}

    def save(self, folder: Path, provenance: dict[str, object] | None = None) -> None:
        documents: dict[str, object] = {"config.json": {"toy": asdict(self.config)}}
        save_head(folder, WEIGHTS, self.tensors(), documents | {PROVENANCE: provenance or {}})


class ToyDrafter:
    static_nodes = None
    hidden: Tensor | None = None

    def __init__(self, head: ToyHead, tree: Tree, calibration: Calibration | None) -> None:
        self.head, self.tree, self.taps = head, tree, head.taps
        self.calibration = calibration

    def observe(self, seen: Committed) -> None:
        self.hidden = seen.last.hidden_states[:, 0]

    def propose(self, roots: Roots) -> Draft:
        assert self.hidden is not None
        logits = self.head.out(self.hidden)
        if self.calibration is not None:
            draws = ChainSampler(self.head.vocab, GREEDY, Generators([], []), self.calibration)
            return draws.chains(self.tree, draws.token(logits).unsqueeze(1))
        best = logits.topk(self.tree.width).indices
        return Draft.of(self.tree, best[:, list(self.tree.ranks[1:])])

    def keep(self, rows: list[int]) -> None:
        if self.hidden is not None:
            self.hidden = self.hidden[rows]

    def take(self, row: int, other: "ToyDrafter") -> None:
        assert self.hidden is not None
        assert other.hidden is not None
        self.hidden[row] = other.hidden[0]


class ToyKind(Kind[ToyHead]):
    head = ToyHead
    forms: ClassVar = {"toy": "Toy heads"}
    phrase = "a toy head"

    def holds(self, folder: Path) -> bool:
        return (folder / WEIGHTS).is_file()

    def read(self, folder: Path, path: str, layers: Sequence[int] | None) -> ToyHead:
        head = ToyHead(ToyConfig(**json.loads((folder / "config.json").read_text())["toy"]))
        head.load_state_dict(load_tensors(folder / WEIGHTS))
        return head

    def most_tokens(self, head: ToyHead) -> int:
        return 1

    def longest(self, head: ToyHead) -> int:
        return 1

    def usual_shape(self, head: ToyHead, gpu: bool | None = None) -> Tree:
        return Tree.from_paths([[0], [1]])

    def drafter(
        self,
        head: ToyHead,
        shape: Shape,
        sampling: Sampling,
        seeds: Sequence[int],
        calibration: Calibration | None = None,
    ) -> ToyDrafter:
        assert isinstance(shape, Tree)
        return ToyDrafter(head, shape, calibration)

    def untrained(self, target: EmbeddingsAndHead, form: str, vocab: DraftVocab) -> ToyHead:
        return ToyHead.from_target(target)

    def pruning_problem(self, head: ToyHead) -> str:
        return "a toy head drafts all ids"

    def export_problem(self, head: ToyHead, engine: ExportFormat) -> str | None:
        return None if engine is ExportFormat.original else "loads no toys"

    def files(self, head: ToyHead, engine: ExportFormat) -> Files:
        return Files({"toy": asdict(head.config)}, WEIGHTS, head.tensors())

    def serve_command(self, head: ToyHead, engine: ExportFormat, folder: str) -> str:
        return f"play {folder}"

    def drafted(
        self, head: ToyHead, target: Target, states: list[Tensor], token_ids: Tensor,
        places: Tensor,
    ) -> Drafted:  # fmt: skip
        return Drafted(head.out(states[-1])[None], {})

    def facts(
        self, head: ToyHead, provenance: dict[str, Any], acceptance: dict[str, Any] | None
    ) -> HeadFacts:
        return HeadFacts(
            "toy", "Toy heads", "Toy", "", "one linear layer", 1, None, "it loads no toys."
        )
