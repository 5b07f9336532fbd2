"""Commands of the tutorial and a recipe run in their order; the tutorial's print what it shows."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from data.embedded import TARGET_PATH
from tests import commands

ROOT = Path(__file__).resolve().parents[1]
PAGE = "".join((ROOT / f"docs/{name}.md").read_text() for name in ("tutorial", "tutorial_serve"))
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)
STEPS = [
    (text, shown if kind == "text" else "")
    for (of, text), (kind, shown) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True)
    if of == "" and not text.startswith(("vllm serve", "python eval/serve.py"))
]
"""Commands that run here, and what the page shows behind each."""
SMALLER = {
    "max_new_tokens=160": ["max_new_tokens=24"],
    "max_new_tokens=32": ["max_new_tokens=12"],
    "train.max_steps=40": ["train.max_steps=2", "train.warmup_steps=1"],
    # Of the recipe.
    "batch_size=64": ["batch_size=64", "max_new_tokens=24"],
    "train.num_epochs=10": ["train.max_steps=2", "train.warmup_steps=1"],
    "head.draft_vocab_size=8192": ["head.draft_vocab_size=1024"],
    "num_repeats=1": ["num_repeats=1", "num_warmups=0", "max_new_tokens=12"],
}
"""Settings with which the small model of the repository is done in seconds."""


def typed(command: str) -> list[str]:
    """The words of a command as it is run here."""
    words = [new for word in shlex.split(command) for new in SMALLER.get(word, [word])]
    launcher = ["-m", "accelerate.commands.launch"] if words[0] == "accelerate" else []
    script, *settings = words[2:] if launcher else words[1:]
    return [sys.executable, *launcher, str(ROOT / script), *settings]


def told(text: str) -> list[str]:
    """The lines that name files, their check or the next command, without figures.

    A measurement's next command follows its figures, which fewer prompts change.
    """
    text = re.sub(
        r"\nnext, (?:measure the sec|measure more|write the|let the)[^\n]*\n.*", "\n", text
    )
    lines = text.replace(f"{ROOT}/", "").splitlines()
    lines = [re.sub(r"sha256 \w+|\d+(?:[.,]\d+)*", "#", each) for each in lines]
    same = ("next, ", "model.safetensors: ", "links ")
    return [each for each in lines if "outputs/" in each or each.startswith(same)]


@pytest.mark.slow
def test_every_command_runs_and_says_and_writes_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "smollm2").symlink_to(TARGET_PATH)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    for kind, text in BLOCKS:
        if kind == "bash":
            fewer = text.replace("-64", "-12").replace("-8", "-3")
            subprocess.run(["bash", "-e", "-c", fewer], cwd=tmp_path, check=True)
    for text, shown in STEPS:
        ended = commands.run(typed(text), tmp_path, environ)
        assert ended.returncode == 0, ended.stderr
        assert {*told(shown)} <= {*told(ended.stdout)}, text
    for path in re.findall(r"`(outputs/[\w./-]+)`", PAGE):
        assert (tmp_path / path).exists(), path


def test_what_a_command_names_as_the_next_is_what_the_page_goes_on_with() -> None:
    named = [re.search(r"^  (?:python|accelerate launch) (\S+)", shown, re.M) for _, shown in STEPS]
    assert [found and found[1] for found in named] == [
        "train/eagle.py", "eval/acceptance.py", "eval/speedup.py", "scripts/regenerate.py",
        "eval/serve.py",
    ]  # fmt: skip


@pytest.mark.slow
def test_every_command_of_the_recipe_runs_after_the_other(tmp_path: Path) -> None:
    page = (ROOT / "docs/recipes/qwen_coder.md").read_text()
    (lines,) = re.findall(r"^```\n(.*?)^```$", page, re.M | re.S)
    model = tmp_path / "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    model.parent.mkdir()
    model.symlink_to(TARGET_PATH)
    rows = (ROOT / "scripts/demo_prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "questions.jsonl").write_text("".join(rows[:12]))
    (tmp_path / "prompts.jsonl").write_text("".join(rows[-3:]))
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    for line in lines.splitlines():
        if not line.startswith("vllm serve"):
            ended = commands.run(typed(line), tmp_path, environ)
            assert ended.returncode == 0, ended.stderr
    served = json.loads(shlex.split(lines.splitlines()[-1])[-1])
    assert (tmp_path / served["model"] / "config.json").exists()
    assert served["method"] in ended.stdout
