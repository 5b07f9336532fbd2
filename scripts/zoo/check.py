"""Finds the architectures of transformers that work: makes each tiny, and tests all features.

`python scripts/zoo/check.py [model_types=[llama,qwen3_next]]` makes a random target of every model
type, compares decoding with `generate`, trains heads and replays them, and writes the table
`targets.md` and `targets.json`. A second start continues; to check a model type again, delete its
file in `out_dir/found`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.entry import Command
from conf.settings.scripts import TargetsRun

COMMAND = Command(__doc__, TargetsRun, "check")
if __name__ == "__main__":
    COMMAND.parse_command_line()

import json
import multiprocessing
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from conf.command.forms import PACKAGE
from conf.errors import InputError
from conf.files import make_folder, write_atomically
from conf.settings.eagle import EagleConfig
from conf.settings.medusa import MedusaConfig
from conf.settings.target import TargetConfig
from data.prepared.packing import PackedDataset
from data.templates.record_encoder import Sample
from eval.decode.drafters.oracle import Oracle
from eval.decode.engine import Generation, count_common_prefix, decode_batch
from eval.decode.generation_config import StopRules
from eval.decode.hf_generate import hf_generate
from eval.measure.acceptance_stats import PromptSteps, tau
from eval.measure.replay import replay_response
from eval.measure.results import build_markdown_table
from heads.decoding.drafting import Draft, Drafter, Roots
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import DynamicShape, Tree
from heads.devices import to_device
from heads.eagle.eagle import EagleHead
from heads.eagle.network import EagleDrafter
from heads.medusa import MedusaDrafter, MedusaHead
from heads.target_model.load import load_config, load_model, load_target
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts.embedded.make import SPECIAL_TOKENS
from scripts.zoo.tiny_targets import (
    MADE_FILE,
    NO_TARGET,
    NUM_TOKENS,
    PAD,
    list_model_types,
    make_tiny_target,
)
from train.batch.data_loader import stack_sequences
from train.eagle import EagleObjective
from train.medusa import MedusaObjective
from train.objective import Objective

CPU = torch.device("cpu")
PROCESSES = multiprocessing.get_context("forkserver")
PROMPT_LENGTHS = (40, 53, 61, 70)
NUM_NEW = 48
NUM_UPDATES = 16
"""Updates of a head. After three, drafts are never right yet, and replay would prove nothing."""
RATE = 0.6
"""Share of right tokens in drafts that are the text itself with errors."""
TIE = 1e-4
"""Margin between the two likeliest logits below which float32 may choose either."""
CHAIN = Tree.make_chain(4)
TREE = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0, 0]])
MEDUSA_TREE = Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
SHAPES = (
    TREE,
    Tree.from_paths(
        [[0], [0, 0], [0, 1], [0, 2], [0, 0, 0], [0, 1, 0], [0, 1, 1], [0, 1, 0, 0], [1]]
    ),
    Tree.from_paths([[rank] for rank in range(5)] + [[rank, 0] for rank in range(4)]),
)
"""Trees with equal numbers of nodes, for texts whose trees differ."""

YES = "yes"
COLUMNS = ("loads", "check", "chain", "tree", "batch", "medusa", "eagle", "replay")
HEADINGS = {
    "medusa": "Medusa", "eagle": "EAGLE-3.1", "replay": "replay = decode",
}  # fmt: skip
STATES = ("works", "works with chains", "refused", "differs", "fails", "not made")

Results = dict[str, dict[str, Any]]
"""Result of a check, by model type."""


def main(config: TargetsRun) -> None:
    """Check the model types, print how many work, and write `targets.md` and `targets.json`.

    Raises:
        InputError: transformers has no such causal or image-text-to-text model.
    """
    known, out_dir = list_model_types(), Path(config.out_dir)
    for name in config.model_types:
        if name not in known:
            raise InputError(f"model_types: {name} is unknown; allowed: {known}")
    names = config.model_types or known
    make_folder(out_dir / "found")
    targets = [name for name in names if name not in NO_TARGET]
    left = [name for name in targets if not get_result_path(out_dir, name).is_file()]
    # Most of what this module imports. Python warns of a main module that is there already.
    preload = ("scripts.zoo.tiny_targets", "eval.measure.replay", "train.eagle")
    PROCESSES.set_forkserver_preload([f"{PACKAGE}{module}" for module in preload])
    with tqdm(left, unit="model type") as bar:
        for name in bar:
            bar.set_postfix_str(name)
            check_in_process(out_dir, name, config.timeout)
    results = {name: json.loads(get_result_path(out_dir, name).read_text()) for name in targets}
    left_out = {name: NO_TARGET[name] for name in names if name in NO_TARGET}
    content = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "counts": count_states(results),
        "found": {
            name: {key: value for key, value in result.items() if key != "traceback"}
            for name, result in results.items()
        },
        "no_target": left_out,
    }
    write_atomically(out_dir / "targets.json", json.dumps(content, indent=1) + "\n")
    write_atomically(out_dir / "targets.md", build_table(results, left_out))
    print(format_counts(results))
    print(f"wrote {out_dir / 'targets.md'} and {out_dir / 'targets.json'}")


def get_result_path(out_dir: Path, name: str) -> Path:
    """Return the file with the result of one model type."""
    return out_dir / "found" / f"{name}.json"


def check_in_process(out_dir: Path, name: str, timeout: float) -> None:
    """Check a model type in a separate process, which may crash or hang."""
    log = out_dir / "found" / f"{name}.log"
    process = PROCESSES.Process(target=check_one, args=(name, out_dir, log))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        why = f"took more than {timeout:g} s"
    elif not get_result_path(out_dir, name).is_file():
        why = f"its process ended with code {process.exitcode}"
    else:
        log.unlink(missing_ok=True)
        return
    result = {"state": "fails", "columns": {"loads": f"FAILED: {why}"}}
    write_atomically(get_result_path(out_dir, name), json.dumps(result, indent=1) + "\n")


def check_one(name: str, out_dir: Path, log: Path) -> None:
    """Make a target, check it and write the result, in a separate process."""
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # matrices this small take longer with more
    try:
        folder = make_tiny_target(name, out_dir / "made")
    except Exception as error:  # noqa: BLE001 any error of transformers
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        result = {"state": "not made", "why": why, "traceback": traceback.format_exc()}
    else:
        result = {**check_target(folder), "made": json.loads((folder / MADE_FILE).read_text())}
    write_atomically(get_result_path(out_dir, name), json.dumps(result, indent=1) + "\n")


def check_target(folder: Path, heads: bool = True) -> dict[str, Any]:
    """Run all checks of one tiny target.

    Args:
        folder: folder from `make_tiny_target`.
        heads: whether to train and replay some heads as well.

    Returns:
        Contents of the result file: the fields of `Findings`, and `state`.
    """
    findings = Findings(str(folder))
    config = TargetConfig(path=str(folder))
    with findings.open_column("loads"):
        load_model(config, load_config(config), torch.float32, CPU)
    if findings.has_passed("loads"):
        with findings.open_column("check"):
            target = load_target(config, CPU)
        if findings.has_passed("check"):
            _Checks(target, findings).run_columns(heads)
    facts = {name: value for name, value in asdict(findings).items() if name != "folder"}
    return {"state": findings.state, **facts}


@dataclass
class Findings:
    """Hold the result of each check of one architecture.

    Attributes:
        folder: folder of the target, which errors name but the table does not.
        columns: `yes`, `refused: ...`, `differs: ...` or `FAILED: ...` by name; checks that were
            not reached are missing.
        attention: attention of the target, as its config names it.
        tau: tau of the replayed chain, by head.
        traceback: traceback of the first failure.
    """

    folder: str
    columns: dict[str, str] = field(default_factory=dict)
    attention: str = ""
    tau: dict[str, float] = field(default_factory=dict)
    traceback: str = ""

    @property
    def state(self) -> str:
        """Return `works`, `works with chains`, `refused`, `differs` or `fails`."""
        values = {name: text.split(":")[0] for name, text in self.columns.items()}
        for word, state in (("FAILED", "fails"), ("differs", "differs")):
            if word in values.values():
                return state
        if {**values, "tree": YES} == dict.fromkeys(COLUMNS, YES):
            return "works" if self.has_passed("tree") else "works with chains"
        return "refused"

    @contextmanager
    def open_column(self, name: str) -> Iterator[None]:
        """Run one check; its column gets any error that the check raises."""
        try:
            yield
            self.columns.setdefault(name, YES)
        except InputError as error:
            self.columns[name] = f"refused: {_format_error_line(error, self.folder)}"
        except Differs as error:
            self.columns[name] = f"differs: {error}"
        except Exception as error:  # noqa: BLE001 every error is a result
            self.columns[name] = (
                f"FAILED: {type(error).__name__}: {_format_error_line(error, self.folder)}"
            )
            self.traceback = self.traceback or traceback.format_exc()

    def has_passed(self, name: str) -> bool:
        """Tell whether a check has passed."""
        return self.columns.get(name) == YES


class Differs(Exception):  # noqa: N818 a measured result, not an error of ours
    """Texts or steps differ from the expected ones."""


def _format_error_line(error: BaseException, folder: str) -> str:
    """Format an error on one line, without the path of the target."""
    return " ".join(str(error).replace(folder, Path(folder).name).split())[:300]


class _Checks:
    """Check a target that loads, on its prompts and the texts that `generate` gives after them."""

    def __init__(self, target: Target, findings: Findings) -> None:
        self.target, self.findings = target, findings
        findings.attention = f"{target.config._attn_implementation}: {target.attention_description}"
        generator = torch.Generator().manual_seed(0)
        self.prompts = [
            torch.randint(len(SPECIAL_TOKENS), NUM_TOKENS, (n,), generator=generator).tolist()
            for n in PROMPT_LENGTHS
        ]
        self.texts: list[list[int]] = []

    def run_columns(self, heads: bool) -> None:
        """Run every column after the check."""
        with self.findings.open_column("loads"):
            self._stop_at([])
            # One text after another, as `generate` must not see padding.
            self.texts = [
                hf_generate(self.target, [prompt], NUM_NEW, GREEDY, 0)[0].token_ids
                for prompt in self.prompts
            ]
            self._check_saved_model()
        if not self.texts:
            return
        with self.findings.open_column("chain"):
            self._check_lossless(Oracle, CHAIN, 1)
        with self.findings.open_column("tree"):
            # With several texts: a target that sees one token too many usually still gives the same
            # ones.
            self._check_lossless(Oracle, TREE, len(self.prompts))
            self._check_lossless(VaryingTreeOracle, TREE, 1)
        with self.findings.open_column("batch"):
            # Texts end at different places, after a third and two thirds.
            self._stop_at([self.texts[n][n * len(self.texts[n]) // 3] for n in (1, 2)])
            self._check_lossless(Oracle, CHAIN, len(self.prompts))
            if self.findings.has_passed("tree"):
                self._check_lossless(VaryingTreeOracle, TREE, len(self.prompts))
        self._stop_at([])
        if not heads:
            return
        for name, trained in (("medusa", self._check_medusa), ("eagle", self._check_eagle)):
            with self.findings.open_column(name):
                trained()

    def _stop_at(self, ids: list[int]) -> None:
        self.target.generation_config.eos_token_id = ids
        self.target.model.generation_config.eos_token_id = ids

    def _check_saved_model(self) -> None:
        """Check that the complete model, loaded by transformers itself, gives the same text."""
        made = json.loads((Path(self.findings.folder) / MADE_FILE).read_text())
        model = getattr(transformers, made["class"]).from_pretrained(self.findings.folder).eval()
        ids = torch.tensor(self.prompts[:1])
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False,
            eos_token_id=self.target.stop_ids or None, pad_token_id=PAD,
        )  # fmt: skip
        whole = StopRules.from_target(self.target).cut_after_end(
            [], text[0, ids.shape[1] :].tolist()
        )
        self._check_texts([Generation(whole)])

    def _check_lossless(self, kind: type[Oracle], tree: Tree, num_texts: int) -> None:
        """Check drafts of which RATE are right, for the first `num_texts` prompts together."""
        drafter = kind(self.texts[:num_texts], tree, RATE, self.target.vocab_size)
        self._check_texts(self._decode_texts(drafter, num_texts))

    def _decode_texts(self, drafter: Drafter, num_texts: int = 1) -> list[Generation]:
        return decode_batch(self.target, drafter, self.prompts[:num_texts], NUM_NEW)

    @torch.no_grad()
    def _check_texts(self, texts: list[Generation]) -> None:
        stops = StopRules.from_target(self.target)
        wrong = []
        for prompt, text, generation in zip(self.prompts, self.texts, texts, strict=False):
            expected = stops.cut_after_end([], text)
            if generation.token_ids == expected:
                continue
            place = count_common_prefix(generation.token_ids, expected)
            ids = torch.tensor([prompt + expected[:place]])
            logits = self.target.model(input_ids=ids, use_cache=False).logits[0, -1].float()
            margin = -logits.topk(2).values.diff().item()
            if margin >= TIE:
                wrong.append(f"from token {place} of {len(expected)}, margin there {margin:.2g}")
        if wrong:
            raise Differs(f"{len(wrong)} of {len(texts)} texts, the first {wrong[0]}")

    def _check_medusa(self) -> None:
        head = MedusaHead.from_target(self.target, 3, 1)
        _train_head(
            MedusaObjective(head, self.target, MedusaConfig(num_heads=3)), self._build_data()
        )
        for tree in (Tree.make_chain(3), MEDUSA_TREE)[: 1 + self.findings.has_passed("tree")]:
            self._check_replay("medusa", head, tree, MedusaDrafter(head, tree))

    def _check_eagle(self) -> None:
        config = EagleConfig(fc_norm=True, norm_output=True, draft_vocab_size=200)
        counts = self._build_data().count_token_ids(self.target.vocab_size)
        vocab = DraftVocab.from_counts(counts, config.draft_vocab_size, self.target.special_ids)
        head = EagleHead.from_settings(self.target, config, vocab, seed=0)
        _train_head(EagleObjective(head, self.target, config), self._build_data())
        self._check_replay("eagle", head, CHAIN, EagleDrafter(head, CHAIN.depth))
        if self.findings.has_passed("tree"):
            self._check_texts(self._decode_texts(EagleDrafter(head, DynamicShape(4, 3, 8)), 2))

    def _build_data(self) -> PackedDataset:
        """Build packed sequences of the target's own texts."""
        samples = [
            Sample(prompt + text, [False] * len(prompt) + [True] * len(text))
            for prompt, text in zip(self.prompts, self.texts, strict=True)
        ]
        return PackedDataset(samples, 256, seed=0)

    def _check_replay(self, name: str, head: Any, tree: Tree, drafter: Drafter) -> None:
        """Check that decoding is lossless, and that its steps equal those of replay."""
        decoded = self._decode_texts(drafter)
        self._check_texts(decoded)
        with self.findings.open_column("replay"):
            replayed = replay_response(self.target, head, tree, self.prompts[0], self.texts[0])
            self.findings.tau.setdefault(name, round(tau([PromptSteps("all", replayed)]), 3))
            if replayed != (steps := decoded[0].steps):
                lengths = ([step.num_accepted for step in each] for each in (replayed, steps))
                place = count_common_prefix(*lengths)
                raise Differs(f"{name}, from pass {place} of {len(replayed)}")


def _train_head(objective: Objective, data: PackedDataset) -> None:
    """Train a head for a few updates on one batch.

    Raises:
        RuntimeError: the loss is not finite.
    """
    objective.train()
    batch = objective.index_training_batch(stack_sequences(data, [*range(len(data))]))
    scale: Tensor = objective.term_weights / objective.compute_divisors(batch).clamp_min(1)
    batch = objective.prepare_batch(batch)
    parameters = [each for each in objective.head.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(parameters, 1e-2)
    for _ in range(NUM_UPDATES):
        optimizer.zero_grad()
        loss = objective(batch, scale).total
        if not loss.isfinite():
            raise RuntimeError(f"the loss is {loss.item()}")
        loss.backward()
        optimizer.step()
    objective.head.eval()


class VaryingTreeOracle(Oracle):
    """Draft trees of another shape for every text and place, like dynamic trees."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Every text has another number of nodes.
        self.num_static_nodes = None

    def propose(self, roots: Roots) -> Draft:
        """Draft a tree of one of SHAPES for each text."""
        assert self.places is not None
        rows, parents, device = [], [], roots.tokens.device
        for (number, text), place in zip(self.texts, self.places.tolist(), strict=True):
            self.tree = SHAPES[(number + place) % len(SHAPES)]
            rows.append(self._draw_tree_tokens(number, text, place))
            parents.append(list(self.tree.parents[1:]))
        depth = max(shape.depth for shape in SHAPES)
        return Draft(to_device(parents, device), to_device(rows, device), depth)


def build_table(results: Results, left_out: dict[str, str]) -> str:
    """Build Markdown: a row per model type, reasons for failures, and types that are no targets."""
    names = [HEADINGS.get(name, name) for name in COLUMNS]
    rows = [build_row(name, each) for name, each in results.items() if each["state"] != "not made"]
    parts = [
        "# Targets",
        f"{format_counts(results)}. Written by `scripts/zoo/check.py`; each is a random model of 4 "
        "layers, hidden size 64, vocabulary 320. Texts of 48 tokens after prompts of 40 to 70, "
        "beyond windows of 12, chunks of 8 and RoPE switches at 64, are compared with `generate`.",
        build_markdown_table([("model type", *names, "attention", "how made"), *rows]),
    ]
    reasons = {name: format_reason(result) for name, result in results.items()}
    for title, pairs in (("Why not", reasons), ("No targets", left_out)):
        lines = [(name, why.replace("|", "/")) for name, why in pairs.items() if why]
        if lines:
            parts += [f"## {title}", build_markdown_table([("model type", "reason"), *lines])]
    return "\n\n".join(parts) + "\n"


def build_row(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    """Build a row of the table."""
    cells = [result["columns"].get(column, "").split(":")[0] for column in COLUMNS]
    for head, accepted in result.get("tau", {}).items():
        cells[COLUMNS.index(head)] += f", tau {accepted:.2f}"
    attention = result.get("attention", "").split(":")[0]
    how = []
    if made := result.get("made"):
        by_hand = (
            ", ".join(f"{key}={value}" for key, value in settings.items()).replace("|", "/")
            for settings in made["by_hand"].values()
        )
        how = [f"{made['class']}, {made['layers']}", *by_hand]
    return name, *cells, attention, "; ".join(how)


def format_reason(result: dict[str, Any]) -> str:
    """Tell why a model type was not made, or list the checks that it failed."""
    if "why" in result:
        return f"not made: {result['why']}"
    reasons = [
        f"{HEADINGS.get(name, name)}: {result['columns'][name]}"
        for name in COLUMNS
        if result["columns"].get(name, "yes") != "yes"
    ]
    return "; ".join(dict.fromkeys(reasons))


def format_counts(results: Results) -> str:
    """Summarise on one line how many work, are refused and so on."""
    parts = ", ".join(f"{number} {state}" for state, number in count_states(results).items())
    return f"{len(results)} model types of transformers {transformers.__version__}: {parts}"


def count_states(results: Results) -> dict[str, int]:
    """Count the model types in each state."""
    numbers = Counter(result["state"] for result in results.values())
    return {state: numbers[state] for state in STATES if numbers[state]}


if __name__ == "__main__":
    COMMAND.run(main)
