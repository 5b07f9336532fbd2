"""Servers of hidden states that share the documents of a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conf.errors import InputError
from data.prepared.packing import PackedDataset
from data.servers import http_client as endpoint_module
from data.servers import server_pool as pool
from data.servers import state_files as files
from data.servers.hidden_states import HiddenStatesClient
from data.servers.server_pool import MOST_FAILURES, HiddenStatesPool
from data.servers.state_files import HiddenStatesError
from data.templates.record_encoder import Sample
from tests.data.servers.test_hidden_states import WRITTEN, assert_same, engine, expected
from tests.servers import HIDDEN, EngineServer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(files, "VISIBLE_S", 0.05)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def pooled(*servers: EngineServer) -> HiddenStatesPool:
    return HiddenStatesPool([engine(server, max_retries=3) for server in servers])


def test_documents_come_in_order_however_their_requests_end(tmp_path: Path) -> None:
    documents = [[token, token + 1] for token in range(40)]
    with EngineServer(tmp_path, WRITTEN, delay_s=0.05) as server, pooled(server) as states:
        server.faults = [(500, {}), "drop", (503, {}), (429, {"Retry-After": "0.1"})]
        for document, found in zip(documents, states.stream_states(documents), strict=True):
            assert_same(found, expected(document))
        assert server.most_at_once == 4
    assert list(server.folder.iterdir()) == []


def test_a_packed_sequence_has_each_document_in_its_place(tmp_path: Path) -> None:
    samples = [Sample([5, 6, 7], [True] * 3), Sample([8, 9], [False, True])]
    row = PackedDataset(samples, max_length=6, seed=0, pad_id=3)[0]
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 3]
    with EngineServer(tmp_path, WRITTEN) as server, pooled(server) as states:
        found = next(states.stream_sequence_states([row]))
    assert sorted(body["prompt"] for body in server.bodies[1:]) == [[5, 6, 7], [8, 9]]
    padding = torch.zeros(1, HIDDEN)
    wanted = expected([5, 6, 7, 8, 9])
    assert_same(found, {name: torch.cat([states, padding]) for name, states in wanted.items()})


def test_documents_of_later_rows_are_in_flight_too(tmp_path: Path) -> None:
    samples = [Sample([token] * 4, [True] * 4) for token in range(1, 9)]
    rows = PackedDataset(samples, max_length=4, seed=0)
    with EngineServer(tmp_path, WRITTEN, delay_s=0.05) as server, pooled(server) as states:
        found = list(states.stream_sequence_states(rows[i] for i in range(8)))
        assert server.most_at_once == 4
    for i, row in enumerate(found):
        assert_same(row, expected(rows[i]["input_ids"].tolist()))


def test_a_failure_reaches_the_reader_in_its_place(tmp_path: Path) -> None:
    documents = [[token] for token in range(20)]
    with EngineServer(tmp_path, WRITTEN) as server, pooled(server) as states:
        server.fault_for = lambda body: (422, {}) if body["prompt"] == [7] else None
        read = states.stream_states(documents)
        assert [next(read)["layers.1"][0, 0].item() for _ in range(7)] == [*range(100, 107)]
        with pytest.raises(
            InputError, match="no hidden states of a document of 1 tokens: HTTP 422"
        ):
            next(read)
        assert_same(states.request_states([9]), expected([9]))


def test_servers_share_the_documents(tmp_path: Path) -> None:
    documents = [[token, token + 1] for token in range(40)]
    with (
        EngineServer(tmp_path / "a", WRITTEN, delay_s=0.05) as first,
        EngineServer(tmp_path / "b", WRITTEN, delay_s=0.05) as second,
        pooled(first, second) as states,
    ):
        for document, found in zip(documents, states.stream_states(documents), strict=True):
            assert_same(found, expected(document))
        asked = [[body["prompt"] for body in server.bodies[1:]] for server in (first, second)]
        assert min(map(len, asked)) > 10
        assert sorted(asked[0] + asked[1]) == documents
        assert (first.most_at_once, second.most_at_once) == (4, 4)


def test_what_one_server_spoils_another_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        EngineServer(tmp_path / "a", WRITTEN) as good,
        EngineServer(tmp_path / "b", WRITTEN) as bad,
        pooled(bad, good) as states,
    ):
        assert_same(states.request_states([7, 5]), expected([7, 5]))
        bad.change, num_before = lambda t: t["token_ids"].add_(1), len(bad.bodies)
        documents = [[token, 3] for token in range(MOST_FAILURES)]
        for document in documents:
            assert_same(states.request_states(document), expected(document))
        assert len(bad.bodies) == num_before + 1  # then the bad one rests
        monkeypatch.setattr(pool, "REST_S", 0.0)
        for document in documents[:3]:
            assert_same(states.request_states(document), expected(document))
        assert len(bad.bodies) == num_before + 4


def test_a_document_that_no_attempt_gives_is_named_and_many_end_the_run(tmp_path: Path) -> None:
    with EngineServer(tmp_path, WRITTEN) as server, pooled(server) as states:
        server.fault_for = lambda body: (422, {}) if body["prompt"] == [7] else None
        with pytest.raises(
            HiddenStatesError, match="no hidden states of a document of 1 tokens: HTTP 422"
        ):
            states.request_states([7])
        assert_same(states.request_states([9]), expected([9]))
        server.fault_for = lambda _: (422, {})
        for _ in range(MOST_FAILURES // 3):
            with pytest.raises(HiddenStatesError):
                states.request_states([7])
        with pytest.raises(InputError, match=rf"\({MOST_FAILURES} attempts in a row have failed\)"):
            states.request_states([7])


def test_a_server_that_is_started_anew_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is checked again, and no failure counts while it is away."""
    monkeypatch.setattr(pool, "WAITS_S", (0.01,) * 5)
    checked: list[HiddenStatesClient] = []
    with EngineServer(tmp_path, WRITTEN) as server:
        states = HiddenStatesPool([engine(server, max_retries=0)], checked.append)
        with states:
            server.faults = ["drop"] * 5
            assert_same(states.request_states([7, 5]), expected([7, 5]))
            assert checked == states.servers * 5
            server.faults = ["drop"] * 6
            with pytest.raises(
                HiddenStatesError, match=r"no hidden states .* of 2 tokens: RemoteProtocolE"
            ):
                states.request_states([7, 5])
            assert_same(states.request_states([7, 5]), expected([7, 5]))


def test_where_one_server_dies_another_is_asked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "WAITS_S", (1000.0,))
    dead, alive = EngineServer(tmp_path / "a", WRITTEN), EngineServer(tmp_path / "b", WRITTEN)
    servers = [engine(each, max_retries=0) for each in (dead, alive)]
    with dead, alive, HiddenStatesPool(servers) as states:
        dead.fault_for = lambda _: "drop"
        for token in range(2 * MOST_FAILURES):
            assert_same(states.request_states([token]), expected([token]))
        assert len(dead.bodies) == 1


def test_no_document_is_asked_for_that_the_storage_has_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two documents of 10 tokens, 3 layers and 2 channels, in float32 at most."""
    size = 10 * 3 * 2 * 4
    room = SimpleNamespace(free=2 * 2 * size)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: room)
    documents = [[token] * 10 for token in range(8)]
    with EngineServer(tmp_path, WRITTEN, delay_s=0.05) as server, pooled(server) as states:
        for document, found in zip(documents, states.stream_states(documents), strict=True):
            assert_same(found, expected(document))
        assert server.most_at_once == 1  # two of them would leave none


def test_answers_come_with_their_states(tmp_path: Path) -> None:
    """By one request; no file is left."""
    server = EngineServer(tmp_path, WRITTEN)
    with server, pooled(server) as states:
        ((ids, found),) = states.request_answers_with_states([[7, 5]], 3, {"temperature": 0.0})
        assert ids == [6, 6, 6]
        assert_same(found, expected([7, 5, 6, 6]))
        assert len(server.bodies) == 2
    assert list(server.folder.iterdir()) == []
