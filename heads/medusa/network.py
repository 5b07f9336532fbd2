"""Network of Medusa heads: K small networks that each predict one later token.

Source: Medusa, arXiv 2401.10774, section 2.1; file layout of FasterDecoding/Medusa, which
vLLM, TGI and TensorRT-LLM read. Letters: N rows, K heads, D hidden, V vocab, W draft vocab.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from conf.errors import InputError
from heads.head import DraftHead
from heads.layers.projection import Projection
from heads.storage import load_tensors
from heads.target_model.embeddings_and_head import EmbeddingsAndOutputHead
from heads.target_model.model import FeatureLayers, TargetOutput
from heads.vocab import DraftVocab

MEDUSA_WEIGHTS, VLLM_WEIGHTS = "medusa_lm_head.safetensors", "model.safetensors"
VLLM_SIGN = '"MedusaModel"'
VLLM_BLOCK = r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"
VLLM_PROJECTION = r"lm_heads\.(\d+)\.weight"
TOKEN_MAP = "token_map"
"""[W] int64 target ids of a reduced draft vocabulary, as vLLM names the tensor."""
ROWS_PER_CHUNK = 256


@dataclass(frozen=True)
class MedusaHeadConfig:
    """Sizes of the heads, and their target."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int
    target: str

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens of a chain, one per head."""
        return self.num_heads


class ResidualBlock(nn.Module):
    """x + SiLU(A x + b), with A and b zero at the start."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return hidden_states + functional.silu(self.linear(hidden_states))


class MedusaNetwork(DraftHead):
    """Networks of K heads.

    Weights that must come from a target or a file start as NaN, so that a forgotten load shows at
    the first loss.

    Args:
        config: architecture.
        vocab: draft vocabulary; all ids by default.
    """

    taps = FeatureLayers()

    def __init__(self, config: MedusaHeadConfig, vocab: DraftVocab | None = None) -> None:
        super().__init__(config, vocab or DraftVocab.make_full(config.vocab_size))
        self.heads = nn.ModuleList(
            nn.Sequential(
                *[ResidualBlock(config.hidden_size) for _ in range(config.num_layers)],
                nn.Linear(config.hidden_size, len(self.vocab.ids), bias=False),
            )
            for _ in range(config.num_heads)
        )
        for head in self.heads:
            nn.init.constant_(head[-1].weight, float("nan"))  # type: ignore[index]

    @property
    def num_heads(self) -> int:
        """K."""
        return self.config.num_heads

    @classmethod
    def from_target(cls, target: EmbeddingsAndOutputHead, num_heads: int, num_layers: int) -> Self:
        """New float32 heads, each equal to the target's own next-token head.

        Neither heads nor engines have a bias of logits: heads learn without the target's.

        Raises:
            InputError: the target's output head is quantised.
        """
        weight = target.output_head.weight
        if target.head_is_quantized:
            raise InputError(
                f"target.path={target.name}: its output head is quantised, but Medusa heads start "
                "as copies of it; name the model before quantisation (target.quantization keeps "
                "the output head)"
            )
        config = MedusaHeadConfig(
            target.hidden_size, target.vocab_size, num_heads, num_layers, target.name
        )
        with target.device:  # heads of a large vocabulary are larger than many a host's memory
            medusa = cls(config)
        for head in medusa.heads:
            head[-1].weight.data.copy_(weight.detach().float())  # type: ignore[index]
        return medusa.attach(target)

    def head_logits(self, k: int, hidden_states: Tensor) -> Tensor:
        """[N, W] logits of head k, counted from 0, on final hidden states [N, D].

        Head 0 reads position t and predicts token t + 2.
        """
        return self.heads[k](hidden_states)

    def head_states(self, k: int, hidden_states: Tensor) -> Tensor:
        """[N, D] what head k, counted from 0, projects."""
        return self.heads[k][:-1](hidden_states)  # type: ignore[index]

    def make_projection(self, k: int) -> Projection:
        """The projection of head k, counted from 0."""
        return Projection(self.heads[k][-1].weight)  # type: ignore[index]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[K, ..., W] logits of every head on final hidden states [..., D]."""
        return torch.stack([head(hidden_states) for head in self.heads])

    @torch.no_grad()
    def compute_candidates(
        self, output: TargetOutput, token_ids: list[int], first: int, depth: int, width: int
    ) -> Tensor:
        """[depth, n, width] int64, the best tokens of each head, see `DraftHead.candidates`."""
        del token_ids
        parts = output.hidden_states[0, first:].split(ROWS_PER_CHUNK)
        return torch.cat([self.rank_token_ids(part, depth, width) for part in parts], dim=1)

    def rank_token_ids(self, hidden_states: Tensor, depth: int, width: int) -> Tensor:
        """[depth, ..., width] int64, the best tokens of each head on states [..., D]."""
        hidden_states = hidden_states.to(next(self.parameters()).dtype)
        logits = (self.head_logits(k, hidden_states) for k in range(depth))
        return self.vocab.to_target_ids(
            torch.stack([each.topk(width, dim=-1).indices for each in logits])
        )


def load_medusa_tensors(folder: Path, path: str) -> dict[str, Tensor]:
    """The tensors of a folder by their original names.

    Raises:
        InputError: none there.
    """
    for name in (MEDUSA_WEIGHTS, VLLM_WEIGHTS):
        if (folder / name).is_file():
            return _original_names(load_tensors(folder / name))
    found = sorted(file.name for file in folder.iterdir())
    raise InputError(
        f"head.path={path}: no {MEDUSA_WEIGHTS} or {VLLM_WEIGHTS} there; found {found}"
    )


def _original_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """vLLM's `blocks.{k}.layers.{j}.*` and `lm_heads.{k}.weight`; other names stay."""
    found = [re.fullmatch(VLLM_BLOCK, name) for name in tensors]
    num_layers = 1 + max((int(match[2]) for match in found if match), default=-1)
    named = {}
    for name, tensor in tensors.items():
        block = re.sub(VLLM_BLOCK, r"\1.\2.linear.\3", name)
        named[re.sub(VLLM_PROJECTION, rf"\1.{num_layers}.weight", block)] = tensor
    return named


def parse_token_map(token_map: Tensor, num_rows: int, size: int, path: str) -> DraftVocab:
    """A vocabulary as a file maps it.

    Args:
        token_map: the file's.
        num_rows: W.
        size: V, as its config says.
        path: what the user calls it.

    Raises:
        InputError: no such map.
    """
    ids = token_map.to(torch.int64)
    if (
        token_map.is_floating_point()
        or ids.shape != (num_rows,)
        or bool((ids.diff() <= 0).any())
        or not 0 <= int(ids[0]) <= int(ids[-1]) < size
    ):
        raise InputError(
            f"head.path={path}: {TOKEN_MAP} is {token_map.dtype} {list(token_map.shape)}: must be "
            f"the target ids of the {num_rows} rows of each projection, rising and below "
            f"vocab_size={size} of config.json"
        )
    return DraftVocab(ids, size)


def infer_config(tensors: dict[str, Tensor], target: str, path: str) -> MedusaHeadConfig:
    """The architecture that tensors show.

    Raises:
        InputError: no projection among them.
    """
    projections = [name for name in tensors if name.count(".") == 2 and name.endswith(".weight")]
    if not projections:
        raise InputError(f"head.path={path}: no Medusa projection among {sorted(tensors)[:5]}")
    vocab_size, hidden_size = tensors[projections[0]].shape
    num_layers = int(projections[0].split(".")[1])
    num_heads = 1 + max(int(name.split(".")[0]) for name in projections)
    return MedusaHeadConfig(hidden_size, vocab_size, num_heads, num_layers, target)
