"""Names the causes for which a server does not answer as the target with the head does."""

from collections.abc import Sequence
from typing import Any

from conf.errors import InputError
from data.servers.serving_engines import ServingEngine
from eval.decode.engine import count_common_prefix
from eval.measure.prompts import Prompt
from eval.served.check import (
    CheckedText,
    DifferingToken,
    find_first_difference,
    format_count_differences,
)

NUM_RENDERED = 3
"""Prompts that the server renders for comparison."""
ENOUGH = 8
"""Differing tokens from which on a repetition penalty may be named as the cause."""


def compare_chat_template(
    server: ServingEngine, prompts: Sequence[Prompt]
) -> tuple[str | None, int]:
    """Compare a few prompts with the server's own rendering of their conversations.

    Returns:
        The difference, or None; and the number of prompts compared, 0 if the server renders no
        conversations.
    """
    some = [prompt for prompt in prompts if prompt.messages][:NUM_RENDERED]
    for number, prompt in enumerate(some):
        try:
            theirs = server.render_prompt(prompt.messages, prompt.tools, prompt.template_kwargs)
        except InputError:  # chats are refused; prompts of token ids may do
            return None, number
        ours = prompt.token_ids
        if isinstance(theirs, int):
            if theirs != len(ours):
                found = f"{theirs} tokens by the server, {len(ours)} here"
                return f"{_TEMPLATE}: {prompt.location} has {found}", number + 1
        elif theirs != ours:
            place = count_common_prefix(theirs, ours)
            ids = [str(text[place]) if place < len(text) else "the end" for text in (theirs, ours)]
            found = f"token {place} is {ids[0]} by the server, {ids[1]} here"
            return f"{_TEMPLATE}: in {prompt.location} {found}", number + 1
    return None, len(some)


_TEMPLATE = "chat template: the server renders conversations in another way"


def diagnose_differences(
    server: ServingEngine,
    prompts: Sequence[Prompt],
    texts: Sequence[CheckedText],
    target: str,
    max_new_tokens: int,
    tolerance: float,
) -> list[str]:
    """Name the cause if a server's texts or drafts are not those of the target with the head.

    Args:
        server: the server that wrote the texts; it is asked once more.
        prompts: the prompts of the texts.
        texts: the checked texts.
        target: name of the target.
        max_new_tokens: limit of each text.
        tolerance: share of tokens, and of counts, that may differ.

    Returns:
        Lines that begin with the cause; empty if nothing differs.
    """
    others = [other for text in texts for other in text.others]
    num_tokens = sum(len(text.served.text) for text in texts)
    if len(others) > tolerance * num_tokens:
        first = others[0]
        asked = prompts[first.prompt].token_ids
        again = server.request_answer(asked, max_new_tokens).text
        drawn = again != texts[first.prompt].served.text
        return [_other_texts(server, others, num_tokens, target, drawn)]
    if lines := format_count_differences(texts, server.depth, tolerance):
        number = find_first_difference(texts)
        return [
            "drafts: the texts are the target's, the drafts are not those of head.path: another "
            "head, or another version of it, is served, or the server computes it otherwise; "
            f"first at prompt {number}",
            *lines,
        ]
    return []


def _other_texts(
    server: ServingEngine, others: list[DifferingToken], num_tokens: int, target: str, drawn: bool
) -> str:
    first = others[0]
    found = (
        f"{len(others)} of {num_tokens} tokens are not those that {target} chooses, first prompt "
        f"{first.prompt} at token {first.token}: {first.ours} here, {first.engine} by the server, "
        f"{first.gap:.2f} nats below"
    )
    if drawn:
        return f"sampling: {found}; asked again, the server answers otherwise: it draws its tokens"
    if len(others) >= ENOUGH and all(other.avoids for other in others):
        return (
            f"sampling: {found}; it avoids only tokens that the text already has: it penalises "
            "repetition"
        )
    adapters = f"; it lists the adapters {', '.join(server.adapters)}" if server.adapters else ""
    return (
        f"target: {found}: {server.model} is another model than target.path, or an adapter or a "
        f"quantisation of it{adapters}"
    )


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
