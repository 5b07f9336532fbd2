"""Reference logits of a P-EAGLE head, row by row, in float32 on the CPU.

Letters: S rows, D depths, H hidden.
"""

from dataclasses import replace

import torch
from torch import Tensor

from heads.eagle.branches import causal_rows
from heads.eagle.golden import on_cpu, projected_by
from heads.head import Golden
from heads.layers.documents import Documents
from heads.peagle.network import KeysValues, PEagleNetwork, remembered
from heads.target_model.embeddings_and_head import embedding_rows
from heads.target_model.model import Target, TargetOutput


def golden(
    head: PEagleNetwork, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
) -> Golden:
    """Compute logits whose row t at depth j is the j-th row after token t.

    That row sees the text up to t. Arguments as in `DraftHead.golden`.
    """
    mask = torch.tensor([head.config.mask_token_id])
    wanted = torch.cat([token_ids, mask])
    embeddings = embedding_rows(target.embedding.weight, wanted, head.dtype)
    own = embeddings
    if head.embed_tokens is not None:
        own = embedding_rows(head.embed_tokens.weight, wanted, head.dtype)
    copy = on_cpu(head, own)
    copy.config = replace(copy.config, mask_token_id=len(own) - 1)
    outputs = _outputs(copy, states, places, len(token_ids) - len(places) - 1)
    beside = {
        "token_embeddings": embeddings[1:-1],
        "mask_token_id": mask,
        "mask_embedding": embeddings[-1:],
    }
    return projected_by(head, target, outputs, beside)


def _outputs(head: PEagleNetwork, states: list[Tensor], places: Tensor, depth: int) -> Tensor:
    """[D, S, H] normalised outputs of a head whose embedding holds only the text, then the mask."""
    rows = torch.arange(len(places))
    output = TargetOutput(states[-1], dict(enumerate(states)))
    seen = causal_rows(Documents.single(len(rows), rows.device), rows)
    text = head.text_rows(head.fuse(head.features(output)), rows + 1, places, seen)
    known: list[KeysValues] = []
    found = head.through(text, [], remembered(known))
    if depth > 1:
        positions = torch.cat([places + step for step in range(1, depth)])
        masks = head.mask_rows(positions, [seen] * (depth - 1))
        found += head.through(None, masks, remembered(known))
    return torch.stack([head.normed(each) for each in found])
