"""What keeps a server from being the target, by name."""

from types import SimpleNamespace
from typing import Any

import pytest

from conf.settings.measure import ServeRun
from data.servers.serving_engines import DraftCounts
from eval.measure.prompts import Prompt
from eval.serving.server_check import ENOUGH, CheckedText, DifferingToken, diagnose_differences

TEXT = DraftCounts([7] * 100, 1, 4, [1, 0, 0, 0])


def found(
    num_others: int, avoids: bool, tolerance: float = 0.0, replayed: DraftCounts = TEXT
) -> list[str]:
    others = [DifferingToken(0, place, 5, 6, 1.5, avoids) for place in range(num_others)]
    texts = [CheckedText(TEXT, replayed, others, 0)]
    asked: Any = SimpleNamespace(request_answer=lambda *_: TEXT, model="toy", adapters=[], depth=4)
    bench: Any = SimpleNamespace(
        prompts=[Prompt("all", [1])],
        embeddings_and_output_head=SimpleNamespace(name="the target"),
    )
    config = ServeRun(max_new_tokens=100, tolerance=tolerance)
    return diagnose_differences(asked, bench, texts, config)


@pytest.mark.parametrize(
    ("num_others", "avoids", "cause"),
    [
        (ENOUGH, True, "sampling: "),
        (ENOUGH - 1, True, "target: "),
        (ENOUGH, False, "target: "),
    ],
)
def test_a_penalty_is_told_from_another_target(num_others: int, avoids: bool, cause: str) -> None:
    [line] = found(num_others, avoids)
    assert line.startswith(
        f"{cause}{num_others} of 100 tokens are not those that the target chooses, first prompt 0 "
        "at token 0: 5 here, 6 by the server, 1.50 nats below"
    )


def test_drafts_of_another_head_are_told_by_every_count_that_differs() -> None:
    replayed = DraftCounts([7] * 100, 2, 8, [1, 1, 0, 2])
    assert found(0, False, replayed=replayed) == [
        "drafts: the texts are the target's, the drafts are not those of head.path: another head, "
        "or another version of it, is served, or the server computes it otherwise; first at "
        "prompt 0",
        "drafts: 2 by replay, 1 by the server",
        "draft tokens: 8 by replay, 4 by the server",
        "accepted at depth 2: 1 by replay, 0 by the server",
        "accepted at depth 4: 2 by replay, 0 by the server",
    ]
    assert len(found(0, False, 0.5, replayed)) == 3  # those of depths


def test_a_tolerated_share_is_no_problem() -> None:
    assert found(5, False, tolerance=0.05) == []
    assert len(found(6, False, tolerance=0.05)) == 1
