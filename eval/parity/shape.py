"""What an engine builds from the `config.json` of an EAGLE head.

Letters: L layers of the target.
"""

import re

from conf.errors import InputError
from eval.parity.chain import FLAGS, EagleShape
from eval.parity.config import Settings, one_value
from eval.parity.engines import Bias, Engine, Layers
from eval.parity.files import Export, Golden
from eval.parity.rope import RopeKeys, read_rope

IDS = "eagle_aux_hidden_state_layer_ids"
LAUNCH = "eagle3_layers_to_capture"


def read_shape(
    export: Export, golden: Golden, engine: Engine, own_head: bool, num_layers: int = 1
) -> EagleShape:
    """Taps every key that decides what the engine computes.

    Args:
        export: the engine's files.
        golden: sizes of the target.
        engine: how they are read.
        own_head: whether the file holds an output head.
        num_layers: of the head.

    Raises:
        InputError: the engine would refuse the config, guess a value, or read another than the
            head was trained with.
    """
    return _Reader(export, golden, engine, num_layers).read(own_head)


class _Reader:
    def __init__(self, export: Export, golden: Golden, engine: Engine, num_layers: int) -> None:
        self._export, self._golden, self._engine = export, golden, engine
        self._num_layers = num_layers
        self._eagle3, self._nested = export.kind != "eagle1", export.format == "speculators"
        self._root = Settings(export.config, export.folder / "config.json", engine.title)
        self._eagle = self._root.part("eagle_config")
        # In speculators' format what Llama has lies in a part of its own.
        self._layer = self._root.part("transformer_layer_config") if self._nested else self._root

    def read(self, own_head: bool) -> EagleShape:
        layer, vocab_size = self._layer, self._golden.vocab_size
        self._check_class()
        self._check_constants()
        hidden = layer.need("hidden_size", int, "takes 4096")
        heads = layer.need("num_attention_heads", int, "takes 32")
        head_dim = layer.need("head_dim", int, "divides hidden_size by num_attention_heads")
        if self._engine.rope is RopeKeys.two_keys and head_dim * heads != hidden:
            raise layer.wrong("head_dim", f"{hidden} / {heads}: it always divides")
        width = self._target_hidden(hidden)
        return EagleShape(
            eagle3=self._eagle3,
            hidden_size=hidden,
            intermediate_size=layer.need("intermediate_size", int, "takes 11008"),
            num_heads=heads,
            num_kv_heads=layer.need("num_key_value_heads", int, "takes num_attention_heads"),
            head_dim=head_dim,
            target_hidden_size=width,
            vocab_size=vocab_size,
            draft_vocab_size=self._draft_size(own_head) if self._eagle3 else vocab_size,
            eps=float(layer.need("rms_norm_eps", float, "takes 1e-6")),
            layers=self._layers(width == hidden) if self._eagle3 else (),
            flags=self._flags() if self._eagle3 else frozenset(),
            fc_bias=self._fc_bias(),
            biased=self._biased(),
            qk_norm=layer.get("model_type") == "qwen3",
            own_head=own_head,
            logit_scale=float(layer.get("logit_scale") or 1.0),
            rope=read_rope(layer, head_dim, self._engine.rope),
        )

    def _check_class(self) -> None:
        root, layer, engine = self._root, self._layer, self._engine
        named = root.need("architectures", list, "finds no class")
        if len(named) != 1 or named[0] not in engine.architectures:
            raise root.wrong("architectures", f"one of {list(engine.architectures)}")
        kind = layer.need("model_type", str, "finds no class")
        layer.only("model_type", *("llama", "qwen3")[: 1 + engine.qwen3])
        if self._nested:
            self._check_speculators()
        elif (kind == "qwen3") != ("Qwen3" in named[0]):
            raise root.wrong("model_type", f"the one of the architecture {named[0]}")

    def _check_speculators(self) -> None:
        """Keys without which neither speculators nor vLLM takes the folder."""
        root, refused = self._root, "refuses the folder"
        method = self._engine.method
        root.equal("speculators_model_type", method, "the kind of the head", refused)
        plan = root.part("speculators_config")
        plan.equal("algorithm", method, "the kind of the head", refused)
        methods = plan.need("proposal_methods", list, refused)
        if not methods or type(methods[0].get("speculative_tokens")) is not int:
            raise plan.wrong("proposal_methods", "speculative_tokens in its first entry")
        plan.part("verifier").need("name_or_path", str, refused)

    def _check_constants(self) -> None:
        layer, golden = self._layer, self._golden
        number = self._num_layers
        layer.equal("num_hidden_layers", number, "the layers in the file", "builds 32 layers")
        layer.equal("vocab_size", golden.vocab_size, "the target's", "takes 32000")
        layer.only("hidden_act", "silu")
        layer.only("tie_word_embeddings", False)
        layer.only("layer_types", None, ["full_attention"])
        layer.only("qkv_bias", False)
        longest = golden.max_position_embeddings
        if layer.need("max_position_embeddings", int, "stops at 2048 positions") < longest:
            raise layer.wrong("max_position_embeddings", f"the target's {longest} or more")

    def _target_hidden(self, hidden: int) -> int:
        root, key = self._root, "target_hidden_size"
        if self._nested:
            # speculators itself builds `fc` for features as wide as the head.
            root.only(key, None, hidden)
        elif root.has(key):
            return root.need(key, int, "multiplies null")
        return hidden

    def _draft_size(self, own_head: bool) -> int:
        root, key = self._root, "draft_vocab_size"
        if self._export.format == "sglang" and root.has(key) and root.get(key) is None:
            if own_head:
                raise root.wrong(key, "a number, as null makes it drop lm_head.weight")
            return self._golden.vocab_size
        size = root.need(key, int, "takes the target's vocabulary or fails")
        if self._engine.random_head and not own_head:
            raise InputError(
                f"{self._export.weights}: lm_head.weight is missing: with {key}={size} "
                f"{self._engine.title} starts it at random"
            )
        return size

    def _layers(self, same_width: bool) -> tuple[int, ...]:
        """Indices of `output_hidden_states` that the engine feeds to the head."""
        count, where = self._golden.num_layers, self._engine.layers
        self._eagle.only("use_aux_hidden_state", True)
        first = 0
        if where is Layers.hidden_states:
            ids = one_value(IDS, list, "takes layers 2, L / 2 and L - 3", self._root, self._eagle)
            self._check_count(len(ids))
        elif where is Layers.fixed:
            ids = [2, count // 2, count - 3]
        else:
            outputs = self._launched() if where is Layers.launch else self._nested_ids()
            ids, first = [i + 1 for i in outputs], 1
        if not self._engine.always_fuses and same_width and len(ids) == 1:
            raise self._root.wrong(IDS, "two or more: it leaves fc out where the widths agree")
        self._check_layers(ids, first)
        return tuple(ids)

    def _nested_ids(self) -> list[int]:
        ids = self._eagle.need(IDS, list, "takes layers 2, L / 2 and L - 3 as others count them")
        self._root.only(IDS, ids)
        self._check_count(len(ids))
        return ids

    def _launched(self) -> list[int]:
        file = self._export.folder / "README.md"
        text = file.read_text() if file.is_file() else ""
        found = re.search(rf"{LAUNCH}: *\[([\d, ]+)\]", text)
        if found is None:
            raise InputError(
                f"{file}: no {LAUNCH}: [...] in it: {self._engine.title} reads the layers from "
                "its launch configuration, and without it takes 1, L / 2 - 1 and L - 4"
            )
        return [int(each) for each in found[1].split(",")]

    def _check_count(self, found: int) -> None:
        """The width of `fc` follows a count that is read elsewhere than the ids."""
        qwen3 = self._layer.get("model_type") == "qwen3"
        places = (self._root, self._eagle) if qwen3 else (self._eagle,)
        counted = next((len(place.get(IDS)) for place in places if place.has(IDS)), 3)
        if (self._layer.get("num_aux_hidden_states") or counted) != found:
            raise self._layer.wrong("num_aux_hidden_states", f"{found}, or it counts {counted}")

    def _check_layers(self, ids: list[int], first: int) -> None:
        file, last = self._root.file, self._golden.num_layers - 1
        trained, title = self._export.layers, self._engine.title
        if ids != sorted(set(ids)) or not all(first <= i <= last for i in ids):
            raise InputError(
                f"{file}: {title} would read hidden states {ids}: it gives those of "
                f"{first}..{last} before the final norm, each once and in rising order"
            )
        if trained is not None and trained != ids:
            raise InputError(
                f"{file}: {title} would read hidden states {ids}, but the head was trained on "
                f"{trained} (headsmith.json: export.layers); engines count layers differently"
            )

    def _flags(self) -> frozenset[str]:
        root, engine = self._root, self._engine
        on = set()
        for flag in FLAGS:
            if flag not in engine.flags:
                if engine.written or root.has(flag):
                    root.equal(flag, False, "as it has none", "is right, but others guess")
                continue
            places = (self._eagle,) if flag in engine.nested else (root, self._eagle)
            value = one_value(flag, bool, "guesses, and not as others do", *places)
            if flag in engine.nested:
                root.only(flag, value)
            if value:
                on.add(flag)
        self._eagle.only("return_hidden_post_norm", "norm_output" in on)
        if {"fc_norm", "norm_before_fc"} <= on and self._export.format != "vllm":
            raise root.wrong("fc_norm", "one of fc_norm and norm_before_fc, not both")
        return frozenset(on)

    def _fc_bias(self) -> bool:
        if self._engine.fc_bias is Bias.key:
            return self._root.need("bias", bool, "guesses, and not as others do")
        # vLLM and SGLang give other projections a bias for this key.
        self._root.only("bias", False)
        return self._engine.fc_bias is Bias.always

    def _biased(self) -> frozenset[str]:
        layer, found = self._layer, set[str]()
        parts = {
            "attention_bias": {f"self_attn.{name}_proj" for name in "qkvo"},
            "mlp_bias": {f"mlp.{name}_proj" for name in ("gate", "up", "down")},
        }
        for key, projections in parts.items():
            if key not in self._engine.biases or layer.get("model_type") == "qwen3":
                layer.only(key, False)
            elif layer.get(key):
                found |= projections
        return frozenset(found)
