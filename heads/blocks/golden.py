"""Reference logits of a block drafter, slot by slot, in float32 on the CPU.

Letters: S rows, D slots, F target hidden, H hidden, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from heads.blocks.network import BlockNetwork
from heads.head import ReferenceLogits
from heads.target_model.embeddings_and_head import (
    copy_output_rows,
    project_in_float32,
    select_embedding_rows,
)
from heads.target_model.model import Target, TargetOutput


def compute_reference_logits(
    head: BlockNetwork,
    target: Target,
    states: list[Tensor],
    token_ids: Tensor,
    position_ids: Tensor,
) -> ReferenceLogits:
    """Compute logits whose row t of slot d drafts in a block after token t, from known token t + 1.

    These are an engine's logits while every draft token is accepted, so tokens before a slot are
    the text's own. Arguments as in `DraftHead.golden`.

    Raises:
        InputError: the target's output head is quantised or has a bias.
    """
    num_rows, mask = len(position_ids), head.config.mask_token_id
    wanted = torch.cat([token_ids, torch.tensor([mask])])
    copy = _on_cpu(head, _select_embeddings(head, target, wanted))
    output = TargetOutput(states[-1], dict(enumerate(states)))
    text = copy.encode_context(copy.collect_features(output), position_ids)
    ends = torch.arange(1, num_rows + 1)
    nothing, depth = torch.zeros_like(ends), len(token_ids) - num_rows - 1
    sight = copy.make_block_range(nothing, ends, depth, (nothing, ends))
    outputs = copy.draft(ends, position_ids + 1, text, sight)
    rows = None if head.lm_head is not None else copy_output_rows(target, head.dtype)
    beside = {"token_embeddings": _select_embeddings(head, target, token_ids[1:], of_target=True)}
    beside["mask_token_id"] = torch.tensor([mask])
    beside["mask_embedding"] = _select_embeddings(
        head, target, torch.tensor([mask]), of_target=True
    )
    found, state = [], None
    for slot in range(depth):
        mine = outputs[:, slot]
        base = (
            copy.compute_logits(mine)
            if rows is None
            else copy.scale_logits(project_in_float32(mine, rows))
        )
        before = token_ids[1 + slot : 1 + slot + num_rows]
        logits, state = copy.compute_slot_logits(base, mine, before, state)
        found.append(logits)
    drawn = torch.stack(found)
    logits = torch.full((*drawn.shape[:2], head.vocab.size), float("-inf"))
    logits[..., head.vocab.ids.cpu()] = drawn
    if rows is None:
        beside["logsumexp"] = drawn.logsumexp(-1)
    return ReferenceLogits(logits, beside, rows)


def _select_embeddings(
    head: BlockNetwork, target: Target, token_ids: Tensor, of_target: bool = False
) -> Tensor:
    """[n, H] rows of the head's own embedding, or of the target's."""
    own = None if of_target else head.embed_tokens
    weight = target.embedding.weight if own is None else own.weight
    return select_embedding_rows(weight, token_ids, head.dtype)


def _on_cpu(head: BlockNetwork, embeddings: Tensor) -> BlockNetwork:
    """Float32 copy whose embedding holds the text's tokens in order, then the mask."""
    config = replace(head.config, mask_token_id=len(embeddings) - 1)
    copy = type(head)(config, head.vocab.to("cpu"))
    copy.embed_tokens = None
    tensors = {n: t for n, t in head.state_dict().items() if not n.startswith("embed_tokens.")}
    copy.load_state_dict(tensors)
    copy.embed_tokens = nn.Embedding.from_pretrained(embeddings.float())
    return copy.eval()
