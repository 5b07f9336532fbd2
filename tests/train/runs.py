"""Runs of the training commands on a tiny target: in this process, and as users start them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path

import commands
import pytest
import torch
from commands import ROOT
from omegaconf import OmegaConf
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from toys import random_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ONE = [sys.executable]
LAUNCH = [*ONE, "-m", "accelerate.commands.launch"]
TWO = [*LAUNCH, "--config_file", str(ROOT / "conf/accelerate/cpu2.yaml")]
WORDS = ("the cat sat on a mat and saw two birds near one old tree").split()  # noqa: SIM905
TEMPLATE = Path(__file__).with_name("words.jinja").read_text()
# Another number of steps would be another run under a schedule that ends with them.
ENDLESS = ("train.max_steps=400", "train.save_steps=1000", "train.schedule=constant")
KEEP_ALL = "train.num_checkpoints=10"
ENV = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "ACCELERATE_", "MASTER"))},
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
EAGLE3 = "head=eagle3 head.layers=[0,1,2] head.num_steps=3 head.draft_vocab_size=12"
BLOCK = "head.layers=[0,1] head.num_layers=2 head.num_anchors=6 head.mask_token_id=0"
ROLLOUT = "rollout.steps=5 rollout.max_new_tokens=8 rollout.batch_size=1"
KINDS = {
    "medusa": "medusa head.num_heads=2 train.optimizer=adamw",
    "eagle1": "eagle head=eagle1 train.average_decay=0.9",
    "hass": "eagle head=hass train.average_decay=0.9",
    "eagle3": f"eagle {EAGLE3} head.noise=0.5 train.average_decay=0.9",
    "eagle3, bfloat16": f"eagle {EAGLE3} train.dtype=bfloat16 train.optimizer=adamw",
    "eagle3_1": "eagle head=eagle3_1 head.layers=[0,1,2]",
    "dflash": f"dflash {BLOCK} head.block_size=4 head.causal=true head.window=8",
    "dflash2": f"dflash2 {BLOCK} head.block_size=4 head.selector_rank=4 head.selector_top_k=6 "
    "head.conv_group_size=8",
    "dspark": f"dspark {BLOCK} head.block_size=4 head.markov_head_type=rnn head.markov_rank=4 "
    "head.own_output_head=true head.draft_vocab_size=12",
    "peagle": f"peagle {BLOCK} head.num_steps=3 head.draft_vocab_size=12 head.num_segments=2",
    "mtp": "mtp head.num_steps=3 train.optimizer=adamw train.learning_rate=0.001",
}
"""The command of `train/` and its settings."""
FAMILIES = ("gpt_oss", "lfm2", "qwen3_next")


def make_inputs(folder: Path) -> Path:
    """A Llama in `target`, a tokenizer of a few words, and conversations."""
    specials = ["<unk>", "<end>", "<user>", "<assistant>"]
    vocab = {word: i for i, word in enumerate([*specials, *WORDS])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="<end>", pad_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    for name in ("target", *FAMILIES):
        fast.save_pretrained(folder / name)
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


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def target_of(inputs: Path, name: str) -> Path:
    """The target, or one of a family or of an architecture with MTP, made when first asked for."""
    if not (inputs / name / "config.json").exists():
        if name in FAMILIES:
            random_model(name, vocab_size=64, eos_token_id=1).save_pretrained(inputs / name)
        else:
            from mtp_targets import saved

            saved(inputs / name, name)
            for file in (inputs / "target").glob("*token*"):  # of the words of the conversations
                shutil.copy(file, inputs / name)
            shutil.copy(inputs / "target/chat_template.jinja", inputs / name)
    return inputs / name


def arguments(inputs: Path, out_dir: Path, *more: str, kind: str = "medusa") -> list[str]:
    """A script and its settings.

    Args:
        kind: of `KINDS`, with `, rollouts` and ` of TARGET` behind.
    """
    name, _, target = kind.partition(" of ")
    name = name.removesuffix(", rollouts")
    script, *own = KINDS[name].split()
    own += ROLLOUT.split() if "rollouts" in kind else []
    return [
        str(ROOT / f"train/{script}.py"), f"target.path={target_of(inputs, target or 'target')}",
        f"data.path={inputs / 'chat.jsonl'}", f"out_dir={out_dir}", "data.max_length=32",
        "data.eval_fraction=0.1", "train.batch_size=4", "train.warmup_steps=2",
        "train.max_steps=12", "train.save_steps=2", "train.eval_steps=6", "train.log_steps=1",
        "train.learning_rate=0.01", "train.adam_learning_rate=0.01", "train.micro_batch_size=2",
        "train.num_eval_sequences=4", "train.num_replay_prompts=2",
        *own, *more,
    ]  # fmt: skip


def start(script: str, *words: str) -> None:
    """A command in this process."""
    import doors  # which runs the first lines of all scripts

    script = script.removeprefix(f"{ROOT}/")
    settings = OmegaConf.to_object(doors.COMMANDS[script].compose_settings(list(words)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        import_module(script.removesuffix(".py").replace("/", ".")).main(settings)


@pytest.fixture(scope="session")
def straight(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a run that is never stopped, once for its kind and settings; what it said is beside."""

    @cache
    def made(kind: str = "medusa", *more: str) -> Path:
        out_dir = tmp_path_factory.mktemp("straight") / "out"
        with (out_dir.parent / "said").open("w") as said, redirect_stdout(said):
            start(*arguments(inputs, out_dir, KEEP_ALL, *more, kind=kind))
        return out_dir

    return made


def launched(layout: str, num_processes: int = 2) -> list[str]:
    file = str(ROOT / "conf/accelerate" / f"{layout}.yaml")
    return [*LAUNCH, "--config_file", file, "--num_processes", str(num_processes)]


def run(command: list[str], cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    return commands.run(command, cwd, {**ENV, **env})


def trained(command: list[str], cwd: Path, **env: str) -> str:
    done = run(command, cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def begin(command: list[str], cwd: Path) -> commands.Command:
    return commands.Command(command, cwd, ENV)


def wait_for(path: Path, process: "commands.Command | subprocess.Popen[str]") -> None:
    until = time.monotonic() + 300  # DeepSpeed compiles an operation at its first launch
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)


def kill_at(path: Path, command: list[str], cwd: Path) -> None:
    """Kills a command and all that it has started as soon as it has written something."""
    process = begin(command, cwd)
    wait_for(path, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def weights(out_dir: Path) -> dict[str, Tensor]:
    (file,) = (out_dir / "head").glob("*.safetensors")
    return load_file(file)


def curve(out_dir: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def assert_equal_weights(found: Path, expected: Path) -> None:
    mine, theirs = weights(found), weights(expected)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name


def assert_same_run(found: Path, expected: Path, step: int = 12) -> None:
    """Head and optimizer state after a step, to 1e-5 of the largest value of a tensor."""
    for name in ("head.safetensors", "optimizer.safetensors"):
        file = Path(f"checkpoints/step-{step:06d}") / name
        theirs, mine = load_file(expected / file), load_file(found / file)
        assert mine.keys() == theirs.keys()
        for key, tensor in theirs.items():
            difference = (mine[key] - tensor).abs().max()
            assert difference <= 1e-5 * tensor.abs().max(), (key, difference, tensor.abs().max())
    folder = found / "checkpoints/step-000012"
    last, state = (load_file(folder / f"{name}.safetensors") for name in ("head", "optimizer"))
    values = [state.get(f"{name}.average", tensor) for name, tensor in last.items()]
    saved = weights(found).values()
    assert sorted(t.sum().item() for t in saved if t.is_floating_point()) == sorted(
        t.sum().item() for t in values
    )
