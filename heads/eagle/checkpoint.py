"""Reader of EAGLE heads of all origins.

Checkpoints have many layouts. The layer is `layers.0.` (EAGLE-1, speculators) or `midlayer.`
(EAGLE-3, SpecForge, Headsmith). Settings lie in the root of `config.json`, in
`transformer_layer_config` (speculators), in `eagle_config` (ModelOpt, TensorRT-LLM) or in `model`
(vLLM's first converter). Tensors take precedence over `config.json`. Settings that `EagleHead` does
not implement are refused, and so are tensors that are missing or unknown.

Sources: the writers SafeAILab/EAGLE, SpecForge, vllm-project/speculators and NeMo Automodel; the
readers of vLLM 0.30 and SGLang. Letters: H hidden, V vocabulary, W draft vocabulary.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig

from conf.errors import InputError
from conf.settings.eagle import EagleForm
from heads.draft_head import UNKNOWN
from heads.eagle.network import LAYER_NAMES, EagleHeadConfig, EagleNetwork
from heads.feature_head import check_layer_ids, tie_output_head
from heads.folders import PROVENANCE, find_head_weights, load_head_tensors
from heads.layers.llama import parse_rope
from heads.vocab import DraftVocab

Head = TypeVar("Head", bound=EagleNetwork)
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
MORE_SIZES = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
# SGLang's names, each with the name in `EagleHead.state_dict`.
ALIASES = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
# Heads with other values compute something else.
REQUIRED_VALUES = {
    "speculators_model_type": "eagle3",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_aux_hidden_state": True,
    "partial_rotary_factor": 1.0,
    "logit_scale": 1.0,
}
# Tensors that belong to flags. `attention_bias` is left out, as SpecForge copies it from the target
# without having one, and `bias`, as vLLM means that of the attention.
FLAGS = {
    "fc_norm": "fc_norm.0.weight",
    "use_aux_norm": "fc_norm.0.weight",
    "norm_before_fc": "input_norm.weight",
}
DRAFT_SIZES = ("draft_vocab_size", "hot_vocab_size", "truncated_vocab_size")


@dataclass
class EagleCheckpoint:
    """Content of a head's folder.

    Attributes:
        path: path as the user typed it.
        settings: `config.json` with its parts merged, without None.
        tensors: tensors by their names in `EagleHead.state_dict`, and `d2t` and `t2d`.
        names: name of each tensor in the file.
        export: notes of `heads.export.writer` about the folder; empty for other writers.
        draft_rows: [W] int64 row in the file for each draft id; None if they are in order.
    """

    path: str
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    names: dict[str, str]
    export: dict[str, Any]
    draft_rows: Tensor | None = None

    @classmethod
    def from_folder(cls, folder: Path, path: str) -> "EagleCheckpoint":
        """Read a folder, named `path` in messages.

        Raises:
            InputError: files are missing, corrupt or pickled.
        """
        checkpoint = cls(path, {}, {}, {}, {})
        checkpoint._read_settings(folder / "config.json")
        checkpoint._read_export(folder / PROVENANCE)
        files = find_head_weights(folder, path)
        if not files:
            raise checkpoint.make_error(
                f"no *.safetensors there; found {sorted(p.name for p in folder.iterdir())}. "
                "Pickled weights (pytorch_model.bin, *.pt) can run code and are never opened; on "
                "the Hub, take the repository's safetensors conversion, usually "
                "head.revision=refs/pr/1, or convert it with "
                "https://huggingface.co/spaces/safetensors/convert"
            )
        for file in files:
            for name, tensor in load_head_tensors(file, path).items():
                # Copied from the target, or zeros, for engines that need them.
                if name not in checkpoint.export.get("added", ()):
                    checkpoint._add_tensor(name, tensor)
        tie_output_head(checkpoint.settings, checkpoint.tensors)
        return checkpoint

    def _read_settings(self, file: Path) -> None:
        root = self._load_json(file)
        for part in ("model", "transformer_layer_config", "eagle_config"):
            if isinstance(root.get(part), dict):
                self._merge_settings(root[part])
        self._merge_settings(root)

    def _read_export(self, file: Path) -> None:
        if file.is_file():
            self.export = self._load_json(file).get("export", {})

    def _load_json(self, file: Path) -> dict[str, Any]:
        try:
            return json.loads(file.read_text())
        except ValueError as error:
            raise self.make_error(f"{file.name} is not JSON: {error}") from error

    def _merge_settings(self, part: dict[str, Any]) -> None:
        self.settings |= {key: value for key, value in part.items() if value is not None}

    def _add_tensor(self, stored_name: str, tensor: Tensor) -> None:
        name = _to_own_name(stored_name)
        if name in self.tensors:
            raise self.make_error(
                f"the same tensor appears twice, as {self.names[name]} and {stored_name}"
            )
        self.tensors[name], self.names[name] = tensor, stored_name

    def get_stored_name(self, name: str) -> str:
        """Return the name that a tensor has, or would have, in the file."""
        if name in self.names or not name.startswith("layer."):
            return self.names.get(name, name)
        return self.layer_prefix + name.removeprefix("layer.")

    @property
    def layer_prefix(self) -> str:
        """Prefix of the layer's tensors in the file; that of EAGLE-3 if the file has none."""
        for name, stored in self.names.items():
            if name.startswith("layer."):
                return stored.removesuffix(name.removeprefix("layer."))
        return LAYER_NAMES[EagleForm.eagle3]

    def make_error(self, problem: str) -> InputError:
        """Make an error that names `head.path`."""
        return InputError(f"head.path={self.path}: {problem}")


def _to_own_name(stored_name: str) -> str:
    name = stored_name.removeprefix("model.")
    for prefix in LAYER_NAMES.values():
        if name.startswith(prefix):
            return "layer." + name.removeprefix(prefix)
    start, dot, rest = name.partition(".")
    return ALIASES.get(start, start) + dot + rest


def build_head_config(
    checkpoint: EagleCheckpoint, layers: Sequence[int] | None, required_values: Mapping[str, Any]
) -> EagleHeadConfig:
    """Build the architecture of a head from its file, as far as all EAGLE heads share it.

    Args:
        checkpoint: content of the head's folder.
        layers: indices of the hidden states to fuse, instead of those in the file.
        required_values: settings that may have no other value.

    Raises:
        InputError: settings contradict the tensors, or are not implemented.
    """
    _check_settings(checkpoint, required_values)
    tensors, settings = checkpoint.tensors, checkpoint.settings
    llama = _parse_llama_config(checkpoint)
    form = _detect_form(checkpoint)
    fields: dict[str, Any] = {
        "form": form,
        "llama": llama,
        "target": _parse_target_name(settings),
        "target_hidden_size": llama.hidden_size,
        "own_embedding": "embed_tokens.weight" in tensors,
        "qk_norm": "layer.self_attn.q_norm.weight" in tensors,
        "fc_bias": "fc.bias" in tensors,
    }
    if form is EagleForm.eagle1:
        if layers is not None:
            raise checkpoint.make_error(
                "an EAGLE-1 head reads the last hidden state: leave head.layers unset"
            )
        return EagleHeadConfig(**fields)
    target_width = _parse_target_width(checkpoint)
    # TensorRT-LLM's name for `norm_output`.
    post_norm = settings.get("return_hidden_post_norm", False)
    eagle3_fields = {
        "target_hidden_size": target_width,
        "layers": _parse_layers(checkpoint, layers, target_width),
        "own_output_head": "lm_head.weight" in tensors,
        "norm_before_fc": FLAGS["norm_before_fc"] in tensors,
        "fc_norm": FLAGS["fc_norm"] in tensors,
        "norm_output": settings.get("norm_output", post_norm),
        # speculators and vLLM disagree on the default; this is the one of the paper's code.
        "norm_before_residual": settings.get("norm_before_residual", False),
    }
    return EagleHeadConfig(**(fields | eagle3_fields))


def _detect_form(checkpoint: EagleCheckpoint) -> EagleForm:
    signs = (
        "layer.hidden_norm.weight" in checkpoint.tensors,
        "speculators_model_type" in checkpoint.settings,
        LAYER_NAMES[EagleForm.eagle3] in checkpoint.layer_prefix,
    )
    return EagleForm.eagle3 if any(signs) else EagleForm.eagle1


def _check_settings(checkpoint: EagleCheckpoint, required_values: Mapping[str, Any]) -> None:
    settings = checkpoint.settings
    for key, value in required_values.items():
        if settings.get(key, value) != value:
            raise checkpoint.make_error(
                f"config.json says {key}={settings[key]}, which is not implemented; must be {value}"
            )
    if "sliding_attention" in settings.get("layer_types", ()):
        raise checkpoint.make_error(
            "config.json says layer_types=['sliding_attention'], which is not implemented"
        )
    for key, name in FLAGS.items():
        if settings.get(key, name in checkpoint.tensors) != (name in checkpoint.tensors):
            verb = "has no" if settings[key] else "has"
            raise checkpoint.make_error(
                f"config.json says {key}={settings[key]}, but the file {verb} {name}"
            )


def _parse_target_name(settings: dict[str, Any]) -> str:
    verifier = settings.get("speculators_config", {}).get("verifier", {})
    return settings.get("base_model_name_or_path") or verifier.get("name_or_path") or UNKNOWN


def _parse_llama_config(checkpoint: EagleCheckpoint) -> LlamaConfig:
    settings = checkpoint.settings
    missing = [key for key in SIZES if key not in settings]
    if missing:
        raise checkpoint.make_error(f"config.json lacks {missing}")
    sizes = {key: settings[key] for key in (*SIZES, *MORE_SIZES) if key in settings}
    try:
        return LlamaConfig(
            **sizes,
            rope_parameters=parse_rope(settings, 10000.0, checkpoint.make_error),
            attention_bias="layer.self_attn.q_proj.bias" in checkpoint.tensors,
            num_hidden_layers=settings.get("num_hidden_layers", 1),
        )
    except (StrictDataclassError, KeyError) as error:
        raise checkpoint.make_error(f"config.json: {error}") from error


def _parse_target_width(checkpoint: EagleCheckpoint) -> int:
    hidden = checkpoint.settings["hidden_size"]
    width = checkpoint.settings.get("target_hidden_size", hidden)
    missing = {"embed_tokens.weight", "lm_head.weight"} - set(checkpoint.tensors)
    if width != hidden and missing:
        raise checkpoint.make_error(
            f"{sorted(missing)} missing, and the target's do not fit: target_hidden_size={width}, "
            f"hidden_size={hidden}"
        )
    return width


def _parse_layers(
    checkpoint: EagleCheckpoint, layers: Sequence[int] | None, width: int
) -> tuple[int, ...]:
    # Engines count layers in several ways, and some name none.
    exported, settings = checkpoint.export.get("layers"), checkpoint.settings
    key = "eagle_aux_hidden_state_layer_ids"
    inner = (settings.get("eagle_config") or {}).get(key)
    check_layer_ids({key: settings.get(key), f"eagle_config.{key}": inner}, checkpoint.make_error)
    named = settings.get(key, ()) if exported is None else exported
    selected = tuple(named if layers is None else layers)
    fc = checkpoint.tensors.get("fc.weight")
    if fc is not None and fc.shape[-1] != (len(selected) or 3) * width:
        raise checkpoint.make_error(
            f"{checkpoint.get_stored_name('fc.weight')} {list(fc.shape)} reads "
            f"{fc.shape[-1] / width:g} hidden states of {width}, but head.layers or config.json "
            f"names {list(selected) or 'none, which is 3'}"
        )
    return selected


def pop_draft_vocab(checkpoint: EagleCheckpoint, form: EagleForm) -> DraftVocab:
    """Build the draft vocabulary of a checkpoint.

    Removes `d2t`, `t2d` and EAGLE-1's copy of the target's output head from its tensors.

    Raises:
        InputError: sizes of the draft vocabulary disagree, or the head cannot have one.
    """
    size, tensors = checkpoint.settings["vocab_size"], checkpoint.tensors
    vocab = DraftVocab.make_full(size)
    if "d2t" in tensors:
        vocab, checkpoint.draft_rows = DraftVocab.from_offsets(
            tensors.pop("d2t"), size, tensors.pop("t2d", None)
        )
    stated = [checkpoint.settings[key] for key in DRAFT_SIZES if key in checkpoint.settings]
    projection = tensors.get("lm_head.weight")
    rows = [] if projection is None else [len(projection)]
    sizes = f"{len(vocab.ids)} of {size} ids by d2t, {stated} by config.json, {rows} by lm_head"
    if form is EagleForm.eagle1:
        # vLLM's first converter added one: https://github.com/vllm-project/vllm/pull/11866
        tensors.pop("lm_head.weight", None)
        if not vocab.is_full or {*stated, *rows} - {size}:
            raise checkpoint.make_error(
                f"an EAGLE-1 head with a draft vocabulary, which is not implemented: {sizes}"
            )
        return vocab
    if {*stated, *rows} - {len(vocab.ids)}:
        raise checkpoint.make_error(f"draft vocabularies disagree: {sizes} (without d2t, all)")
    if not rows and not vocab.is_full:
        raise checkpoint.make_error(
            f"lm_head.weight is missing, and the target's does not fit {sizes}"
        )
    return vocab


def load_into(head: Head, checkpoint: EagleCheckpoint) -> Head:
    """Load all tensors of a checkpoint into a head, and return the head.

    Raises:
        InputError: a tensor is missing, unknown or of another shape.
    """
    expected, tensors = head.state_dict(), checkpoint.tensors
    shapes = {
        name: f"{checkpoint.get_stored_name(name)} {list(tensors[name].shape)}, "
        f"not {list(expected[name].shape)}"
        for name in set(expected) & set(tensors)
        if expected[name].shape != tensors[name].shape
    }
    problems_by_kind = {
        "missing": [checkpoint.get_stored_name(name) for name in set(expected) - set(tensors)],
        "foreign": [checkpoint.get_stored_name(name) for name in set(tensors) - set(expected)],
        "misshapen": list(shapes.values()),
    }
    problems = [f"{kind}: {sorted(names)}" for kind, names in problems_by_kind.items() if names]
    if problems:
        raise checkpoint.make_error("tensors " + "; ".join(problems))
    head.load_state_dict(head.select_draft_rows(tensors, checkpoint.draft_rows))
    return head
