"""Runs of every kind: resumed, killed, refused, and in processes of every layout."""

import hashlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import commands
import pytest
import torch
from safetensors.torch import load_file

from conf.errors import InputError
from tests.train.runs import (
    ENDLESS,
    ENV,
    KEEP_ALL,
    LAUNCH,
    ONE,
    ROOT,
    TWO,
    arguments,
    assert_equal_weights,
    assert_same_run,
    begin,
    curve,
    launched,
    run,
    start,
    trained,
    wait_for,
    weights,
)

Straight = Callable[..., Path]
OFTEN = ("medusa", "eagle3", "dspark", "medusa, rollouts")
SELDOM = (
    "eagle1", "hass", "eagle3_1", "dflash", "dflash2", "peagle", "mtp", "eagle3 of gpt_oss",
    "eagle3 of lfm2", "eagle3 of qwen3_next", "mtp of MiMoForCausalLM",
    "mtp of DeepseekV3ForCausalLM",
)  # fmt: skip
EACH = [*OFTEN, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SELDOM)]


@pytest.mark.parametrize("kind", EACH)
def test_a_head_learns_and_a_run_that_is_resumed_ends_as_one_that_was_not_stopped(
    kind: str, straight: Straight, inputs: Path, tmp_path: Path
) -> None:
    out_dir = straight(kind)
    losses, heldout = curve(out_dir, "train/loss"), curve(out_dir, "eval/loss")
    assert len(losses) == 12
    assert sum(losses[-3:]) < 0.98 * sum(losses[:3]) or heldout[-1] < heldout[0]
    last = 1 if kind == "eagle1" else 2  # depth of its training
    # The target's own layer is measured before its first step, too.
    num_evaluations = 3 if kind.startswith("mtp of") else 2
    for name in (f"loss_d{last}", f"top1_d{last}", f"greedy_alpha_d{last}", "tau"):
        assert len(curve(out_dir, f"eval/{name}")) == num_evaluations, name
    assert len(curve(out_dir, "rollout/tau")) == (3 if "rollouts" in kind else 0)
    # Within a round of rollouts.
    saved = f"train.resume={out_dir / 'checkpoints/step-000006'}"
    start(*arguments(inputs, tmp_path / "out", saved, kind=kind))
    assert_equal_weights(tmp_path / "out", out_dir)
    assert curve(tmp_path / "out", "train/loss") == losses[6:]


def test_a_run_says_what_it_does_and_where_its_head_is_from(
    straight: Straight, inputs: Path
) -> None:
    out_dir = straight()
    said = (out_dir.parent / "said").read_text()
    assert "1 process(es), cpu, 1 thread(s) each; the head goes to" in said
    assert "target: scaled_dot_product_attention, document by document" in said
    assert "verdict: " in said[said.index("head saved to") : said.index("next, measure")]
    assert f"eval/acceptance.py head.path={out_dir}/head target.path={inputs}/target" in said
    origin = json.loads((out_dir / "head/headsmith.json").read_text())
    assert origin["target"] == str(inputs / "target")
    assert origin["config"]["train"]["batch_size"] == 4
    assert origin["versions"]["torch"] == version("torch")
    assert origin["about_head"][-1].startswith("head: 2 Medusa heads, ")
    assert {"argv", "git", "data"} <= set(origin)
    prompts = json.loads((out_dir / "head/trained_prompts.json").read_text())
    assert origin["trained_on"] == {
        "path": str(inputs / "chat.jsonl"),
        "sha256": hashlib.sha256((inputs / "chat.jsonl").read_bytes()).hexdigest(),
        "chat_template_kwargs": {},
        "target_dtype": "float32",
        "num_prompts": prompts["num_prompts"],
    }
    said = (straight("eagle3").parent / "said").read_text()
    assert "draft vocabulary: 12 of 18 ids cover" in said
    assert "draft vocabulary: covers " in said  # of held-out text
    assert "head: eagle3, 3 steps" in said
    saved = weights(straight("eagle3"))
    assert (saved["d2t"].shape, saved["t2d"].sum()) == ((12,), 12)
    assert saved["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert "embed_tokens.weight" not in saved
    said = (straight("dspark").parent / "said").read_text()
    assert "2 layers over hidden states [0, 1]" in said
    assert "blocks of 4 rows" in said
    assert "answers of the target" in (straight("medusa, rollouts").parent / "said").read_text()


def test_a_trained_head_is_gone_on_from_with_its_own_vocabulary(
    straight: Straight, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = straight("eagle3")
    more = [f"head.path={before / 'head'}", "head.draft_vocab_size=8", "train.max_steps=3"]
    other_half = [f"data.path={tmp_path / 'new.jsonl'}", "data.chat_template_kwargs={brief: true}"]
    rows = [{"prompt": f"the cat {word}", "response": "a mat"} for word in ("sat", "saw", "and")]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start(*arguments(inputs, tmp_path / "out", *more, *other_half, kind="eagle3"))
    said = (
        f"head.path={before / 'head'}: was trained with data.chat_template_kwargs={{}}, but is "
        'trained further with data.chat_template_kwargs={"brief": true}, so it sees other prompts'
    )
    assert said in capsys.readouterr().out.splitlines()
    counts = [
        json.loads((each / "head/headsmith.json").read_text())["trained_on"]["num_prompts"]
        for each in (before, tmp_path / "out")
    ]
    assert counts[1] == counts[0] + 2
    assert weights(tmp_path / "out")["d2t"].equal(weights(before)["d2t"])
    assert curve(tmp_path / "out", "train/loss_d1")[0] < curve(before, "train/loss_d1")[0]
    other = arguments(inputs, tmp_path / "other", *more, kind="eagle1")
    with pytest.raises(InputError, match=r"an eagle3 head, but the recipe has head\.form=eagle1"):
        start(*other)


def test_a_refused_run_leaves_neither_lock_nor_folder(inputs: Path, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": each}]} for each in ("the cat", "a mat")]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="nothing to learn"):
        start(*arguments(inputs, tmp_path / "out", f"data.path={tmp_path / 'bad.jsonl'}"))
    assert not (tmp_path / "out").exists()


# --- In processes of their own.


def test_a_second_run_in_a_folder_is_refused_and_a_killed_one_ends_as_if_it_had_not_been(
    straight: Straight, inputs: Path, tmp_path: Path
) -> None:
    out_dir = tmp_path / "out"
    command = [*ONE, *arguments(inputs, out_dir, "train.resume=auto")]
    process = begin(command, tmp_path)
    wait_for(out_dir / "checkpoints/step-000004", process)
    os.killpg(process.pid, signal.SIGSTOP)
    second = run(command, tmp_path)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    named = f"process {process.pid} on {socket.gethostname()}"
    assert (second.returncode, named in second.stderr) == (2, True), second.stderr
    assert not (out_dir / "head").exists()
    assert (out_dir / ".lock").exists()
    assert "continuing from" in trained(command, tmp_path)
    assert not (out_dir / ".lock").exists()
    assert_equal_weights(out_dir, straight())
    assert curve(out_dir, "train/loss") == curve(straight(), "train/loss")


def test_both_processes_of_a_launch_end_where_a_run_of_another_machine_lives(
    inputs: Path, tmp_path: Path
) -> None:
    lock, done = tmp_path / "out/.lock", threading.Event()
    lock.parent.mkdir()
    lock.write_text("another 1 token")

    def give_signs() -> None:
        while not done.wait(0.05):
            os.utime(lock)

    signs = threading.Thread(target=give_signs)
    signs.start()
    try:
        found = commands.run_two([*ONE, *arguments(inputs, lock.parent)], tmp_path, ENV)
    finally:
        done.set()
        signs.join()
    assert [each.returncode for each in found] == [2, 2], found
    assert "another process is writing here: process 1 on another" in found[0].stderr
    assert lock.read_text() == "another 1 token"


def test_fsdp2_equals_one_process(straight: Straight, inputs: Path, tmp_path: Path) -> None:
    asked = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    command = [*ONE, *arguments(inputs, tmp_path / "out")]
    done = commands.run_two(command, tmp_path, ENV | asked)
    assert [process.returncode for process in done] == [0, 0], done
    assert "2 process(es), cpu" in done[0].stdout
    assert "layout: FSDP2, 50% of the optimizer state on each process" in done[0].stdout
    assert_same_run(tmp_path / "out", straight())
    for name in ("train/loss", "train/tokens", "eval/loss", "eval/top1_d1", "eval/tau"):
        found, expected = curve(tmp_path / "out", name), curve(straight(), name)
        assert found == pytest.approx(expected, abs=1e-5), name


def with_fault(name: str, words: list[str]) -> list[str]:
    return [str(ROOT / "tests/launched_fault.py"), name, *words[1:]]


def test_an_evaluation_that_fails_in_one_process_stops_none(
    straight: Straight, inputs: Path, tmp_path: Path
) -> None:
    command = [*ONE, *with_fault("second-cannot-measure", arguments(inputs, tmp_path / "out"))]
    processes = commands.run_two(command, tmp_path, ENV)
    assert [done.returncode for done in processes] == [0, 0], processes
    said = "".join(done.stdout + done.stderr for done in processes)
    assert said.count("the evaluation failed in process 1, training goes on") == 2
    assert "RuntimeError: tensors on two devices" in said
    assert "its last evaluation failed" in said
    assert curve(tmp_path / "out", "eval/loss") == []
    for name, expected in weights(straight()).items():
        torch.testing.assert_close(weights(tmp_path / "out")[name], expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "zero3"])
def test_the_head_of_the_best_step_stays_in_every_layout(
    straight: Straight, inputs: Path, tmp_path: Path, layout: str
) -> None:
    more = ["train.optimizer=adamw"] if layout == "zero3" else []
    words = with_fault("peaking", arguments(inputs, tmp_path / "out", *more))
    said = trained([*launched(layout), *words], tmp_path)
    assert "kept: step 6, as the tau of step 12, 1.000, is below that of step 6, 2.000" in said
    best = load_file(straight("medusa", *more) / "checkpoints/step-000006/head.safetensors")
    found = weights(tmp_path / "out")
    assert sorted(t.sum().item() for t in found.values()) == pytest.approx(
        sorted(t.sum().item() for t in best.values()), abs=1e-4
    )


SAME_FOR = {"medusa": 12, "eagle3": 12, "eagle3, bfloat16": 6}
"""Steps after which optimizer states are the same too; later bfloat16 is, a few bits at a time."""
LAYOUTS = {
    "medusa": "ddp zero1 zero2 zero3",
    "eagle3": "ddp fsdp2",
    "eagle3, bfloat16": "fsdp2 zero2 zero3",
    "hass": "ddp",
    "eagle3_1": "fsdp2",
    "dflash": "fsdp2 zero2",
    "dflash2": "ddp zero3",
    "dspark": "ddp fsdp2",
    "peagle": "ddp zero2",
    "mtp of MiMoForCausalLM": "fsdp2 zero3",
    "mtp of DeepseekV3ForCausalLM": "ddp",
    "eagle3, rollouts": "zero2",
    "dspark, rollouts": "ddp",
    "eagle3 of qwen3_next": "ddp",
}
"""Each kind in some, each layout with several."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"), [(kind, each) for kind, own in LAYOUTS.items() for each in own.split()]
)
def test_two_processes_equal_one_in_every_layout(
    straight: Straight, inputs: Path, tmp_path: Path, kind: str, layout: str
) -> None:
    # Muon rounds what differs in the last bit apart, and DeepSpeed does not have it.
    more = ["train.optimizer=adamw"] if layout.startswith("zero") else []
    expected = straight(kind, *more)
    words = arguments(inputs, tmp_path / "out", *more, KEEP_ALL, kind=kind)
    said = trained([*launched(layout), *words], tmp_path)
    name = layout.upper().replace("ZERO", "ZeRO-")
    share = 100 if layout == "ddp" else 50
    assert f"layout: {name}, {share}% of the optimizer state on each process" in said
    assert said.count("head saved to") == 1
    for name in ("train/loss", "eval/loss", "eval/tau", "rollout/tau", "rollout/tokens"):
        found = curve(tmp_path / "out", name)
        assert found == pytest.approx(curve(expected, name), abs=1e-4), name
    if kind in SAME_FOR:
        assert_same_run(tmp_path / "out", expected, SAME_FOR[kind])
        return
    for name, each in weights(expected).items():
        # A hundredth of the learning rate: AdamW enlarges the rounding of small gradients' sums.
        torch.testing.assert_close(weights(tmp_path / "out")[name], each, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "stages"),
    [
        (4, [(launched("zero3"), 0), (ONE, 4), (launched("fsdp2"), 6), (launched("zero1"), 10)]),
        # Three processes, whose shards are padded.
        (6, [(launched("zero3", 3), 0), (launched("fsdp2", 3), 4), (launched("zero3", 3), 8),
             (launched("zero2", 3), 10)]),
    ],
)  # fmt: skip
def test_a_run_goes_on_in_other_layouts_and_numbers_of_processes(
    straight: Straight, inputs: Path, tmp_path: Path, batch_size: int, stages: list
) -> None:
    more = [KEEP_ALL, f"train.batch_size={batch_size}"]
    resume: list[str] = []
    for number, (command, begins) in enumerate(stages):
        if number:
            before = tmp_path / str(number - 1) / f"checkpoints/step-{begins:06d}"
            resume = [f"train.resume={before}"]
        trained([*command, *arguments(inputs, tmp_path / str(number), *resume, *more)], tmp_path)
    assert_same_run(tmp_path / str(len(stages) - 1), straight("medusa", more[1]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "fsdp2"])
def test_sigterm_saves_a_checkpoint_for_another_number_of_processes(
    inputs: Path, tmp_path: Path, layout: str
) -> None:
    launcher = ONE if layout == "one" else launched(layout)
    long = arguments(inputs, tmp_path / "out", *ENDLESS)
    process = begin([*launcher, *long], tmp_path)
    wait_for(tmp_path / "out/metrics.jsonl", process)
    os.killpg(process.pid, signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert "continue with train.resume=auto" in text
    assert not (tmp_path / "out/.lock").exists()
    line = f" {' '.join(long)} train.resume=auto\n"
    if layout == "one":
        assert f"next, train on:\n  python{line}" in text
        assert process.returncode == 0  # torch's elastic launcher always reports the signal
    else:
        assert f" (with your options of accelerate launch):\n  accelerate launch{line}" in text
    (saved,) = (tmp_path / "out/checkpoints").iterdir()
    more = [f"train.max_steps={int(saved.name[5:]) + 3}", "train.resume=auto"]
    other = launched("cpu2") if layout == "one" else ONE
    assert f"continuing from {saved}" in trained([*other, *long, *more], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "zero1", "zero3"])
def test_a_loss_that_is_not_finite_is_never_applied(
    inputs: Path, tmp_path: Path, layout: str
) -> None:
    wild = ["train.learning_rate=1e30", "train.warmup_steps=0", "train.save_steps=1"]
    done = run([*launched(layout), *arguments(inputs, tmp_path / "out", *wild)], tmp_path)
    assert done.returncode != 0
    assert "is not finite at step 2" in done.stderr
    (saved,) = (tmp_path / "out/checkpoints").iterdir()
    assert saved.name == "step-000001"
    for name, tensor in load_file(saved / "head.safetensors").items():
        assert tensor.isfinite().all(), name


@pytest.mark.slow
def test_two_machines_of_one_process_each(straight: Straight, inputs: Path, tmp_path: Path) -> None:
    port = str(20000 + os.getpid() % 10000)
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    command = [*launched("multi_node"), "--num_machines", "2", *address, "--machine_rank"]
    own = arguments(inputs, tmp_path / "out")
    second, first = (begin([*command, rank, *own], tmp_path) for rank in "10")
    for machine in (first, second):
        said, _ = machine.communicate(timeout=180)
        assert machine.returncode == 0, said
    assert_same_run(tmp_path / "out", straight())


@pytest.mark.slow
def test_launch_that_silently_runs_one_process_is_refused(inputs: Path, tmp_path: Path) -> None:
    command = [*LAUNCH, "--cpu", "--num_processes", "2", *arguments(inputs, tmp_path / "out")]
    done = run(command, tmp_path)
    assert done.returncode != 0
    assert "error: accelerate was asked for several processes and started one" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "who", ["data-slow-on-first", "data-slow-on-second", "first-measures-long", "first-saves-long"]
)
def test_a_process_is_waited_for_longer_than_a_collective(
    inputs: Path, tmp_path: Path, who: str
) -> None:
    short = ["train.max_steps=3", "train.eval_steps=4", "train.save_steps=4"]
    words = with_fault(who, arguments(inputs, tmp_path / "out", *short))
    assert "head saved to" in trained([*TWO, *words], tmp_path)


@pytest.mark.slow
def test_two_processes_leave_out_what_one_does(inputs: Path, tmp_path: Path) -> None:
    for name, command in (("one", ONE), ("two", TWO)):
        words = arguments(inputs, tmp_path / name)
        said = trained([*command, *with_fault("spoiled-sequences", words)], tmp_path)
        assert "is not finite" in said
    assert_same_run(tmp_path / "two", tmp_path / "one")
    one, two = (curve(tmp_path / n, "train/skipped_sequences") for n in ("one", "two"))
    assert one == two
    assert two[-1] > 0


@pytest.mark.slow
def test_wandb_offline_and_unreachable(inputs: Path, tmp_path: Path) -> None:
    key = "a1b2c3d4e5" * 4
    more = ["log.tracker=wandb", "train.max_steps=3"]
    for mode, wanted in (("offline", 0), ("online", 1)):
        out_dir = tmp_path / mode
        env = {"WANDB_MODE": mode, "WANDB_API_KEY": key, "WANDB_BASE_URL": "http://127.0.0.1:9"}
        text = trained([*ONE, *arguments(inputs, out_dir, *more)], tmp_path, **env)
        assert text.count("log.tracker=wandb failed, so the run goes on") == wanted, text
        assert (out_dir / "head").is_dir()
        for path in out_dir.rglob("*"):
            assert not path.is_file() or key.encode() not in path.read_bytes(), path
