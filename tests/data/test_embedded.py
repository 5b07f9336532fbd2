import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conf.settings.data import DataRun
from data.embedded import CONVERSATIONS, PROMPTS, TARGET_PATH, fill_default_paths, is_embedded

FOLDER = Path(TARGET_PATH).parent


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_files_are_those_that_the_script_wrote():
    made = json.loads((FOLDER / "recipe.json").read_text())["sha256"]
    found = {name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for name in made}
    assert found == made
    lying = {p.relative_to(FOLDER).as_posix() for p in FOLDER.glob("model/*")}
    assert lying | {"train.jsonl", "prompts.jsonl"} == set(made)
    assert sum((FOLDER / name).stat().st_size for name in made) < 10e6


def test_answers_are_the_targets_likeliest_tokens():
    target = AutoModelForCausalLM.from_pretrained(TARGET_PATH, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TARGET_PATH)
    same = []
    for row in rows(CONVERSATIONS)[:8]:
        out = tokenizer.apply_chat_template(
            row["messages"], return_assistant_tokens_mask=True, return_tensors="pt"
        )
        with torch.no_grad():
            likeliest = target(out["input_ids"]).logits[0, :-1].argmax(-1)
        answer = out["assistant_masks"][0, 1:-1].bool()  # without its end, where it was cut
        same.append((likeliest == out["input_ids"][0, 1:])[:-1][answer])
    assert torch.cat(same).float().mean() > 0.95  # ties fall otherwise on another processor


def test_prompts_are_of_files_that_no_conversation_is_of():
    assert not {row["file"] for row in rows(PROMPTS)} & {row["file"] for row in rows(CONVERSATIONS)}


def test_what_is_unset_is_filled():
    run = DataRun()
    fill_default_paths(run)
    assert (run.target.path, run.data.path) == (TARGET_PATH, CONVERSATIONS)
    run = DataRun()
    run.target.path = "own/target"
    fill_default_paths(run, prompts=True)
    assert (run.target.path, run.data.path) == ("own/target", PROMPTS)


@pytest.mark.parametrize(
    ("path", "embedded"),
    [
        (TARGET_PATH, True),
        ("/another/checkout/data/embedded/model", True),
        ("/a/checkout/of/2026/data/embedded/target", True),
        ("/another/checkout/data/embedded", False),
        ("/my/data/target", False),
        ("Qwen/Qwen3-8B", False),
    ],
)
def test_embedded_target_is_known_in_any_checkout(path: str, embedded: bool):
    assert is_embedded(path) == embedded
