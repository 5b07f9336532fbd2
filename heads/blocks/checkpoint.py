"""Reader of block drafters of all origins.

Tensors have the authors' names everywhere. Settings lie in the root of `config.json` and in
`dflash_config` (z-lab, SpecForge, DeepSpec, Headsmith), or in `transformer_layer_config`
(speculators). `target_layer_ids` counts outputs of layers; `aux_hidden_state_layer_ids` counts
hidden states, one more. Settings that contradict the tensors or are not implemented are refused.

Sources: the writers z-lab/dflash, deepseek-ai/DeepSpec, SpecForge and vllm-project/speculators;
the readers of vLLM 0.32 and SGLang 0.5.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig

from conf.errors import InputError
from heads.blocks.network import FULL, SLIDING, BlockHeadConfig, BlockNetwork
from heads.draft_head import UNKNOWN
from heads.feature_head import check_layer_ids, tie_output_head
from heads.folders import PROVENANCE, find_head_weights, load_head_tensors
from heads.layers.llama import parse_rope
from heads.vocab import DraftVocab

Head = TypeVar("Head", bound=BlockNetwork)
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
MORE_SIZES = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
# Heads with other values compute something else.
REQUIRED_VALUES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "use_aux_hidden_state": True,
    "is_neox_style": True,
    "partial_rotary_factor": 1.0,
    "logit_scale": 1.0,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
}
MASK_EMBEDDING = "mask_embedding.pt"
"""File beside the weights that replaces the mask token's embedding in vLLM."""
EARLY_PREFIX = "logit_head."
"""Prefix of Markov and confidence heads in SpecForge's first files."""
VERIFIER_TENSORS = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors that speculators uses in training only."""


@dataclass
class BlockCheckpoint:
    """Content of a head's folder.

    Attributes:
        path: path as the user typed it.
        settings: `config.json` with its parts merged, without None.
        tensors: tensors by their names in `BlockNetwork.state_dict`.
        vocab: draft vocabulary.
        export: notes of `heads.export.writer` about the folder; empty for other writers.
        draft_rows: [W] int64 row in the file for each draft id; None if they are in order.
    """

    path: str
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    vocab: DraftVocab
    export: dict[str, Any]
    draft_rows: Tensor | None = None

    @classmethod
    def from_folder(
        cls, folder: Path, path: str, implemented: Collection[str] = ()
    ) -> "BlockCheckpoint":
        """Read settings and tensors of a folder.

        Args:
            folder: local folder.
            path: path as the user typed it.
            implemented: keys of `REQUIRED_VALUES` that this kind of head implements.

        Raises:
            InputError: files are missing, pickled or corrupt, or settings belong to another
                architecture.
        """
        settings, export, tensors = _load_settings(folder, path), {}, dict[str, Tensor]()
        if (folder / PROVENANCE).is_file():
            export = json.loads((folder / PROVENANCE).read_text()).get("export", {})
        files = find_head_weights(folder, path)
        checkpoint = cls(path, settings, tensors, DraftVocab.make_full(1), export)
        if not files:
            names = sorted(each.name for each in folder.iterdir())
            raise checkpoint.make_error(
                f"no *.safetensors there; found {names}. Pickled weights can run code and are "
                "never opened; convert them with https://huggingface.co/spaces/safetensors/convert"
            )
        if (folder / MASK_EMBEDDING).is_file():
            raise checkpoint.make_error(
                f"{MASK_EMBEDDING}: a separate pickled mask embedding, which is never opened; name "
                "another head"
            )
        for file in files:
            for name, tensor in load_head_tensors(file, path).items():
                tensors[name.removeprefix("model.").removeprefix(EARLY_PREFIX)] = tensor
        checkpoint._drop_target_tensors()
        tie_output_head(settings, tensors)
        checkpoint._check_settings(implemented)
        checkpoint.vocab = checkpoint._parse_draft_vocab()
        return checkpoint

    def _drop_target_tensors(self) -> None:
        """Drop copies of the target's tensors that the export notes or speculators' names mark."""
        copies = (*self.export.get("added", ()), *VERIFIER_TENSORS)
        for name in copies:
            self.tensors.pop(name, None)

    def make_error(self, problem: str) -> InputError:
        """Make an error that names `head.path`."""
        return InputError(f"head.path={self.path}: {problem}")

    def _check_settings(self, implemented: Collection[str]) -> None:
        for key, required in REQUIRED_VALUES.items():
            if key not in implemented and self.settings.get(key, required) != required:
                raise self.make_error(
                    f"config.json says {key}={self.settings[key]}, which is not implemented; must "
                    f"be {required}"
                )
        if "mask_hidden" in self.tensors:
            raise self.make_error("mask_hidden: belongs to a P-EAGLE head, which is another kind")
        missing = [key for key in SIZES if key not in self.settings]
        if missing:
            raise self.make_error(f"config.json lacks {missing}")

    def _parse_draft_vocab(self) -> DraftVocab:
        size, tensors = self.settings["vocab_size"], self.tensors
        d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
        vocab = DraftVocab.make_full(size)
        if d2t is not None:
            vocab, self.draft_rows = DraftVocab.from_offsets(d2t, size, t2d)
        stated, rows = self.settings.get("draft_vocab_size", size), tensors.get("lm_head.weight")
        if stated != len(vocab.ids) or (rows is not None and len(rows) != len(vocab.ids)):
            raise self.make_error(
                f"draft vocabularies disagree: {len(vocab.ids)} of {size} ids by d2t (without it, "
                f"all), {stated} by config.json, {None if rows is None else len(rows)} by lm_head"
            )
        if not vocab.is_full and rows is None:
            raise self.make_error(
                "lm_head.weight is missing, and the target's has other ids than these "
                f"{len(vocab.ids)}"
            )
        return vocab

    def build_head_config(self, layers: Sequence[int] | None, anchored: bool) -> BlockHeadConfig:
        """Build the architecture of the head.

        Args:
            layers: indices of the hidden states to read, instead of those in `config.json`.
            anchored: value of `sample_from_anchor` if the file lacks the key.

        Raises:
            InputError: a needed key is missing, or a value is not implemented.
        """
        settings = self.settings
        llama, window = self._parse_llama_config(), self._parse_window()
        width = settings.get("target_hidden_size", llama.hidden_size)
        selected, full_layers = self._parse_layers(layers, width), self._find_full_layers(window)
        return BlockHeadConfig(
            llama=llama,
            target=self._parse_target_name(),
            target_hidden_size=width,
            num_target_layers=settings.get("num_target_layers", 0),
            layers=selected,
            block_size=self.get_integer("block_size"),
            mask_token_id=self.get_integer("mask_token_id"),
            sample_from_anchor=settings.get("sample_from_anchor", anchored),
            causal=self._is_causal(window, full_layers),
            window=window,
            full_layers=full_layers,
            own_output_head="lm_head.weight" in self.tensors,
            own_embedding="embed_tokens.weight" in self.tensors,
        )

    def get_integer(self, key: str) -> int:
        """Return an integer setting of `config.json`.

        Raises:
            InputError: the key is missing, or its value is no integer.
        """
        value = self.settings.get(key)
        if not isinstance(value, int):
            raise self.make_error(f"config.json has {value!r} for {key}: must be a whole number")
        return value

    def _parse_target_name(self) -> str:
        verifier = self.settings.get("speculators_config", {}).get("verifier", {})
        return (
            self.settings.get("base_model_name_or_path") or verifier.get("name_or_path") or UNKNOWN
        )

    def _parse_window(self) -> int | None:
        """Return the number of tokens that layers with a window see; None without a window.

        Raises:
            InputError: the window has no size.
        """
        if not (self.settings.get("use_swa", False) or SLIDING in self._get_layer_types()):
            return None
        size = self.settings.get("swa_window_size", self.settings.get("sliding_window"))
        if not isinstance(size, int):
            raise self.make_error(
                "config.json asks for a sliding window, but has no sliding_window"
            )
        return size

    def _get_layer_types(self) -> list[str]:
        return self.settings.get("layer_types", [])

    def _find_full_layers(self, window: int | None) -> tuple[int, ...]:
        """Return the indices of layers without a window, if other layers have one.

        Raises:
            InputError: kinds of layers are unknown, or their number is not that of the layers.
        """
        kinds, number = self._get_layer_types(), self.settings["num_hidden_layers"]
        if not set(kinds) <= {SLIDING, FULL} or len(kinds) not in (0, number):
            raise self.make_error(
                f"config.json says layer_types {kinds}: must be {number} of {SLIDING} and {FULL}"
            )
        if window is None or SLIDING not in kinds:
            return ()
        return tuple(index for index, kind in enumerate(kinds) if kind == FULL)

    def _is_causal(self, window: int | None, full_layers: Sequence[int]) -> bool:
        """Tell whether rows are causal, as vLLM decides: by a key, or else by sliding layers.

        Raises:
            InputError: the config says that rows of `full_layers` are causal too.
        """
        settings = self.settings
        if "speculators_model_type" in settings:
            # As the key says: without a window, speculators trains rows that see each other.
            return window is not None and not settings.get("sliding_window_non_causal", True)
        stated = settings.get("is_causal", settings.get("causal"))
        if stated and full_layers:
            raise self.make_error(
                "config.json says that rows are causal in all layers, but layers "
                f"{list(full_layers)} see all of the text; must be false or unset"
            )
        return SLIDING in self._get_layer_types() if stated is None else bool(stated)

    def _parse_layers(self, layers: Sequence[int] | None, width: int) -> tuple[int, ...]:
        settings = self.settings
        named = [index + 1 for index in settings.get("target_layer_ids", ())]
        keys = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
        stated = {"target_layer_ids + 1": named, **{key: settings.get(key) for key in keys}}
        check_layer_ids(stated, self.make_error)
        for key in keys:
            named = settings.get(key, named)
        selected = tuple(named if layers is None else layers)
        fc = self.tensors.get("fc.weight")
        if not selected or (fc is not None and fc.shape[-1] != len(selected) * width):
            read = "nothing" if fc is None else f"{fc.shape[-1] / width:g} hidden states of {width}"
            raise self.make_error(
                f"fc.weight reads {read}, but head.layers or config.json names {list(selected)}"
            )
        return selected

    def _parse_llama_config(self) -> LlamaConfig:
        settings = self.settings
        sizes = {key: settings[key] for key in (*SIZES, *MORE_SIZES) if key in settings}
        try:
            # The theta is the engines' default.
            rope = parse_rope(settings, 1e6, self.make_error)
            return LlamaConfig(**sizes, rope_parameters=rope, attention_bias=False)
        except (StrictDataclassError, KeyError) as error:
            raise self.make_error(f"config.json: {error}") from error

    def load_into(self, head: Head) -> Head:
        """Load the tensors into a head with the architecture of `build_head_config`.

        Raises:
            InputError: a tensor is missing, unknown or of another shape.
        """
        expected, tensors = head.state_dict(), self.tensors
        shapes = [
            f"{name} {list(tensors[name].shape)}, not {list(expected[name].shape)}"
            for name in sorted(set(expected) & set(tensors))
            if expected[name].shape != tensors[name].shape
        ]
        wrong = {
            "missing": sorted(set(expected) - set(tensors)),
            "foreign": sorted(set(tensors) - set(expected)),
            "misshapen": shapes,
        }
        problems = [f"{kind}: {names}" for kind, names in wrong.items() if names]
        if problems:
            raise self.make_error("tensors " + "; ".join(problems))
        head.load_state_dict(head.select_draft_rows(tensors, self.draft_rows))
        return head


def _load_settings(folder: Path, path: str) -> dict[str, Any]:
    """Read `config.json`, with its parts merged and without None.

    Raises:
        InputError: the file is no JSON.
    """
    file = folder / "config.json"
    try:
        root = json.loads(file.read_text())
    except ValueError as error:
        raise InputError(f"head.path={path}: config.json is not JSON: {error}") from error
    # Engines read `dflash_config` first, then the root.
    merged: dict[str, Any] = {}
    for part in (root.get("transformer_layer_config"), root, root.get("dflash_config")):
        if isinstance(part, dict):
            merged |= {key: value for key, value in part.items() if value is not None}
    return merged
