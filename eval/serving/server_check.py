"""A server's texts and counts beside those that the target and its head make of the same texts.

The target and the head read the server's own text: which token would the target have chosen, which
would the head have drafted? After a near-tie that the server decides the other way, as happens in
bfloat16, the rest of the text is still compared. If texts or counts differ, the cause is named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conf.errors import InputError
from conf.settings.measure import ServeRun
from data.servers.serving_engines import DraftCounts, ServingEngine
from eval.decode.engine import count_common_prefix
from eval.measure.acceptance_stats import (
    LENGTH_DEFINITIONS,
    PassCounts,
    compute_acceptance_lengths,
    compute_length_interval,
)
from eval.measure.measurement import Measurement
from eval.measure.prompts import Prompt
from eval.measure.replay import compute_accepted_lengths, rank_candidates

NEAR_TIES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Distance in nats within which rounding may swap two logits."""
NUM_RENDERED = 3
"""Prompts that the server renders for comparison."""
ENOUGH = 8
"""Differing tokens from which on a repetition penalty may be named as the cause."""
_TEMPLATE = "chat template: the server renders conversations in another way"


@dataclass(frozen=True)
class DifferingToken:
    """A token of a server that the target would not have chosen.

    Attributes:
        prompt: index, from 0.
        token: place of the token in the text, from 0.
        ours: id that the target chooses.
        engine: id that the server chose.
        gap: logit of `ours` minus logit of `engine`, in nats.
        avoids: whether `ours` occurs in the prompt or the text before, and `engine` does not.
    """

    prompt: int
    token: int
    ours: int
    engine: int
    gap: float
    avoids: bool


@dataclass(frozen=True)
class CheckedText:
    """A text of a server, checked.

    Attributes:
        served: the text with the server's counts.
        replayed: the text with the counts of the head's replay along it.
        others: tokens that the target would not have chosen, without near-ties.
        near_ties: number of tokens that differ from the target's choice by a near-tie.
    """

    served: DraftCounts
    replayed: DraftCounts
    others: list[DifferingToken]
    near_ties: int


@torch.no_grad()
def replay_server_text(
    measurement: Measurement, row: Mapping[str, Any], max_new_tokens: int, within: bool
) -> CheckedText:
    """Read a server's text with the target, and replay the head's chain along it.

    Args:
        measurement: measurement with the head, whose chain is as deep as the server drafts.
        row: number of the prompt as `id`, the server's text and counts as `served`, and its tokens
            after the end of the text, one draft's length at least, as `beyond`.
        max_new_tokens: largest number of tokens of the text.
        within: whether the server's drafts end with the text (see `DraftCounts.within`).
    """
    target, head = measurement.embeddings_and_output_head, measurement.head
    number, served = row["id"], DraftCounts(**row["served"])
    prompt, text = measurement.prompts[number].token_ids, served.text
    whole = [*text, *row["beyond"]]
    output = measurement.answer_source.encode_response(prompt, whole, head.draft_head.taps)
    ranked = rank_candidates(head.draft_head, head.chain, output, prompt, whole)
    accepted, lengths, root = compute_accepted_lengths(head.chain, ranked, whole), list[int](), 0
    while root < len(text) - 1:
        lengths.append(accepted[root])
        root += accepted[root] + 1
    depth = head.chain.depth
    replayed = (
        DraftCounts.from_passes_within_text(text, lengths, depth, max_new_tokens, target.stop_ids)
        if within
        else DraftCounts.from_passes(text, lengths, depth)
    )
    first = len(prompt) - 1
    states = output.hidden_states[0, first : first + len(text)]
    logits = target.compute_logits(states).float()
    server_ids = torch.tensor(text, device=logits.device)
    best, ids = logits.max(dim=-1)
    gaps = (best - logits.gather(1, server_ids[:, None])[:, 0]).tolist()
    near = NEAR_TIES.get(target.dtype, NEAR_TIES[torch.bfloat16])
    others, seen = list[DifferingToken](), {*prompt}
    for place, (target_id, server_id, gap) in enumerate(zip(ids.tolist(), text, gaps, strict=True)):
        if gap > near:
            avoids = target_id in seen and server_id not in seen
            others.append(DifferingToken(number, place, target_id, server_id, gap, avoids))
        seen.add(server_id)
    near_ties = sum(0 < gap <= near for gap in gaps)
    return CheckedText(served, replayed, others, near_ties)


def diagnose_differences(
    server: ServingEngine, measurement: Measurement, texts: Sequence[CheckedText], config: ServeRun
) -> list[str]:
    """Name the cause if a server's texts or drafts differ from the target with the head.

    Args:
        server: server that wrote the texts, and is asked once more.
        measurement: measurement with the target, and the prompts of the texts.
        texts: checked texts.
        config: settings of the command; its `tolerance` is the share of tokens that may differ, and
            of the greater of two sums of counts.

    Returns:
        Lines that begin with the cause; empty if nothing differs.
    """
    target, tolerance = measurement.embeddings_and_output_head.name, config.tolerance
    others = [other for text in texts for other in text.others]
    num_tokens = sum(len(text.served.text) for text in texts)
    if len(others) > tolerance * num_tokens:
        first = others[0]
        facts = (
            f"{len(others)} of {num_tokens} tokens are not those that {target} chooses, first "
            f"prompt {first.prompt} at token {first.token}: {first.ours} here, {first.engine} by "
            f"the server, {first.gap:.2f} nats below"
        )
        asked = measurement.prompts[first.prompt].token_ids
        written = texts[first.prompt].served.text
        if server.request_answer(asked, config.max_new_tokens).text != written:
            why = "asked again, the server answers otherwise: it draws its tokens"
            return [f"sampling: {facts}; {why}"]
        if len(others) >= ENOUGH and all(other.avoids for other in others):
            why = "it avoids only tokens that the text already has: it penalises repetition"
            return [f"sampling: {facts}; {why}"]
        listed = f"; it lists the adapters {', '.join(server.adapters)}" if server.adapters else ""
        return [
            f"target: {facts}: {server.model} is another model than target.path, or an adapter or "
            f"a quantisation of it{listed}"
        ]
    replayed, served = (
        DraftCounts.from_texts([getattr(text, side) for text in texts], server.depth)
        for side in ("replayed", "served")
    )
    counts = {
        "drafts": (replayed.drafts, served.drafts),
        "draft tokens": (replayed.proposed, served.proposed),
    }
    for depth, pair in enumerate(zip(replayed.accepted, served.accepted, strict=True), start=1):
        counts[f"accepted at depth {depth}"] = pair
    lines = [
        f"{name}: {a} by replay, {b} by the server"
        for name, (a, b) in counts.items()
        if abs(a - b) > tolerance * max(a, b)
    ]
    if lines:
        number = find_first_difference(texts)
        return [
            "drafts: the texts are the target's, the drafts are not those of head.path: another "
            "head, or another version of it, is served, or the server computes it otherwise; "
            f"first at prompt {number}",
            *lines,
        ]
    return []


def compare_chat_template(
    server: ServingEngine, prompts: Sequence[Prompt]
) -> tuple[str | None, int]:
    """Compare a few prompts with the server's own rendering of their conversations.

    Returns:
        The difference, or None; and the number of prompts compared, 0 if the server renders no
        conversations.
    """
    rendered = [prompt for prompt in prompts if prompt.messages][:NUM_RENDERED]
    for number, prompt in enumerate(rendered):
        try:
            server_ids = server.render_prompt(prompt.messages, prompt.tools, prompt.template_kwargs)
        except InputError:  # chats are refused; prompts of token ids may do
            return None, number
        own_ids = prompt.token_ids
        if server_ids in (own_ids, len(own_ids)):
            continue
        if isinstance(server_ids, int):
            text = f"{prompt.location} has {server_ids} tokens by the server, {len(own_ids)} here"
        else:
            place = count_common_prefix(server_ids, own_ids)
            theirs, ours = (
                ids[place] if place < len(ids) else "the end" for ids in (server_ids, own_ids)
            )
            text = f"in {prompt.location} token {place} is {theirs} by the server, {ours} here"
        return f"{_TEMPLATE}: {text}", number + 1
    return None, len(rendered)


def find_first_difference(texts: Sequence[CheckedText]) -> int | None:
    """Find the first prompt whose counts differ from the replay's; None if all agree."""
    differ = (number for number, text in enumerate(texts) if text.served != text.replayed)
    return next(differ, None)


def summarise_counts(
    prompts: Sequence[Prompt], texts: Sequence[DraftCounts], server: ServingEngine, seed: int
) -> dict[str, object]:
    """Compute acceptance from a server's counts, under every definition that the counts allow.

    A server whose drafts end with the text does not count passes without drafts. Its result has no
    lengths per pass.
    """
    passes = [
        PassCounts(
            prompt.dialogue, text.drafts, text.drafts, sum(text.accepted), len(text.text) - 1
        )
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    counted = ["drafts"] if server.within else list(LENGTH_DEFINITIONS)
    lengths, total = compute_acceptance_lengths(passes), DraftCounts.from_texts(texts, server.depth)
    return {
        "acceptance_length": {count: lengths[count] for count in counted},
        "per_draft_ci95": compute_length_interval(passes, "drafts", seed),
        "per_position": [count / max(1, total.drafts) for count in total.accepted],
        "num_drafts": total.drafts,
        "num_drafted": total.proposed,
        "num_accepted": sum(total.accepted),
        "accepted": total.accepted,
        "num_tokens": sum(len(text.text) for text in texts),
    }


def summarise_checks(texts: Sequence[CheckedText]) -> dict[str, Any]:
    """Count texts, tokens and differences, for the results file."""
    others = [other for text in texts for other in text.others]
    return {
        "num_texts": len(texts),
        "num_tokens": sum(len(text.served.text) for text in texts),
        "num_other_tokens": len(others),
        "num_near_ties": sum(text.near_ties for text in texts),
        "first_other_tokens": [vars(other) for other in others[:5]],
        "num_equal_counts": sum(text.served == text.replayed for text in texts),
        "first_difference": find_first_difference(texts),
    }
