"""Taps an exported P-EAGLE head as its engine would, and computes its logits.

Letters as in `eval/parity/chain.py`.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from conf.errors import InputError
from eval.parity.chain import FLAGS, Chain
from eval.parity.engines import ENGINES
from eval.parity.files import Export, Golden
from eval.parity.readers.eagle import ServedEagle

FORMATS = {"peagle": ("vllm", "speculators")}
LAYER, MASK_HIDDEN, MASK_KEY = "layers.0.", "mask_hidden", "mask_token_id"
READ = {
    "vllm": replace(
        ENGINES["vllm", "eagle3"], flags=tuple(flag for flag in FLAGS if flag != "norm_output")
    ),
    # vLLM forgets `fc_norm` when it takes over such a config.
    "speculators": replace(
        ENGINES["speculators", "eagle3"],
        architectures=("PEagleSpeculator", "PEagleDraftModel"),
        flags=("norm_before_fc", "norm_before_residual"),
        method="peagle",
    ),
}


class ServedPEagle(ServedEagle):
    """An exported P-EAGLE head."""

    def __init__(self, export: Export, golden: Golden) -> None:
        super().__init__(export, golden, READ[export.format])
        said, trained = export.config.get(MASK_KEY), int(golden.need(MASK_KEY, (1,)))
        if said != trained:
            raise InputError(
                f"{export.folder / 'config.json'}: {MASK_KEY}={said}: the head was trained with "
                f"{trained}"
            )

    def _num_layers(self, tensors: dict[str, Tensor]) -> int:
        return len({name.split(".")[1] for name in tensors if name.startswith("layers.")})

    def _expected(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        must, may = super()._expected()
        shape = self._shape
        for number in range(1, self._num_layers(self._canonical(self._export.tensors))):
            layer = f"layers.{number}."
            must |= shape.layer_tensors(layer, two_inputs=False)
            must[f"{layer}input_layernorm.weight"] = (shape.hidden_size,)
        must[MASK_HIDDEN] = (1, 1, len(shape.layers) * shape.target_hidden_size)
        return must, may

    def _states(self, features: Tensor, embeds: Tensor, position_ids: Tensor) -> Iterator[Tensor]:
        """Each row by itself: the text up to it and the rows behind, one causal sequence."""
        num_rows = len(features)
        depth = len(embeds) - num_rows
        chain = Chain(self._shape, self._weights)
        feature = self._weights[MASK_HIDDEN].reshape(1, -1)
        found = []
        for end in range(1, num_rows + 1):
            fed = chain.fused(torch.cat([features[:end], feature.expand(depth - 1, -1)]))
            read = torch.cat([embeds[:end], self._mask_embedding().expand(depth - 1, -1)])
            behind = position_ids[end - 1] + torch.arange(1, depth)
            positions = torch.cat([position_ids[:end], behind])
            inputs, states = chain.inputs(fed, read)
            for number in range(self._num_layers(self._weights)):
                layer = f"layers.{number}."
                if number:
                    inputs = chain.norm(states, f"{layer}input_layernorm.weight")
                states = chain.finish(states, _attended(chain, inputs, positions, layer), layer)
            found.append(chain.norm(states[end - 1 :], "norm.weight"))
        yield from torch.stack(found, 1)

    def _mask_embedding(self) -> Tensor:
        if self._embedding is not None:
            return self._embedding[self._export.config[MASK_KEY]].float()[None]
        return self._golden.need("mask_embedding", (1, self._shape.hidden_size))


def _attended(chain: Chain, inputs: Tensor, positions: Tensor, layer: str) -> Tensor:
    """[n, Q * d] of a causal sequence of inputs [n, I]."""
    query, keys = (
        chain.shape.rope.rotate(chain.heads(inputs, which, layer), positions) for which in "qk"
    )
    values = chain.heads(inputs, "v", layer)
    rows = range(len(inputs))
    seen = [chain.attend(query[n], keys[: n + 1], values[: n + 1]) for n in rows]
    return torch.stack(seen)


def read(export: Export, golden: Golden) -> ServedPEagle:
    """See `eval.parity.gate.Reader`."""
    return ServedPEagle(export, golden)
