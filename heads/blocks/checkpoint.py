"""Reader of block drafters of all origins.

Tensors have the authors' names everywhere. Settings lie in the root of `config.json` and in
`dflash_config` (z-lab, SpecForge, DeepSpec, Headsmith), or in `transformer_layer_config`
(speculators). `target_layer_ids` counts outputs of layers; `aux_hidden_state_layer_ids` counts
hidden states, one more. Settings that contradict the tensors or are not implemented are refused.

Sources: the writers z-lab/dflash, deepseek-ai/DeepSpec, SpecForge and vllm-project/speculators;
the readers of vLLM 0.32 and SGLang 0.5.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Self

from heads.blocks.layouts import FULL, SLIDING, BlockHeadConfig
from heads.head_checkpoint import EMBEDDING, OUTPUT_HEAD, ROOT, HeadCheckpoint
from heads.vocab import DraftVocab

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


class BlockCheckpoint(HeadCheckpoint):
    """Content of a block head's folder.

    Attributes:
        vocab: draft vocabulary.
    """

    vocab: DraftVocab
    # Engines read `dflash_config` first, then the root.
    sections = ("transformer_layer_config", ROOT, "dflash_config")
    sizes = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
        "vocab_size",
    )
    default_theta = 1e6  # the engines'
    # speculators' copies, used in training only.
    target_tensors = ("verifier_lm_head.weight", "verifier_norm.weight")

    @classmethod
    def from_folder(cls, folder: Path, path: str, implemented: Collection[str] = ()) -> Self:
        """Read settings and tensors of a folder.

        Args:
            folder: local folder.
            path: path as the user typed it.
            implemented: keys of `REQUIRED_VALUES` that this kind of head implements.

        Raises:
            InputError: files are missing, pickled or corrupt, or settings belong to another
                architecture.
        """
        checkpoint = super().from_folder(folder, path)
        if (folder / MASK_EMBEDDING).is_file():
            raise checkpoint.make_error(
                f"{MASK_EMBEDDING}: a separate pickled mask embedding, which is never opened; name "
                "another head"
            )
        if "mask_hidden" in checkpoint.tensors:
            raise checkpoint.make_error(
                "mask_hidden: belongs to a P-EAGLE head, which is another kind"
            )
        checkpoint.check_settings(
            {key: each for key, each in REQUIRED_VALUES.items() if key not in implemented}
        )
        stated = checkpoint.settings.get("draft_vocab_size", checkpoint.settings["vocab_size"])
        checkpoint.vocab = checkpoint.pop_draft_vocab([stated])
        return checkpoint

    @classmethod
    def to_own_name(cls, stored_name: str) -> str:
        """See `HeadCheckpoint.to_own_name`."""
        return super().to_own_name(stored_name).removeprefix(EARLY_PREFIX)

    def build_head_config(self, layers: Sequence[int] | None, anchored: bool) -> BlockHeadConfig:
        """Build the architecture of the head.

        Args:
            layers: indices of the hidden states to read, instead of those in `config.json`.
            anchored: value of `sample_from_anchor` if the file lacks the key.

        Raises:
            InputError: a needed key is missing, or a value is not implemented.
        """
        settings = self.settings
        llama, kinds, window = self.parse_llama_config(), settings.get("layer_types", []), None
        if settings.get("use_swa", False) or SLIDING in kinds:
            window = settings.get("swa_window_size", settings.get("sliding_window"))
            if not isinstance(window, int):
                raise self.make_error(
                    "config.json asks for a sliding window, but has no sliding_window"
                )
        width = settings.get("target_hidden_size", llama.hidden_size)
        selected, full_layers = self._parse_layers(layers, width), self._find_full_layers(window)
        return BlockHeadConfig(
            llama=llama,
            target=self.target_name,
            target_hidden_size=width,
            num_target_layers=settings.get("num_target_layers", 0),
            layers=selected,
            block_size=self.get_integer("block_size"),
            mask_token_id=self.get_integer("mask_token_id"),
            sample_from_anchor=settings.get("sample_from_anchor", anchored),
            causal=self._is_causal(window, full_layers),
            window=window,
            full_layers=full_layers,
            own_output_head=OUTPUT_HEAD in self.tensors,
            own_embedding=EMBEDDING in self.tensors,
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

    def _find_full_layers(self, window: int | None) -> tuple[int, ...]:
        """Return the indices of layers without a window, if other layers have one.

        Raises:
            InputError: kinds of layers are unknown, or their number is not that of the layers.
        """
        kinds, number = self.settings.get("layer_types", []), self.settings["num_hidden_layers"]
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
        return SLIDING in settings.get("layer_types", []) if stated is None else bool(stated)

    def _parse_layers(self, layers: Sequence[int] | None, width: int) -> tuple[int, ...]:
        settings = self.settings
        named = [index + 1 for index in settings.get("target_layer_ids", ())]
        keys = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
        stated = {"target_layer_ids + 1": named, **{key: settings.get(key) for key in keys}}
        self.check_layer_ids(stated)
        for key in keys:
            named = settings.get(key, named)
        return self.select_layers(named if layers is None else layers, width)
