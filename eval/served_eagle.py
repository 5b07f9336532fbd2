"""Reads an exported EAGLE head as its engine would, and computes its logits.

Letters as in `eval/served_chain.py`; R compared ids, L layers of the target.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from conf.schema import InputError
from eval.served_chain import FLAGS, LAYER, Chain, EagleShape
from eval.served_config import Settings, one_value
from eval.served_engines import Bias, Engine, Layers
from eval.served_files import Export, Golden
from eval.served_rope import read_rope

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
IDS = "eagle_aux_hidden_state_layer_ids"


class ServedEagle:
    """An exported EAGLE head.

    Args:
        export: the engine's files.
        golden: sizes of the target.
        engine: how they are read.

    Raises:
        InputError: the engine would refuse the files, guess, or serve another head.
    """

    def __init__(self, export: Export, golden: Golden, engine: Engine) -> None:
        self._export, self._golden, self._engine = export, golden, engine
        root = Settings(export.config, export.folder / "config.json", engine.title)
        tensors = self._canonical(export.tensors)
        self._shape = self._read(root, own_head=OUTPUT in tensors)
        self._check(tensors)
        self._targets = self._drafted(tensors)
        self._weights = {n: t.float() for n, t in tensors.items() if t.is_floating_point()}
        self._check_embedding(tensors)

    @property
    def lines(self) -> list[str]:
        """What was found, a line for each kind of check."""
        shape = self._shape
        on = ", ".join(sorted(shape.flags)) or "none"
        owner = "its own" if shape.own_head else "the target's"
        read = f"hidden states {list(shape.layers)}" if shape.eagle3 else "the last hidden state"
        return [
            f"config.json: {self._engine.title} reads {read}, norm flags on: {on}",
            f"{self._export.weights.name}: {len(self._export.tensors)} tensors of "
            f"{self._export.dtype}, none missing, none to spare",
            f"vocabulary: drafts {shape.draft_vocab_size} of {shape.vocab_size} ids with "
            f"{owner} output head",
        ]

    def logits(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """[S, R] logits of the golden ids, and [S] their logsumexp over all, at each depth."""
        golden, shape = self._golden, self._shape
        ids = golden.need("ids", (None,))
        position_ids = golden.need("position_ids", (None,))
        token_ids = golden.need("token_ids", (None,))
        embeds = self._embeds(token_ids)
        chain = Chain(shape, self._weights)
        for states in chain.states(self._features(len(position_ids)), embeds, position_ids):
            if not shape.own_head:
                rows = golden.need("output_head", (len(ids), shape.hidden_size))
                yield shape.logit_scale * states @ rows.T, None
                continue
            drafted = shape.logit_scale * functional.linear(states, self._weights[OUTPUT])
            every = torch.full((len(states), shape.vocab_size), -torch.inf)
            every[:, self._targets] = drafted
            yield every[:, ids], drafted.logsumexp(dim=-1)

    def _features(self, num_rows: int) -> Tensor:
        shape = (num_rows, self._shape.target_hidden_size)
        layers = self._shape.layers or (self._golden.num_layers,)
        return torch.cat([self._golden.need(f"hidden_states.{i}", shape) for i in layers], dim=-1)

    def _embeds(self, token_ids: Tensor) -> Tensor:
        """[S + D, H] of the embedding that the engine uses."""
        if EMBEDDING in self._weights and not self._shares_embedding:
            return functional.embedding(token_ids, self._weights[EMBEDDING])
        return self._golden.need("token_embeddings", (len(token_ids), self._shape.hidden_size))

    @property
    def _shares_embedding(self) -> bool:
        """Whether the engine drops the head's embedding for the target's."""
        same = self._shape.hidden_size == self._shape.target_hidden_size
        return self._engine.target_embedding and same

    def _canonical(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """With the layer's names as `LAYER` has them."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            prefix = next((p for p in self._engine.prefixes if name.startswith(p)), "")
            new = LAYER + name.removeprefix(prefix) if prefix else name
            if new in found:
                raise self._wrong(name, "is there under two names", "one of them")
            # A prefix that the engine does not know must not pass for one that it knows.
            foreign = not prefix and name.startswith(LAYER)
            found[f"? {name}" if foreign else new] = tensor
        return found

    def _read(self, root: Settings, own_head: bool) -> EagleShape:
        engine, golden = self._engine, self._golden
        eagle3 = self._export.kind == "eagle3"
        layer = root.part("transformer_layer_config") if self._speculators else root
        self._check_architecture(root, layer)
        hidden = layer.need("hidden_size", int, "takes 4096")
        heads = layer.need("num_attention_heads", int, "takes 32")
        head_dim = layer.need("head_dim", int, "divides hidden_size by num_attention_heads")
        layer.equal("num_hidden_layers", 1, "as the head has one layer", "builds 32 layers")
        layer.equal("vocab_size", golden.vocab_size, "the target's", "takes 32000")
        layer.only("hidden_act", "silu")
        layer.only("tie_word_embeddings", False)
        layer.only("layer_types", None, ["full_attention"])
        positions = layer.need("max_position_embeddings", int, "stops at 2048")
        if positions < golden.max_position_embeddings:
            raise layer.wrong(
                "max_position_embeddings", f"at least {golden.max_position_embeddings}"
            )
        target_hidden = root.get("target_hidden_size")
        if root.has("target_hidden_size") and target_hidden is None and not self._speculators:
            raise root.wrong("target_hidden_size", "a number, or the key left out")
        return EagleShape(
            eagle3=eagle3,
            hidden_size=hidden,
            intermediate_size=layer.need("intermediate_size", int, "takes 11008"),
            num_heads=heads,
            num_kv_heads=layer.need("num_key_value_heads", int, "takes num_attention_heads"),
            head_dim=head_dim,
            target_hidden_size=target_hidden or hidden,
            vocab_size=golden.vocab_size,
            draft_vocab_size=self._draft_size(root, own_head) if eagle3 else golden.vocab_size,
            eps=float(layer.need("rms_norm_eps", float, "takes 1e-6")),
            layers=self._layers(root) if eagle3 else (),
            flags=self._flags(root) if eagle3 else frozenset(),
            fc_bias=self._fc_bias(root),
            biased=self._biased(layer),
            qk_norm=layer.get("model_type") == "qwen3",
            own_head=own_head,
            logit_scale=float(layer.get("logit_scale") or 1.0),
            rope=read_rope(layer, head_dim, engine.legacy_rope),
        )

    @property
    def _speculators(self) -> bool:
        return self._export.format == "speculators"

    def _check_architecture(self, root: Settings, layer: Settings) -> None:
        named = root.need("architectures", list, "finds no class")
        if len(named) != 1 or named[0] not in self._engine.architectures:
            raise root.wrong("architectures", f"one of {list(self._engine.architectures)}")
        qwen3 = layer.need("model_type", str, "finds no class") == "qwen3"
        layer.only("model_type", "llama", *(["qwen3"] if self._engine.biases else []))
        if not self._speculators and qwen3 != ("Qwen3" in named[0]):
            raise root.wrong("model_type", f"the one of the architecture {named[0]}")
        if self._speculators:
            _check_speculators(root)

    def _draft_size(self, root: Settings, own_head: bool) -> int:
        if root.has("draft_vocab_size") and root.get("draft_vocab_size") is None:
            if own_head:
                raise root.wrong(
                    "draft_vocab_size", f"the rows of {OUTPUT}, which it drops at null"
                )
            return self._golden.vocab_size
        return root.need("draft_vocab_size", int, "drafts all ids of the target")

    def _layers(self, root: Settings) -> tuple[int, ...]:
        """Indices of `output_hidden_states` that the engine feeds to the head."""
        count, nested = self._golden.num_layers, root.part("eagle_config")
        nested.only("use_aux_hidden_state", True)
        default = "takes layers 2, L / 2 and L - 3"
        if self._engine.layers is Layers.hidden_states:
            ids = one_value(IDS, list, default, root, nested)
            self._check_count(root, nested, len(ids))
        elif self._engine.layers is Layers.outputs:
            ids = [i + 1 for i in nested.need(IDS, list, default)]
        elif self._engine.layers is Layers.launch and self._export.layers:
            ids = self._export.layers
        else:
            ids = [2, count // 2, count - 3]
        self._check_layers(ids)
        return tuple(ids)

    def _check_count(self, root: Settings, nested: Settings, found: int) -> None:
        """The width of `fc` follows a count that is read elsewhere than the ids."""
        places = (root, nested) if root.get("model_type") == "qwen3" else (nested,)
        counted = next((len(place.get(IDS)) for place in places if place.has(IDS)), 3)
        if (root.get("num_aux_hidden_states") or counted) != found:
            raise nested.wrong(IDS, f"the {found} ids of the root, or it fuses 3 layers")

    def _check_layers(self, ids: list[int]) -> None:
        file, count = self._export.folder / "config.json", self._golden.num_layers
        trained = self._export.layers
        if ids != sorted(set(ids)) or not all(0 <= i < count for i in ids):
            raise InputError(
                f"{file}: {IDS} stands for hidden states {ids}: {self._engine.title} gives "
                f"those of 0..{count - 1}, each once and in rising order"
            )
        if trained is not None and list(trained) != ids:
            raise InputError(
                f"{file}: {self._engine.title} reads hidden states {ids}, but the head was "
                f"trained on {trained} (headsmith.json: export.layers): layers are off"
            )

    def _flags(self, root: Settings) -> frozenset[str]:
        engine, nested = self._engine, root.part("eagle_config")
        on = set()
        for flag in FLAGS:
            places = (nested,) if flag in engine.nested else (root, nested)
            if flag in engine.flags:
                value = one_value(flag, bool, "and other engines differ on its default", *places)
            elif engine.written or root.has(flag):
                root.equal(flag, False, "as it has none", "serves heads without")
                value = False
            else:
                value = False
            if value:
                on.add(flag)
            if flag in engine.nested and root.has(flag) and root.get(flag) != value:
                raise root.wrong(flag, f"{value!r}, as eagle_config says")
        if {"fc_norm", "norm_before_fc"} <= on:
            raise root.wrong("fc_norm", "one of fc_norm and norm_before_fc, not both")
        return frozenset(on)

    def _fc_bias(self, root: Settings) -> bool:
        if self._engine.fc_bias is Bias.key:
            return root.need("bias", bool, "or another engine takes its own default")
        # vLLM and SGLang give other projections a bias for this key.
        root.only("bias", False)
        return self._engine.fc_bias is Bias.always

    def _biased(self, layer: Settings) -> frozenset[str]:
        names = {"attention_bias": ("q", "k", "v", "o"), "mlp_bias": ("gate", "up", "down")}
        found = set()
        for key, projections in names.items():
            if not self._engine.biases:
                layer.only(key, False)
            elif layer.get(key):
                part = "self_attn" if key == "attention_bias" else "mlp"
                found |= {f"{part}.{name}_proj" for name in projections}
        if layer.get("model_type") == "qwen3":
            layer.only("mlp_bias", False)
            found.discard("self_attn.o_proj")
        return frozenset(found)

    def _check(self, tensors: dict[str, Tensor]) -> None:
        """Names, shapes and integer types."""
        shape = self._shape
        expected = shape.tensors()
        if not shape.own_head and "output_head" not in self._golden.tensors:
            raise self._wrong(OUTPUT, "is missing", "the head's own; it would put another there")
        allowed = dict(expected)
        reduced = shape.draft_vocab_size != shape.vocab_size
        if shape.eagle3 and reduced:
            expected["d2t"] = (shape.draft_vocab_size,)
            allowed |= {"d2t": expected["d2t"], "t2d": (shape.vocab_size,)}
            if self._engine.needs_t2d:
                expected["t2d"] = allowed["t2d"]
        allowed[EMBEDDING] = (shape.vocab_size, shape.hidden_size)
        if self._engine.needs_embedding:
            expected[EMBEDDING] = allowed[EMBEDDING]
        missing = sorted(set(expected) - set(tensors))
        extra = sorted(set(tensors) - set(allowed))
        if missing or extra:
            raise InputError(
                f"{self._export.weights}: tensors missing: {missing}, that "
                f"{self._engine.title} does not read: {extra}"
            )
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != allowed[name]:
                raise self._wrong(name, f"is {list(tensor.shape)}", f"{list(allowed[name])}")
            kinds = {"d2t": (torch.int64, torch.int32), "t2d": (torch.bool,)}.get(name)
            if tensor.dtype not in kinds if kinds else not tensor.is_floating_point():
                raise self._wrong(name, f"is of {tensor.dtype}", f"{kinds or 'floats'}")

    def _drafted(self, tensors: dict[str, Tensor]) -> Tensor:
        """[W] the target ids of the output head's rows."""
        draft_ids = torch.arange(self._shape.draft_vocab_size)
        offsets = tensors.get("d2t")
        if offsets is None:
            return draft_ids
        targets = draft_ids + offsets.long()
        problem = self._disagreement(targets, tensors.get("t2d"))
        if problem is None:
            return targets
        if self._disagreement(offsets.long(), tensors.get("t2d")) is None:
            problem += ": it holds absolute target ids"
        raise self._wrong("d2t", problem, "offsets: target id minus draft id")

    def _disagreement(self, targets: Tensor, mask: Tensor | None) -> str | None:
        if targets.min() < 0 or targets.max() >= self._shape.vocab_size:
            return f"leads to ids of {int(targets.min())}..{int(targets.max())}"
        if len(targets.unique()) != len(targets):
            return "leads to the same id twice"
        if mask is not None and not (mask[targets].all() and mask.sum() == len(targets)):
            return "leads to other ids than t2d marks"
        return None

    def _check_embedding(self, tensors: dict[str, Tensor]) -> None:
        """An embedding that the engine drops must be the target's."""
        if EMBEDDING not in tensors or not self._shares_embedding:
            return
        token_ids = self._golden.need("token_ids", (None,))
        theirs = self._embeds(token_ids).to(tensors[EMBEDDING].dtype)
        if not torch.equal(tensors[EMBEDDING][token_ids], theirs):
            raise self._wrong(EMBEDDING, "is not the target's", "the target's: it takes that")

    def _wrong(self, name: str, found: str, needed: str) -> InputError:
        return InputError(
            f"{self._export.weights}: {name} {found}: {self._engine.title} needs {needed}"
        )


def _check_speculators(root: Settings) -> None:
    """Keys without which neither speculators nor vLLM recognises the folder."""
    root.equal("speculators_model_type", "eagle3", "the head's kind", "refuses the folder")
    plan = root.part("speculators_config")
    plan.equal("algorithm", "eagle3", "the head's kind", "refuses the folder")
    methods = plan.need("proposal_methods", list, "refuses the folder")
    if not methods or type(methods[0].get("speculative_tokens")) is not int:
        raise plan.wrong("proposal_methods", "speculative_tokens in its first entry")
    plan.part("verifier").need("name_or_path", str, "finds no target")
