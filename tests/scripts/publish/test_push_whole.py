"""A head's whole way: measured, exported, pushed against odds, pulled, measured again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import ROOT

from conf.settings.data import DataConfig
from conf.settings.drafting import HeadRef
from conf.settings.eagle import EagleForm
from conf.settings.export import ExportFormat, ExportRun
from conf.settings.measure import AcceptanceRun, SpeedupRun
from conf.settings.target import TargetConfig
from eval import acceptance, speedup
from heads.target_model.load import load_target
from scripts import export
from tests.hub_server import TOKEN, Fault, HubServer
from tests.scripts.publish.test_push import hub_env
from tests.toys import eagle_head, save_target

REPO = "me/toy-eagle3"
MEASURE = {"max_new_tokens": 24, "num_turns": 1, "depth": 3}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder: head, measurements with pictures, two exports."""
    run = tmp_path_factory.mktemp("run")
    where = TargetConfig(path=str(save_target(run / "target", num_hidden_layers=6)))
    head = eagle_head(load_target(where, torch.device("cpu")), EagleForm.eagle3, 150)
    head.save(run / "head", {"target": "target", "config": {"target": {"path": where.path}}})
    rows = [{"category": c, "turns": [f"hello {c}, how are you?"]} for c in ("math", "writing")]
    (run / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ref = HeadRef(path=str(run / "head"))
    measure = {
        "target": where,
        "data": DataConfig(path=str(run / "prompts.jsonl")),
        "head": ref,
        "out_dir": str(run),
        **MEASURE,
    }
    acceptance.main(AcceptanceRun(**measure))
    speedup.main(SpeedupRun(**measure, num_repeats=1, methods=["eagle_chain"]))
    for engine in (ExportFormat.vllm, ExportFormat.sglang):
        export.main(
            ExportRun(target=where, head=ref, format=engine, out_dir=str(run / engine.value))
        )
    return run


def command(script: str, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        env=env, cwd=env["HF_HOME"], capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


def wait_for_the_others(hub: HubServer) -> None:
    """Waits until nothing comes in but what is held."""
    before = None
    while before != sum(hub.received.values()):
        before = sum(hub.received.values())
        time.sleep(3)  # the client waits 1 s before it mends a connection


@pytest.mark.slow
def test_pushed_against_odds_and_pulled_the_head_measures_the_same(
    run_dir: Path, tmp_path: Path
) -> None:
    push = [
        f"head.path={run_dir / 'head'}", f"exports=[{run_dir / 'vllm'},{run_dir / 'sglang'}]",
        f"repo_id={REPO}", "base_model=somebody/target",
    ]  # fmt: skip
    outputs = []
    with HubServer() as hub:
        hub.part_size = 150_000
        env = hub_env(hub, tmp_path)
        hub.faults += [Fault(20_000, "cut"), Fault(100_000, "hold")]
        with subprocess.Popen(
            [sys.executable, str(ROOT / "scripts/push.py"), *push],
            env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as first:  # fmt: skip
            assert hub.stalled.wait(120)
            wait_for_the_others(hub)
            os.kill(first.pid, signal.SIGKILL)
            outputs.append(first.communicate()[0])
        assert len(hub.repos[REPO].commits) == 1, "nothing is visible"
        assert hub.faults == []
        arrived = {oid: hub.received[oid] for oid in hub.objects}
        assert arrived, "the small files"

        second = command("scripts/push.py", env, *push)
        assert second.returncode == 0, second.stderr
        outputs.append(second.stdout + second.stderr)
        assert {oid: hub.received[oid] for oid in arrived} == arrived, "sent once"
        assert len(hub.repos[REPO].commits) == 2
        assert hub.repos[REPO].private
        files = hub.repos[REPO].files("main") or {}

        fresh = hub_env(hub, tmp_path / "fresh")
        (tmp_path / "fresh").mkdir()
        measured = command(
            "eval/acceptance.py", fresh, f"head.path={REPO}", f"target.path={run_dir / 'target'}",
            f"data.path={run_dir / 'prompts.jsonl'}", f"out_dir={tmp_path / 'again'}",
            *(f"{key}={value}" for key, value in MEASURE.items()),
        )  # fmt: skip
        assert measured.returncode == 0, measured.stderr
        assert not list((tmp_path / "fresh").rglob("parity")), "a head comes without its exports"

        code = f"from huggingface_hub import snapshot_download as s; print(s('{REPO}'))"
        pulled = subprocess.run(
            [sys.executable, "-c", code], env=fresh, capture_output=True, text=True, check=True
        )
        verified = command("scripts/verify_export.py", fresh, f"{pulled.stdout.strip()}/vllm")
        assert verified.returncode == 0, verified.stderr
        assert "parity: max |difference|" in verified.stdout

        stranger = hub_env(hub, tmp_path / "stranger", token=None)
        refused = subprocess.run(
            [sys.executable, "-c", code], env=stranger, capture_output=True, text=True, check=False
        )
        assert "RepositoryNotFoundError" in refused.stderr

    before = json.loads((run_dir / "acceptance.json").read_text())
    after = json.loads((tmp_path / "again" / "acceptance.json").read_text())
    for key in ("tau", "alpha", "by_category", "dynamic_tree", "num_tokens"):
        assert after[key] == before[key], key
    card = files["README.md"].decode()
    for text in (f"**{before['tau']:.3f}**", "![acceptance](acceptance.png)", "| sglang |"):
        assert text in card
    for text in (*outputs, measured.stdout + measured.stderr):
        assert TOKEN not in text
    for name, content in files.items():
        assert TOKEN.encode() not in content, name
