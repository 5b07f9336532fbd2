"""Requests of a push to the Hub, and uploads that break off."""

import json
import os
import signal
from hashlib import sha256
from pathlib import Path

import pytest

from conf.errors import InputError
from tests.hub_server import Fault, HubServer, Repo
from tests.scripts.publish.test_push import hub, run_dir, upload

__all__ = ["hub", "run_dir"]  # fixtures
WEIGHTS = "medusa_lm_head.safetensors"
REPO = "me/qwen-medusa"


def size_of(run_dir: Path) -> int:
    return (run_dir / "head" / WEIGHTS).stat().st_size


def received(hub: HubServer, run_dir: Path) -> int:
    """Bytes of the weights that reached the server, broken uploads included."""
    return hub.received[sha256((run_dir / "head" / WEIGHTS).read_bytes()).hexdigest()]


def test_a_broken_connection_is_the_clients_to_mend(hub: HubServer, run_dir: Path) -> None:
    hub.faults.append(Fault(10_000, "cut"))
    upload(run_dir)
    assert len(hub.repos[REPO].commits) == 2, "one commit after the initial one"
    assert received(hub, run_dir) == 10_000 + size_of(run_dir)


def test_what_arrived_is_not_sent_again(hub: HubServer, run_dir: Path) -> None:
    hub.faults.append(Fault(10_000, "refuse"))
    expected = r"Error while uploading 'medusa_lm_head.safetensors'.*Run the same command again"
    with pytest.raises(InputError, match=expected) as refused:
        upload(run_dir)
    assert "signature" not in str(refused.value)
    assert len(hub.repos[REPO].commits) == 1, "nothing is visible"
    picture = sha256((run_dir / "acceptance.png").read_bytes()).hexdigest()
    assert hub.received[picture] == len((run_dir / "acceptance.png").read_bytes())
    upload(run_dir)
    assert hub.received[picture] == len((run_dir / "acceptance.png").read_bytes())
    assert received(hub, run_dir) == 10_000 + size_of(run_dir)
    assert len(hub.repos[REPO].commits) == 2


def test_large_files_come_in_parts(hub: HubServer, run_dir: Path) -> None:
    hub.part_size = 10_000
    upload(run_dir)
    assert sorted(part for _, part in hub.parts) == [1, 2, 3]
    files = hub.repos[REPO].files("main") or {}
    assert files[WEIGHTS] == (run_dir / "head" / WEIGHTS).read_bytes()


def test_pushing_the_same_again_changes_nothing(hub: HubServer, run_dir: Path) -> None:
    upload(run_dir)
    upload(run_dir)
    assert len(hub.repos[REPO].commits) == 2
    assert received(hub, run_dir) == size_of(run_dir)


def test_files_of_an_earlier_head_go_with_the_same_commit(hub: HubServer, run_dir: Path) -> None:
    upload(run_dir)
    repo = hub.repos[REPO]
    old = {
        "model.safetensors": b"old", "speedup.png": b"old", "notes.txt": b"kept",
        "sglang/headsmith.json": b"{}", "sglang/config.json": b"{}",
        "sglang/parity/parity.safetensors": b"old", "docs/config.json": b"kept",
    }  # fmt: skip
    repo.commit({**(repo.files("main") or {}), **old})
    upload(run_dir)
    assert set(repo.files("main") or {}) == {
        ".gitattributes", "README.md", "acceptance.png", "config.json", "docs/config.json",
        "headsmith.json", WEIGHTS, "notes.txt",
    }  # fmt: skip
    assert len(repo.commits) == 4


def test_a_killed_upload_goes_on_where_it_was(hub: HubServer, run_dir: Path) -> None:
    hub.faults.append(Fault(10_000, "hold"))
    first = os.fork()
    if first == 0:
        try:
            upload(run_dir)
        finally:
            os._exit(1)
    assert hub.stalled.wait(60)
    os.kill(first, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == -signal.SIGKILL
    assert len(hub.repos[REPO].commits) == 1, "nothing is visible"
    upload(run_dir)
    assert received(hub, run_dir) == 10_000 + size_of(run_dir)
    assert len(hub.repos[REPO].commits) == 2


def target(hub: HubServer, **facts: object) -> None:
    hub.repos["Qwen/Qwen3-8B"] = Repo(private=False, **facts)  # type: ignore[arg-type]
    hub.repos["Qwen/Qwen3-8B"].commit({})


def card_of(hub: HubServer) -> str:
    return (hub.repos[REPO].files("main") or {})["README.md"].decode()


def test_a_head_of_a_private_target_stays_private_unless_told(
    hub: HubServer, run_dir: Path
) -> None:
    target(hub)
    hub.repos["Qwen/Qwen3-8B"].private = True
    with pytest.raises(InputError, match=r"private=false: Qwen/Qwen3-8B is a private .*leave priv"):
        upload(run_dir, private=False)
    assert REPO not in hub.repos
    upload(run_dir)
    assert hub.repos[REPO].private
    upload(run_dir, repo_id="me/public", private=False, publish_private_target=True)
    assert not hub.repos["me/public"].private


def test_a_private_adapter_counts_too(hub: HubServer, run_dir: Path) -> None:
    hub.repos["me/lora"] = Repo(private=True)
    hub.repos["me/lora"].commit({})
    path = run_dir / "head" / "headsmith.json"
    provenance = json.loads(path.read_text())
    provenance["config"]["target"]["adapter"] = "me/lora"
    path.write_text(json.dumps(provenance))
    with pytest.raises(InputError, match="private=false: me/lora is a private repository"):
        upload(run_dir, private=False)


def test_the_card_tells_a_gated_targets_terms(hub: HubServer, run_dir: Path) -> None:
    target(hub, gated="manual")
    upload(run_dir, private=False)
    assert (
        "[Qwen/Qwen3-8B](https://huggingface.co/Qwen/Qwen3-8B) is gated: users agree to its "
        "terms before they download it, and the terms apply to this head to the extent that it was "
        "made from it. It holds output "
        "layers that started as copies of its own."
    ) in card_of(hub)


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ({"license": "apache-2.0"}, "Qwen/Qwen3-8B has apache-2.0; set license="),
        ({"license": "other", "license_name": "qwen-research"}, "has qwen-research; set"),
        ({}, "the card will name no licence"),
    ],
)
def test_a_licence_is_suggested_and_never_taken(
    hub: HubServer,
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    card: dict[str, str],
    said: str,
) -> None:
    target(hub, card=card)
    upload(run_dir)
    assert said in capsys.readouterr().out
    assert "license:" not in card_of(hub)


def test_an_unknown_target_is_said_to_be_unknown(
    hub: HubServer, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(run_dir, private=False)
    assert (
        f"Qwen/Qwen3-8B: {hub.url} does not show it to you; it is private to others, or deleted. "
        "Its licence and terms are unknown here; check them before you push"
    ) in capsys.readouterr().out
    assert "gated" not in card_of(hub)
