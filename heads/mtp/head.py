"""Answers of MTP heads. See `heads/head.py`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor
from transformers import AutoConfig

from conf.errors import InputError
from conf.settings.eagle import MtpConfig
from conf.settings.export import ExportFormat
from heads.decoding.head_drafter import ChainDrafter, DynamicTreeDrafter
from heads.eagle.drafter import EagleChain, EagleTree
from heads.head import ExportPlan, HeadFacts, HeadFiles, ReferenceLogits, Variant, get_head_settings
from heads.mtp import checkpoint
from heads.mtp.config import MtpHeadConfig, build_layer_settings
from heads.mtp.families import FAMILIES, KNOWN, OTHER
from heads.mtp.network import MtpNetwork
from heads.readings import ConfigVariants, flip_setting
from heads.target_model import sizes
from heads.target_model.embeddings_and_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab

PROBLEM = (
    "loads an MTP layer only from the target's own folder; write it there with `scripts/mtp.py "
    "action=stitch`"
)


def iter_layer_variants(head: Any) -> ConfigVariants:
    """Settings of MTP layers that readers get wrong most often."""
    for name in ("state_first", "feeds_back_normed", "zeroes_first"):
        yield flip_setting(head, name)


class MtpHead(MtpNetwork):
    """Layer for multi-token prediction of a target: its own, or a new one."""

    variants: ClassVar = {"mtp": Variant("MTP layers", MtpConfig)}
    name_with_article = "an MTP layer"
    chain_drafter: ClassVar[type[ChainDrafter]] = EagleChain
    tree_drafter: ClassVar[type[DynamicTreeDrafter]] = EagleTree
    config_type = MtpHeadConfig
    ambiguities = (iter_layer_variants,)

    @classmethod
    def from_folder(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self | None:
        """Load a head's folder, or the layer in the files of a whole model that has one."""
        settings = checkpoint.load_model_config(folder)
        own = settings.get("architectures") == [cls.__name__]
        if settings.get("architectures") and (
            reason := checkpoint.find_unsupported_reason(settings)
        ):
            raise InputError(
                f"head.path={path}: the MTP layer of this model cannot be read yet, as {reason}; "
                f"allowed: {KNOWN}. Name a draft head, such as one of train/eagle.py"
            )
        if not own and checkpoint.find_family(settings) is None:
            return None
        if layers is not None:
            raise InputError(
                f"head.path={path}: an MTP layer reads the last hidden state; leave head.layers "
                "unset"
            )
        return (
            super().from_folder(folder, path, None)
            if own
            else cls._from_model_files(folder, path, settings)
        )

    @classmethod
    def _from_model_files(cls, folder: Path, path: str, settings: dict[str, Any]) -> Self:
        what = f"head.path={path}"
        tensors = checkpoint.load_mtp_tensors(folder, settings, what)
        if not tensors:
            raise InputError(f"{what}: the model has no MTP layers; name a draft head")
        config = AutoConfig.from_pretrained(folder).get_text_config()
        family = str(checkpoint.find_family(settings))
        sparse = any(".experts." in name for name in tensors)
        head = cls(
            build_mtp_config(config, family, path, sparse), DraftVocab.make_full(config.vocab_size)
        )
        expected = head.build_files().tensors
        wrong = sorted(
            set(tensors) ^ set(expected)
            | {n for n in set(tensors) & set(expected) if tensors[n].shape != expected[n].shape}
        )
        if wrong:
            names = [
                head.config.family_entry.to_stored_name(
                    name, checkpoint.count_decoder_layers(settings)
                )
                for name in wrong
            ]
            raise InputError(f"{what}: MTP tensors missing, unknown or of another shape: {names}")
        head.load_state_dict(tensors)
        return head

    @classmethod
    def from_settings(
        cls, target: EmbeddingsAndOutputHead, settings: MtpConfig, vocab: DraftVocab, seed: int
    ) -> Self:
        """Make a new layer of the target's own kind, with experts if the target has them."""
        del settings, vocab
        family = next((name for name in target.architectures if name in FAMILIES), OTHER)
        sparse = not FAMILIES[family].is_dense and any(
            getattr(target.config, name, None)
            for name in ("num_experts", "n_routed_experts", "moe_num_experts")
        )
        config = build_mtp_config(target.config, family, target.name, sparse)
        return cls(config, DraftVocab.make_full(target.vocab_size)).initialise(target, seed)

    def build_files(self) -> HeadFiles:
        """Fields of `config`; parameters and buffers by their names here."""
        files = super().build_files()
        buffers = {name: buffer.detach() for name, buffer in self.named_buffers()}
        return HeadFiles(files.config, files.weights, files.tensors | buffers)

    def plan_export(self, engine: ExportFormat, folder: str = "DIR") -> ExportPlan:
        """Return no files: engines read the layer from the target's folder."""
        del engine, folder
        return ExportPlan(PROBLEM)

    def compute_reference_logits(
        self, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> ReferenceLogits:
        """Not called, as no engine has an export."""
        raise AssertionError(target, states, token_ids, places)

    def build_card_facts(
        self, provenance: dict[str, Any], acceptance: dict[str, Any] | None
    ) -> HeadFacts:
        """Facts for the head's model card."""
        drafted = get_head_settings(provenance).get("num_steps", 1)
        return HeadFacts(
            tag="mtp",
            name="MTP layer",
            method="multi-token prediction",
            paper="2412.19437",
            description=(
                f"the decoder layer for multi-token prediction of {self.config.family} (hidden "
                f"size {self.config.hidden_size}) on the target's last hidden state. It drafts "
                "token by token, to any depth, each from its own last output"
            ),
            num_draft_tokens=len(acceptance["alpha"]) if acceptance else drafted,
            vllm_method=None,
            vllm_problem=f"vLLM {PROBLEM}.",
        )


def build_mtp_config(config: Any, family: str, name: str, sparse: bool) -> MtpHeadConfig:
    """Architecture of a target's layer.

    Args:
        config: config of the target's text part.
        family: a key of `FAMILIES`.
        name: name of the target.
        sparse: whether the layer is a mixture of experts.
    """
    row = FAMILIES[family]
    positions = config.max_position_embeddings
    return MtpHeadConfig(
        family=family,
        layer=build_layer_settings(config, row, sparse),
        target=name,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_positions=min(positions, config.index_topk) if row.has_indexer else positions,
        state_first=row.state_first,
        zeroes_first=row.zeroes_first,
        state_before_norm=row.state_before_norm,
        feeds_back_normed=row.feeds_back_normed,
        num_target_layers=sizes.count_layers(config),
    )
