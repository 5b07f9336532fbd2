"""Draft logits of speculators for a block drafter, float32 on a CPU.

Run by the Python of its own environment, on a file with `ids` [S + D + 1] and `features` [S, nF]:

    python speculators_blocks.py head inputs.safetensors logits.safetensors

Writes `logits` [D, S, W]: row t of slot d is drafted behind tokens 0..t, while token t + 1 is sure
and the ones behind it are the text's own; -inf for what DFlash-2 does not take for a candidate.
"""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.dflash import core


def opened(folder: str) -> core.DFlashDraftModel:
    """The head as a model of speculators."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def told(model: core.DFlashDraftModel, hidden, logits, before):
    """[S, D, W] of a kind, given [S, D, .] and the tokens before [S, D]."""
    kind = model.config.speculators_model_type
    if kind == "dspark":
        return logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    if kind == "dflash2":
        chosen, scores = model.candidate_selector.select(logits, hidden, before)
        return torch.full_like(logits, -torch.inf).scatter(-1, chosen, scores)
    return logits


@torch.no_grad()
def logits(model: core.DFlashDraftModel, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    num_rows, size = len(features), model.block_size
    anchors = torch.arange(1, num_rows + 1)
    core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    rest = torch.zeros(len(ids) - num_rows, features.shape[1])
    hidden, drawn, *_ = model._backbone_forward(
        hidden_states=torch.cat([features, rest])[None],
        input_ids=ids[None],
        loss_mask=torch.ones(1, len(ids)),
        verifier_last_hidden_states=torch.zeros(1, len(ids), model.hidden_size),
        document_ids=torch.zeros(1, len(ids), dtype=torch.int64),
        max_anchors=num_rows,
    )
    first = 0 if model.config.sample_from_anchor else 1
    hidden, drawn = (each.view(num_rows, size, -1)[:, first:] for each in (hidden, drawn))
    before = ids[anchors[:, None] + torch.arange(size - first)]
    return told(model, hidden, drawn, before).transpose(0, 1)


def main() -> None:
    head, inputs, outputs = sys.argv[1:]
    found = logits(opened(head), **load_file(inputs))
    save_file({"logits": found.contiguous()}, outputs)


if __name__ == "__main__":
    main()
