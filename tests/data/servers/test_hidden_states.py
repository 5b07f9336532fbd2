"""Servers of hidden states: what one gives and refuses, and how several share a run."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import ROOT
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import InputError
from data.prepared.packing import PackedDataset
from data.servers import http_client as endpoint_module
from data.servers import server_pool as pool
from data.servers import state_files as files
from data.servers.hidden_states import HiddenStatesClient, ServerFeatureLayers, check_version
from data.servers.http_client import Endpoint
from data.servers.server_pool import MOST_FAILURES, HiddenStatesPool
from data.servers.state_files import HiddenStatesError
from data.templates.record_encoder import Sample
from tests.servers import HIDDEN, EngineServer, state

NUM_LAYERS = 4
LAYERS = (3, 1)
WRITTEN = [1, 3, 4]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(files, "VISIBLE_S", 0.05)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def halved(states: Tensor) -> Tensor:
    """A final norm."""
    return states / 2


def taps(
    layers: tuple[int, ...] = LAYERS, final_norm=halved, hidden_size=HIDDEN
) -> ServerFeatureLayers:
    return ServerFeatureLayers(layers, NUM_LAYERS, hidden_size, final_norm)


def engine(
    server: EngineServer, wanted: ServerFeatureLayers | None = None, **endpoint
) -> HiddenStatesClient:
    settings = {"max_retries": 3, "timeout_s": 5.0, "setting": "engine", **endpoint}
    return HiddenStatesClient(Endpoint(server.url, **settings), wanted or taps(), concurrency=4)


def expected(token_ids: list[int]) -> dict[str, Tensor]:
    return {
        "layers.3": torch.tensor([state(token, 3) for token in token_ids]),
        "layers.1": torch.tensor([state(token, 1) for token in token_ids]),
        "hidden_states": torch.tensor([state(token, 4) for token in token_ids]) / 2,
    }


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_layers_come_by_their_number_and_the_last_one_normed(tmp_path: Path) -> None:
    with EngineServer(tmp_path, WRITTEN) as server, engine(server) as states:
        found = states.request_states([7, 5])
    assert found["layers.1"].tolist() == [[107, -1], [105, -1]]
    assert found["layers.3"].tolist() == [[307, -1], [305, -1]]
    assert found["hidden_states"].tolist() == [[203.5, -0.5], [202.5, -0.5]]
    asked = {"model": "toy", "prompt": [7, 5], "max_tokens": 1, "temperature": 0}
    assert server.bodies[-1] == asked
    assert list(server.folder.iterdir()) == []


def test_a_last_layer_that_is_also_tapped_is_written_once(tmp_path: Path) -> None:
    wanted = taps((4, 0))
    assert wanted.written_layers == [0, 4]
    with EngineServer(tmp_path, [0, 4]) as server, engine(server, wanted) as states:
        found = states.request_states([7])
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "layers.4": [[407, -1]],
        "layers.0": [[7, -1]],
        "hidden_states": [[203.5, -0.5]],
    }


def test_an_adapter_is_asked_for_by_its_name(tmp_path: Path) -> None:
    """vLLM lists it beside the target, and tells the window of the target alone."""
    server = EngineServer(tmp_path, WRITTEN)
    server.models = ({"id": "toy", "max_model_len": 17}, {"id": "tuned", "parent": "toy"})
    with server, engine(server, model="tuned") as states:
        assert states.max_model_len == 17
        states.request_states([7, 5])
    assert {body["model"] for body in server.bodies} == {"tuned"}
    with EngineServer(tmp_path / "b", WRITTEN) as other:
        refused(other, r"serves no model tuned; it lists \['other', 'toy'\]", model="tuned")


def test_without_a_final_norm_there_are_layers_alone(tmp_path: Path) -> None:
    wanted = taps((2,), final_norm=None)
    with EngineServer(tmp_path, [2]) as server, engine(server, wanted) as states:
        assert states.request_states([7]).keys() == {"layers.2"}


def test_the_page_shows_the_command_line_that_serves_these_states() -> None:
    """For EAGLE-3, which reads three of the 36 layers of Qwen3-8B, and the last."""
    page = (ROOT / "data/servers/README.md").read_text()
    [line] = re.findall(r"^vllm serve Qwen/Qwen3-8B .*", page, re.M)
    wanted = ServerFeatureLayers((2, 18, 33), 36, 4096, halved).serve_options("/dev/shm")
    assert shlex.split(line)[3:] == ["--max-model-len", "2049", *wanted]


def refused(
    server: EngineServer, match: str, wanted: ServerFeatureLayers | None = None, **endpoint
) -> None:
    """The server is refused before the first document."""
    with pytest.raises(InputError, match=match), engine(server, wanted, **endpoint):
        pytest.fail("it was taken")


SERVE = r"; serve with: vllm serve MODEL --spec.*_layer_ids\": \[1, 3, 4\].*shm/layers-1-3-4"


def test_a_server_that_cannot_do_it_is_refused_before_the_first_document(tmp_path: Path) -> None:
    with EngineServer(tmp_path, WRITTEN) as server:
        address = f"engine={server.url}: "
        refused(server, rf"{address}serves no model big; it lists \['other', 'toy'\]", model="big")
        deep = taps(hidden_size=8)
        refused(server, rf"{address}hidden states have shape \[1, 3, 2\], not \[1, 3, 8\]", deep)
        server.layers = [1, 2, 3, 4]
        refused(server, rf"{address}hidden states have shape \[1, 4, 2\], not \[1, 3, 2\].*{SERVE}")
        server.folder = server.told_folder = tmp_path
        refused(server, rf"{address}writes .*, outside of layers-1-3-4, so perhaps other.*{SERVE}")
        server.answer = lambda _: {"choices": [], "kv_transfer_params": None}  # type: ignore[method-assign]
        refused(server, f"{address}returns no hidden states{SERVE}")
        server.fault_for = lambda _: (400, {})
        refused(server, f"{address}no hidden states of a document of 1 tokens: HTTP 400")
        server.fault_for = lambda _: (500, {})
        refused(server, rf"{address}no hidden states .* HTTP 500.*\(2 attempts\)", max_retries=1)
        server.models = ()
        refused(server, f"{address}lists no model")
    refused(server, rf"{address}ConnectError.*\(1 attempts\){SERVE}", max_retries=0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.clear(), r"safetensors: incomplete \(no such file\)"),
        (lambda t: t["hidden_states"][0, 1, 0].fill_(torch.nan), "have NaN or infinity"),
        (lambda t: t["hidden_states"][1, 2].zero_(), "states are zeros, so it left them out"),
    ],
    ids=["no file", "NaN", "unwritten"],
)
def test_what_is_written_is_checked(tmp_path: Path, change, match: str) -> None:
    with EngineServer(tmp_path, WRITTEN) as server, engine(server) as states:
        server.change = change
        with pytest.raises(HiddenStatesError, match=match):
            states.request_states([7, 5])


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 6e4), (torch.bfloat16, 1e-30)])
def test_states_whose_norm_the_dtype_cannot_hold_pass(
    dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    with EngineServer(tmp_path, WRITTEN) as server, engine(server) as states:
        server.change = lambda t: t.update(
            hidden_states=torch.full(t["hidden_states"].shape, value, dtype=dtype)
        )
        assert (states.request_states([7, 5])["layers.1"] == torch.tensor(value, dtype=dtype)).all()


def test_a_first_token_may_have_states_of_zeros(tmp_path: Path) -> None:
    with EngineServer(tmp_path, WRITTEN) as server, engine(server) as states:
        server.change = lambda t: t["hidden_states"][0].zero_()
        assert states.request_states([7, 5])["layers.1"].tolist() == [[0, 0], [105, -1]]


def test_a_file_with_other_tokens_is_nobody_s_to_delete(tmp_path: Path) -> None:
    with EngineServer(tmp_path, WRITTEN) as server:
        mine = server.folder / "model.safetensors"
        save_file({"weight": torch.ones(2)}, mine)
        mine.with_name("model.safetensors.lock").touch()
        server.answer = lambda _: {"kv_transfer_params": {"hidden_states_path": str(mine)}}  # type: ignore[method-assign]
        refused(server, "model.safetensors: holds other tokens than were sent")
    assert mine.is_file()


def test_a_document_beyond_the_context_is_refused_unsent(tmp_path: Path) -> None:
    with EngineServer(tmp_path, WRITTEN) as server, engine(server) as states:
        assert states.request_states(list(range(16)))["layers.1"].shape == (16, HIDDEN)
        num_sent = len(server.bodies)
        message = (
            r"a document of 17 tokens is too long, as the server takes 16 and 1 more; serve with "
            r"--max-model-len 18, or set data.max_length lower"
        )
        with pytest.raises(InputError, match=message):
            states.request_states(list(range(17)))
        assert len(server.bodies) == num_sent


def test_layers_that_the_target_lacks() -> None:
    with pytest.raises(
        InputError, match=r"layers=\[5, -1\]: not in the target, which has hidden states 0..4"
    ):
        taps((5, 2, -1))
    with pytest.raises(InputError, match=r"layers=\[\]: no hidden state to read"):
        taps((), final_norm=None)


@pytest.mark.parametrize(
    "version", ["0.26.0", "0.31.0rc1", "0.32.1.dev7+gabc", "1.0.0", "dev", "0.1.dev17+gabc"]
)
def test_versions_that_write_as_it_is_read_pass(version: str) -> None:
    check_version(version, "here")


@pytest.mark.parametrize("version", ["0.1.0", "0.25.3", "0.25.1.dev3+gabc"])
def test_an_older_version_is_refused(tmp_path: Path, version: str) -> None:
    with EngineServer(tmp_path, WRITTEN) as server:
        server.version = version
        refused(server, rf"vLLM {version.replace('+', '.')} writes hidden")


class RecordedServer(EngineServer):
    """Answers as vLLM's own server gave them, but for the file that it names."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, WRITTEN)
        recorded = json.loads((Path(__file__).parent / "vllm_0.32.0.json").read_text())
        self.version, self.models = "0.32.0", tuple(recorded["models"]["data"])
        self.recorded = recorded["completion"]
        self.follows = lambda _ids, _num: self.recorded["choices"][0]["token_ids"]

    def answer(self, body: dict) -> dict[str, Any]:
        return self.recorded | {"kv_transfer_params": super().answer(body)["kv_transfer_params"]}


def test_a_recorded_answer_is_read_with_its_states_and_its_tokens(tmp_path: Path) -> None:
    """The states are a stand-in's."""
    with RecordedServer(tmp_path) as server, engine(server) as states:
        assert (states.model, states.max_model_len) == ("target", 320)
        assert_same(states.request_states([5, 6, 7]), expected([5, 6, 7]))
        ids, found = states.request_answer([5, 6, 7], 2, {"temperature": 0.0}, include_outputs=True)
    assert ids == [302, 359]
    assert_same(found, expected([5, 6, 7, 302]))


# --- Servers that share the documents of a run.


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
