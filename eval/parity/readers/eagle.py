"""Reader of exported EAGLE heads that computes their logits as their serving engine does.

Letters: S rows, D depths, H hidden, Ht hidden of the target, I input of the attention, Q heads, d
head size, R compared ids.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from conf.errors import InputError
from eval.parity.decoder import EMBEDDING, OUTPUT, ServedLayers, Shapes
from eval.parity.eagle import (
    CONVENTIONS,
    LAYER,
    EagleConfigReader,
    EagleShape,
    EngineConventions,
    Presence,
)
from eval.parity.export_files import Export, ReferenceLogits

FORMATS = {
    kind: tuple(name for name, head in CONVENTIONS if head == kind) for kind in ("eagle1", "eagle3")
}


class ServedEagle(ServedLayers):
    """Exported EAGLE head.

    Args:
        export, golden: as in `ServedHead`.
        conventions: conventions of the engine.
        shape: shape as the serving engine builds it.
        num_layers: layers of the head.
    """

    shape: EagleShape

    def __init__(
        self, export: Export, golden: ReferenceLogits, conventions: EngineConventions, shape:
            EagleShape,
        num_layers: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(export, golden, conventions.title, shape)
        self.conventions, self.num_layers = conventions, num_layers
        tensors = self.rename_tensors(self._canonical_name)
        self.check_tensors(tensors, *self.list_expected_shapes())
        self._target_ids = self.target_ids()
        # The embedding is not converted: it is large, and few of its rows are needed.
        self.embedding = tensors.pop(EMBEDDING, None)
        self.weights = {n: t.float() for n, t in tensors.items() if t.is_floating_point()}

    @property
    def report_lines(self) -> list[str]:
        """Lines about the checks."""
        shape = self.shape
        on = ", ".join(sorted(shape.flags)) or "none"
        read = f"hidden states {list(shape.layers)}" if shape.eagle3 else "the last hidden state"
        return [
            f"{self.export.config_name}: {self.title} reads {read}, norm flags on: {on}",
            self.tensor_line,
            self.vocabulary_line(shape.own_head),
        ]

    def iter_logits(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """[S, R] logits of the reference ids, and [S] logsumexp over all ids, at each depth."""
        golden, shape = self.golden, self.shape
        position_ids = golden.require_tensor("position_ids", (None,))
        reached, all_positions = int(position_ids.max()), golden.max_position_embeddings
        if reached < all_positions // 2:
            raise InputError(
                f"{golden.file}: position_ids end at {reached} of {all_positions}, so a wrong RoPE "
                "would go unnoticed; export again"
            )
        width = (len(position_ids), shape.target_hidden_size)
        layers = shape.layers or (golden.num_layers,)
        features = torch.cat(
            [golden.require_tensor(f"hidden_states.{i}", width) for i in layers], dim=-1
        )
        embeds = self._select_embeddings(golden.require_tensor("token_ids", (None,)))
        for states in self.iter_output_states(features, embeds, position_ids):
            if shape.own_head:
                drafted = shape.logit_scale * self.apply_linear(states, "lm_head")
                yield (
                    self.select_reference_ids(drafted, self._target_ids),
                    drafted.logsumexp(dim=-1),
                )
            else:
                rows = golden.require_tensor("output_head", (None, shape.hidden_size))
                yield shape.logit_scale * states @ rows.T, None

    def list_expected_shapes(self) -> tuple[Shapes, Shapes]:
        """Shapes of required and of optional tensors."""
        shape, conventions = self.shape, self.conventions
        if not shape.own_head and "output_head" not in self.golden.tensors:
            raise self.make_error(
                OUTPUT, "is missing", "the head's own: it would take the target's"
            )
        must, may = shape.list_tensor_shapes(), Shapes()
        if shape.eagle3 and shape.draft_vocab_size != shape.vocab_size:
            must["d2t"] = (shape.draft_vocab_size,)
            if conventions.t2d is not Presence.no:
                mask = must if conventions.t2d is Presence.must else may
                mask["t2d"] = (shape.vocab_size,)
        embedding = must if conventions.embedding is Presence.must else may
        embedding[EMBEDDING] = (shape.vocab_size, shape.hidden_size)
        return must, may

    def iter_output_states(
        self, features: Tensor, embeds: Tensor, position_ids: Tensor
    ) -> Iterator[Tensor]:
        """Yield inputs [S, H] of the output head at depth 0, 1, ..., while every draft is accepted.

        Args:
            features: [S, n * Ht] hidden states of the target, concatenated as the engine fuses
                them.
            embeds: [S + D, H] embeddings of the token after each hidden state, then of draft
                tokens.
            position_ids: [S] int64 positions of the hidden states.
        """
        fed, num_rows = self.fuse_features(features), len(features)
        own = torch.eye(num_rows, dtype=torch.bool)
        keys, values, seen = list[Tensor](), list[Tensor](), list[Tensor]()
        for depth in range(len(embeds) - num_rows):
            positions = position_ids + depth
            inputs, residual = self.build_layer_inputs(fed, embeds[depth : depth + num_rows])
            keys.append(self.project_heads(inputs, LAYER, "k", positions))
            values.append(self.project_heads(inputs, LAYER, "v"))
            # The text up to a row, and the row's own draft tokens.
            seen.append(own if depth else torch.ones_like(own).tril())
            attended = self.attend(
                self.project_heads(inputs, LAYER, "q", positions),
                torch.cat(keys), torch.cat(values), torch.cat(seen, dim=1),
            )  # fmt: skip
            outputs = self.finish_layer(residual, attended, LAYER)
            normed = self.apply_norm(outputs, "norm") if self.shape.eagle3 else outputs
            yield normed
            fed = normed if "norm_output" in self.shape.flags else outputs

    def fuse_features(self, features: Tensor) -> Tensor:
        """Fuse [S, n * Ht] into [S, H]. EAGLE-1 reads one hidden state unchanged."""
        if not self.shape.eagle3:
            return features
        if "norm_before_fc" in self.shape.flags:
            features = self.apply_norm(features, "input_norm")
        if "fc_norm" in self.shape.flags:
            parts = features.split(self.shape.target_hidden_size, dim=-1)
            normed = [self.apply_norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
            features = torch.cat(normed, dim=-1)
        return self.apply_linear(features, "fc")

    def build_layer_inputs(self, fed: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """[S, I] input of the attention and [S, H] residual of the first layer."""
        if not self.shape.eagle3:
            inputs = self.apply_linear(torch.cat([embeds, fed], dim=-1), "fc")
            return inputs, inputs
        states = self.apply_norm(fed, f"{LAYER}hidden_norm")
        embeds = self.apply_norm(embeds, f"{LAYER}input_layernorm")
        residual = states if "norm_before_residual" in self.shape.flags else fed
        return torch.cat([embeds, states], dim=-1), residual

    def finish_layer(self, residual: Tensor, attended: Tensor, layer: str) -> Tensor:
        """[S, H] output of a layer, from residual [S, H] and attention output [S, Q * d]."""
        hidden = residual + self.apply_linear(attended, f"{layer}self_attn.o_proj")
        return hidden + self.apply_mlp(
            self.apply_norm(hidden, f"{layer}post_attention_layernorm"), layer
        )

    def _select_embeddings(self, token_ids: Tensor) -> Tensor:
        """[S + D, H] embeddings that the serving engine uses."""
        shape = self.shape
        wanted = (len(token_ids), shape.hidden_size)
        if self.embedding is None:
            return self.golden.require_tensor("token_embeddings", wanted)
        own = self.embedding[token_ids].float()
        dropped = self.conventions.embedding is Presence.no
        if not dropped or shape.hidden_size != shape.target_hidden_size:
            return own
        if not torch.equal(own, self.golden.require_tensor("token_embeddings", wanted)):
            raise self.make_error(EMBEDDING, "is not the target's", "the target's: it takes that")
        return own

    def _canonical_name(self, name: str) -> str:
        prefix = next((p for p in self.conventions.prefixes if name.startswith(p)), "")
        if prefix:
            return LAYER + name.removeprefix(prefix)
        # An unknown prefix must not pass for a known one.
        return f"? {name}" if name.startswith(LAYER) else name


def parse_shape(
    export: Export, golden: ReferenceLogits, conventions: EngineConventions, num_layers: int = 1
) -> EagleShape:
    """Shape of the head in a `config.json`. See `EagleConfigReader`."""
    config = EagleConfigReader(export, golden, conventions, num_layers)
    return config.parse_shape(own_head=OUTPUT in export.tensors)


def build_head(export: Export, golden: ReferenceLogits) -> ServedEagle:
    """See `eval.parity.parity_check.Reader`."""
    conventions = CONVENTIONS[export.format, export.kind]
    return ServedEagle(export, golden, conventions, parse_shape(export, golden, conventions))
