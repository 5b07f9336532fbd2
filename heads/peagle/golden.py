"""Reference logits of a P-EAGLE head, row by row, in float32 on the CPU.

Letters: S rows, D depths, H hidden.
"""

from dataclasses import replace

import torch
from torch import Tensor

from heads.eagle.branches import build_causal_range
from heads.eagle.golden import copy_to_cpu, project_reference_logits
from heads.head import ReferenceLogits
from heads.layers.documents import Documents
from heads.peagle.network import KeysValues, PEagleNetwork, make_list_store
from heads.target_model.embeddings_and_head import select_embedding_rows
from heads.target_model.model import Target, TargetOutput


def compute_reference_logits(
    head: PEagleNetwork, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
) -> ReferenceLogits:
    """Compute logits whose row t at depth j is the j-th row after token t.

    That row sees the text up to t. Arguments as in `DraftHead.golden`.
    """
    mask = torch.tensor([head.config.mask_token_id])
    wanted = torch.cat([token_ids, mask])
    embeddings = select_embedding_rows(target.embedding.weight, wanted, head.dtype)
    own = embeddings
    if head.embed_tokens is not None:
        own = select_embedding_rows(head.embed_tokens.weight, wanted, head.dtype)
    copy = copy_to_cpu(head, own)
    copy.config = replace(copy.config, mask_token_id=len(own) - 1)
    outputs = _compute_outputs(copy, states, places, len(token_ids) - len(places) - 1)
    beside = {
        "token_embeddings": embeddings[1:-1],
        "mask_token_id": mask,
        "mask_embedding": embeddings[-1:],
    }
    return project_reference_logits(head, target, outputs, beside)


def _compute_outputs(
    head: PEagleNetwork, states: list[Tensor], places: Tensor, depth: int
) -> Tensor:
    """[D, S, H] normalised outputs of a head whose embedding holds only the text, then the mask."""
    rows = torch.arange(len(places))
    output = TargetOutput(states[-1], dict(enumerate(states)))
    seen = build_causal_range(Documents.from_length(len(rows), rows.device), rows)
    text = head.build_context_rows(head.fuse(head.collect_features(output)), rows + 1, places, seen)
    known: list[KeysValues] = []
    found = head.run_layers(text, [], make_list_store(known))
    if depth > 1:
        positions = torch.cat([places + step for step in range(1, depth)])
        masks = head.build_mask_rows(positions, [seen] * (depth - 1))
        found += head.run_layers(None, masks, make_list_store(known))
    return torch.stack([head.apply_final_norm(each) for each in found])
