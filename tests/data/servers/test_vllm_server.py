"""A server that a command starts: found, waited for, and ended with the command."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from vllm_environments import make_environment

from conf.errors import InputError
from data.servers.vllm_server import find_vllm_python, serve_model


@pytest.fixture(autouse=True)
def no_vllm_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}/scripts:/usr/bin:/bin")


def test_a_python_with_vllm_is_found_where_it_is_named_or_on_the_path(tmp_path: Path) -> None:
    folder = make_environment(tmp_path / "its")
    python = str(folder / "bin/python")
    assert find_vllm_python(str(folder)) == find_vllm_python(python) == python
    assert find_vllm_python("auto") is None
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts/vllm"
    script.write_text(f"#!{python}\nraise SystemExit\n")
    script.chmod(0o755)
    assert find_vllm_python("auto") == python
    assert find_vllm_python("none") is None
    script.write_text("#!/nowhere/python\n")
    assert find_vllm_python("auto") is None


@pytest.mark.parametrize("place", [sys.executable, "/nowhere"])
def test_a_place_without_it_is_refused(place: str) -> None:
    with pytest.raises(InputError, match=rf"^vllm={place}: no Python that imports vLLM; give "):
        find_vllm_python(place)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_it_serves_while_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, log = str(make_environment(tmp_path / "its") / "bin/python"), tmp_path / "new/vllm.log"
    with serve_model(python, "me/model", ["--max-num-seqs", "7"], log) as url:
        (model,) = httpx.get(f"{url}/models").json()["data"]
    host, port = "--host 127.0.0.1", url.split(":")[2].removesuffix("/v1")
    assert model["id"] == f"--model me/model {host} --port {port} --max-num-seqs 7"
    assert not is_alive(model["pid"])
    assert log.read_text().startswith("serving")
    cache_gib = int(model["cache_gib"])
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert 1 <= cache_gib <= max(1, memory_gib / 4)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    with serve_model(python, "me/model", [], log) as url:
        assert httpx.get(f"{url}/models").json()["data"][0]["cache_gib"] == "7"


def test_it_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    python = str(make_environment(tmp_path / "its") / "bin/python")
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from data.servers.vllm_server import serve_model\n"
        "with serve_model(sys.argv[1], 'me', [], Path(sys.argv[2])) as url:\n"
        "    print(url, flush=True)\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, python, str(tmp_path / "log")]
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True) as started:
        assert started.stdout is not None
        url = started.stdout.readline().strip()
        (model,) = httpx.get(f"{url}/models").json()["data"]
        started.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while is_alive(model["pid"]) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_alive(model["pid"])


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        ("bad", [f"line {number}" for number in range(5, 19)] + ["no such model: bad"]),
        ("bad: ValueError: too long", ["ValueError: too long"]),
    ],
)
def test_a_server_that_does_not_start_is_told_of_in_its_own_words(
    model: str, lines: list[str], tmp_path: Path
) -> None:
    python, log = str(make_environment(tmp_path / "its") / "bin/python"), tmp_path / "log"
    with pytest.raises(InputError) as refused, serve_model(python, model, [], log):
        pass
    told, *found = str(refused.value).splitlines()
    assert told == (
        "vLLM ended with 3; set vllm=none to answer in process, or start the server yourself and "
        f"set endpoint=URL. From {log}:"
    )
    assert found == lines
