"""Counts of drafts: ours for a head, and where those of a serving engine differ."""

from dataclasses import dataclass

from data.servers.counts import DraftCounts
from eval.decode.engine import common_prefix, decode
from heads.decoding.drafting import Drafter
from heads.target_model.model import Target


def drafted(
    target: Target,
    drafter: Drafter,
    prompt_ids: list[int],
    max_new_tokens: int,
    depth: int,
    within: bool = False,
) -> DraftCounts:
    """Decodes a greedy text with our engine, its drafts counted as serving engines count them.

    Unlike the steps of a decode, the paths go on beyond the end of the text.

    Args:
        target: the frozen target.
        drafter: of chains; fresh.
        prompt_ids: the rendered prompt.
        max_new_tokens: tokens of the text at most.
        depth: draft tokens of a chain.
        within: count as engines do whose drafts end with the text at the latest: llama.cpp.
    """
    generation = decode(target, drafter, prompt_ids, max_new_tokens)
    lengths = [len(path) for path in generation.paths]
    text = generation.token_ids
    if within:
        return DraftCounts.within(text, lengths, depth, max_new_tokens, target.stop_ids)
    return DraftCounts.of(text, lengths, depth)


@dataclass(frozen=True)
class Totals:
    """Sums over all texts; `accepted` per depth."""

    drafts: int
    proposed: int
    accepted: list[int]

    @classmethod
    def of(cls, texts: list[DraftCounts]) -> "Totals":
        """The sums."""
        columns = zip(*(text.accepted for text in texts), strict=True)
        return cls(
            sum(text.drafts for text in texts),
            sum(text.proposed for text in texts),
            [sum(column) for column in columns],
        )


@dataclass(frozen=True)
class FirstDifference:
    """The first place where two texts differ; None where one of them has ended."""

    prompt: int
    token: int
    ours: int | None
    engine: int | None


def divergences(ours: list[DraftCounts], engine: list[DraftCounts]) -> list[FirstDifference]:
    """The first different token of each text that has one, prompts and tokens counted from 0."""
    differences = []
    for prompt, (mine, theirs) in enumerate(zip(ours, engine, strict=True)):
        if mine.text != theirs.text:
            token = common_prefix(mine.text, theirs.text)
            ended = (*mine.text, None), (*theirs.text, None)
            differences.append(FirstDifference(prompt, token, *(text[token] for text in ended)))
    return differences


def problems(ours: list[DraftCounts], engine: list[DraftCounts], tolerance: float) -> list[str]:
    """Lines that say which counts differ: none, if a serving engine computes what we do.

    Args:
        ours: texts by `drafted`.
        engine: those of the same prompts by a running serving engine.
        tolerance: share of the texts that may differ, and share of the greater count by which
            drafts, draft tokens, and accepted tokens of a depth, may.
    """
    lines, different = [], divergences(ours, engine)
    if len(different) > tolerance * len(ours):
        at = different[0]
        lines.append(
            f"{len(different)} of {len(ours)} texts, first prompt {at.prompt} at token "
            f"{at.token}: {at.ours} by us, {at.engine} by the engine"
        )
    mine, theirs = Totals.of(ours), Totals.of(engine)
    counts = {
        "drafts": (mine.drafts, theirs.drafts),
        "draft tokens": (mine.proposed, theirs.proposed),
    }
    for depth, pair in enumerate(zip(mine.accepted, theirs.accepted, strict=True), start=1):
        counts[f"accepted at depth {depth}"] = pair
    lines += [
        f"{name}: {a} by us, {b} by the engine"
        for name, (a, b) in counts.items()
        if abs(a - b) > tolerance * max(a, b)
    ]
    return lines
