"""Reference values of a trained head: hidden states, logits, and further inputs of a reader.

They travel with an export, so that a reader can compute the head from the exported files and
compare. All arithmetic is float32 on the CPU, whatever the dtype of the head.

Letters: S rows, D depths (of Medusa: its heads), L target layers, F target hidden, H hidden, V
vocabulary, W ids the head can draft, R ids whose logits are kept.
"""

from typing import Any

import torch
from torch import Tensor, nn

from heads.head import DraftHead
from heads.target_model.decoder import extract_hidden_state
from heads.target_model.model import Target
from heads.target_model.sizes import find_max_positions

MOST_IDS = 8192
"""Largest vocabulary of which all ids are kept."""
LIKELIEST, SPREAD = 16, 1024
"""Ids kept of larger vocabularies: the likeliest per row and depth, and evenly spaced ones."""


@torch.no_grad()
def compute_reference_tensors(
    head: DraftHead, target: Target, num_rows: int = 24, depth: int = 4
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Compute hidden states of one text and the head's logits on them.

    Row t at depth j has read hidden states 0..t beside tokens 0..t, and then its own outputs beside
    tokens t+1..t+j, like an engine's chain while every draft token is accepted. Positions are
    spread over the whole range, so that a wrong RoPE is noticed.

    Args:
        head: attached head in the dtype of the export.
        target: the frozen target.
        num_rows: number S of rows.
        depth: number D of depths, for a head that drafts to any depth.

    Returns:
        Tensors `token_ids` [S + D], `position_ids` [S], `hidden_states.{i}` [S, F] with i as in
        `output_hidden_states`, `ids` [R], `logits` [D, S, R], and, if needed, `logsumexp` [D, S],
        `token_embeddings` [S + D, H], `output_head` [R, F]; and metadata for the safetensors file.

    Raises:
        InputError: the head drafts with the target's output head, which is quantised or has a bias.
    """
    depth = head.max_draft_tokens or depth
    longest = find_max_positions(target.config)
    token_ids = _draw_tokens(target, num_rows + depth + 1)
    states = _hidden_states(target, token_ids[:num_rows])
    # A block has one row more than draft tokens.
    places = torch.linspace(0, longest - depth - 2, num_rows, dtype=torch.float64).long()
    made = head.compute_reference_logits(target, states, token_ids, places)
    ids = _choose_ids(made.logits)
    tensors = {"token_ids": token_ids[1:], "position_ids": places, "ids": ids}
    tensors |= _select_features(states, bool(head.taps.layers)) | made.beside
    tensors["logits"] = made.logits[..., ids]
    if made.output_head is not None:
        tensors["output_head"] = made.output_head[ids]
    metadata = {
        "headsmith_parity": "1",
        "kind": head.variant,
        "num_layers": str(target.num_layers),
        "max_position_embeddings": str(longest),
        "vocab_size": str(target.vocab_size),
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, metadata


def _draw_tokens(target: Target, count: int) -> Tensor:
    """[count] int64 tokens, always the same and independent of a tokenizer."""
    size = min(target.vocab_size, len(target.embedding.weight))
    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(0))


def _hidden_states(target: Target, token_ids: Tensor) -> list[Tensor]:
    """L + 1 tensors [S, F]: the input of each layer, and the last hidden state.

    Taken from inputs, not from the outputs that taps read, so that a tap off by one is noticed. A
    layer for images only has the input of the next layer.
    """
    active = getattr(target.config, "altup_active_idx", None)
    found: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[module] = extract_hidden_state(args or kwargs["hidden_states"], active)

    handles = [
        block.register_forward_pre_hook(note, with_kwargs=True) for block in target.decoder_layers
    ]
    try:
        ids = token_ids.unsqueeze(0).to(target.device)
        states = [target.decoder(input_ids=ids, use_cache=False).last_hidden_state]
    finally:
        for handle in handles:
            handle.remove()
    for block in reversed(target.decoder_layers):
        states.append(found[block] if block in found else states[-1].clone())
    return [each[0].cpu() for each in reversed(states)]


def _select_features(states: list[Tensor], fused: bool) -> dict[str, Tensor]:
    """All hidden states for a head that fuses some, so that a layer off by one is noticed."""
    first = 0 if fused else len(states) - 2
    return {
        f"hidden_states.{index}": each if each.dtype is torch.bfloat16 else each.float()
        for index, each in enumerate(states)
        if index >= first
    }


def _choose_ids(logits: Tensor) -> Tensor:
    """[R] int64 rising ids of logits [D, S, V]: all, or the likeliest and evenly spaced ones."""
    size = logits.shape[-1]
    if size <= MOST_IDS:
        return torch.arange(size)
    spread = torch.linspace(0, size - 1, SPREAD, dtype=torch.float64).long()
    return torch.cat([logits.topk(LIKELIEST).indices.flatten(), spread]).unique()
