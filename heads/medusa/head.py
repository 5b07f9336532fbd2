"""Medusa heads: K small networks that each predict one future token from one hidden state.

Source: Medusa, arXiv 2401.10774, section 2.1; file layout of FasterDecoding/Medusa, which
vLLM, TGI and TensorRT-LLM read. Letters: N rows, K heads, D hidden, V vocab, W draft vocab.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from conf.errors import InputError
from heads.folders import PROVENANCE
from heads.kind import DraftHead, check_fits
from heads.layers.projection import Projection
from heads.storage import load_tensors, locate, save_head
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.target_model.model import Taps, TargetOutput
from heads.vocab import DraftVocab

WEIGHTS, VLLM_WEIGHTS = "medusa_lm_head.safetensors", "model.safetensors"
VLLM_SIGN = '"MedusaModel"'
VLLM_BLOCK = r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"
VLLM_PROJECTION = r"lm_heads\.(\d+)\.weight"
TOKEN_MAP = "token_map"
"""[W] int64 target ids beside the weights of a reduced draft vocabulary, as vLLM names it."""
ROWS_PER_CHUNK = 256


@dataclass(frozen=True)
class MedusaHeadConfig:
    """Shape of the heads and the target they belong to."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int
    target: str


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


class MedusaHead(DraftHead):
    """K independent heads; head k (from 1) at position t predicts token t + 1 + k.

    Weights start as NaN where they must come from a target or a file, so that a forgotten
    load shows at the first loss.

    Args:
        config: the architecture.
        vocab: the ids it can draft; all unless told.
    """

    taps = Taps()

    def __init__(self, config: MedusaHeadConfig, vocab: DraftVocab | None = None) -> None:
        super().__init__()
        self.config = config
        self.vocab = vocab or DraftVocab.everything(config.vocab_size)
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
    def from_target(
        cls, target: EmbeddingsAndHead, num_heads: int, num_layers: int
    ) -> "MedusaHead":
        """Untrained float32 heads, each equal to the target's own next-token head.

        They have no bias of logits, and engines no place for one: they learn without the target's.

        Raises:
            InputError: the target's output head is quantised.
        """
        weight = target.output_head.weight
        if target.head_is_quantized:
            raise InputError(
                f"target.path={target.name}: its output head is quantised, and Medusa heads start "
                "as copies of it; name the model before quantisation (target.quantization leaves "
                "its output head alone)"
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

    def compile_layers(self) -> None:
        """Compiles the residual blocks, on first use."""
        for head in self.heads:
            for block in head[:-1]:  # type: ignore[index]
                block.compile(dynamic=True)

    def states(self, k: int, hidden_states: Tensor) -> Tensor:
        """[N, D] what head k, counted from 0, projects."""
        return self.heads[k][:-1](hidden_states)  # type: ignore[index]

    def projection(self, k: int) -> Projection:
        """The projection of head k, counted from 0."""
        return Projection(self.heads[k][-1].weight)  # type: ignore[index]

    def output_heads(self) -> list[Tensor]:
        """See `DraftHead.output_heads`."""
        return [head[-1].weight for head in self.heads]  # type: ignore[index]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[K, ..., W] logits of every head on final hidden states [..., D]."""
        return torch.stack([head(hidden_states) for head in self.heads])

    def attach(self, target: EmbeddingsAndHead, dtype: torch.dtype | None = None) -> "MedusaHead":
        """Checks that the heads fit a target and moves to its device.

        Args:
            target: the frozen target.
            dtype: of the heads' parameters; unset leaves them.

        Raises:
            InputError: with both sizes.
        """
        check_fits(self, target, self.config.hidden_size)
        self.vocab = self.vocab.to(target.device)
        return self.to(target.device, dtype)

    def pruned(self, vocab: DraftVocab) -> "MedusaHead":
        """See `DraftHead.pruned`."""
        small = MedusaHead(self.config, vocab)
        rows = self.vocab.to_draft(vocab.ids.to(self.vocab.ids.device))
        last = f".{self.config.num_layers}.weight"
        tensors = {
            name: tensor[rows] if name.endswith(last) else tensor
            for name, tensor in self.state_dict().items()
        }
        small.load_state_dict(tensors)
        return small

    @torch.no_grad()
    def candidates(
        self, output: TargetOutput, token_ids: list[int], first: int, depth: int, width: int
    ) -> Tensor:
        """[depth, n, width] int64, the best tokens of each head, see `DraftHead.candidates`."""
        del token_ids
        parts = output.hidden_states[0, first:].split(ROWS_PER_CHUNK)
        return torch.cat([self.best(part, depth, width) for part in parts], dim=1)

    def best(self, hidden_states: Tensor, depth: int, width: int) -> Tensor:
        """[depth, ..., width] int64, the best tokens of each head on states [..., D]."""
        hidden_states = hidden_states.to(next(self.parameters()).dtype)
        logits = (self.head_logits(k, hidden_states) for k in range(depth))
        return self.vocab.to_target(
            torch.stack([each.topk(width, dim=-1).indices for each in logits])
        )

    def tensors(self) -> dict[str, Tensor]:
        """Original names: `{k}.{layer}.linear.{weight,bias}` and `{k}.{num_layers}.weight`."""
        # Not `state_dict`, which FSDP takes as a wish for shards.
        named = {name.removeprefix("heads."): p.detach() for name, p in self.named_parameters()}
        return named if self.vocab.full else named | {TOKEN_MAP: self.vocab.ids}

    def save(self, folder: Path, provenance: dict[str, object] | None = None) -> None:
        """See `DraftHead.save`."""
        documents: dict[str, object] = {"config.json": self.config_json()}
        if provenance is not None:
            documents[PROVENANCE] = provenance
        save_head(folder, WEIGHTS, self.tensors(), documents)

    def config_json(self) -> dict[str, object]:
        """Keys of the original, of TGI and of vLLM's `MedusaConfig`."""
        reduced = {} if self.vocab.full else {"truncated_vocab_size": len(self.vocab.ids)}
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "base_model_name_or_path": self.config.target,
            "hidden_size": self.config.hidden_size,
            "vocab_size": self.config.vocab_size,
            "medusa_num_heads": self.config.num_heads,
            "medusa_num_layers": self.config.num_layers,
            "medusa_fc_bias": True,
            "dtype": "float32",
            **reduced,
        }

    @classmethod
    def load(cls, path: str, revision: str | None = None) -> "MedusaHead":
        """Loads a folder or Hub repository in the original layout, which is ours, or in vLLM's.

        The published config of the original authors counts fewer heads than the file holds,
        and none of the sizes, so shapes are read from the tensors.

        Raises:
            InputError: missing, corrupt or foreign files; any tensor too many or too few.
        """
        return cls.read(locate(path, revision), path)

    @classmethod
    def read(cls, folder: Path, path: str) -> "MedusaHead":
        """`load` of a folder that `locate` has found for `path`."""
        settings = json.loads((folder / "config.json").read_text())
        tensors = _load(folder, path)
        token_map = tensors.pop(TOKEN_MAP, None)
        config = _config_of(tensors, str(settings.get("base_model_name_or_path")), path)
        vocab = DraftVocab.everything(config.vocab_size)
        if token_map is not None:
            vocab = _reduced(token_map, config.vocab_size, int(settings.get("vocab_size", 0)), path)
        head = cls(replace(config, vocab_size=vocab.size), vocab)
        expected = {name: each for name, each in head.tensors().items() if name != TOKEN_MAP}
        wrong = sorted(
            set(tensors) ^ set(expected)
            | {n for n in set(tensors) & set(expected) if tensors[n].shape != expected[n].shape}
        )
        if wrong:
            raise InputError(f"head.path={path}: tensors missing, foreign or misshapen: {wrong}")
        head.load_state_dict({f"heads.{name}": tensor for name, tensor in tensors.items()})
        return head


def is_medusa(folder: Path) -> bool:
    """Whether a folder with a `config.json` holds Medusa heads."""
    return (folder / WEIGHTS).is_file() or VLLM_SIGN in (folder / "config.json").read_text()


def _load(folder: Path, path: str) -> dict[str, Tensor]:
    """The tensors by their original names."""
    for name in (WEIGHTS, VLLM_WEIGHTS):
        if (folder / name).is_file():
            return _original_names(load_tensors(folder / name))
    found = sorted(file.name for file in folder.iterdir())
    raise InputError(f"head.path={path}: no {WEIGHTS} or {VLLM_WEIGHTS} there; found {found}")


def _original_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """vLLM's `blocks.{k}.layers.{j}.*` and `lm_heads.{k}.weight`; other names stay."""
    found = [re.fullmatch(VLLM_BLOCK, name) for name in tensors]
    num_layers = 1 + max((int(match[2]) for match in found if match), default=-1)
    named = {}
    for name, tensor in tensors.items():
        block = re.sub(VLLM_BLOCK, r"\1.\2.linear.\3", name)
        named[re.sub(VLLM_PROJECTION, rf"\1.{num_layers}.weight", block)] = tensor
    return named


def _reduced(token_map: Tensor, num_rows: int, size: int, path: str) -> DraftVocab:
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


def _config_of(tensors: dict[str, Tensor], target: str, path: str) -> MedusaHeadConfig:
    projections = [name for name in tensors if name.count(".") == 2 and name.endswith(".weight")]
    if not projections:
        raise InputError(f"head.path={path}: no Medusa projection among {sorted(tensors)[:5]}")
    vocab_size, hidden_size = tensors[projections[0]].shape
    num_layers = int(projections[0].split(".")[1])
    num_heads = 1 + max(int(name.split(".")[0]) for name in projections)
    return MedusaHeadConfig(hidden_size, vocab_size, num_heads, num_layers, target)
