"""Answers of Medusa heads. See `heads/head.py`."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from conf.errors import InputError
from conf.settings.export import ExportFormat
from conf.settings.medusa import MedusaConfig
from heads.decoding.chains import Calibration
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import Sampling
from heads.decoding.tree import DraftShape, Tree
from heads.head import ExportPlan, HeadFacts, HeadFiles, ReferenceLogits, Variant
from heads.medusa import export
from heads.medusa.drafter import MedusaCut, MedusaDrafter
from heads.medusa.network import (
    MEDUSA_WEIGHTS,
    TOKEN_MAP,
    VLLM_SIGN,
    MedusaNetwork,
    ResidualBlock,
    infer_config,
    load_medusa_tensors,
    parse_token_map,
)
from heads.target_model.embeddings_and_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab

TOKEN_MAP_PROBLEM = (
    "version 0.32 has a place for `token_map`, but gives each head as many rows as the target has "
    "ids and then refuses fewer. The unpruned head loads."
)


class MedusaHead(MedusaNetwork):
    """K independent heads. Head k (from 1) at position t predicts token t + 1 + k."""

    variants: ClassVar = {"medusa": Variant("Medusa heads", MedusaConfig)}
    name_with_article = "a Medusa head"
    has_static_tree = True
    output_head_patterns = (r"heads\.\d+\.\d+\.weight",)
    compiled_modules = (ResidualBlock,)

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
        config = infer_config(tensors, str(settings.get("base_model_name_or_path")), path)
        vocab = DraftVocab.make_full(config.vocab_size)
        if token_map is not None:
            vocab = parse_token_map(
                token_map, config.vocab_size, int(settings.get("vocab_size", 0)), path
            )
        head = cls(replace(config, vocab_size=vocab.size), vocab)
        expected = {
            name: each for name, each in head.collect_tensors().items() if name != TOKEN_MAP
        }
        wrong = sorted(
            set(tensors) ^ set(expected)
            | {n for n in set(tensors) & set(expected) if tensors[n].shape != expected[n].shape}
        )
        if wrong:
            raise InputError(
                f"head.path={path}: tensors missing, unknown or of another shape: {wrong}"
            )
        head.load_state_dict({f"heads.{name}": tensor for name, tensor in tensors.items()})
        return head

    @classmethod
    def from_settings(
        cls, target: EmbeddingsAndOutputHead, settings: MedusaConfig, vocab: DraftVocab, seed: int
    ) -> Self:
        """Make new heads, each equal to the target's own next-token head, for all ids."""
        del vocab, seed
        return cls.from_target(target, settings.num_heads, settings.num_layers)

    def make_drafter(
        self,
        shape: DraftShape,
        sampling: Sampling,
        seeds: Sequence[int],
        calibration: Calibration | None = None,
    ) -> Drafter:
        """Make a drafter, which ranks candidates and draws nothing."""
        del sampling, seeds
        assert isinstance(shape, Tree)
        if calibration is not None:
            return MedusaCut(self, shape.depth, calibration)
        return MedusaDrafter(self, shape)

    def build_files(self) -> HeadFiles:
        """Files with the original names, and keys of the original, TGI and vLLM's `MedusaConfig`.

        The names are `{k}.{layer}.linear.{weight,bias}` and `{k}.{num_layers}.weight`.
        """
        named = {name.removeprefix("heads."): p.detach() for name, p in self.named_parameters()}
        fewer = {}
        if not self.vocab.is_full:
            named[TOKEN_MAP], fewer = self.vocab.ids, {"truncated_vocab_size": len(self.vocab.ids)}
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
            **fewer,
        }
        return HeadFiles(config, MEDUSA_WEIGHTS, named)

    def plan_export(self, engine: ExportFormat, folder: str = "DIR") -> ExportPlan:
        """See `heads/medusa/export.py`."""
        problem = export.find_export_problem(self, engine)
        if problem is not None:
            return ExportPlan(problem)
        command = export.serve_command(self, engine, folder)
        original = engine is ExportFormat.original
        hint = export.AUTHORS_HINT if original else ""
        return ExportPlan(None, partial(export.build_engine_files, self, engine), command, hint)

    def compute_reference_logits(
        self, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> ReferenceLogits:
        """Compute reference logits from the last hidden states. See `DraftHead.golden`."""
        del target, token_ids, places
        # One head at a time, as all together can be larger than the target.
        each = [deepcopy(part).to("cpu", torch.float32)(states[-1].float()) for part in self.heads]
        logits = torch.stack(each)
        return ReferenceLogits(logits, {"logsumexp": logits.logsumexp(-1)})

    def build_card_facts(
        self, provenance: dict[str, Any], acceptance: dict[str, Any] | None
    ) -> HeadFacts:
        """Card facts; of Medusa-2 if an adapter was trained with the heads."""
        del acceptance
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
            num_draft_tokens=config.num_heads,
            vllm_method="medusa" if self.vocab.is_full else None,
            vllm_problem=TOKEN_MAP_PROBLEM,
            copied=["output layers that started as copies of its own"],
        )
