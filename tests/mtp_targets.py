"""Small random targets with an MTP layer of their own, in the layouts of their families."""

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import toys
from safetensors.torch import save_file
from torch import Tensor
from toys import TINY, endless_target, tokenizer

from heads.mtp.checkpoint import split_experts
from heads.mtp.mtp import MtpHead, build_mtp_config
from heads.target_model.load import find_final_norm
from heads.target_model.model import Target
from heads.target_model.weight_files import load_tensor_table
from heads.vocab import DraftVocab

TARGETS: dict[str, tuple[str, dict[str, Any], bool]] = {
    architecture: (
        each["model_type"],
        {key: value for name in each.get("with", []) for key, value in TINY["shared"][name].items()}
        | each["settings"],
        each["sparse"],
    )
    for architecture, each in TINY["mtp"].items()
}
"""By architecture: the model type, its settings, and whether the layer is a mixture.

Within `index_topk` tokens, models with an indexer are DeepSeek-V3's. The RoPE of latent attention
scales scores by more than the size of a head.
"""


def uneven(norm: Tensor) -> None:
    """Has the state before a norm, of these weights, be another one than the state behind it."""
    norm.data.add_(torch.randn(norm.shape, generator=torch.Generator().manual_seed(2)))


@cache
def target_with_layer(architecture: str) -> tuple[Target, MtpHead]:
    """A target whose texts no token ends, and its layer with weights that count."""
    model_type, settings, sparse = TARGETS[architecture]
    with patch.dict(toys.FAMILIES, {model_type: settings}):
        target = endless_target(model_type, vocab_size=300)
    target.tokenizer = tokenizer()
    uneven(find_final_norm(target.model).weight)
    shape = build_mtp_config(target.config, architecture, "toy", sparse)
    head = MtpHead(shape, DraftVocab.make_full(target.vocab_size)).initialise(target, seed=0)
    generator = torch.Generator().manual_seed(1)
    for tensor in [*head.parameters(), *head.buffers()]:
        if tensor.dim() > 1:
            tensor.data.mul_(12.0)
        else:  # of a norm, else one that is applied twice would be one applied once
            tensor.data.add_(torch.randn(tensor.shape, generator=generator))
    return target, head.eval()


def saved(
    folder: Path, architecture: str, changed: dict[str, Any] | None = None, joined: bool = False
) -> Path:
    """The target in a folder, with its layer's tensors in a shard of their own.

    Args:
        folder: to write.
        architecture: a key of `TARGETS`.
        changed: tensors by their names in the file, in place of or besides the layer's; None for
            one takes it away.
        joined: the experts in one tensor.
    """
    target, head = target_with_layer(architecture)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    family, num_layers = head.config.family_entry, target.num_layers
    held = head.build_files().tensors
    own = {
        family.to_stored_name(name, num_layers): tensor.contiguous().clone()
        for name, tensor in (held if joined else split_experts(held)).items()
    }
    ends = [target.embedding.weight, target.output_head.weight]
    own |= {
        name: t.detach().clone()
        for name, t in zip(family.list_copies(num_layers), ends, strict=False)
    }
    own = {name: t for name, t in (own | (changed or {})).items() if t is not None}
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (folder / "model.safetensors").rename(folder / shards[0])
    save_file(own, folder / shards[1], metadata={"format": "pt"})
    places = dict.fromkeys(load_tensor_table(folder / shards[0]), shards[0]) | dict.fromkeys(
        own, shards[1]
    )
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [architecture], family.counts[0]: 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
