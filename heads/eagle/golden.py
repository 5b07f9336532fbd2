"""What an EAGLE head makes of features, one draft after another, in float32 on the CPU.

Letters: S rows, D depths, F target hidden, H hidden, V vocabulary, W ids the head can draft.
"""

import torch
from torch import Tensor, nn

from conf.schema import InputError
from heads.documents import Documents
from heads.eagle.branches import Branches, causal_rows
from heads.eagle.head import EagleHead
from heads.kind import Drafted
from heads.target.model import Target, TargetOutput

ROWS_PER_CHUNK = 8192


def drafted(
    head: EagleHead, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
) -> Drafted:
    """Row t at depth j has read features 0..t beside tokens 0..t, then its own outputs.

    What an engine's chain does while every draft is accepted; arguments as `Kind.drafted` says.
    """
    embeddings = _embeddings(target.embedding, token_ids, head.dtype)
    own = _embeddings(head.embed_tokens, token_ids, head.dtype) if head.embed_tokens else embeddings
    outputs = _unrolled(_on_cpu(head, own), states, places)
    beside = {"token_embeddings": embeddings[1:]}
    if head.lm_head is None:
        rows = _output_rows(target, head.dtype)
        return Drafted(_projected(outputs, rows), beside, rows)
    found = _projected(outputs, head.lm_head.weight.cpu())
    logits = torch.full((*found.shape[:2], head.vocab.size), float("-inf"))
    logits[..., head.vocab.ids.cpu()] = found
    return Drafted(logits, beside | {"logsumexp": found.logsumexp(-1)})


def _embeddings(embedding: nn.Embedding, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[S + D + 1, H] rows as an engine that runs in `dtype` holds them."""
    weight = embedding.weight
    return weight[token_ids.to(weight.device)].to("cpu", dtype)


def _on_cpu(head: EagleHead, embeddings: Tensor) -> EagleHead:
    """A float32 copy whose embedding holds the tokens of the text alone, in their order."""
    copy = EagleHead(head.config, head.vocab.to("cpu"))
    copy.embed_tokens = None
    tensors = {n: t for n, t in head.state_dict().items() if not n.startswith("embed_tokens.")}
    copy.load_state_dict(tensors)
    copy.embed_tokens = nn.Embedding.from_pretrained(embeddings.float())
    return copy.eval()


def _unrolled(head: EagleHead, hidden_states: list[Tensor], position_ids: Tensor) -> Tensor:
    """[D, S, H] normed outputs of a head made by `_on_cpu`."""
    assert head.embed_tokens is not None
    num_rows = len(position_ids)
    places = torch.arange(len(head.embed_tokens.weight))
    rows = places[:num_rows]
    output = TargetOutput(hidden_states[-1], dict(enumerate(hidden_states)))
    text = head.read(head.fuse(head.features(output)), places[1 : num_rows + 1], position_ids)
    documents = Documents.single(num_rows, rows.device)
    branches = Branches(text.keys[None], text.values[None], causal_rows(documents, rows))
    steps = head.unroll(text, places, rows, branches)
    depth = len(places) - num_rows - 1
    return torch.stack([head.normed(next(steps)) for _ in range(depth)])


def _output_rows(target: Target, dtype: torch.dtype) -> Tensor:
    """[V, F] of the target's output head.

    Its scalings stay out: they change no greedy draft, and engines leave them out of drafts.
    """
    if not target.has_plain_head:
        raise InputError(
            f"target.path={target.name}: its output head is quantised or has a bias, and this "
            "head drafts with it; allowed: target.quantization=none and a plain output head"
        )
    return target.output_head.weight.detach().to("cpu", dtype)


def _projected(outputs: Tensor, weight: Tensor) -> Tensor:
    """[D, S, W] float32 of outputs [D, S, H] by a weight [W, H] of any dtype."""
    parts = [outputs @ rows.float().T for rows in weight.split(ROWS_PER_CHUNK)]
    return torch.cat(parts, dim=-1)
