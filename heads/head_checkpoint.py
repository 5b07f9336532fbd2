"""Reader of heads that others published: what folders of EAGLE and of block heads share.

Tensors take precedence over `config.json`. Settings that a head does not implement are refused, and
so are tensors that are missing or unknown. Letters: V vocabulary, W draft vocabulary, H hidden.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig

from conf.errors import InputError
from heads.draft_head import UNKNOWN, DraftHead
from heads.folders import find_head_weights, load_export_record, load_head_tensors
from heads.layers.llama import parse_rope
from heads.vocab import DraftVocab

Head = TypeVar("Head", bound=DraftHead)
ROOT = ""
"""Name of `config.json` itself among its sections."""
MORE_SIZES = (
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"),
    "num_hidden_layers",
)
EMBEDDING, OUTPUT_HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass
class HeadCheckpoint:
    """Content of a head's folder.

    Attributes:
        path: path as the user typed it.
        settings: `config.json` with its sections merged, without None.
        tensors: tensors by their names in the head's `state_dict`, and `d2t` and `t2d`.
        names: name of each tensor in the file.
        export: notes of `heads.export.writer` about the folder; empty for other writers.
        draft_rows: [W] int64 row in the file for each draft id; None if they are in order.
        sections: sections of `config.json` with settings; later ones take precedence.
        sizes: settings that `config.json` must have.
        default_theta: theta of RoPE if `config.json` names none.
        target_tensors: tensors in files that the head does not need.
    """

    path: str
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    names: dict[str, str]
    export: dict[str, Any]
    draft_rows: Tensor | None = None
    sections: ClassVar[tuple[str, ...]]
    sizes: ClassVar[tuple[str, ...]]
    default_theta: ClassVar[float]
    target_tensors: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_folder(cls, folder: Path, path: str) -> Self:
        """Read a folder, named `path` in messages.

        Raises:
            InputError: files are missing, corrupt or pickled.
        """
        checkpoint = cls(path, {}, {}, {}, load_export_record(folder))
        checkpoint._read_settings(folder / "config.json")
        files = find_head_weights(folder, path)
        if not files:
            raise checkpoint.make_error(
                f"no *.safetensors there; found {sorted(p.name for p in folder.iterdir())}. "
                "Pickled weights (pytorch_model.bin, *.pt) can run code and are never opened; on "
                "the Hub, take the repository's safetensors conversion, usually "
                "head.revision=refs/pr/1, or convert it with "
                "https://huggingface.co/spaces/safetensors/convert"
            )
        # Copied from the target, or zeros, for engines that need them.
        left_out = {*checkpoint.export.get("added", ()), *cls.target_tensors}
        tensors, names = checkpoint.tensors, checkpoint.names
        stored = (pair for file in files for pair in load_head_tensors([file], path).items())
        for stored_name, tensor in stored:
            name = cls.to_own_name(stored_name)
            if name in tensors and stored_name not in left_out:
                raise checkpoint.make_error(
                    f"the same tensor appears twice, as {names[name]} and {stored_name}"
                )
            if not {name, stored_name} & left_out:
                tensors[name], names[name] = tensor, stored_name
        # Engines tie so too. A head with a smaller draft vocabulary has rows for other ids, so its
        # output head is never tied.
        tied = checkpoint.settings.get("tie_word_embeddings") and "d2t" not in tensors
        if tied and EMBEDDING in tensors:
            tensors.setdefault(OUTPUT_HEAD, tensors[EMBEDDING].clone())
        return checkpoint

    def _read_settings(self, file: Path) -> None:
        try:
            root = json.loads(file.read_text())
        except ValueError as error:
            raise self.make_error(f"{file.name} is not JSON: {error}") from error
        for name in self.sections:
            section = root if name == ROOT else root.get(name)
            if isinstance(section, dict):
                self.settings |= {key: each for key, each in section.items() if each is not None}

    @classmethod
    def to_own_name(cls, stored_name: str) -> str:
        """Return the name in the head's `state_dict` of a tensor in the file."""
        return stored_name.removeprefix("model.")

    def get_stored_name(self, name: str) -> str:
        """Return the name that a tensor has, or would have, in the file."""
        return self.names.get(name, name)

    def make_error(self, problem: str) -> InputError:
        """Make an error that names `head.path`."""
        return InputError(f"head.path={self.path}: {problem}")

    @property
    def target_name(self) -> str:
        """Return the target that the config names."""
        verifier = self.settings.get("speculators_config", {}).get("verifier", {})
        return (
            self.settings.get("base_model_name_or_path") or verifier.get("name_or_path") or UNKNOWN
        )

    def check_settings(self, required_values: Mapping[str, Any]) -> None:
        """Refuse settings with other values than these, and missing sizes.

        Raises:
            InputError: naming the setting.
        """
        for key, value in required_values.items():
            if self.settings.get(key, value) != value:
                raise self.make_error(
                    f"config.json says {key}={self.settings[key]}, which is not implemented; must "
                    f"be {value}"
                )
        missing = [key for key in self.sizes if key not in self.settings]
        if missing:
            raise self.make_error(f"config.json lacks {missing}")

    def parse_llama_config(self, attention_bias: bool = False) -> LlamaConfig:
        """Parse the sizes and the RoPE of the head's layers.

        Raises:
            InputError: a value is invalid or not implemented.
        """
        names = [name for name in (*self.sizes, *MORE_SIZES) if name in self.settings]
        sizes = {"num_hidden_layers": 1} | {name: self.settings[name] for name in names}
        rope = parse_rope(self.settings, self.default_theta, self.make_error)
        try:
            return LlamaConfig(**sizes, rope_parameters=rope, attention_bias=attention_bias)
        except (StrictDataclassError, KeyError) as error:
            raise self.make_error(f"config.json: {error}") from error

    def check_layer_ids(self, named: Mapping[str, Sequence[int] | None]) -> None:
        """Refuse a config that names different target layers, by the place that names them.

        Raises:
            InputError: naming two places and their layers.
        """
        stated = [(place, list(layers)) for place, layers in named.items() if layers]
        for place, layers in stated[1:]:
            first, expected = stated[0]
            if layers != expected:
                raise self.make_error(
                    f"config.json says {first}={expected}, but {place}={layers}; keep the right one"
                )

    def select_layers(self, layers: Sequence[int], width: int, default: int = 0) -> tuple[int, ...]:
        """Return the hidden states that a head fuses, `default` many where none are named.

        Raises:
            InputError: the fusion layer reads another number of states of this width.
        """
        fc, number = self.tensors.get("fc.weight"), len(layers) or default
        if not number or (fc is not None and fc.shape[-1] != number * width):
            read = "reads nothing"
            if fc is not None:
                read = f"{list(fc.shape)} reads {fc.shape[-1] / width:g} hidden states of {width}"
            named = list(layers) or (f"none, which is {default}" if default else [])
            raise self.make_error(
                f"{self.get_stored_name('fc.weight')} {read}, but head.layers or config.json names "
                f"{named}"
            )
        return tuple(layers)

    def pop_draft_vocab(self, stated: Sequence[int], whole_kind: str = "") -> DraftVocab:
        """Build the draft vocabulary, and remove `d2t` and `t2d` from the tensors.

        Args:
            stated: sizes of the draft vocabulary that the config names.
            whole_kind: name of a kind of head that always drafts all ids; empty for others.

        Raises:
            InputError: sizes of the draft vocabulary disagree, or the head cannot have one.
        """
        size, tensors = self.settings["vocab_size"], self.tensors
        vocab = DraftVocab.make_full(size)
        if "d2t" in tensors:
            vocab, self.draft_rows = DraftVocab.from_offsets(
                tensors.pop("d2t"), size, tensors.pop("t2d", None)
            )
        rows = [len(tensors[OUTPUT_HEAD])] if OUTPUT_HEAD in tensors else []
        sizes = (
            f"{len(vocab.ids)} of {size} ids by d2t, {list(stated)} by config.json, {rows} by "
            "lm_head"
        )
        if whole_kind and {len(vocab.ids), *stated, *rows} - {size}:
            raise self.make_error(
                f"{whole_kind} with a draft vocabulary, which is not implemented: {sizes}"
            )
        if {*stated, *rows} - {len(vocab.ids)}:
            raise self.make_error(f"draft vocabularies disagree: {sizes} (without d2t, all)")
        if not rows and not vocab.is_full:
            raise self.make_error(
                f"{OUTPUT_HEAD} is missing, and the target's does not fit {sizes}"
            )
        return vocab

    def load_into(self, head: Head) -> Head:
        """Load all tensors into a head, and return the head.

        Raises:
            InputError: a tensor is missing, unknown or of another shape.
        """
        expected, tensors, stored = head.state_dict(), self.tensors, self.get_stored_name
        problems_by_kind = {
            "missing": [stored(name) for name in set(expected) - set(tensors)],
            "foreign": [stored(name) for name in set(tensors) - set(expected)],
            "misshapen": [
                f"{stored(name)} {list(tensors[name].shape)}, not {list(expected[name].shape)}"
                for name in set(expected) & set(tensors)
                if expected[name].shape != tensors[name].shape
            ],
        }
        problems = [f"{kind}: {sorted(names)}" for kind, names in problems_by_kind.items() if names]
        if problems:
            raise self.make_error("tensors " + "; ".join(problems))
        head.load_state_dict(head.select_draft_rows(tensors, self.draft_rows))
        return head
