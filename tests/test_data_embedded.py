import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from conf.schema import InputError
from data import embedded
from data.embedded import CATEGORIES, Embedded, Recipe, ensure_embedded
from data.embedded_corpus import Piece, cut_pieces, find_source_files, render

ROOT = Path(__file__).resolve().parents[1]
SMALL = Recipe(
    num_files=60, vocab_size=320, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2,
    num_kv_heads=1, train_length=64, batch_size=4, num_steps=6, warmup_steps=2,
    num_conversations=8, num_prompts=8, max_new_tokens=12, generate_batch_size=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Embedded:
    return ensure_embedded(tmp_path_factory.mktemp("cache"), progress=False, recipe=SMALL)


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_target_loads_as_any_hugging_face_model(made):
    target = AutoModelForCausalLM.from_pretrained(made.target_path)
    tokenizer = AutoTokenizer.from_pretrained(made.target_path)
    assert type(target).__name__ == "LlamaForCausalLM"
    assert target.config.head_dim == 32
    assert target.dtype == torch.float32
    assert len(tokenizer) == target.config.vocab_size == 320
    generation = GenerationConfig.from_pretrained(made.target_path)
    assert tokenizer.convert_ids_to_tokens([generation.eos_token_id, generation.pad_token_id]) == [
        "<|end|>",
        "<|pad|>",
    ]
    names = {path.name for path in Path(made.target_path).iterdir()}
    assert {"chat_template.jinja", "model.safetensors", "generation_config.json"} <= names


def test_assistant_mask_marks_the_answer_and_its_end(made):
    tokenizer = AutoTokenizer.from_pretrained(made.target_path)
    messages = [
        {"role": "user", "content": "def f(a):"},
        {"role": "assistant", "content": "    return  a\n"},
        {"role": "user", "content": "x = 1"},
        {"role": "assistant", "content": "\n\ty"},
    ]
    out = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True)
    marked = [i for i, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(marked) == "    return  a\n<|end|>\n\ty<|end|>"
    # The prompt is a prefix of the whole: no token spans the border.
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert out["input_ids"][: len(prompt)] == prompt


def test_training_text_is_what_the_template_renders(made):
    tokenizer = AutoTokenizer.from_pretrained(made.target_path)
    piece = Piece("function", "a.py", "def f():\n    x = 1", "    return x")
    messages = [
        {"role": "user", "content": piece.prompt},
        {"role": "assistant", "content": piece.continuation},
    ]
    expected = tokenizer.apply_chat_template(messages, tokenize=False)
    assert render(piece, tokenizer.bos_token) == expected


def test_prompts_come_from_files_that_were_not_trained_on(made):
    files = find_source_files()
    assert not set(files.train) & set(files.held_out)
    assert "json/decoder.py" in files.train + files.held_out
    assert not [name for name in files.train if name.startswith(("test/", "idlelib/"))]
    assert {row["file"] for row in rows(made.prompts_path)} <= set(files.held_out)
    assert {row["file"] for row in rows(made.train_path)} <= set(files.train)


def test_rows(made):
    prompts = rows(made.prompts_path)
    assert [row["question_id"] for row in prompts] == list(range(8))
    assert Counter(row["category"] for row in prompts) == dict.fromkeys(CATEGORIES, 2)
    assert len({row["turns"][0] for row in prompts}) == 8
    for row in rows(made.train_path):
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        assert row["messages"][1]["content"].strip()


def test_response_is_the_targets_greedy_text(made):
    target = AutoModelForCausalLM.from_pretrained(made.target_path)
    tokenizer = AutoTokenizer.from_pretrained(made.target_path)
    for row in rows(made.train_path)[:3]:
        ids = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        out = target.generate(ids, max_new_tokens=SMALL.max_new_tokens, do_sample=False)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert text == row["messages"][1]["content"]


def test_pieces_keep_the_code_and_name_their_construct():
    text = '"""Doc."""\nimport os\n# why\nimport re\n\n@deco\ndef f(a,\n      b):\n    return a\n\n'
    text += "class C:\n    x = 1\n    y = 2\n    def g(self):\n        a = 1\n        return a\n"
    pieces = list(cut_pieces("a.py", text, max_chars=500))
    assert [(p.category, p.prompt, p.continuation) for p in pieces] == [
        ("module", '"""Doc."""', "import os\nimport re"),
        ("function", "@deco\ndef f(a,", "      b):\n    return a"),
        ("class", "class C:", "    x = 1\n    y = 2"),
        ("method", "def g(self):", "    a = 1\n    return a"),
    ]
    long = "def f():\n" + "    value = 1\n" * 20
    assert {p.category for p in cut_pieces("a.py", long, max_chars=60)} == {"function", "body"}


def test_second_call_builds_nothing(made, monkeypatch):
    monkeypatch.setattr(embedded, "build", lambda *_: pytest.fail("built again"))
    root = Path(made.target_path).parents[1]
    assert ensure_embedded(root, progress=False, recipe=SMALL) == made
    monkeypatch.setenv("HEADSMITH_CACHE", str(root))
    assert ensure_embedded(progress=False, recipe=SMALL) == made


def test_a_seed_gives_the_same_files(made, tmp_path):
    state = torch.get_rng_state()
    again = ensure_embedded(tmp_path, progress=False, recipe=SMALL)
    assert torch.equal(state, torch.get_rng_state())  # the caller's draws are left alone
    for name in ("target/model.safetensors", "target/tokenizer.json", "train.jsonl"):
        first = Path(made.target_path).parent / name
        assert (Path(again.target_path).parent / name).read_bytes() == first.read_bytes()


def slow_build(folder: Path, recipe: Recipe, progress: bool) -> None:
    with (folder.parent / "builds.txt").open("a") as file:
        file.write(f"{os.getpid()}\n")
    (folder / "target").mkdir()
    (folder / "target/config.json").write_text("{}")
    (folder / "target/model.safetensors").write_text("")
    time.sleep(float(os.environ.get("SLOW_S", "1")))
    (folder / "train.jsonl").write_text("{}\n")
    (folder / "prompts.jsonl").write_text("{}\n")


def ask(root: Path) -> None:
    embedded.build = slow_build
    ensure_embedded(root, progress=False, recipe=SMALL)


def test_processes_that_ask_at_once_build_once(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=ask, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len((tmp_path / "builds.txt").read_text().splitlines()) == 1


def test_a_killed_build_is_made_again(tmp_path, monkeypatch):
    context = multiprocessing.get_context("fork")
    monkeypatch.setenv("SLOW_S", "60")
    process = context.Process(target=ask, args=(tmp_path,))
    process.start()
    partial = tmp_path / f"{SMALL.key()}.partial/target/model.safetensors"
    for _ in range(200):
        if partial.exists():
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert partial.exists()
    assert not (tmp_path / SMALL.key()).exists()

    monkeypatch.setenv("SLOW_S", "0")
    monkeypatch.setattr(embedded, "build", slow_build)
    result = ensure_embedded(tmp_path, progress=False, recipe=SMALL)
    assert Path(result.prompts_path).is_file()
    assert not partial.exists()
    assert len((tmp_path / "builds.txt").read_text().splitlines()) == 2


def test_an_incomplete_cache_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SLOW_S", "0")
    monkeypatch.setattr(embedded, "build", slow_build)
    first = ensure_embedded(tmp_path, progress=False, recipe=SMALL)
    Path(first.train_path).unlink()
    assert Path(ensure_embedded(tmp_path, progress=False, recipe=SMALL).train_path).is_file()


def test_an_unwritable_cache_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match=r"file: cannot write.*HEADSMITH_CACHE"):
        ensure_embedded(file, progress=False, recipe=SMALL)
    folder = tmp_path / "read_only"
    folder.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    if os.geteuid() != 0:  # root writes anywhere
        with pytest.raises(InputError, match="HEADSMITH_CACHE"):
            ensure_embedded(folder, progress=False, recipe=SMALL)


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    def fill(folder: Path, recipe: Recipe, progress: bool) -> None:
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded, "build", fill)
    with pytest.raises(InputError, match=r"No space left on device.*set HEADSMITH_CACHE"):
        ensure_embedded(tmp_path, progress=False, recipe=SMALL)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_another_recipe_has_another_folder():
    assert Recipe().key() != SMALL.key()
    assert Recipe().key() == Recipe().key()


def test_quickstart_does_only_what_is_missing(tmp_path):
    out = tmp_path / "quickstart"
    (out / "head").mkdir(parents=True)
    (out / "head/config.json").write_text("{}")
    (out / "acceptance.json").write_text('{"tau": 2.0, "alpha": [0.5], "by_category": {}}')
    figures = {"tau": 2.0, "tokens_per_s": 10.0, "speedup": 1.5, "efficiency": 0.75}
    (out / "speedup.json").write_text(
        json.dumps({"baseline": "generate", "methods": {"medusa_chain": figures}})
    )
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/quickstart.py", out],
        capture_output=True, text=True, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert "1.50" in done.stdout and "done before" in done.stdout
