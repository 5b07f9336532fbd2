"""Heads of the training commands on the embedded target, served by vLLM and llama.cpp."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT
from environments import (
    LLAMACPP,
    VLLM,
    accepted_by_depth,
    counts_of_llamacpp,
    counts_of_vllm,
    drafted,
    needs,
    opened,
)
from ggufs import save_target_gguf

from conf.settings.drafting import HeadRef
from conf.settings.export import ExportFormat, ExportRun
from conf.settings.target import TargetConfig
from data.embedded import PROMPTS, TARGET_PATH
from data.rows.records import load_records
from data.templates.record_encoder import RecordEncoder
from eval.measure.prompts import render_first_turns
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import Tree
from heads.draft_head import DraftHead
from heads.eagle.network import EagleDrafter
from heads.kinds import load_head
from heads.medusa import MedusaDrafter, MedusaHead
from heads.target_model.load import load_target_tokenizer
from heads.target_model.model import Target
from scripts import export

BRIEFLY = {
    "data.max_length": 128,
    "train.batch_size": 2,
    "train.max_steps": 60,
    "train.warmup_steps": 4,
    "train.learning_rate": 3e-3,
    "train.num_eval_sequences": 2,
    "train.num_replay_prompts": 0,
}
NUM_TOKENS, DEPTH, LLAMACPP_DEPTHS = 64, 3, (4, 7)
# Ends texts of the embedded target.
STOP = 5
REDUCED = "head.draft_vocab_size=256"
SMALL_BLOCKS = ["head.num_layers=2", "head.block_size=8", "head.num_anchors=64"]

pytestmark = pytest.mark.engine


def trained(command: list[str], out_dir: Path) -> Path:
    script, *settings = command
    settings += [f"{key}={value}" for key, value in BRIEFLY.items()]
    line = [sys.executable, str(ROOT / script), *settings, f"out_dir={out_dir}"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return out_dir / "head"


def exported(head: Path, engine: str, out_dir: Path) -> Path:
    config = ExportRun(
        target=TargetConfig(path=TARGET_PATH),
        head=HeadRef(path=str(head)),
        format=ExportFormat(engine),
        out_dir=str(out_dir),
    )
    export.main(config)
    return out_dir


def chain(head: DraftHead) -> Drafter:
    if isinstance(head, MedusaHead):
        return MedusaDrafter(head, Tree.make_chain(DEPTH))
    return EagleDrafter(head, DEPTH)


@pytest.fixture(scope="module")
def target() -> Target:
    return opened(Path(TARGET_PATH))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_target_tokenizer(TargetConfig(path=TARGET_PATH))
    records = load_records(PROMPTS).records[:8]
    return [prompt.token_ids for prompt in render_first_turns(records, RecordEncoder(tokenizer))]


@needs(VLLM)
@pytest.mark.parametrize(
    ("command", "method", "engines"),
    [
        pytest.param(["train/medusa.py"], "medusa", ["vllm", "original"], id="Medusa"),
        pytest.param(
            ["train/eagle.py", "head=eagle1"], "eagle", ["vllm", "original"], id="EAGLE-1"
        ),
        *(
            pytest.param(
                ["train/eagle.py", f"head={head}", *reduced],
                "eagle3",
                ["vllm", "speculators"],
                id=f"{name}{', 256 ids' if reduced else ''}",
            )
            for head, name in (("eagle3", "EAGLE-3"), ("eagle3_1", "EAGLE-3.1"))
            for reduced in ([], [REDUCED])
        ),
    ],
)
def test_vllm_serves_an_export_with_our_counts(
    target: Target, prompts: list[list[int]], tmp_path: Path, command, method: str, engines
) -> None:
    saved = trained(command, tmp_path / "run")
    folders = [exported(saved, engine, tmp_path / engine) for engine in engines]
    settings: list[dict[str, Any]] = [
        {"method": method, "model": str(folder), "num_speculative_tokens": DEPTH}
        for folder in folders
    ]
    theirs = counts_of_vllm(tmp_path, target, prompts, NUM_TOKENS, settings)

    head = load_head(str(saved)).attach(target).eval()
    ours = [asdict(drafted(target, chain(head), prompt, NUM_TOKENS, DEPTH)) for prompt in prompts]
    for engine, counts in zip(engines, theirs, strict=True):
        assert counts == ours, engine
    accepted = accepted_by_depth(ours)
    assert accepted[0] > 20
    assert accepted[1] > 0


@needs(LLAMACPP)
@pytest.mark.parametrize(
    ("command", "method"),
    [
        pytest.param(["train/eagle.py", "head=eagle3"], "draft-eagle3", id="EAGLE-3"),
        pytest.param(["train/dflash.py", *SMALL_BLOCKS], "draft-dflash", id="DFlash"),
        # Its recipe's 16 need a hidden size of 272.
        pytest.param(
            ["train/dflash2.py", *SMALL_BLOCKS, "head.selector_top_k=13"],
            "draft-dflash",
            id="DFlash-2",
        ),
        pytest.param(["train/dspark.py", *SMALL_BLOCKS], "draft-dspark", id="DSpark"),
    ],
)
def test_llamacpp_serves_an_export_with_our_counts(
    target, prompts, tmp_path, monkeypatch, command, method
) -> None:
    """Texts that the target may end."""
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", STOP)
    save_target_gguf(target, tmp_path / "target.gguf", STOP)
    saved = trained(command, tmp_path / "run")
    (file,) = exported(saved, "llamacpp", tmp_path / "out").glob("*.gguf")
    files = {"model": str(file), "method": method}
    servers = [
        {"target": str(tmp_path / "target.gguf"), "draft": files | {"num_tokens": depth}}
        for depth in LLAMACPP_DEPTHS
    ]
    theirs = counts_of_llamacpp(tmp_path, prompts[:4], NUM_TOKENS, servers)

    head = load_head(str(saved)).attach(target).eval()
    for depth, counts in zip(LLAMACPP_DEPTHS, theirs, strict=True):
        chain = Tree.make_chain(depth)
        drafters = [head.make_drafter(chain, GREEDY, [0]) for _ in counts]
        assert counts == [
            asdict(drafted(target, drafter, prompt, NUM_TOKENS, depth, within=True))
            for drafter, prompt in zip(drafters, prompts, strict=False)
        ]
        accepted = accepted_by_depth(counts)
        assert accepted[0] > 10
        assert accepted[1] > 0
