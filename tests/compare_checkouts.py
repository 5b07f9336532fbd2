"""Do two checkouts behave the same on this machine? The net under a renaming or a move of code.

    python tests/compare_checkouts.py BASE HEAD [--only ROOM ...] [--out FOLDER] [--jobs N]

A checkout is driven by its commands, as users type them, and by the functions of docs/python.md.
What it prints and writes is flattened to values by key, one file for each room, and kept while
commit, tool and machine are the same. Exit status 1: a value differs, or one side lacks it.
A checkout against itself runs twice, which shows what is not deterministic.
"""

import argparse
import ast
import difflib
import hashlib
import inspect
import json
import os
import platform
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from chats import assistant, user, write_rows
from commands import ROOT, Command

LIMIT_S = 900
"""Seconds after which a command is ended, which counts as its exit status."""
NUM_SHOWN = 20
NUM_KEPT = 6
"""Folders of checkouts, the last ones that were used."""

Record = dict[str, Any]

# What is not compared, and why. Everything else is.

MASKED_KEYS = re.compile(
    # Measured times, and what is computed or chosen by them: the faster baseline, shares of the
    # time.
    r".*(_per_s|_ms|waiting|seconds|draft_s|speedup|speedup_ci95)|breakdown|efficiency|baseline"
    # Of this code or its folder: they change with every commit, or with every name of a module.
    r"|git|prepared|argv"
)
"""Names of values in JSON, wherever they stand; that they are there is compared."""
MASKED_TEXT = (
    # Progress bars, which tell times.
    (re.compile(r"^.*\d(?:%\|| ?\w+ \[\d\d:\d\d).*$\n?", re.M), ""),
    # Two commands that want the same data at once: one waits, by chance.
    (re.compile(r"^waiting for process .*$\n?", re.M), ""),
    # The cache of prepared data is keyed by the code's checksum; preparing takes time.
    (re.compile(r"^ *prepared: .*$", re.M), "prepared: MASKED"),
    (
        re.compile(r"\b\d+(?:[.,]\d+)* (tokens/s|rows/s|s|ms|minutes|seconds|per second)\b"),
        r"MASKED \1",
    ),
    # What progress bars wipe.
    (re.compile(r"\n{2,}"), "\n"),
    (re.compile(r"free: [\d.]+ GiB"), "free: MASKED"),
    # The faster of two baselines.
    (re.compile(r"over the baseline, (vanilla|generate)\b"), "over the baseline, MASKED"),
    # Lines of source files, as warnings and tracebacks name them.
    (re.compile(r"(\.py)(:|\", line )\d+"), r"\1\2N"),
    (re.compile(r"/tmp/[\w.-]+"), "<tmp>"),
    # The checkout's commit, and a file that holds times.
    (re.compile(r"\b[0-9a-f]{40}\b"), "<commit>"),
    (re.compile(r"(headsmith\.json) \([\d,]+ bytes\)"), r"\1 (MASKED bytes)"),
)
"""In everything that is printed, and in texts of files."""
COMMANDS = tuple(
    str(script.relative_to(ROOT))
    for folder in ("train", "eval", "scripts")
    for script in sorted((ROOT / folder).rglob("*.py"))
    if "COMMAND.parse_command_line()" in script.read_text() and script.parent.name != "bench"
)
"""Commands with settings."""
OTHER_COMMANDS = (
    "scripts/verify_export.py", "scripts/bench/cpu.py", "scripts/bench/gpu.py",
    "scripts/bench/measure.py",
)  # fmt: skip
"""Commands of argparse, without settings. Python files of other names may have moved."""
KEYS_OF_CACHES = re.compile(r"\b[0-9a-f]{32}\b")
ESCAPES = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
MOVED = re.compile(r"(?<![\w/.<-])(?:[\w.<>-]+/)+([\w-]+)\.py\b")
OBJECT = re.compile(r"`[a-z_]\w*(?:\.[a-z_]\w*)+\.[A-Z]\w*`")


def masked(text: str, names: Mapping[str, str]) -> str:
    """A text without what may differ.

    Args:
        names: folders, and what stands for them.
    """
    lines = [line.rpartition("\r")[2].rstrip() for line in ESCAPES.sub("", text).split("\n")]
    text = re.sub(r"/[^\s'\"]+/site-packages/", "<packages>/", "\n".join(lines))
    for folder, name in names.items():
        if name == "<repo>":  # where a file lies in a checkout may change, its name does not
            text = re.sub(rf"{re.escape(folder)}(?:/[\w.-]+)*/([\w.-]+)", r"<repo>/\1", text)
        text = text.replace(folder, name)
    for pattern, instead in MASKED_TEXT:
        text = pattern.sub(instead, text)
    known = COMMANDS + OTHER_COMMANDS
    text = MOVED.sub(lambda found: found[0] if found[0] in known else "<module>.py", text)
    return OBJECT.sub("`<object>`", text)


def leaves(key: str, value: Any, names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Values of JSON by their keys; a list of numbers is one value."""
    if isinstance(value, dict) and value:
        for name, each in value.items():
            told = "MASKED" if MASKED_KEYS.fullmatch(name) else each
            yield from leaves(f"{key}/{masked(name, names)}", told, names)
    elif isinstance(value, list) and any(isinstance(each, dict | str) for each in value):
        for number, each in enumerate(value):
            yield from leaves(f"{key}[{number}]", each, names)
    else:
        yield key, masked(value, names) if isinstance(value, str) else value


def tensors(file: Path) -> Iterator[tuple[str, str]]:
    """Dtype, shape and checksum of each tensor of a safetensors file."""
    data = file.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    for name, told in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = told["data_offsets"]
        digest = hashlib.sha256(data[start + begin : start + end]).hexdigest()[:16]
        yield name, f"{told['dtype']} {told['shape']} {digest}"


def written(folder: Path, names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Values of all files below a folder; of pictures and pages, which show times, the names."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        key = KEYS_OF_CACHES.sub("<key>", str(file.relative_to(folder)))
        if file.suffix == ".safetensors":
            yield from ((f"{key}/{name}", told) for name, told in tensors(file))
        elif file.suffix == ".json" and file.name != "tokenizer.json":
            yield from leaves(key, json.loads(file.read_text()), names)
        elif file.suffix == ".jsonl":
            for number, line in enumerate(file.read_text().splitlines()):
                yield from leaves(f"{key}[{number}]", json.loads(line), names)
        elif file.suffix in (".md", ".yaml", ".txt", ".jinja", ".csv"):
            yield key, masked(file.read_text(), names)
        elif file.suffix in (".png", ".html", ".lock"):
            yield key, "there"
        else:
            yield key, hashlib.sha256(file.read_bytes()).hexdigest()


# A checkout, and its commands.


def public(checkout: str) -> Any:
    """The public functions of a checkout, certainly its own, as docs/python.md imports them."""
    page = Path(checkout, "docs/python.md").read_text()
    found = re.search(r"^from ([\w.]+) import .*load_target", page, re.M)
    assert found, f"{checkout}/docs/python.md imports no load_target"
    module = import_module(found[1])
    assert Path(str(module.__file__)).resolve().is_relative_to(checkout), module.__file__
    return module


@dataclass
class Checkout:
    """A checkout, and the folder of its files and records.

    Attributes:
        path: of the checkout.
        folder: for what it writes; `files/<room>/<task>` is what a task wrote.
        inputs: what both checkouts read.
        jobs: commands at a time.
        record: of the room that is running.
    """

    path: Path
    folder: Path
    inputs: Path
    jobs: int
    room: str = ""
    record: Record = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = self

    @property
    def names(self) -> dict[str, str]:
        """Folders that differ between checkouts, the inner ones first."""
        own = {str(self.folder): "<own>", str(self.inputs): "<inputs>", str(self.path): "<repo>"}
        own |= {str(self.base.folder): "<own>"}  # of what is carried, and was BASE's own
        return dict(sorted(own.items(), key=lambda each: -len(each[0])))

    @property
    def env(self) -> dict[str, str]:
        cache = str(self.folder / "cache")
        return {
            **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
            **SHARED_ENV, "HOME": str(self.folder / "home"), "PYTHONPATH": str(self.path),
            "HEADSMITH_CACHE": cache, "HF_HOME": cache,
        }  # fmt: skip

    def files(self, task: str, room: str | None = None) -> Path:
        name = re.sub(r"[^\w-]+", "-", task)  # no sign that a command line would need quotes for
        return self.folder / "files" / (room or self.room) / name

    def run(self, tasks: Mapping[str, str], timed: bool = False, until: str = "") -> None:
        """Runs command lines, some at a time, and records what they print and write.

        Args:
            tasks: a command line by name. `{out}` is the task's folder, `{files}` those of all
                rooms, `{base}` those of BASE, `{in}` the inputs.
            timed: its tables tell times, and are left out.
            until: a text at which a command is ended; what it says later is left out.
        """
        with ThreadPoolExecutor(self.jobs) as pool:
            for found in pool.map(lambda task: self._ran(*task, timed, until), tasks.items()):
                self.record.update(found)

    def _ran(self, task: str, line: str, timed: bool, until: str) -> Record:
        out, started = self.files(task), monotonic()
        shutil.rmtree(out, ignore_errors=True)
        places = {"out": out, "files": self.folder / "files", "in": self.inputs}
        places["base"] = self.base.folder / "files"
        words = [re.sub(r"\{(out|files|in|base)\}", lambda found: str(places[found[1]]), word)
                 for word in shlex.split(line)]  # fmt: skip
        if words[0] in TASKS:
            words.insert(0, __file__)
        process = Command([sys.executable, *words], self.path, self.env, merged=False)
        while process.poll() is None and monotonic() < started + LIMIT_S:
            if until and until in process.printed():
                break
            sleep(0.2)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        printed = process.communicate()
        say(f"  {self.room}/{task}: {monotonic() - started:.1f} s, status {process.returncode}")
        found: Record = {f"{task}: status": process.returncode}
        for name, said in zip(("printed", "error"), printed, strict=True):
            text = masked(said, self.names)
            if until and until in text:
                text = text.partition(until)[0] + until + text.partition(until)[2].split("\n")[0]
            if timed:
                lines = [each.strip() for each in text.splitlines() if not each.startswith(BOX)]
                text = "\n".join(lines)
            found[f"{task}: {name}"] = text
        if "{out}" in line and out.is_dir():
            found |= {f"{task}: {key}": value for key, value in written(out, self.names)}
        return found


BOX = ("┏", "┃", "┡", "│", "└", "├")
SHARED_ENV = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "COLUMNS": "200",
    "TERM": "dumb", "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": "0", "HF_HUB_DISABLE_TELEMETRY": "1",
}  # fmt: skip


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# What both checkouts read: made once, the target by BASE.


def make_inputs(base: Checkout) -> None:
    """Targets, conversations, prompts and a curve of costs."""
    folder = base.inputs
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    chats = list(functions())
    rows = [{"messages": [user(asked), assistant(said)]} for asked, said in chats]
    write_rows(folder / "chats.jsonl", rows)
    prompts = [{"turns": [asked], "category": asked.split()[0]} for asked, _ in chats[::8]]
    write_rows(folder / "prompts.jsonl", prompts)
    curve: Record = {"device": "none", "source": "none", "draft_seconds": 3e-4}
    curve |= {"sizes": [1, 2, 4, 8, 16, 32], "seconds": [0.01, 0.01, 0.01, 0.012, 0.014, 0.018]}
    (folder / "curve.json").write_text(json.dumps(curve))
    (folder / "curve.txt").touch()
    for kind, files in (("bad", BAD_ROWS), ("forms", FORMS)):
        (folder / kind).mkdir()
        for name, each in files.items():
            write_rows(folder / kind / f"{name}.jsonl", each)
    base.room = "inputs"
    base.record = {}
    base.run({"targets": "api_targets {in}"})
    assert base.record["targets: status"] == 0, base.record["targets: error"]
    (folder / "done").touch()


def functions() -> Iterator[tuple[str, str]]:
    """Begin and rest of functions of the standard library, as the embedded target knows them."""
    for name in ("fnmatch", "glob", "heapq", "posixpath", "shlex", "textwrap", "timeit"):
        source = inspect.getsource(import_module(name))
        for node in ast.walk(ast.parse(source)):
            lines = (ast.get_source_segment(source, node) or "").splitlines()
            if isinstance(node, ast.FunctionDef) and len(lines) > 4:
                yield "\n".join(lines[:2]), "\n".join(lines[2:9])


def api_targets(api: Any, folder: str) -> None:
    """The embedded target, two of its layers that draft for it, and a target of a family of MTP."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    target = api.load_target()
    for name, num_layers in (("target", target.model.config.num_hidden_layers), ("draft", 2)):
        target.model.config.num_hidden_layers = num_layers
        target.model.model.layers = target.model.model.layers[:num_layers]
        target.model.save_pretrained(Path(folder, name))
        target.tokenizer.save_pretrained(Path(folder, name))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    ids = {name: getattr(target.model.config, name) for name in ("vocab_size", "eos_token_id")}
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes, **heads, **ids))
    model.save_pretrained(Path(folder, "mimo"))
    target.tokenizer.save_pretrained(Path(folder, "mimo"))
    file = Path(folder, "mimo/config.json")
    told = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 0}
    file.write_text(json.dumps(json.loads(file.read_text()) | told))


# The rooms.

ON = "target.path={in}/target data.path={in}/chats.jsonl data.max_length=128 data.num_proc=1"
STEPS = (
    "train.max_steps=4 train.batch_size=2 train.eval_steps=2 train.save_steps=2 train.log_steps=1 "
    "train.warmup_steps=0 train.num_eval_sequences=2 train.num_replay_prompts=2"
)
HEADS = {
    "medusa": "train/medusa.py head.num_heads=3",
    "eagle1": "train/eagle.py head=eagle1",
    "eagle3": "train/eagle.py head=eagle3 head.draft_vocab_size=512",
    "eagle3_1": "train/eagle.py head=eagle3_1 head.draft_vocab_size=512",
    "peagle": "train/peagle.py head.num_layers=2 head.num_steps=4",
    "dflash": "train/dflash.py head.num_layers=2 head.block_size=5",
    "dflash2": "train/dflash2.py head.num_layers=2 head.block_size=5",
    "dspark": "train/dspark.py head.num_layers=2 head.block_size=5",
    "mtp": "train/mtp.py",
}
"""By the recipe, or the command without recipes."""
CONTINUED = {
    "hass": "train/eagle.py head=hass head.path={files}/train/eagle1/head",
    "medusa2": "train/medusa2.py head.path={files}/train/medusa/head",
    "rollouts": "train/eagle.py head=eagle3 rollout.steps=2 rollout.max_new_tokens=12",
    "average": "train/dflash.py head.path={files}/train/dflash/head train.average_decay=0.9 "
    "train.optimizer=adamw train.schedule=cosine",
    "scratch": "train/eagle.py head=eagle3 head.output_head=scratch head.num_steps=2 "
    "train.dtype=bfloat16 train.micro_batch_size=2",
}


def train(checkout: Checkout) -> None:
    """Training of every kind of head, by command and by function, and what it prints."""
    lines = {name: f"{line} {ON} {STEPS} out_dir={{out}}" for name, line in HEADS.items()}
    first = "medusa"  # prepares the data, which the others find
    checkout.run({first: lines.pop(first)})
    checkout.run(lines)
    checkout.run(
        {name: f"{line} {ON} {STEPS} out_dir={{out}}" for name, line in CONTINUED.items()}
        | {
            "default": f"train/medusa.py {STEPS} data.num_prompts=16 data.max_length=128 "
            "data.num_proc=1 out_dir={out}",
            "steps": "api_steps {out} {in}/target",
            "mtp of a family": f"train/mtp.py {ON} {STEPS} target.path={{in}}/mimo out_dir={{out}}",
        }
    )
    long = {name: f"{HEADS[name]} {ON} train.max_steps=99999 out_dir={{out}}" for name in LONG}
    checkout.run(
        {f"long {name}": line for name, line in long.items()}, until="\nmemory on each device"
    )


LONG = ("medusa", "eagle3")
"""Of a CPU's long runs, some are compiled and others not."""
STEPS_OF = (
    ("medusa", {}), ("medusa", {"labels": "hard", "off_path_weight": 1.0}), ("eagle1", {}),
    ("eagle3", {}), ("eagle3_1", {}), ("hass", {}), ("peagle", {}), ("dflash", {}),
    ("dflash2", {}), ("dspark", {}), ("mtp", {}), ("mtp", {"own_tokens": True}),
    *(("eagle3", {"divergence": name}) for name in ("rkl", "js", "tv", "nla", "hybrid")),
    ("eagle3", {"text_weight": 0.5, "top_k_weight": 0.5, "noise": 0.1}),
    ("eagle3", {"step_normalizer": "mean", "token_normalizer": "supervised"}),
)  # fmt: skip


def api_steps(api: Any, out: str, path: str) -> None:
    """Loss, figures and the gradient's norm in three steps of every kind of head."""
    import torch

    target = api.load_target(path)
    ids = torch.arange(3, 3 + 2 * 32).reshape(2, 32) * 7 % 1000
    mask = torch.arange(32)[None].expand(2, -1) >= 8
    documents = torch.stack([torch.zeros(32), torch.arange(32) // 20]).long()
    found: Record = {}
    for recipe, settings in STEPS_OF:
        objective = api.training_objective(recipe, target, **settings)
        optimizer = torch.optim.SGD(objective.head.parameters(), 1e-2)
        for step in range(3):
            optimizer.zero_grad()
            told = api.training_step(objective, ids, mask, document_ids=documents, seed=step)
            told.loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(objective.head.parameters(), 1.0)
            optimizer.step()
            found[f"{recipe} {settings} {step}"] = {
                "loss": told.loss.item(), "norm": norm.item(), **told.metrics,
            }  # fmt: skip
    write_api(out, found)


def write_api(out: str, found: Record) -> None:
    Path(out).mkdir(parents=True, exist_ok=True)
    Path(out, "api.json").write_text(json.dumps(found))


ENGINES = ("vllm", "sglang", "trtllm", "speculators", "original", "llamacpp")
EXPORTS = {
    "medusa": "vllm trtllm original", "eagle1": "vllm sglang original",
    "eagle3": "vllm speculators llamacpp", "eagle3_1": "vllm sglang trtllm speculators",
    "peagle": "vllm speculators", "dflash": "vllm sglang speculators original llamacpp",
    "dflash2": "vllm sglang speculators original", "mtp": "vllm",
    "dspark": "vllm sglang speculators original llamacpp",
}  # fmt: skip
"""Engines by head; which others refuse it, `api_tensors` asks."""


def export(checkout: Checkout) -> None:
    """Exports of every head for every engine, pruned heads, and what a push would send."""
    head = "head.path={files}/train/%s/head target.path={in}/target"
    cells = {
        f"{name}-{engine}": f"scripts/export.py format={engine} {head % name} out_dir={{out}}"
        for name, engines in EXPORTS.items()
        for engine in engines.split()
    }
    half = f"scripts/export.py format=vllm {head % 'eagle3'} dtype=bfloat16 out_dir={{out}}"
    asked = "api_tensors {out} {in}/target {files}/train"
    checkout.run({"tensors": asked, **cells, "half": half})
    given = json.loads((checkout.files("tensors") / "api.json").read_text())
    for name in cells:
        for file in checkout.files(name).glob("model.safetensors"):
            checkout.record[f"{name}: as the function gives it"] = given[name] == dict(
                tensors(file)
            )
    push = (
        "scripts/push.py head.path={files}/train/eagle3_1/head repo_id=me/toy license=apache-2.0 "
        "base_model=me/target dry_run=true "
        "exports=[{files}/export/eagle3_1-vllm,{files}/export/eagle3_1-speculators] "
        "out_dir={out} layout="
    )
    made = [name for name in cells if (checkout.files(name) / "headsmith.json").exists()]
    checkout.run(
        {f"verify-{name}": f"scripts/verify_export.py {{files}}/export/{name}" for name in made}
        | {f"push-{layout}": push + layout for layout in ("one", "each")}
    )
    whole = "target.path={files}/export/mtp-stitch"
    trained = "target.path={in}/mimo head.path={files}/train/mtp-of-a-family/head"
    checkout.run({"mtp-stitch": f"scripts/mtp.py action=stitch {trained} out_dir={{out}}"})
    checkout.run(
        {
            "mtp-check": f"scripts/mtp.py action=check {whole}",
            "mtp-extract": f"scripts/mtp.py action=extract {whole} out_dir={{out}}",
        }
    )
    prune = (
        f"scripts/prune.py {head % 'eagle3'} data.path={{in}}/chats.jsonl data.max_length=128 "
        "data.num_proc=1 sizes=[64,256] ranks=[8] num_sequences=4 num_replay_prompts=2 "
        "max_new_tokens=12 out_dir={out}"
    )
    checkout.run({"prune": prune}, timed=True)


def api_tensors(api: Any, out: str, path: str, heads: str) -> None:
    """Tensors of every head for every engine, or why not."""
    from safetensors.torch import save_file

    target = api.load_target(path)
    found: Record = {}
    for name in HEADS:
        head = api.load_head(f"{heads}/{name}/head", target)
        for engine in ENGINES:
            try:
                named = api.engine_tensors(head, engine)
            except api.InputError as error:
                found[f"{name}-{engine}"] = str(error)
                continue
            file = Path(out, "tensors")
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file({each: tensor.clone() for each, tensor in named.items()}, file)
            found[f"{name}-{engine}"] = dict(tensors(file))
            file.unlink()
    write_api(out, found)


def helps(checkout: Checkout) -> None:
    """The pages of `--help`, in words, and the settings of every command and recipe."""
    recipes = ("eagle1", "eagle3", "eagle3_1", "hass")
    checkout.run(
        {f"help {name}": f"{name} --help" for name in COMMANDS + OTHER_COMMANDS}
        | {f"settings {name}": f"{name} --cfg job" for name in COMMANDS}
        | {f"recipe {name}": f"train/eagle.py head={name} --cfg job" for name in recipes}
        | {
            "help of a setting": "train/eagle.py --help train.compile",
            "help of a section": "eval/speedup.py --help suffix",
            "help of values": "train/eagle.py head=hass seed=3 --help head.top_k_weight seed",
        }
    )
    for key, text in checkout.record.items():
        if key.startswith("help "):  # where lines end depends on the lengths of names
            checkout.record[key] = "\n".join(" ".join(str(text).split()).split(". "))


ROWS = json.loads((Path(__file__).parent / "compared_rows.json").read_text())
BAD_ROWS: dict[str, list[Any]] = ROWS["bad"]
"""Data that are refused, by the name of the file."""
FORMS: dict[str, list[Any]] = ROWS["forms"]
"""Rows of every form."""
REFUSED = (Path(__file__).parent / "compared_refusals.txt").read_text().splitlines()
"""Command lines. `{on}` names target and data, `{asked}` those to measure with; an `out_dir` is
added where none is named."""


def refusals(checkout: Checkout) -> None:
    """Messages and exit status of wrong command lines, broken heads and malformed rows."""
    break_heads(checkout.folder / "files/train", checkout.folder / "files/broken")
    asked = "target.path={in}/target data.path={in}/prompts.jsonl"
    lines = {line: line.replace("{on}", ON).replace("{asked}", asked) for line in REFUSED}
    for name in BAD_ROWS:
        on = f"target.path={{in}}/target data.path={{in}}/bad/{name}.jsonl data.num_proc=1"
        lines |= {f"show {name}": f"scripts/show_mask.py {on}"}
        lines |= {f"train {name}": f"train/medusa.py {on}"}
        on = on.removesuffix(" data.num_proc=1")
        lines |= {f"measure {name}": f"eval/speedup.py {on} methods=[ngram] max_new_tokens=2"}
    bare = ("out_dir=", "verify_export", "relay", "show_mask")
    checkout.run(
        {
            name: line if any(word in line for word in bare) else f"{line} out_dir={{out}}"
            for name, line in lines.items()
        }
    )


def break_heads(trained: Path, broken: Path) -> None:
    """Folders of an EAGLE-3 head, each with something wrong."""
    shutil.rmtree(broken, ignore_errors=True)
    for name in ("no-config", "no-tensor", "shape", "pickled", "other-target"):
        shutil.copytree(trained / "eagle3/head", broken / name)
    (broken / "no-config/config.json").unlink()
    file = broken / "no-tensor/model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"fc.weight"', b'"fc.weighs"'))
    file = broken / "shape/model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    (broken / "pickled/model.safetensors").rename(broken / "pickled/pytorch_model.bin")
    config = broken / "other-target/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 77}))


PROMPTS = "target.path={in}/target data.path={in}/prompts.jsonl num_turns=1 max_new_tokens=12"
ALL_HEADS = (*HEADS, "hass")
MEASURED = {
    "one": "data.num_prompts=2",
    "three": "data.num_prompts=3 batch_size=3",
    "sampled": "data.num_prompts=2 temperature=0.8 top_p=0.9 seed=3",
    "low-rank": "data.num_prompts=2 output_rank=8 methods=[eagle_tree,medusa_tree,dflash_chain]",
}


def evaluate(checkout: Checkout) -> None:
    """Acceptance, replayed and decoded, and what every way to draft writes, in all figures."""
    conditions = '["mode=replay","mode=decode"]'
    checkout.run(
        {
            name: f"eval/acceptance.py head.path={{files}}/train/{name}/head {PROMPTS} "
            f"data.num_prompts=2 'conditions={conditions}' out_dir={{out}}"
            for name in ALL_HEADS
        }
        | {"answers": "api_answers {out} {in}/target {files}/train"}
    )
    heads = ",".join(f"{{files}}/train/{name}/head" for name in HEADS)
    checkout.run(
        {
            name: f"eval/speedup.py {PROMPTS} heads=[{heads}] draft.path={{in}}/draft "
            f"self_draft.skip=[2] num_warmups=0 num_repeats=1 {more} out_dir={{out}}"
            for name, more in MEASURED.items()
        },
        timed=True,
    )
    for name in ("medusa", "eagle3_1"):  # the command writes beside the head
        head = checkout.files(f"{name}-head")
        shutil.copytree(checkout.files(f"{name}", "train") / "head", head, dirs_exist_ok=True)
        on = f"head.path={head} {PROMPTS} data.num_prompts=4 num_repeats=1 out_dir={{out}}"
        search = "max_nodes=8 top_ks=[1,2] batch_sizes=[1,2] curve={in}/curve.json"
        checkout.run({f"search-{name}": f"eval/tree_search.py {on} {search}"}, timed=True)


def api_answers(api: Any, out: str, path: str, heads: str) -> None:
    """Texts with every head, greedy and sampled, and what they accept."""
    target = api.load_target(path)
    found: Record = {}
    for name in ALL_HEADS:
        head = api.load_head(f"{heads}/{name}/head", target)
        for warmth in (0.0, 0.8):
            told = api.generate(target, head, "def f(x):", 24, warmth, 5)
            found[f"{name} {warmth}"] = [told.text, told.tau, *told.token_ids]
        told = api.generate(target, None, "def f(x):", 24)
        known = api.acceptance(target, head, told.prompt_ids, told.token_ids, depth=3)
        found[f"{name} replayed"] = [known.tau, *known.alpha]
    write_api(out, found)


def data(checkout: Checkout) -> None:
    """Token ids and masks of every form of rows, packed and stored; hidden states of a target."""
    on = "target.path={in}/target data.num_proc=1 data.max_length=64 data.path={in}/"
    packed = "data.eval_fraction=0.4 data.prepared_dir={out}/prepared num_replay_prompts=1"
    packed += " layers=[] out_dir={out}/store"
    forms = {name: f"forms/{name}.jsonl data.form={name}" for name in FORMS}
    checkout.run(
        {f"mask-{name}": f"scripts/show_mask.py {on}{file}" for name, file in forms.items()}
    )
    checkout.run(
        {
            f"packed-{name}": f"scripts/capture.py {on}{file} {packed}"
            for name, file in forms.items()
            if name != "turns"
        }
    )
    rows = "chats.jsonl data.num_prompts=12 num_replay_prompts=2 out_dir={out}"
    stores = {
        "bf16": "", "int8": "format=int8", "fp8": "format=fp8", "top_k": "teacher=top_k top_k=8",
    }  # fmt: skip
    checkout.run(
        {f"store-{name}": f"scripts/capture.py {on}{rows} {more}" for name, more in stores.items()}
    )
    checkout.run(
        {
            "stored": f"train/eagle.py data.features={{files}}/data/store-int8 {STEPS} "
            "out_dir={out}",
            "answers": "scripts/regenerate.py target.path={in}/target "
            "data.path={in}/forms/messages.jsonl max_new_tokens=8 out_dir={out}",
        }
    )


def carry(checkout: Checkout) -> None:
    """Runs, heads, exports and stored states that BASE wrote, gone on with and read."""
    lines = HEADS | {"medusa2": CONTINUED["medusa2"], "average": CONTINUED["average"]}
    resumed = {
        name: f"{line} {ON} {STEPS} train.resume={{base}}/train/{name}/checkpoints/step-000002 "
        "out_dir={out}"
        for name, line in lines.items()
    }
    checkout.run({name: line.replace("{files}", "{base}") for name, line in resumed.items()})
    for name in lines:
        ours, theirs = (
            dict(written(folder / "head", checkout.names))
            for folder in (checkout.files(name), checkout.base.files(name, "train"))
        )
        same = [ours[key] == told for key, told in theirs.items() if ".safetensors" in key]
        checkout.record[f"{name}: as without a stop"] = all(same) and len(same)
    out = "out_dir={out}"
    measure = f"{PROMPTS} data.num_prompts=2 {out}"
    checkout.run(
        {
            f"measured-{name}": f"eval/acceptance.py head.path={{base}}/{path} {measure}"
            for name, path in {
                **{name: f"train/{name}/head" for name in HEADS},
                "vllm": "export/eagle3-vllm", "gguf": "export/eagle3-llamacpp",
                "speculators": "export/dspark-speculators", "trtllm": "export/medusa-trtllm",
                "pruned": "export/prune/64/head",
            }.items()
        }
        | {
            f"verified-{name}": f"scripts/verify_export.py {{base}}/export/{name}"
            for name in ("medusa-trtllm", "eagle3-llamacpp", "dflash-sglang", "peagle-vllm")
        }
        | {"stored": f"train/eagle.py data.features={{base}}/data/store-int8 {STEPS} {out}"}
    )  # fmt: skip


TASKS: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (api_targets, api_steps, api_tensors, api_answers)
}
ROOMS: dict[str, Callable[[Checkout], None]] = {
    "train": train, "eval": evaluate, "data": data, "export": export, "help": helps,
    "refusals": refusals, "carry": carry,
}  # fmt: skip
NEEDS = {"eval": ["train"], "export": ["train"], "refusals": ["train"],
         "carry": ["train", "data", "export"]}  # fmt: skip
"""Rooms whose files a room reads; of `carry`, BASE's."""


# Records, and their differences.


def identity() -> str:
    """Of this tool, the machine's processor and its libraries."""
    cpu = Path("/proc/cpuinfo")
    found = re.search(r"^model name.*$", cpu.read_text(), re.M) if cpu.exists() else None
    told = [found[0] if found else platform.processor(), sys.version, Path(__file__).read_text()]
    told += [*REFUSED, str(ROWS), *COMMANDS]
    told += map(version, ("torch", "transformers"))
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:8]


def opened(path: Path, out: Path, jobs: int, again: bool) -> Checkout:
    """A checkout; what is not a clean commit, or is to run again, has no records yet."""
    path = path.resolve()
    commit, status = (
        subprocess.run(["git", *words], cwd=path, check=True, capture_output=True, text=True).stdout
        for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
    )
    suffix = "again" if again else "dirty" if status else "clean"
    folder = out / f"{commit[:12]}-{suffix}-{identity()}"
    if suffix != "clean":
        shutil.rmtree(folder, ignore_errors=True)
    (folder / "home").mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    return Checkout(path, folder, out / f"inputs-{identity()}", jobs)


def recorded(checkout: Checkout, room: str) -> Record:
    """A room's values by key, of an earlier start or of now."""
    for needed in NEEDS.get(room, []):
        recorded(checkout.base if room == "carry" else checkout, needed)
    name = f"carry of {checkout.base.folder.name}" if room == "carry" else room
    file = checkout.folder / f"{name}.json"
    if not file.exists():
        say(f"{room} of {checkout.path}")
        started = monotonic()
        checkout.room, checkout.record = room, {}
        ROOMS[room](checkout)
        text = json.dumps(checkout.record, indent=1, sort_keys=True)
        file.with_suffix(".tmp").write_text(text)
        file.with_suffix(".tmp").replace(file)
        say(f"{room} of {checkout.path}: {monotonic() - started:.0f} s")
    return json.loads(file.read_text())


LACKING = "(lacking)"


def shown(base: Any, head: Any) -> str:
    """Two values that differ; of texts the lines that do."""
    if isinstance(base, str) and isinstance(head, str) and "\n" in base + head:
        lines = list(difflib.unified_diff(base.splitlines(), head.splitlines(), lineterm="", n=0))
        return "\n".join(f"    {line[:200]}" for line in lines[2:10] if line[:2] != "@@")
    return f"    - {str(base)[:200]}\n    + {str(head)[:200]}"


def compared(room: str, base: Record, head: Record) -> int:
    """Prints how two records differ; the number of differences."""
    keys = [*base, *(key for key in head if key not in base)]
    pairs = {key: (base.get(key, LACKING), head.get(key, LACKING)) for key in keys}
    differing = [key for key, (ours, theirs) in pairs.items() if ours != theirs]
    print(f"{room}: {len(keys)} values, {len(differing)} differ")
    for key in differing[:NUM_SHOWN]:
        print(f"  {key}\n{shown(*pairs[key])}")
    if len(differing) > NUM_SHOWN:
        print(f"  and {len(differing) - NUM_SHOWN} more")
    return len(differing)


def main() -> int:
    """1 if any value differs; in a fork, one of `TASKS` with the functions of its folder."""
    if sys.argv[1:] and sys.argv[1] in TASKS:
        sys.path.insert(0, str(Path.cwd()))
        TASKS[sys.argv[1]](public(str(Path.cwd())), *sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("base", type=Path, help="a checkout")
    parser.add_argument("head", type=Path, help="another, or the same")
    parser.add_argument("--only", nargs="+", choices=ROOMS, default=list(ROOMS), metavar="ROOM",
                        help=f"of {', '.join(ROOMS)}")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("outputs/compared"), help="for all files")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1),
                        help="commands at a time")  # fmt: skip
    given = parser.parse_args()
    os.environ.update(SHARED_ENV)  # the server of forks reads it when it loads its libraries
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    base = opened(given.base, out, given.jobs, again=False)
    head = opened(given.head, out, given.jobs, again=False)
    if base.folder == head.folder:
        head = opened(given.head, out, given.jobs, again=True)
    head.base = base
    for old in sorted(out.glob("*-*-*"), key=lambda each: each.stat().st_mtime)[:-NUM_KEPT]:
        shutil.rmtree(old)
    make_inputs(base)
    found = {room: [recorded(each, room) for each in (base, head)] for room in given.only}
    return int(sum([compared(room, *records) for room, records in found.items()]) > 0)


if __name__ == "__main__":
    sys.exit(main())
