"""The keys of printed speculative configs, held against vLLM's own checks of them."""

import ast
import json
import os
import shlex
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from environments import VLLM, needs, opened, run
from feature_heads import feature_head
from toys import noisy_head, save_target

from conf.settings.export import ExportFormat
from heads.draft_head import DraftHead, EngineAdvice
from heads.eagle.layouts import QUANTISED_HINT
from heads.export.writer import SCHEDULE_KEY
from heads.target_model.model import Target

WHEEL = "HEADSMITH_VLLM_WHEEL"
"""Wheel of vLLM 0.33, of which only Python files are read."""
SCHEDULE, MOST = [[1, 2, 3], [3, 5, 0]], 8
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("eagle1", {}), ("eagle3", {}), ("eagle3.1", {}), ("peagle", {"num_layers": 1}), ("dflash", {}),
    ("dflash2", {}), ("dspark", {}),
]  # fmt: skip
QUANTISED = "draft_lm_head_quantization"

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return opened(save_target(tmp_path_factory.mktemp("target"), num_hidden_layers=6))


def printed(head: DraftHead, folder: str) -> dict[str, Any]:
    """The speculative config of the line that serves a head."""
    line = shlex.split(head.plan_export(ExportFormat.vllm, folder).command)
    return json.loads(line[line.index("--speculative-config") + 1])


def advised(head: DraftHead, schedule: list[list[int]]) -> DraftHead:
    tokens = head.max_draft_tokens or 3
    head.advice = EngineAdvice(tokens, "", schedule)
    return head


@needs(VLLM)
def test_vllm_takes_every_config_that_is_printed(target: Target, tmp_path: Path) -> None:
    configs, expected = [], []
    for kind, settings in KINDS:
        head = feature_head(target, kind, **settings)
        head.save(tmp_path / kind)
        for schedule in ([], SCHEDULE):
            config = printed(advised(head, schedule), str(tmp_path / kind))
            assert (SCHEDULE_KEY in config) == bool(schedule)
            tokens = config["num_speculative_tokens"]
            own = {
                "method": config["method"],
                "num_speculative_tokens": tokens,
                "parallel_drafting": kind in ("peagle", "dflash", "dflash2", "dspark"),
            }
            # Beyond its last range a schedule goes on as it ends.
            lookup = [min(3, tokens)] * 2 + [0] * (MOST - 2) if schedule else None
            configs.append(config)
            expected.append(own | {"lookup": lookup})
    medusa = noisy_head(target, num_heads=2)
    medusa.save(tmp_path / "medusa")
    configs.append(printed(advised(medusa, SCHEDULE), str(tmp_path / "medusa")))
    assert SCHEDULE_KEY not in configs[-1]
    own = {"method": "medusa", "num_speculative_tokens": 2, "parallel_drafting": False}
    expected.append(own | {"lookup": None})
    found = checked(target, configs, tmp_path)
    assert found == expected


@needs(VLLM)
def test_vllm_refuses_other_keys_and_schedules(target: Target, tmp_path: Path) -> None:
    head = advised(feature_head(target, "eagle3"), SCHEDULE)
    head.save(tmp_path / "head")
    usual = printed(head, str(tmp_path / "head"))
    found = checked(
        target,
        [
            usual | {SCHEDULE_KEY: [[2, 8, 3]]},
            usual | {SCHEDULE_KEY: [[1, 4, 3], [4, 8, 0]]},
            usual | {QUANTISED: "fp8"},  # since 0.33
        ],
        tmp_path,
    )
    first, overlap, unknown = (each["refused"] for each in found)
    assert "must start at 1" in first
    assert "non-overlapping" in overlap
    assert QUANTISED in unknown


def checked(target: Target, configs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    job, result = folder / "job.json", folder / "result.json"
    job.write_text(json.dumps({"target": target.name, "speculative": configs, "most": MOST}))
    run(VLLM, "vllm_config.py", job, result)
    return json.loads(result.read_text())


@cache
def source_of(path: str) -> str:
    with zipfile.ZipFile(os.environ[WHEEL]) as wheel:
        return wheel.read(path).decode()


def field_of(name: str) -> str:
    """The type of a field of `SpeculativeConfig`, as it is written."""
    tree = ast.parse(source_of("vllm/config/speculative.py"))
    (config,) = (
        each
        for each in tree.body
        if isinstance(each, ast.ClassDef) and each.name == "SpeculativeConfig"
    )
    (annotation,) = (
        each.annotation
        for each in config.body
        if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == name
    )
    return ast.unparse(annotation)


@pytest.mark.skipif(WHEEL not in os.environ, reason=f"{WHEEL} names no wheel of vLLM 0.33")
def test_the_newest_vllm_has_every_key(target: Target) -> None:
    for kind, settings in KINDS:
        head = advised(feature_head(target, kind, **settings), SCHEDULE)
        for key in printed(head, "DIR"):
            assert field_of(key), key
    assert field_of(SCHEDULE_KEY) == "list[tuple[int, int, int]] | None"
    assert field_of(QUANTISED) == "Literal['fp8', 'nvfp4'] | None"
    assert f'"{QUANTISED}": "fp8" (or "nvfp4")' in QUANTISED_HINT
    # The rule by which `shares_output_head` goes.
    assert 'if self.method not in ("eagle", "eagle3", "mtp")' in source_of(
        "vllm/config/speculative.py"
    )
    assert f"{QUANTISED} needs a drafter that shares the target lm_head" in source_of(
        "vllm/v1/worker/gpu/spec_decode/eagle/utils.py"
    )


@pytest.mark.skipif(WHEEL not in os.environ, reason=f"{WHEEL} names no wheel of vLLM 0.33")
def test_the_newest_vllm_reads_a_schedule_alike() -> None:
    rules: dict[str, Any] = {}
    exec(source_of("vllm/v1/spec_decode/dynamic/utils.py"), rules)
    lookup = rules["build_dynamic_sd_schedule_lookup"]
    assert lookup(SCHEDULE, MOST, 3)[1:] == [3, 3, 0, 0, 0, 0, 0, 0]
    assert lookup([[1, 2, 5]], 4, 3)[1:] == [3, 3, 3, 3], "no more than the server's own number"
    with pytest.raises(ValueError, match="must start at 1"):
        lookup([[2, 8, 3]], MOST, 3)
