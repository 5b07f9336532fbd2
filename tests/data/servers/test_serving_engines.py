"""Counts of a text by hand: 1 is the first token, which the prompt's pass gives; 9 ends a text."""

import pytest

from data.servers.http_client import Endpoint
from data.servers.serving_engines import DraftCounts, ServingEngine
from tests.servers import DraftServer


def test_whole_drafts_count_beyond_the_text() -> None:
    """Two passes of 3 draft tokens: 2 and a bonus token, then 3, of which the text holds one."""
    text = [1, 5, 6, 7, 5]
    assert DraftCounts.from_passes(text, [2, 3], depth=3) == DraftCounts(text, 2, 6, [2, 2, 1])


@pytest.mark.parametrize(
    ("text", "lengths", "room", "drafts", "proposed", "accepted"),
    [
        pytest.param([1, 5, 6, 7, 5], [2, 3], 9, 2, 6, [2, 2, 1], id="much room"),
        # Behind 1 5 6 7 the text has room for one draft token and a bonus token.
        pytest.param([1, 5, 6, 7, 5, 6], [2, 3], 6, 2, 4, [2, 1, 0], id="room for one"),
        pytest.param([1, 5, 6, 7, 5], [2, 3], 5, 1, 3, [1, 1, 0], id="a pass without room"),
        pytest.param([1, 5], [0], 2, 0, 0, [0, 0, 0], id="no room at all"),
        pytest.param([9], [], 8, 0, 0, [0, 0, 0], id="nothing to draft"),
        # 5 9 x: the stop token counts as the bonus token.
        pytest.param([1, 5, 9], [3], 8, 1, 3, [1, 0, 0], id="a stop token inside"),
        pytest.param([1, 5, 9], [2], 8, 1, 3, [1, 0, 0], id="a wrong token behind the stop token"),
        pytest.param([1, 9], [3], 8, 1, 3, [0, 0, 0], id="a stop token first"),
        pytest.param([1, 5, 6, 9], [3], 8, 1, 3, [1, 1, 1], id="a stop token last"),
        pytest.param([1, 5, 6, 7, 9], [3], 8, 1, 3, [1, 1, 1], id="a stop token as bonus token"),
        pytest.param([1, 5, 9], [1], 8, 1, 3, [1, 0, 0], id="a stop token in place of a draft's"),
        # Two draft tokens fit, and the stop token is the second; then one that lies behind both.
        pytest.param([1, 5, 9], [3], 4, 1, 2, [1, 1, 0], id="a stop token last, little room"),
        pytest.param([1, 5, 6, 9], [3], 4, 1, 2, [1, 1, 0], id="a stop token where room ends"),
    ],
)
def test_drafts_that_end_with_the_text(
    text: list[int], lengths: list[int], room: int, drafts: int, proposed: int, accepted: list[int]
) -> None:
    found = DraftCounts.from_passes_within_text(text, lengths, depth=3, room=room, stop_ids=[9])
    assert found == DraftCounts(text, drafts, proposed, accepted)


def test_a_server_renders_a_message_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    asked: list[dict] = []
    with DraftServer("vllm", 0, lambda ids, _: (ids, [])) as server:
        server.rendered = lambda messages: asked.extend(messages) or [5]
        with ServingEngine(Endpoint(server.root, None), drafts=False) as engine:
            engine.connect()
            message = {"role": "user", "content": "a\nb", "content_parts": ["a", "b"]}
            assert engine.render_prompt([message], None, {}) == [5]
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    assert asked == [{"role": "user", "content": parts}]
