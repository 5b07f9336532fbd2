"""Medusa heads: K small networks that each predict one later token.

They draft with one forward of all heads, then a static tree of candidates.

Source: Medusa, arXiv 2401.10774, section 2.1; file layout of FasterDecoding/Medusa. Files for
engines are made as their loaders read them: vLLM 0.32 `models/medusa.py`; TensorRT-LLM up to 1.1
`models/medusa/weight.py`; FasterDecoding/Medusa `model/medusa_model.py`. Letters: B texts, N rows,
K heads, D hidden, V vocabulary, W draft vocabulary.
"""

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from conf.errors import InputError
from conf.settings.export import ExportFormat
from conf.settings.medusa import MedusaConfig
from heads.decoding.drafting import CommittedTokens, Draft, Drafter, HeadDrafter, Roots
from heads.decoding.sampling import Sampling
from heads.decoding.tree import DraftShape, Tree
from heads.draft_head import DraftHead, ExportPlan, HeadFacts, HeadFiles, ReferenceLogits, Variant
from heads.export.writer import format_dtype, format_vllm_command
from heads.folders import find_weight_files, load_head_tensors
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead, Projection
from heads.target_model.model import FeatureLayers, Target, TargetOutput
from heads.vocab import DraftVocab

MEDUSA_WEIGHTS, VLLM_WEIGHTS = "medusa_lm_head.safetensors", "model.safetensors"
TOKEN_MAP = "token_map"
"""vLLM's name of the target ids [W] int64 of a reduced draft vocabulary."""
VLLM_SIGN = '"MedusaModel"'
"""Text in `config.json` by which heads in vLLM's layout are recognised."""
VLLM_BLOCK = r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"
VLLM_PROJECTION = r"lm_heads\.(\d+)\.weight"
ROWS_PER_CHUNK = 256
"""Number of hidden states whose logits are in memory at once."""
AUTHORS_HINT = (
    "The authors' loader always builds 5 heads; heads missing in the file draft at random."
)
CONVERT_TO_PICKLE = (
    "import torch; from safetensors.torch import load_file; "
    "torch.save(load_file('{folder}/medusa_lm_head.safetensors'), '{folder}/medusa_lm_head.pt')"
)
TOKEN_MAP_PROBLEM = (
    "version 0.32 has a place for `token_map`, but gives each head as many rows as the target has "
    "ids and then refuses fewer. The unpruned head loads."
)


@dataclass(frozen=True)
class MedusaHeadConfig:
    """Sizes of the heads, and the name of their target."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int
    target: str

    @property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens of a chain, one per head."""
        return self.num_heads


class ResidualBlock(nn.Module):
    """x + SiLU(A x + b), with A and b zero at the start."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states [..., D] to [..., D]."""
        return hidden_states + functional.silu(self.linear(hidden_states))


class MedusaHead(DraftHead):
    """K independent heads. Head k (from 1) at position t predicts token t + 1 + k.

    Each is some residual blocks, then a projection to logits. Weights that must come from a target
    or a file start as NaN, so that a forgotten load shows at the first loss.

    Args:
        config: architecture.
        vocab: draft vocabulary; all ids by default.
    """

    taps = FeatureLayers()
    variants: ClassVar = {"medusa": Variant("Medusa heads", MedusaConfig)}
    name_with_article = "a Medusa head"
    has_static_tree = True
    output_head_patterns = (r"heads\.\d+\.\d+\.weight",)
    compiled_modules = (ResidualBlock,)

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
        """Number K of heads."""
        return self.config.num_heads

    @classmethod
    def from_target(cls, target: EmbeddingsAndOutputHead, num_heads: int, num_layers: int) -> Self:
        """Make float32 heads, each equal to the target's own next-token head, and attach them.

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
        """Compute logits [N, W] of head k, counted from 0, on final hidden states [N, D].

        Head 0 reads position t and predicts token t + 2.
        """
        return self.heads[k](hidden_states)

    def head_states(self, k: int, hidden_states: Tensor) -> Tensor:
        """Compute the states [N, D] that head k, counted from 0, projects to logits."""
        return self.heads[k][:-1](hidden_states)  # type: ignore[index]

    def make_projection(self, k: int) -> Projection:
        """Make the projection of head k, counted from 0."""
        return Projection(self.heads[k][-1].weight)  # type: ignore[index]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute logits [K, ..., W] of every head on final hidden states [..., D]."""
        return torch.stack([head(hidden_states) for head in self.heads])

    @torch.no_grad()
    def compute_candidates(
        self, output: TargetOutput, token_ids: list[int], first: int, depth: int, width: int
    ) -> Tensor:
        """Compute best tokens [depth, n, width] per head. See `DraftHead.compute_candidates`."""
        del token_ids
        parts = output.hidden_states[0, first:].split(ROWS_PER_CHUNK)
        return torch.cat([self.rank_token_ids(part, depth, width) for part in parts], dim=1)

    def rank_token_ids(self, hidden_states: Tensor, depth: int, width: int) -> Tensor:
        """Rank the tokens of each head on states [..., D]: the best [depth, ..., width] int64."""
        hidden_states = hidden_states.to(next(self.parameters()).dtype)
        logits = (self.head_logits(k, hidden_states) for k in range(depth))
        return self.vocab.to_target_ids(
            torch.stack([each.topk(width, dim=-1).indices for each in logits])
        )

    @classmethod
    def from_folder(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self | None:
        """Load heads in the original layout, which Headsmith writes, or in vLLM's.

        The authors' published config counts fewer heads than the file holds and has no sizes, so
        shapes are read from the tensors.
        """
        config_file = folder / "config.json"
        if not (folder / MEDUSA_WEIGHTS).is_file() and VLLM_SIGN not in config_file.read_text():
            return None
        if layers is not None:
            raise InputError(
                f"head.path={path}: a Medusa head reads the last hidden state; leave head.layers "
                "unset"
            )
        settings = json.loads(config_file.read_text())
        tensors = load_medusa_tensors(folder, path)
        token_map = tensors.pop(TOKEN_MAP, None)
        names = [name for name in tensors if name.count(".") == 2 and name.endswith(".weight")]
        if not names:
            raise InputError(f"head.path={path}: no Medusa projection among {sorted(tensors)[:5]}")
        (num_rows, hidden_size), num_layers = tensors[names[0]].shape, int(names[0].split(".")[1])
        num_heads = 1 + max(int(name.split(".")[0]) for name in names)
        vocab, rows = DraftVocab.make_full(num_rows), None
        if token_map is not None:
            size = int(settings.get("vocab_size", 0))
            vocab, rows = _parse_token_map(token_map, num_rows, size, path)
        target = str(settings.get("base_model_name_or_path"))
        config = MedusaHeadConfig(hidden_size, vocab.size, num_heads, num_layers, target)
        head = cls(config, vocab)
        shapes = {n: t.shape for n, t in head.collect_tensors().items() if n != TOKEN_MAP}
        wrong = sorted(dict({n: t.shape for n, t in tensors.items()}.items() ^ shapes.items()))
        if wrong:
            raise InputError(
                f"head.path={path}: tensors missing, unknown or of another shape: {wrong}"
            )
        named = {f"heads.{name}": tensor for name, tensor in tensors.items()}
        head.load_state_dict(head.select_draft_rows(named, rows))
        return head

    @classmethod
    def from_settings(
        cls, target: EmbeddingsAndOutputHead, settings: MedusaConfig, vocab: DraftVocab, seed: int
    ) -> Self:
        """Make new heads for all ids, each equal to the target's own next-token head."""
        del vocab, seed
        return cls.from_target(target, settings.num_heads, settings.num_layers)

    def make_drafter(self, shape: DraftShape, sampling: Sampling, seeds: Sequence[int]) -> Drafter:
        """Make a drafter of the attached heads; it ranks candidates and draws nothing."""
        del sampling, seeds
        assert isinstance(shape, Tree)
        return MedusaDrafter(self, shape)

    def build_files(self) -> HeadFiles:
        """Build files with the original names, and the keys of all engines.

        The keys are those of the authors and of vLLM's `MedusaConfig`. The names are
        `{k}.{layer}.linear.{weight,bias}` and `{k}.{num_layers}.weight`.
        """
        tensors = {name.removeprefix("heads."): p.detach() for name, p in self.named_parameters()}
        vocab_settings = {}
        if not self.vocab.is_full:
            tensors[TOKEN_MAP] = self.vocab.ids
            vocab_settings["truncated_vocab_size"] = len(self.vocab.ids)
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "base_model_name_or_path": self.config.target,
            "hidden_size": self.config.hidden_size,
            "vocab_size": self.config.vocab_size,
            "medusa_num_heads": self.config.num_heads,
            "medusa_num_layers": self.config.num_layers,
            "medusa_fc_bias": True,
            "dtype": "float32",
            **vocab_settings,
        }
        return HeadFiles(config, MEDUSA_WEIGHTS, tensors)

    def plan_export(self, engine: ExportFormat, folder: str = "DIR") -> ExportPlan:
        """Plan the files and the command for an engine. See `DraftHead.plan_export`."""
        blocks, original = self.config.num_layers, engine is ExportFormat.original
        if engine not in ENGINES:
            return ExportPlan("loads no Medusa heads")
        if not self.vocab.is_full:
            # vLLM 0.32 knows `token_map`, but makes each head as large as the target's vocabulary
            # and then refuses fewer rows.
            return ExportPlan(
                "loads no Medusa heads with a reduced draft vocabulary; export the unpruned head"
            )
        if original and blocks > 1:
            return ExportPlan(
                f"merges the {blocks} residual blocks of a head into one (head.num_layers)"
            )
        command = format_serve_command(self, engine, folder)
        hint, last = AUTHORS_HINT if original else "", LAST_VERSIONS.get(engine, "")
        return ExportPlan(None, partial(build_engine_files, self, engine), command, hint, last)

    def compute_reference_logits(
        self, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> ReferenceLogits:
        """Compute reference logits. See `DraftHead.compute_reference_logits`."""
        del target, token_ids, places
        # One head at a time, as all together can be larger than the target.
        each = [deepcopy(part).to("cpu", torch.float32)(states[-1].float()) for part in self.heads]
        logits = torch.stack(each)
        return ReferenceLogits(logits, {"logsumexp": logits.logsumexp(-1)})

    def build_card_facts(self, provenance: dict[str, Any]) -> HeadFacts:
        """Collect the facts of the model card; of Medusa-2 if an adapter was trained too."""
        config = self.config
        return HeadFacts(
            tag="medusa",
            name="Medusa heads",
            method="Medusa-2" if "adapter" in provenance else "Medusa-1",
            paper="2401.10774",
            description=(
                f"{config.num_heads} heads of {config.num_layers} residual "
                f"block{'s' if config.num_layers > 1 else ''} (hidden size {config.hidden_size}, "
                f"{self.vocab.describe_size()}). Head k drafts the token k + 1 positions ahead"
            ),
            num_draft_tokens=self.num_engine_tokens,
            vllm_method="medusa" if self.vocab.is_full else None,
            vllm_problem=TOKEN_MAP_PROBLEM,
            copied=["output layers that started as copies of its own"],
            last_vllm_version=LAST_VERSIONS[ExportFormat.vllm],
        )


class MedusaDrafter(HeadDrafter):
    """Drafts a static tree from the hidden state of the last committed token.

    Args:
        head: trained heads on the target's device.
        tree: static tree, at most as deep as the number of heads.
    """

    row_attributes = ("hidden",)
    hidden: Tensor | None = None

    def __init__(self, head: MedusaHead, tree: Tree) -> None:
        super().__init__(head, tree)
        self.tree = tree
        self.num_static_nodes = tree.num_nodes
        levels = [depth - 1 for depth in tree.depths[1:]]
        self.slots = torch.tensor(
            [level * tree.width + rank for level, rank in zip(levels, tree.ranks[1:], strict=True)]
        )

    def observe(self, seen: CommittedTokens) -> None:
        """Store the hidden states [B, D] of the last committed tokens."""
        hidden = seen.last_output.hidden_states[:, 0]
        # In place, as captured steps know the address.
        self.hidden = hidden if self.hidden is None else self.hidden.copy_(hidden)

    def propose(self, roots: Roots) -> Draft:  # noqa: ARG002
        """Draft the tree's candidates: head k fills the nodes of depth k."""
        assert self.hidden is not None
        self.slots = self.slots.to(self.hidden.device)
        candidates = self.head.rank_token_ids(self.hidden, self.tree.depth, self.tree.width)
        return Draft.from_tree(self.tree, candidates.transpose(0, 1).flatten(1)[:, self.slots])


def load_medusa_tensors(folder: Path, path: str) -> dict[str, Tensor]:
    """Load the tensors of a folder by their original names, with vLLM's translated.

    Raises:
        InputError: the folder has no weights file, or files that its index names are missing.
    """
    for name in (MEDUSA_WEIGHTS, VLLM_WEIGHTS):
        files = find_weight_files(f"head.path={path}", folder, Path(name).stem)
        if files:
            tensors = load_head_tensors(files, path)
            matches = [re.fullmatch(VLLM_BLOCK, each) for each in tensors]
            num_layers = 1 + max((int(match[2]) for match in matches if match), default=-1)
            last = rf"\1.{num_layers}.weight"
            return {
                re.sub(VLLM_PROJECTION, last, re.sub(VLLM_BLOCK, r"\1.\2.linear.\3", each)): tensor
                for each, tensor in tensors.items()
            }
    file_names = sorted(file.name for file in folder.iterdir())
    raise InputError(
        f"head.path={path}: no {MEDUSA_WEIGHTS} or {VLLM_WEIGHTS} there; found {file_names}"
    )


def _parse_token_map(
    token_map: Tensor, num_rows: int, size: int, path: str
) -> tuple[DraftVocab, Tensor]:
    """Build the vocabulary of a map [W] of V target ids, and [W] int64 the row for each of its ids.

    Raises:
        InputError: the map names an id twice, has not W = `num_rows`, or has ids beyond V = `size`.
    """
    ids, rows = token_map.to(torch.int64).sort()
    if (
        token_map.is_floating_point()
        or ids.shape != (num_rows,)
        or bool((ids.diff() <= 0).any())
        or not 0 <= int(ids[0]) <= int(ids[-1]) < size
    ):
        raise InputError(
            f"head.path={path}: {TOKEN_MAP} is {token_map.dtype} {list(token_map.shape)}: must be "
            f"the target ids of the {num_rows} rows of each projection, each once and "
            f"below vocab_size={size} of config.json"
        )
    return DraftVocab(ids, size), rows


ENGINES = (ExportFormat.vllm, ExportFormat.trtllm, ExportFormat.original)
"""Engines that load such heads."""
LAST_VERSIONS = {ExportFormat.vllm: "0.32", ExportFormat.trtllm: "1.1"}
"""Last versions of engines that have Medusa."""


def build_engine_files(head: MedusaHead, engine: ExportFormat) -> HeadFiles:
    """Build the files of heads in the layout of an engine that can serve them."""
    dtype, files = format_dtype(head), head.build_files()
    settings = files.config | {"dtype": dtype, "torch_dtype": dtype}
    architectures = settings.pop("architectures")
    if engine is not ExportFormat.vllm:
        return HeadFiles(settings, MEDUSA_WEIGHTS, files.tensors)
    # vLLM's own names, as older versions do not know the authors'.
    settings["architectures"] = architectures
    renamed = {}
    for name, tensor in files.tensors.items():
        k, layer, *rest = name.split(".")
        block = f"blocks.{k}.layers.{layer}.{rest[-1]}"
        renamed[block if rest[0] == "linear" else f"lm_heads.{k}.weight"] = tensor
    return HeadFiles(settings, VLLM_WEIGHTS, renamed)


def format_serve_command(head: MedusaHead, engine: ExportFormat, folder: str) -> str:
    """Format the command that starts an engine with heads, as lines for a shell.

    The engine drafts one token per head.
    """
    num_heads, target = head.num_heads, head.target_name
    if engine is ExportFormat.vllm:
        return format_vllm_command("medusa", num_heads, target, folder)
    if engine is ExportFormat.trtllm:
        return (
            f"python examples/medusa/convert_checkpoint.py --model_dir {target} "
            f"--medusa_model_dir {folder} --num_medusa_heads {num_heads} "
            "--dtype bfloat16 --output_dir checkpoint\n"
            "trtllm-build --checkpoint_dir checkpoint --output_dir engine --gemm_plugin bfloat16 "
            "--speculative_decoding_mode medusa\n"
            f"python examples/run.py --engine_dir engine --tokenizer_dir {target} "
            f"--medusa_choices '{json.dumps([[0] * k for k in range(1, num_heads + 1)])}' "
            "--temperature 1.0 --max_output_len 128 --input_text 'Hello'"
        )
    # The authors' loader only opens pickles.
    convert = CONVERT_TO_PICKLE.format(folder=folder)
    return f'python -c "{convert}"\npython -m medusa.inference.cli --model {folder}'
