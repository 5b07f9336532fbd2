"""Check that a target is supported, before training or measuring with it.

The check runs everything that is needed: two texts of different length in one batch, beyond every
window and chunk; then trees and chains after them, of which each text keeps another part; and
packed documents. All must agree with the model's own results for each text, or with its decoding if
it is recurrent, as its reading and decoding may differ. The check finds architectures that ignore
explicit masks or positions, keep a state elsewhere, or scale logits in unknown ways. A slow check
is remembered for later starts.

Letters: n tokens, V vocabulary.
"""

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import asdict
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from conf.command.run_record import compute_code_checksum
from conf.errors import InputError
from conf.files import cache_dir, load_json, write_atomically
from conf.settings.target import TargetConfig
from heads.layers.documents import Documents
from heads.target_model.decoder import MODEL_ERRORS, find_cache_argument
from heads.target_model.identity import identify_target
from heads.target_model.model import Target, TargetOutput, prefill

BEYOND = 8  # tokens of the longer text beyond windows and chunks
SHORTEST, LONGEST = 16, 16384  # tokens without these; wider windows are not tried
SHORTER = 5  # tokens that the other text lacks
NUM_BEHIND = 6  # tokens after each text, for which drafts are checked

# A tree: root, a wrong child, the right one, and the same again below it.
PARENTS = [0, 0, 0, 2, 2]
RIGHT = [0, 2, 4]

WORTH_S = 2.0
"""Seconds from which a check is remembered."""
KEPT = ("needs_masks", "numerical_difference", "attention_calls", "state_bytes")


def check_support_once(target: Target, config: TargetConfig) -> None:
    """Run `check_target_support`, unless this target passed it here before.

    Raises:
        InputError: the target is not supported.
    """
    file = _find_check_file(target, config)
    known = None if file is None else load_json(file)
    if known is not None and known["code"] == _compute_code_checksum():
        for name in KEPT:
            setattr(target, name, known[name])
        return
    start = time.monotonic()
    check_target_support(target)
    if file is None or time.monotonic() - start <= WORTH_S:
        return
    # Without permission to write, the next start checks again.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = {name: getattr(target, name) for name in KEPT}
        stored = json.dumps({"code": _compute_code_checksum(), **kept})
        write_atomically(file, stored, shared=True)


def _compute_code_checksum() -> str:
    """Compute the checksum of the code that a check runs, which takes longer than a quick check."""
    heads = Path(__file__).parents[1]
    folders = ("target_model", "decoding", "layers")
    return compute_code_checksum(
        sorted(file for folder in folders for file in (heads / folder).glob("*.py"))
    )


def _find_check_file(target: Target, config: TargetConfig) -> Path | None:
    """Find the file of a check, named after all it depends on but code; None: unknown weights."""
    identity = identify_target(config, target.tokenizer, target.dtype)
    if identity.weights is None:
        return None
    device = f"cpu, {torch.backends.cpu.get_cpu_capability()}"
    if target.device.type == "cuda":
        device = torch.cuda.get_device_name(target.device)
    facts: dict[str, Any] = asdict(identity) | {
        "name": None,  # the same files may lie in several places
        "versions": [torch.__version__, transformers.__version__],
        "attention": target.config._attn_implementation,
        "device": device,
        "device_map": config.device_map,
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return cache_dir() / "checks" / f"{key}.json"


def check_target_support(target: Target) -> None:
    """Refuse a target whose passes differ from the model's, and choose how documents are read.

    Raises:
        InputError: naming the difference and its size.
    """
    if target.device.type == "meta":
        raise InputError(
            f"target.path={target.name}: its embedding is offloaded, but a target's results lie "
            "beside it; set target.device_map so that the embedding stays on a device"
        )
    # Long enough for every window and chunk that can be tried.
    sizes = [SHORTEST, *target.attention_pattern.length_limits, target.long_rope.switch or 0]
    num_tokens = max(size for size in sizes if size <= LONGEST) + BEYOND + NUM_BEHIND
    ids = torch.randint(1 << 30, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    text = (ids % target.vocab_size).to(target.device)
    target.needs_masks = reason = _compare_documents(target, text, by_kernel=True)
    if reason and (with_masks := _compare_documents(target, text, by_kernel=False)):
        raise _make_refusal(target, f"packed documents: {with_masks}")
    reason = _compare_drafts(target, text)
    if reason and not target.needs_masks:
        target.needs_masks = reason
        reason = _compare_drafts(target, text)
    if reason:
        raise _make_refusal(target, reason)
    if target.is_recurrent:
        decoded = _compute_decoded_logits(target, text, NUM_BEHIND)
        target.numerical_difference = _describe_difference(
            target, decoded, _compute_own_logits(target, text, NUM_BEHIND)
        )


def _make_refusal(target: Target, reason: str) -> InputError:
    return InputError(
        f"target.path={target.name}: {target.config.model_type} "
        f"({type(target.model).__name__}) cannot be served: {reason}"
    )


@torch.no_grad()
def _compute_own_logits(target: Target, ids: Tensor, num_last: int) -> Tensor:
    """Compute the model's own logits [num_last, V] float32 after the last tokens of a text."""
    parameters = signature(target.model.forward).parameters
    options = {"logits_to_keep": num_last} if "logits_to_keep" in parameters else {}
    return target.model(input_ids=ids, use_cache=False, **options).logits[0, -num_last:].float()


@torch.no_grad()
def _compute_decoded_logits(target: Target, ids: Tensor, num_last: int) -> Tensor:
    """Compute `_compute_own_logits` with the last tokens read one by one, as `generate` does."""
    model, num_first = target.model, ids.shape[1] - num_last + 1
    parameters: Any = signature(model.forward).parameters
    cache = DynamicCache(config=target.config)
    name = find_cache_argument(parameters)
    if model._is_stateful and "position_ids" not in parameters:
        parameters = {}  # Mamba takes a mask of all tokens for that of the new ones
    logits = []
    for start, end in pairwise([0, *range(num_first, ids.shape[1] + 1)]):
        given = {
            "position_ids": torch.arange(start, end, device=ids.device).unsqueeze(0),
            "attention_mask": torch.ones_like(ids[:, :end]),
        }
        given = {key: value for key, value in given.items() if key in parameters}
        output = model(input_ids=ids[:, start:end], use_cache=True, **{name: cache}, **given)
        logits.append(output.logits[0, -1].float())
    return torch.stack(logits)


def _describe_difference(target: Target, logits: Tensor, expected: Tensor) -> str:
    """Describe the difference of logits from the model's own; empty if they agree."""
    if expected.isnan().any():
        raise InputError(
            f"target.dtype={str(target.dtype).removeprefix('torch.')}: hidden states of "
            f"target.path={target.name} overflow, so its own logits are no numbers; set "
            "target.dtype=bfloat16 or float32"
        )
    # int8 rounds activations by the batch that they come in.
    exact = target.dtype == torch.float32 and not getattr(target.model, "is_quantized", False)
    tolerance = 1e-3 if exact else 0.3
    difference = ((logits - expected).abs().max() / expected.std().clamp_min(1e-6)).item()
    if difference < tolerance:
        return ""
    return (
        f"differs from its own pass by {difference:.2g} standard deviations of the logits "
        f"(allowed {tolerance})"
    )


@torch.no_grad()
def _compare_documents(target: Target, text: Tensor, by_kernel: bool) -> str:
    """Compare reading two packed documents, in both orders, with reading each alone.

    With `by_kernel`, each layer must also have asked for its own window.
    """
    alone = text[:, :-3], text[:, -3:]
    long, short = alone[0].shape[1], 3
    packed = torch.cat([torch.cat(alone, 1), torch.cat(alone[::-1], 1)])
    places = [torch.arange(size, device=text.device) for size in (long, short)]
    positions = torch.stack([torch.cat(places), torch.cat(places[::-1])])
    numbers = torch.tensor([[0] * long + [1] * short, [0] * short + [1] * long])
    documents = Documents.from_ids(numbers).to_device(text.device)
    try:
        states = target.encode_documents(packed, positions, documents).hidden_states
    except MODEL_ERRORS as error:
        return f"{type(error).__name__}: {error}"
    windows = [window for window, _ in target.attention_calls]
    if by_kernel and windows != target.attention_pattern.windows:
        return f"{type(target.model).__name__} does not attend through transformers' interface"
    own_logits = [_compute_own_logits(target, document, 3) for document in alone]
    # The last three tokens of each document.
    rows = [(0, long - 3), (0, long), (1, 0), (1, long)]
    last = torch.cat([states[row, start : start + 3] for row, start in rows])
    difference = _describe_difference(
        target, target.compute_logits(last).float(), torch.cat([*own_logits, *own_logits[::-1]])
    )
    return difference and f"a read by documents {difference}"


def _compare_drafts(target: Target, text: Tensor) -> str:
    """Describe the difference of prompts and of drafts after them; empty without one."""
    try:
        return _find_draft_difference(target, text)
    except MODEL_ERRORS as error:
        return f"{type(error).__name__}: {error}"


@torch.no_grad()
def _find_draft_difference(target: Target, text: Tensor) -> str:
    """Describe the first difference of prompts and of drafts after them; empty without one.

    Two texts, the second a part of the first, are drafted for and continued by `text` [1, n].
    """
    ids, device = text[0], text.device
    longest = len(ids) - NUM_BEHIND
    shorter, switch = longest - SHORTER, target.long_rope.switch
    if switch is not None and switch < longest:
        # Both sides of a switch of frequencies; no drafted text may cross it.
        shorter = switch - NUM_BEHIND
    prompts, lengths, texts = (longest, shorter), [longest, shorter], [0, 1]
    # A recurrent layer of transformers may treat one token and many differently.
    compute = _compute_decoded_logits if target.is_recurrent else _compute_own_logits
    expected = [compute(target, text[:, : size + NUM_BEHIND], NUM_BEHIND + 1) for size in prompts]

    def compare_states(name: str, output: TargetOutput, nodes: list[int], depths: list[int]) -> str:
        """Describe the difference of the states of nodes at depths after the texts."""
        places = torch.tensor([nodes] * len(lengths), device=device)
        states = output.select_tokens(places).hidden_states.flatten(0, 1)
        own = [
            expected[each][length + depth + 1 - prompts[each]]
            for each, length in zip(texts, lengths, strict=True)
            for depth in depths
        ]
        logits = target.compute_logits(states).float()
        difference = _describe_difference(target, logits, torch.stack(own))
        return difference and f"{name}, after texts of {lengths} tokens, {difference}"

    def draft(name: str, parents: list[int], right: list[int], num_kept: list[int]) -> str:
        """Run a tree whose `right` nodes continue the texts, and keep the first of them."""
        num_nodes = len(parents)
        mask = torch.eye(num_nodes, dtype=torch.bool, device=device)
        for node in range(1, num_nodes):
            mask[node] |= mask[parents[node]]
        depths = mask.sum(-1) - 1
        rows = torch.stack([ids[length + depths] for length in lengths])
        wrong = [node for node in range(num_nodes) if node not in right]
        rows[:, wrong] = (rows[:, wrong] + 1) % target.vocab_size
        is_chain = parents[1:] == list(range(num_nodes - 1))
        output = target.run_pending(cache, rows, None if is_chain else mask[None], depths[None])
        difference = compare_states(name, output, right, depths[right].tolist())
        cache.commit([right[:num] for num in num_kept])
        lengths[:] = [length + num for length, num in zip(lengths, num_kept, strict=True)]
        return difference

    cache = target.new_cache(2)
    whole, target.prefill_chunk = target.prefill_chunk, max(1, shorter // 2)
    try:
        output = prefill(target, cache, [ids[:length].tolist() for length in lengths])
    finally:
        target.prefill_chunk = whole
    last = output.select_tokens(torch.tensor(lengths, device=device).unsqueeze(1) - 1)
    difference = compare_states("a prompt", last, [0], [-1])
    for name, parents, right, num_kept in (
        ("a draft tree", PARENTS, RIGHT, [len(RIGHT), 1]),
        ("a draft after a kept part of a tree", [0, 0, 1], [0, 1, 2], [1, 2]),
    ):
        difference = difference or draft(name, parents, right, num_kept)
    cache.select_rows([1])
    target.state_bytes = cache.states.bytes_per_token if cache.states else 0
    lengths, texts = lengths[1:], [1]
    return difference or draft("a draft after a text ended", [0, 0], [0, 1], [1])
