"""Reader of exported P-EAGLE heads that computes their logits as their serving engine does.

Letters as in `eval/parity/readers/eagle.py`.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from conf.errors import InputError
from eval.parity.decoder import Shapes
from eval.parity.eagle import CONVENTIONS, FLAGS
from eval.parity.export_files import Export, ReferenceLogits
from eval.parity.readers.eagle import ServedEagle, parse_shape

FORMATS = {"peagle": ("vllm", "speculators")}
MASK_HIDDEN, MASK_KEY = "mask_hidden", "mask_token_id"
OWN_CONVENTIONS = {
    "vllm": replace(
        CONVENTIONS["vllm", "eagle3"], flags=tuple(flag for flag in FLAGS if flag != "norm_output")
    ),
    # vLLM drops `fc_norm` when it converts such a config.
    "speculators": replace(
        CONVENTIONS["speculators", "eagle3"],
        architectures=("PEagleSpeculator", "PEagleDraftModel"),
        flags=("norm_before_fc", "norm_before_residual"),
        method="peagle",
    ),
}


class ServedPEagle(ServedEagle):
    """Exported P-EAGLE head."""

    def __init__(self, export: Export, golden: ReferenceLogits) -> None:
        numbers = {name.split(".")[1] for name in export.tensors if name.startswith("layers.")}
        conventions = OWN_CONVENTIONS[export.format]
        num_layers = len(numbers | {"0"})
        shape = parse_shape(export, golden, conventions, num_layers)
        super().__init__(export, golden, conventions, shape, num_layers)
        said, trained = export.config.get(MASK_KEY), int(golden.require_tensor(MASK_KEY, (1,)))
        if said != trained:
            raise InputError(
                f"{export.folder / 'config.json'}: {MASK_KEY}={said}, but the head was trained "
                f"with {trained}; export again"
            )

    def list_expected_shapes(self) -> tuple[Shapes, Shapes]:
        """Shapes of required and of optional tensors."""
        must, may = super().list_expected_shapes()
        shape = self.shape
        for number in range(1, self.num_layers):
            norms = ("input_layernorm", "post_attention_layernorm")
            must |= shape.layer_tensors(f"layers.{number}.", norms, shape.biased)
        must[MASK_HIDDEN] = (1, 1, len(shape.layers) * shape.target_hidden_size)
        return must, may

    def iter_output_states(
        self, features: Tensor, embeds: Tensor, position_ids: Tensor
    ) -> Iterator[Tensor]:
        """Compute each row separately: its text and the rows after, as one causal sequence."""
        num_rows = len(features)
        depth = len(embeds) - num_rows
        feature = self.weights[MASK_HIDDEN].reshape(1, -1)
        if self.embedding is None:
            mask = self.golden.require_tensor("mask_embedding", (1, self.shape.hidden_size))
        else:
            mask = self.embedding[self.export.config[MASK_KEY]].float()[None]
        outputs = []
        for end in range(1, num_rows + 1):
            fed = self.fuse_features(torch.cat([features[:end], feature.expand(depth - 1, -1)]))
            read = torch.cat([embeds[:end], mask.expand(depth - 1, -1)])
            behind = position_ids[end - 1] + torch.arange(1, depth)
            positions = torch.cat([position_ids[:end], behind])
            causal = torch.ones(len(fed), len(fed), dtype=torch.bool).tril()
            inputs, states = self.build_layer_inputs(fed, read)
            for number in range(self.num_layers):
                layer = f"layers.{number}."
                if number:
                    inputs = self.apply_norm(states, f"{layer}input_layernorm")
                query, keys = (
                    self.project_heads(inputs, layer, which, positions) for which in "qk"
                )
                attended = self.attend(query, keys, self.project_heads(inputs, layer, "v"), causal)
                states = self.finish_layer(states, attended, layer)
            outputs.append(self.apply_norm(states[end - 1 :], "norm"))
        yield from torch.stack(outputs, 1)


def build_head(export: Export, golden: ReferenceLogits) -> ServedPEagle:
    """See `eval.parity.parity_check.Reader`."""
    return ServedPEagle(export, golden)
