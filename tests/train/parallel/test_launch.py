"""`train/medusa.py` as users start it: real processes, a tiny target, a small file."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import commands
import pytest
import torch
from commands import ROOT
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SCRIPT = str(ROOT / "train" / "medusa.py")
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
TWO = [*LAUNCH, "--config_file", str(ROOT / "conf/accelerate/cpu2.yaml")]
WORDS = ("the cat sat on a mat and saw two birds near one old tree").split()  # noqa: SIM905
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }} <end>{% endgeneration %}"
    "{% else %}{{ m['content'] }} <end>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
# Another number of steps would be another run under a schedule that ends with them.
ENDLESS = ("train.max_steps=400", "train.save_steps=1000", "train.schedule=constant")
ENV = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "ACCELERATE_", "MASTER"))},
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    specials = ["<unk>", "<end>", "<user>", "<assistant>"]
    vocab = {word: i for i, word in enumerate([*specials, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", pad_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    rows = []
    for i in range(120):
        words = [WORDS[(i * 7 + j * (1 + i % 4)) % len(WORDS)] for j in range(12)]
        messages = [
            {"role": "user", "content": " ".join(words[:5])},
            {"role": "assistant", "content": " ".join(words[5:])},
        ]
        rows.append(json.dumps({"messages": messages}) + "\n")
    (folder / "chat.jsonl").write_text("".join(rows))
    return folder


def arguments(inputs: Path, out_dir: Path, *more: str) -> list[str]:
    return [
        SCRIPT, f"target.path={inputs / 'target'}", f"data.path={inputs / 'chat.jsonl'}",
        f"out_dir={out_dir}", "data.max_length=32", "data.eval_fraction=0.1",
        "head.num_heads=2", "train.batch_size=4", "train.warmup_steps=2", "train.max_steps=12",
        "train.save_steps=2", "train.eval_steps=6", "train.log_steps=1",
        "train.learning_rate=0.01", "train.optimizer=adamw", *more,
    ]  # fmt: skip


def run(command: list[str], cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    return commands.run(command, cwd, {**ENV, **env})


def trained(command: list[str], cwd: Path, **env: str) -> str:
    done = run(command, cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def weights(out_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(out_dir / "head" / "medusa_lm_head.safetensors")


def curve(out_dir: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.fixture(scope="module")
def straight(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process that was never stopped."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    text = trained([sys.executable, *arguments(inputs, elsewhere / "out")], elsewhere)
    assert "1 process(es), cpu, 1 thread(s) each; the head goes to" in text
    assert "head saved to" in text
    assert "verdict: " in text[text.index("head saved to") : text.index("next, measure")]
    assert f"eval/acceptance.py head.path={elsewhere}/out/head target.path={inputs}/target" in text
    return elsewhere / "out"


def wait_for(path: Path, process: commands.Command) -> None:
    until = time.monotonic() + 300  # DeepSpeed compiles an operation at its first launch
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)


def begin(command: list[str], cwd: Path) -> commands.Command:
    return commands.Command(command, cwd, ENV)


def test_head_learns_and_says_where_it_is_from(straight: Path, inputs: Path) -> None:
    losses = curve(straight, "train/loss")
    assert len(losses) == 12
    assert losses[-1] < 0.75 * losses[0]
    assert {f"eval/{name}_d{d}" for name in ("loss", "top1", "top5") for d in (1, 2)} <= set(
        json.loads((straight / "metrics.jsonl").read_text().splitlines()[-1])
    )
    origin = json.loads((straight / "head" / "headsmith.json").read_text())
    assert origin["target"] == str(inputs / "target")
    assert origin["config"]["train"]["batch_size"] == 4
    assert origin["versions"]["torch"] == version("torch")
    assert origin["about_head"][-1].startswith("head: 2 Medusa heads, ")
    assert {"argv", "git", "data"} <= set(origin)
    prompts = json.loads((straight / "head/trained_prompts.json").read_text())
    assert origin["trained_on"] == {
        "path": str(inputs / "chat.jsonl"),
        "sha256": hashlib.sha256((inputs / "chat.jsonl").read_bytes()).hexdigest(),
        "chat_template_kwargs": {},
        "target_dtype": "float32",
        "num_prompts": prompts["num_prompts"],
    }


def test_kill_9_then_resume_equals_an_uninterrupted_run(
    straight: Path, inputs: Path, tmp_path: Path
) -> None:
    command = [sys.executable, *arguments(inputs, tmp_path / "out")]
    process = begin(command, tmp_path)
    wait_for(tmp_path / "out/checkpoints/step-000004", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out/head").exists()
    assert "continuing from" in trained([*command, "train.resume=auto"], tmp_path)
    for name, expected in weights(straight).items():
        assert torch.equal(weights(tmp_path / "out")[name], expected), name
    assert curve(tmp_path / "out", "train/loss") == curve(straight, "train/loss")


@pytest.mark.slow
def test_launch_that_silently_runs_one_process_is_refused(inputs: Path, tmp_path: Path) -> None:
    command = [*LAUNCH, "--cpu", "--num_processes", "2", *arguments(inputs, tmp_path / "out")]
    done = run(command, tmp_path)
    assert done.returncode != 0
    assert "error: accelerate was asked for several processes and started one" in done.stderr
    assert not (tmp_path / "out").exists()


def faulty(name: str, inputs: Path, out_dir: Path, *more: str) -> list[str]:
    command = [*TWO, str(ROOT / "tests/launched_fault.py"), name]
    return [*command, *arguments(inputs, out_dir, *more)[1:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "who", ["data-slow-on-first", "data-slow-on-second", "first-measures-long", "first-saves-long"]
)
def test_a_process_is_waited_for_longer_than_a_collective(
    inputs: Path, tmp_path: Path, who: str
) -> None:
    short = ["train.max_steps=3", "train.eval_steps=4", "train.save_steps=4"]
    said = trained(faulty(who, inputs, tmp_path / "out", *short), tmp_path)
    assert "head saved to" in said


@pytest.mark.parametrize(
    ("fault", "process"),
    [
        pytest.param("first-cannot-measure", 0, marks=pytest.mark.slow),
        ("second-cannot-measure", 1),
    ],
)
def test_an_evaluation_that_fails_in_one_process_stops_none(
    straight: Path, inputs: Path, tmp_path: Path, fault: str, process: int
) -> None:
    command = [sys.executable, *faulty(fault, inputs, tmp_path / "out")[len(TWO) :]]
    processes = commands.run_two(command, tmp_path, ENV)
    assert [done.returncode for done in processes] == [0, 0], processes
    said = "".join(done.stdout + done.stderr for done in processes)
    assert said.count(f"the evaluation failed in process {process}, training goes on") == 2
    assert "RuntimeError: tensors on two devices" in said
    assert "its last evaluation failed" in said
    assert curve(tmp_path / "out", "eval/loss") == []
    for name, expected in weights(straight).items():
        torch.testing.assert_close(weights(tmp_path / "out")[name], expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_wandb_offline_and_unreachable(inputs: Path, tmp_path: Path) -> None:
    key = "a1b2c3d4e5" * 4
    more = ["log.tracker=wandb", "train.max_steps=3"]
    for mode, wanted in (("offline", 0), ("online", 1)):
        out_dir = tmp_path / mode
        env = {"WANDB_MODE": mode, "WANDB_API_KEY": key, "WANDB_BASE_URL": "http://127.0.0.1:9"}
        text = trained([sys.executable, *arguments(inputs, out_dir, *more)], tmp_path, **env)
        assert text.count("log.tracker=wandb failed, so the run goes on") == wanted, text
        assert (out_dir / "head").is_dir()
        for path in out_dir.rglob("*"):
            assert not path.is_file() or key.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_soft_labels_and_bfloat16(inputs: Path, tmp_path: Path) -> None:
    more = ["head.labels=soft", "train.dtype=bfloat16", "train.schedule=wsd"]
    said = trained([sys.executable, *arguments(inputs, tmp_path / "out", *more)], tmp_path)
    assert "attention of the target: scaled_dot_product_attention, document by document\n" in said
    losses = curve(tmp_path / "out", "train/loss")
    assert losses[-1] < losses[0]
    assert all(tensor.dtype == torch.float32 for tensor in weights(tmp_path / "out").values())
