"""Files of hidden states by HTTP: the relay beside a server, and the client of those who train."""

import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import torch
from commands import ROOT, Command
from loopback import Answers, Loopback
from safetensors.torch import save, save_file

from conf.errors import InputError
from conf.settings.scripts import RelayRun
from data.servers import state_files
from data.servers.http_client import RELAY_TOKEN_VARIABLE
from data.servers.state_files import HiddenStatesError, RelayFiles, make_lock_path
from scripts import relay as relay_script
from scripts.relay import RelayServer, check_relay
from tests.servers import relaying

IDS = [7, 5, 6]
STATES = torch.arange(3 * 2 * 4).view(3, 2, 4).bfloat16()
CONTENT = save({"hidden_states": STATES, "token_ids": torch.tensor(IDS)})
NAME = "cmpl-1-0.safetensors"
THERE = Path("/only/the/server/has/this") / NAME
"""As the server names a file; trainers do not see it."""
KEY = "s3cret-token"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "VISIBLE_S", 0.05)
    monkeypatch.setattr(state_files, "FIRST_DELAY_S", 0.01)
    monkeypatch.delenv(RELAY_TOKEN_VARIABLE, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The server's, with a file that is whole and its lock."""
    folder = tmp_path / "layers-1-2"
    folder.mkdir()
    (folder / NAME).write_bytes(CONTENT)
    make_lock_path(folder / NAME).touch()
    return folder


def test_states_come_as_they_were_written_and_are_deleted(folder: Path) -> None:
    with relaying(folder) as server:
        client = RelayFiles(server.url, timeout_s=5.0)
        for _ in range(3):
            (folder / NAME).write_bytes(CONTENT)
            found = client.load_and_delete(THERE, IDS)
            assert found.dtype is torch.bfloat16
            assert torch.equal(found, STATES)
            assert list(folder.iterdir()) == []
        assert len(client._idle) == 1  # one connection did for all
        client.close()


def test_many_threads_take_their_own(folder: Path) -> None:
    found: dict[int, torch.Tensor] = {}
    with relaying(folder) as server:
        client = RelayFiles(server.url, timeout_s=5.0)

        def take(number: int) -> None:
            tensors = {"hidden_states": STATES + number, "token_ids": torch.tensor([number])}
            save_file(tensors, folder / f"{number}.safetensors")
            found[number] = client.load_and_delete(Path(f"/x/{number}.safetensors"), [number])

        threads = [threading.Thread(target=take, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.close()
    for number in range(20):
        assert torch.equal(found[number], STATES + number)


def test_a_file_that_is_being_written_is_waited_for(folder: Path) -> None:
    lock = make_lock_path(folder / NAME).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / NAME).write_bytes(CONTENT[:-8] + bytes(8))

    def end() -> None:
        (folder / NAME).write_bytes(CONTENT)
        lock.close()

    threading.Timer(0.3, end).start()
    with relaying(folder) as server:
        assert torch.equal(RelayFiles(server.url, 5.0).load_and_delete(THERE, IDS), STATES)


@pytest.mark.parametrize("given", [None, KEY[:-1], KEY + "x"])
def test_nobody_without_the_token_is_answered(given, folder, monkeypatch) -> None:
    if given is not None:
        monkeypatch.setenv(RELAY_TOKEN_VARIABLE, given)
    with relaying(folder, KEY) as server:
        client = RelayFiles(server.url, 5.0)
        assert client.free_bytes() is None
        message = (
            f"target.relay={server.url}: HTTP 401: wrong token; set HEADSMITH_RELAY_TOKEN here as"
        )
        with pytest.raises(InputError, match=message) as refused:
            client.load_and_delete(THERE, IDS)
    assert not isinstance(refused.value, HiddenStatesError)
    assert KEY not in str(refused.value)
    assert given is None or given not in str(refused.value)
    assert (folder / NAME).exists()
    monkeypatch.setenv(RELAY_TOKEN_VARIABLE, KEY)
    with relaying(folder, KEY) as server:
        client = RelayFiles(server.url, 5.0)
        assert client.free_bytes() > 0
        assert torch.equal(client.load_and_delete(THERE, IDS), STATES)


@pytest.mark.parametrize("value", ["two words", "schlüssel", "line\nbreak"])
def test_a_token_that_cannot_be_sent(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RELAY_TOKEN_VARIABLE, value)
    with pytest.raises(
        InputError, match=f"{RELAY_TOKEN_VARIABLE}: .*allowed are ASCII letters"
    ) as refused:
        RelayFiles("http://localhost:1", 5.0)
    assert value not in str(refused.value)


def test_a_relay_that_is_down_and_comes_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    with relaying(folder) as server:
        url, port = server.url, server.server_port
        client = RelayFiles(url, 5.0)
        assert torch.equal(client.load_and_delete(THERE, IDS), STATES)
    client._idle[0].sock.shutdown(socket.SHUT_RDWR)  # the relay's end of it, which outlived it
    monkeypatch.setattr(state_files.time, "sleep", waits.append)
    with pytest.raises(HiddenStatesError, match=rf"relay={url}: \w+Error: .* \(4 attempts\)"):
        client.load_and_delete(THERE, IDS)
    assert waits == [0, 0, 0.01, 0.02]
    (folder / NAME).write_bytes(CONTENT)
    with relaying(folder, port=port):
        for _ in range(6):  # more than attempts
            ended = HTTPConnection("127.0.0.1", port)
            ended.connect()
            ended.sock.shutdown(socket.SHUT_RDWR)
            client._idle.append(ended)
        assert torch.equal(client.load_and_delete(THERE, IDS), STATES)


class Breaking(Answers, BaseHTTPRequestHandler):
    """Ends so many answers in the middle, or does not answer them."""

    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        broken, self.owner.num_broken = self.owner.num_broken > 0, self.owner.num_broken - 1
        if broken and self.owner.busy:
            self.send_error(503, "busy")
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[:-20] if broken else CONTENT)

    def do_DELETE(self) -> None:
        self.send_bytes(b"")


@pytest.mark.parametrize(
    ("busy", "message"),
    [(False, "ValueError: it ends 20 bytes early"), (True, "HTTP 503: (.|\n)*")],
)
def test_a_relay_that_dies_in_the_middle_of_a_file_or_is_busy_is_asked_four_times(
    busy: bool, message: str
) -> None:
    with Loopback(Breaking) as server:
        server.busy, server.num_broken = busy, 3
        client = RelayFiles(server.root, 5.0)
        assert torch.equal(client.load_and_delete(THERE, IDS), STATES)
        server.num_broken = 4
        with pytest.raises(HiddenStatesError, match=rf"{message} \(4 attempts\)"):
            client.load_and_delete(THERE, IDS)
        client.close()


def test_a_relay_that_hangs_is_waited_for_once(folder: Path) -> None:
    lock = make_lock_path(folder / NAME).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    with (
        relaying(folder) as server,
        pytest.raises(HiddenStatesError, match=r"Timeout.*\(1 attempts\)"),
    ):
        begin = time.monotonic()
        RelayFiles(server.url, timeout_s=0.2).load_and_delete(THERE, IDS)
    assert time.monotonic() - begin < 5
    lock.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda path: [each.unlink() for each in (path, make_lock_path(path))],
            f"has no {NAME}; start scripts/relay.py beside the server, on the folder it",
        ),
        (lambda path: path.unlink(), r": incomplete \(no such file\); the disk may be"),
        (lambda path: os.truncate(path, 99), r": incomplete \(99 bytes\); the disk may"),
        (lambda path: save_file({"a": STATES}, path), ": holds other tokens than were sent"),
    ],
    ids=["missing", "failed", "short", "other tokens"],
)
def test_a_file_that_another_attempt_may_give(folder: Path, change, message: str) -> None:
    change(folder / NAME)
    with relaying(folder) as server, pytest.raises(HiddenStatesError, match=message) as refused:
        RelayFiles(server.url, 5.0).load_and_delete(THERE, IDS)
    assert "attempts" not in str(refused.value)  # it is not asked again here


def asked(server: RelayServer, method: str, path: str) -> tuple[int, bytes]:
    """The answer to a request whose path nobody has tidied."""
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        line = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        with suppress(ConnectionError):  # of lines that it does not read to their end
            connection.sendall(line.encode())
        answer = b""
        with suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                answer += part
    return int(answer.split(maxsplit=2)[1]), answer.partition(b"\r\n\r\n")[2]


OUTSIDE = [
    "/../secret.safetensors", "/%2e%2e/secret.safetensors", "/..%2fsecret.safetensors",
    "//inner/secret.safetensors", "/./secret.safetensors", "../secret.safetensors",
    "/inner/secret.safetensors", "/inner%2fsecret.safetensors", "/inner\\secret.safetensors",
    "/.secret.safetensors", "/secret.txt", f"/{NAME}.lock", f"/{NAME}?a=b", f"/{NAME}%00",
    "/..safetensors", "/", "*", "http://other/secret.safetensors",
    f"/{'a' * 300}.safetensors", f"/{'a' * 5000}.safetensors", f"/{'a' * 100_000}.safetensors",
]  # fmt: skip


def test_no_path_leads_out_of_the_folder(folder: Path) -> None:
    (folder / "inner").mkdir()
    secrets = ("../secret.safetensors", "inner/secret.safetensors", ".secret.safetensors",
               "secret.txt", NAME, f"{NAME}.lock")  # fmt: skip
    for name in secrets:
        (folder / name).write_bytes(b"secret")
    with relaying(folder) as server:
        for path in OUTSIDE:
            for method in ("GET", "DELETE"):
                status, body = asked(server, method, path)
                assert status in (404, 414), path
                assert b"secret" not in body
    assert all((folder / name).exists() for name in secrets)


def test_links_are_not_followed(folder, tmp_path, monkeypatch) -> None:
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(CONTENT)
    (folder / "link.safetensors").symlink_to(outside)
    with relaying(folder) as server:
        assert asked(server, "GET", "/link.safetensors") == (404, b"no such file")
        with monkeypatch.context() as patch:  # one that is made behind that look
            patch.setattr(Path, "is_symlink", lambda _: False)
            status, body = asked(server, "GET", "/link.safetensors")
            assert (status, b"Too many levels" in body) == (500, True)
        assert asked(server, "DELETE", "/link.safetensors") == (200, b"deleted")
    assert outside.read_bytes() == CONTENT
    assert not (folder / "link.safetensors").is_symlink()


def test_a_write_that_failed_has_a_status_of_its_own_and_so_has_all_but_reading(folder) -> None:
    with relaying(folder) as server:
        for method in ("POST", "PUT", "HEAD"):
            assert asked(server, method, f"/{NAME}")[0] == 501
        assert (folder / NAME).read_bytes() == CONTENT
        (folder / NAME).unlink()
        assert asked(server, "GET", f"/{NAME}")[0] == 409


def test_an_address_of_the_newer_kind(folder: Path) -> None:
    with socket.socket(socket.AF_INET6) as found:
        try:
            found.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has none")
    with relaying(folder, host="::1") as server:
        assert server.url == f"http://[::1]:{server.server_port}"
        assert torch.equal(RelayFiles(server.url, 5.0).load_and_delete(THERE, IDS), STATES)


def test_health(folder: Path) -> None:
    os.utime(folder / NAME, (time.time() - 100,) * 2)
    (folder / "young.safetensors").touch()
    with relaying(folder) as server:
        status, body = asked(server, "GET", "/health")
        found = json.loads(body)
        assert (status, found["files"]) == (200, 2)
        assert 100 <= found["oldest_s"] < 110
        free = RelayFiles(server.url, 5.0).free_bytes()
        assert free == pytest.approx(found["free_bytes"], rel=0.1)
        for each in folder.iterdir():
            each.unlink()
        assert json.loads(asked(server, "GET", "/health")[1])["oldest_s"] is None
        folder.rmdir()
        assert asked(server, "GET", "/health")[0] == 404


def test_old_files_are_deleted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "young.safetensors").touch()
    for name in (NAME, f"{NAME}.lock"):
        os.utime(folder / name, (time.time() - 100,) * 2)
    os.utime(folder / "young.safetensors", (time.time() + 100,) * 2)
    with relaying(folder, max_age_s=1.0):
        for _ in range(100):
            time.sleep(0.02)
            if told := capsys.readouterr().out:
                break
    assert [each.name for each in folder.iterdir()] == ["young.safetensors"]
    assert told == "deleted 1 files that nobody read for 1 s\n"


def test_what_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("0.0.0.0", "10.0.0.5", "::", "gpu-7"):
        message = rf"host={host}: other machines .* {RELAY_TOKEN_VARIABLE}=\$"
        with pytest.raises(InputError, match=message):
            check_relay(RelayRun(folder="x", host=host))
    for host in ("127.0.0.1", "localhost", "::1"):
        check_relay(RelayRun(folder="x", host=host))
    monkeypatch.setenv(RELAY_TOKEN_VARIABLE, KEY)
    check_relay(RelayRun(folder="x", host="0.0.0.0"))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file: cannot be made: File exists"):
        RelayServer(RelayRun(folder=str(tmp_path / "file")), None)
    with relaying(tmp_path / "new") as server:
        assert (tmp_path / "new").is_dir()
        taken = RelayRun(folder=str(tmp_path), port=server.server_port)
        with pytest.raises(InputError, match=f"host=127.0.0.1, port={taken.port}: .*in use"):
            RelayServer(taken, None)


@pytest.mark.parametrize(
    "url", ["10.0.0.5:8100", "ftp://a", "http://", "http://u:p@a:1", "http://a:port"]
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(InputError, match=r"target\.relay=.*: must be like http://10\.0\.0\.5:8100"):
        RelayFiles(url, 5.0)


def test_the_command_says_how_to_use_it_and_ends_with_ctrl_c(folder: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    arguments = [f"folder={folder}", f"port={port}"]
    command = [sys.executable, str(ROOT / "scripts/relay.py"), *arguments]
    process = Command(command, folder.parent, {**os.environ, RELAY_TOKEN_VARIABLE: KEY})
    os.environ.pop(RELAY_TOKEN_VARIABLE, None)
    for _ in range(600):
        time.sleep(0.05)
        with suppress(OSError):
            connection = HTTPConnection("127.0.0.1", port)
            connection.request("GET", f"/{NAME}", headers={"Authorization": f"Bearer {KEY}"})
            body = connection.getresponse().read()
            break
    assert body == CONTENT
    os.kill(process.pid, signal.SIGINT)
    told, _ = process.communicate()
    assert process.returncode == 0
    assert told == (
        f"{folder}: set target.relay=[http://127.0.0.1:{port}] where heads are trained, and "
        f"{RELAY_TOKEN_VARIABLE} as here; stop with Ctrl-C\nended\n"
    )
    assert relay_script.WAIT_S >= 600
