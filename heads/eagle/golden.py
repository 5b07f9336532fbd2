"""Reference logits of an EAGLE head, depth by depth, in float32 on the CPU.

Letters: S rows, D depths, F target hidden, H hidden, V vocabulary, W ids the head can draft.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from heads.eagle.branches import BranchCache, build_causal_range
from heads.eagle.network import EagleNetwork
from heads.head import ReferenceLogits
from heads.layers.documents import Documents
from heads.target_model.embeddings_and_head import (
    copy_output_rows,
    project_in_float32,
    select_embedding_rows,
)
from heads.target_model.model import Target, TargetOutput

Head = TypeVar("Head", bound=EagleNetwork)


def compute_reference_logits(
    head: EagleNetwork, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
) -> ReferenceLogits:
    """Compute logits whose row t at depth j reads hidden states 0..t, then its own outputs.

    These are an engine's logits while every draft token is accepted. Arguments as in
    `DraftHead.golden`.
    """
    embeddings = select_embedding_rows(target.embedding.weight, token_ids, head.dtype)
    own = embeddings
    if head.embed_tokens is not None:
        own = select_embedding_rows(head.embed_tokens.weight, token_ids, head.dtype)
    outputs = _compute_unrolled_outputs(copy_to_cpu(head, own), states, places)
    return project_reference_logits(head, target, outputs, {"token_embeddings": embeddings[1:]})


def project_reference_logits(
    head: EagleNetwork, target: Target, outputs: Tensor, beside: dict[str, Tensor]
) -> ReferenceLogits:
    """Logits of normalised outputs [D, S, H], by the head's output head or the target's."""
    if head.lm_head is None:
        rows = copy_output_rows(target, head.dtype)
        return ReferenceLogits(project_in_float32(outputs, rows), beside, rows)
    found = project_in_float32(outputs, head.lm_head.weight.cpu())
    logits = torch.full((*found.shape[:2], head.vocab.size), float("-inf"))
    logits[..., head.vocab.ids.cpu()] = found
    return ReferenceLogits(logits, beside | {"logsumexp": found.logsumexp(-1)})


def copy_to_cpu(head: Head, embeddings: Tensor) -> Head:
    """Float32 copy whose embedding holds only the text's tokens, in order."""
    copy = type(head)(head.config, head.vocab.to("cpu"))
    copy.embed_tokens = None
    tensors = {n: t for n, t in head.state_dict().items() if not n.startswith("embed_tokens.")}
    copy.load_state_dict(tensors)
    copy.embed_tokens = nn.Embedding.from_pretrained(embeddings.float())
    return copy.eval()


def _compute_unrolled_outputs(
    head: EagleNetwork, hidden_states: list[Tensor], position_ids: Tensor
) -> Tensor:
    """[D, S, H] normalised outputs of a head made by `on_cpu`."""
    assert head.embed_tokens is not None
    num_rows = len(position_ids)
    places = torch.arange(len(head.embed_tokens.weight))
    rows = places[:num_rows]
    output = TargetOutput(hidden_states[-1], dict(enumerate(hidden_states)))
    text = head.encode_context(
        head.fuse(head.collect_features(output)), places[1 : num_rows + 1], position_ids
    )
    documents = Documents.from_length(num_rows, rows.device)
    branches = BranchCache(text.keys[None], text.values[None], build_causal_range(documents, rows))
    steps = head.unroll(text, places, rows, branches)
    depth = len(places) - num_rows - 1
    return torch.stack([head.apply_final_norm(next(steps)) for _ in range(depth)])
