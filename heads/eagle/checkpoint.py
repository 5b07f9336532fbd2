"""Reader of EAGLE heads of all origins.

Checkpoints have many layouts. The layer is `layers.0.` (EAGLE-1, speculators) or `midlayer.`
(EAGLE-3, SpecForge, Headsmith). Settings lie in the root of `config.json`, in
`transformer_layer_config` (speculators), in `eagle_config` (ModelOpt, TensorRT-LLM) or in `model`
(vLLM's first converter).

Sources: the writers SafeAILab/EAGLE, SpecForge, vllm-project/speculators and NeMo Automodel; the
readers of vLLM 0.33 and SGLang. Letters: H hidden, V vocabulary, W draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from conf.settings.eagle import EagleForm
from heads.eagle.network import LAYER_NAMES, EagleHeadConfig
from heads.head_checkpoint import EMBEDDING, OUTPUT_HEAD, ROOT, HeadCheckpoint
from heads.target_model.architecture import SLIDING
from heads.vocab import DraftVocab

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


class EagleCheckpoint(HeadCheckpoint):
    """Content of an EAGLE head's folder."""

    sections = ("model", "transformer_layer_config", "eagle_config", ROOT)
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    default_theta = 10000.0

    @classmethod
    def to_own_name(cls, stored_name: str) -> str:
        """See `HeadCheckpoint.to_own_name`. The layer is `layer.`, whatever the file calls it."""
        name = super().to_own_name(stored_name)
        for prefix in LAYER_NAMES.values():
            if name.startswith(prefix):
                return "layer." + name.removeprefix(prefix)
        start, dot, rest = name.partition(".")
        return ALIASES.get(start, start) + dot + rest

    def get_stored_name(self, name: str) -> str:
        """Return the name that a tensor has, or would have, in the file."""
        if name in self.names or not name.startswith("layer."):
            return self.names.get(name, name)
        return self.layer_prefix + name.removeprefix("layer.")

    @property
    def layer_prefix(self) -> str:
        """Return the layer's prefix in the file; that of EAGLE-3 if the file has none."""
        for name, stored in self.names.items():
            if name.startswith("layer."):
                return stored.removesuffix(name.removeprefix("layer."))
        return LAYER_NAMES[EagleForm.eagle3]

    @property
    def form(self) -> EagleForm:
        """Return the form of the head, by its tensors and keys."""
        signs = (
            "layer.hidden_norm.weight" in self.tensors,
            "speculators_model_type" in self.settings,
            LAYER_NAMES[EagleForm.eagle3] in self.layer_prefix,
        )
        return EagleForm.eagle3 if any(signs) else EagleForm.eagle1

    def build_head_config(
        self, layers: Sequence[int] | None, required_values: Mapping[str, Any]
    ) -> EagleHeadConfig:
        """Build the architecture of a head from its file, as far as all EAGLE heads share it.

        Args:
            layers: indices of the hidden states to fuse, instead of those in the file.
            required_values: settings that may have no other value.

        Raises:
            InputError: settings contradict the tensors, or are not implemented.
        """
        self.check_settings(required_values)
        tensors, settings, form = self.tensors, self.settings, self.form
        llama = self.parse_llama_config("layer.self_attn.q_proj.bias" in tensors)
        fields: dict[str, Any] = {
            "form": form,
            "llama": llama,
            "target": self.target_name,
            "target_hidden_size": llama.hidden_size,
            "own_embedding": EMBEDDING in tensors,
            "qk_norm": "layer.self_attn.q_norm.weight" in tensors,
            "fc_bias": "fc.bias" in tensors,
            "window": self._parse_window(llama.num_hidden_layers),
        }
        if form is EagleForm.eagle1:
            if layers is not None:
                raise self.make_error(
                    "an EAGLE-1 head reads the last hidden state: leave head.layers unset"
                )
            return EagleHeadConfig(**fields)
        target_width = settings.get("target_hidden_size", llama.hidden_size)
        missing = {EMBEDDING, OUTPUT_HEAD} - set(tensors)
        if target_width != llama.hidden_size and missing:
            raise self.make_error(
                f"{sorted(missing)} missing, and the target's do not fit: "
                f"target_hidden_size={target_width}, hidden_size={llama.hidden_size}"
            )
        # TensorRT-LLM's name for `norm_output`.
        post_norm = settings.get("return_hidden_post_norm", False)
        eagle3_fields = {
            "target_hidden_size": target_width,
            "layers": self._parse_layers(layers, target_width),
            "own_output_head": OUTPUT_HEAD in tensors,
            "norm_before_fc": FLAGS["norm_before_fc"] in tensors,
            "fc_norm": FLAGS["fc_norm"] in tensors,
            "norm_output": settings.get("norm_output", post_norm),
            # speculators and vLLM disagree on the default; this is the one of the paper's code.
            "norm_before_residual": settings.get("norm_before_residual", False),
        }
        return EagleHeadConfig(**(fields | eagle3_fields))

    def check_settings(self, required_values: Mapping[str, Any]) -> None:
        """See `HeadCheckpoint.check_settings`. Refuses flags that contradict the tensors too."""
        super().check_settings(required_values)
        settings = self.settings
        for key, name in FLAGS.items():
            if settings.get(key, name in self.tensors) != (name in self.tensors):
                verb = "has no" if settings[key] else "has"
                raise self.make_error(
                    f"config.json says {key}={settings[key]}, but the file {verb} {name}"
                )

    def _parse_window(self, num_layers: int) -> int | None:
        """Parse the window of all layers, which speculators gives heads unless told otherwise."""
        kinds, window = self.settings.get("layer_types") or (), self.settings.get("sliding_window")
        if SLIDING not in kinds:
            return None
        if kinds != [SLIDING] * num_layers:
            raise self.make_error(
                f"config.json says layer_types={kinds}: windows in some layers are not implemented;"
                f" must be {num_layers} of {SLIDING}, or none"
            )
        if not isinstance(window, int) or window < 1:
            raise self.make_error(
                f"config.json says layer_types={kinds} and sliding_window={window}: must be a "
                "number of tokens, 1 or more"
            )
        return window

    def _parse_layers(self, layers: Sequence[int] | None, width: int) -> tuple[int, ...]:
        # Engines count layers in several ways, and some name none.
        exported, settings = self.export.get("layers"), self.settings
        key = "eagle_aux_hidden_state_layer_ids"
        inner = (settings.get("eagle_config") or {}).get(key)
        self.check_layer_ids({key: settings.get(key), f"eagle_config.{key}": inner})
        named = settings.get(key, ()) if exported is None else exported
        return self.select_layers(named if layers is None else layers, width, 3)

    def pop_eagle_vocab(self) -> DraftVocab:
        """Build the draft vocabulary. See `HeadCheckpoint.pop_draft_vocab`.

        Removes EAGLE-1's copy of the target's output head too.
        """
        stated = [self.settings[key] for key in DRAFT_SIZES if key in self.settings]
        if self.form is EagleForm.eagle3:
            return self.pop_draft_vocab(stated)
        vocab = self.pop_draft_vocab(stated, "an EAGLE-1 head")
        # vLLM's first converter added one: https://github.com/vllm-project/vllm/pull/11866
        self.tensors.pop(OUTPUT_HEAD, None)
        return vocab
