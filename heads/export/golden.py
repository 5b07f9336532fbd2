"""Golden values of a trained head: features, what it makes of them, and what a reader needs.

They travel with an export, so that anyone can compute the head from the exported files and
compare. The arithmetic is float32 on the CPU, whatever the dtype of the head.

Letters: S rows, D depths (of Medusa: its heads), L target layers, F target hidden, H hidden, V
vocabulary, W ids the head can draft, R ids whose logits are kept.
"""

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conf.schema import InputError
from heads.documents import Documents
from heads.eagle.branches import Branches, causal_rows
from heads.eagle.head import EagleHead
from heads.kinds import Head, kind_of
from heads.medusa.head import MedusaHead
from heads.target.model import Target, TargetOutput

MOST_IDS = 8192
"""Vocabularies up to this size are kept whole."""
LIKELIEST, SPREAD = 16, 1024
"""Of a larger one: ids per row and depth, and ids in equal steps over it."""
ROWS_PER_CHUNK = 8192


@dataclass(frozen=True)
class _Drafted:
    """What a head makes of the features.

    Attributes:
        logits: [D, S, V], -inf where the head cannot draft the id.
        beside: what else goes into the file.
        output_head: [V, F] of the target, if the head drafts with that.
    """

    logits: Tensor
    beside: dict[str, Tensor]
    output_head: Tensor | None = None


@torch.no_grad()
def golden(
    head: Head, target: Target, num_rows: int = 24, depth: int = 4
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Features of one text and the head's logits on them.

    Row t at depth j has read features 0..t beside tokens 0..t, and then, one after another, its
    own last output beside tokens t+1..t+j: what an engine's chain does while every draft is
    accepted. Positions are spread over the whole range, so that a wrong RoPE shows.

    Args:
        head: in the dtype of the export, attached to `target`.
        target: the frozen target.
        num_rows: S.
        depth: D of an EAGLE head.

    Returns:
        Tensors `token_ids` [S + D], `position_ids` [S], `hidden_states.{i}` [S, F] as the
        target's `output_hidden_states` counts them, `ids` [R], `logits` [D, S, R], and, where
        they apply, `logsumexp` [D, S], `token_embeddings` [S + D, H], `output_head` [R, F];
        metadata for the safetensors file.

    Raises:
        InputError: the head drafts with an output head of the target that is quantised or has
            a bias.
    """
    depth = head.num_heads if isinstance(head, MedusaHead) else depth
    longest = target.config.max_position_embeddings
    token_ids = _tokens(target, num_rows + depth + 1)
    states = _hidden_states(target, token_ids[:num_rows])
    places = torch.linspace(0, longest - depth - 1, num_rows, dtype=torch.float64).long()
    if isinstance(head, MedusaHead):
        drafted = _medusa(head, states[-1])
    else:
        drafted = _eagle(head, target, states, token_ids, places)
    ids = _ids(drafted.logits)
    tensors = {"token_ids": token_ids[1:], "position_ids": places, "ids": ids}
    tensors |= _features(states, kind_of(head)) | drafted.beside
    tensors["logits"] = drafted.logits[..., ids]
    if drafted.output_head is not None:
        tensors["output_head"] = drafted.output_head[ids]
    metadata = {
        "headsmith_parity": "1",
        "kind": kind_of(head),
        "num_layers": str(target.num_layers),
        "max_position_embeddings": str(longest),
        "vocab_size": str(target.vocab_size),
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, metadata


def _tokens(target: Target, count: int) -> Tensor:
    """[count] int64 tokens, always the same, without any text that a tokenizer would need."""
    size = min(target.vocab_size, len(target.embedding.weight))
    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(0))


def _hidden_states(target: Target, token_ids: Tensor) -> list[Tensor]:
    """L + 1 tensors [S, F]; transformers' own, not our taps, so that a tap off by one shows."""
    output = target.decoder(
        input_ids=token_ids.unsqueeze(0).to(target.device),
        output_hidden_states=True,
        use_cache=False,
    )
    return [states[0].cpu() for states in output.hidden_states]


def _features(states: list[Tensor], kind: str) -> dict[str, Tensor]:
    """All features of EAGLE-3, among them those of layers read one too low or too high."""
    first = 0 if kind == "eagle3" else len(states) - 2
    return {
        f"hidden_states.{index}": each if each.dtype is torch.bfloat16 else each.float()
        for index, each in enumerate(states)
        if index >= first
    }


def _medusa(head: MedusaHead, states: Tensor) -> _Drafted:
    # One head at a time: together they can be larger than the target.
    each = [deepcopy(part).to("cpu", torch.float32)(states.float()) for part in head.heads]
    logits = torch.stack(each)
    return _Drafted(logits, {"logsumexp": logits.logsumexp(-1)})


def _eagle(
    head: EagleHead, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
) -> _Drafted:
    embeddings = _embeddings(target.embedding, token_ids, head.dtype)
    own = _embeddings(head.embed_tokens, token_ids, head.dtype) if head.embed_tokens else embeddings
    outputs = _unrolled(_on_cpu(head, own), states, places)
    beside = {"token_embeddings": embeddings[1:]}
    if head.lm_head is None:
        rows = _output_rows(target, head.dtype)
        return _Drafted(_projected(outputs, rows), beside, rows)
    drafted = _projected(outputs, head.lm_head.weight.cpu())
    logits = torch.full((*drafted.shape[:2], head.vocab.size), float("-inf"))
    logits[..., head.vocab.ids.cpu()] = drafted
    return _Drafted(logits, beside | {"logsumexp": drafted.logsumexp(-1)})


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


def _ids(logits: Tensor) -> Tensor:
    """[R] int64 rising ids of logits [D, S, V]: all, or the likeliest and a spread."""
    size = logits.shape[-1]
    if size <= MOST_IDS:
        return torch.arange(size)
    spread = torch.linspace(0, size - 1, SPREAD, dtype=torch.float64).long()
    return torch.cat([logits.topk(LIKELIEST).indices.flatten(), spread]).unique()
