"""Checks all features on one tiny target, and compares its texts with `generate`."""

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from conf.errors import InputError
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
from heads.decoding.drafting import Draft, Drafter, Roots
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import DynamicShape, Tree
from heads.devices import to_device
from heads.eagle.drafter import EagleChain, EagleTree
from heads.eagle.eagle import EagleHead
from heads.medusa import MedusaDrafter, MedusaHead
from heads.target_model.load import load_config_and_tokenizer, load_model, load_target
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts.embedded.corpus import SPECIAL_TOKENS
from scripts.zoo.tiny import MADE_FILE, NUM_TOKENS, PAD
from train.eagle import EagleObjective
from train.medusa import MedusaObjective
from train.objective import Objective

CPU = torch.device("cpu")
PROMPT_LENGTHS = (40, 53, 61, 70)
NUM_NEW = 48
NUM_UPDATES = 16
"""Three show that training runs, but leave drafts that are never right, which makes replay easy."""
RATE = 0.6
"""Acceptance of drafts that are the text itself with errors."""
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


@dataclass
class Findings:
    """Result of each check of one architecture.

    Attributes:
        folder: folder of the target, which errors name but the table does not.
        columns: `yes`, `refused: ...`, `differs: ...` or `FAILED: ...` by name; checks that were
            not reached are missing.
        attention: attention of the target, as its config names it.
        tau: of each head's chain, replayed.
        traceback: traceback of the first failure.
    """

    folder: str
    columns: dict[str, str] = field(default_factory=dict)
    attention: str = ""
    tau: dict[str, float] = field(default_factory=dict)
    traceback: str = ""

    @property
    def state(self) -> str:
        """`works`, `works with chains`, `refused`, `differs` or `fails`."""
        values = {name: text.split(":")[0] for name, text in self.columns.items()}
        for word, state in (("FAILED", "fails"), ("differs", "differs")):
            if word in values.values():
                return state
        if {**values, "tree": YES} == dict.fromkeys(COLUMNS, YES):
            return "works" if self.has_passed("tree") else "works with chains"
        return "refused"

    @contextmanager
    def open_column(self, name: str) -> Iterator[None]:
        """Run one check; its column gets any error that it raises."""
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
        """True for a check that passed."""
        return self.columns.get(name) == YES


class Differs(Exception):  # noqa: N818 a measured result, not an error of ours
    """Texts or steps differ from the expected ones."""


def check_target(folder: Path, heads: bool = True) -> dict[str, Any]:
    """Run all checks of one tiny target.

    Args:
        folder: folder from `scripts.zoo.tiny.tiny_target`.
        heads: also train and replay some heads.

    Returns:
        JSON content: `Findings` and their state.
    """
    findings = Findings(str(folder))
    config = TargetConfig(path=str(folder))
    with findings.open_column("loads"):
        load_model(config, load_config_and_tokenizer(config)[0], torch.float32, CPU)
    if findings.has_passed("loads"):
        with findings.open_column("check"):
            target = load_target(config, CPU)
        if findings.has_passed("check"):
            _Checks(target, findings).run_columns(heads)
    kept = {name: value for name, value in asdict(findings).items() if name != "folder"}
    return {"state": findings.state, **kept}


class _Checks:
    """A target that loads, its prompts, and the texts that `generate` gives after them."""

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
            self.texts = self._generate_texts()
            self._same_as_saved()
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

    def _same_as_saved(self) -> None:
        """Check that the complete model, loaded by transformers itself, gives the same text."""
        made = json.loads((Path(self.findings.folder) / MADE_FILE).read_text())
        if made["left_out"]:
            return
        model = getattr(transformers, made["class"]).from_pretrained(self.findings.folder).eval()
        ids = torch.tensor(self.prompts[:1])
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False,
            eos_token_id=self.target.stop_ids or None, pad_token_id=PAD,
        )  # fmt: skip
        whole = StopRules.from_target(self.target).cut_after_end(
            [], text[0, ids.shape[1] :].tolist()
        )
        self._same_texts([Generation(whole)])

    def _generate_texts(self) -> list[list[int]]:
        """Generate one text after another, as `generate` must not see padding."""
        return [
            hf_generate(self.target, [prompt], NUM_NEW, GREEDY, 0)[0].token_ids
            for prompt in self.prompts
        ]

    def _check_lossless(self, kind: type[Oracle], tree: Tree, num_texts: int) -> None:
        """Check drafts that are right at RATE, for the first prompts together."""
        drafter = kind(self.texts[:num_texts], tree, RATE, self.target.vocab_size)
        self._same_texts(self._decode_texts(drafter, num_texts))

    def _decode_texts(self, drafter: Drafter, num_texts: int = 1) -> list[Generation]:
        return decode_batch(self.target, drafter, self.prompts[:num_texts], NUM_NEW)

    def _same_texts(self, texts: list[Generation]) -> None:
        stops = StopRules.from_target(self.target)
        wrong = []
        for prompt, whole, one in zip(self.prompts, self.texts, texts, strict=False):
            expected = stops.cut_after_end([], whole)
            if one.token_ids == expected:
                continue
            place = count_common_prefix(one.token_ids, expected)
            margin = self._compute_margin(prompt + expected[:place])
            if margin >= TIE:
                wrong.append(f"from token {place} of {len(expected)}, margin there {margin:.2g}")
        if wrong:
            raise Differs(f"{len(wrong)} of {len(texts)} texts, the first {wrong[0]}")

    @torch.no_grad()
    def _compute_margin(self, ids: list[int]) -> float:
        logits = self.target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        first, second = logits.float().topk(2).values.tolist()
        return first - second

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
        self._check_replay("eagle", head, CHAIN, EagleChain(head, CHAIN.depth))
        if self.findings.has_passed("tree"):
            self._same_texts(self._decode_texts(EagleTree(head, DynamicShape(4, 3, 8)), 2))

    def _build_data(self) -> PackedDataset:
        """The target's own texts."""
        samples = [
            Sample(prompt + text, [False] * len(prompt) + [True] * len(text))
            for prompt, text in zip(self.prompts, self.texts, strict=True)
        ]
        return PackedDataset(samples, 256, seed=0)

    def _check_replay(self, name: str, head: Any, tree: Tree, drafter: Drafter) -> None:
        """Check that decoding is lossless, and that its steps equal those of replay."""
        decoded = self._decode_texts(drafter)
        self._same_texts(decoded)
        with self.findings.open_column("replay"):
            told = replay_response(self.target, head, tree, self.prompts[0], self.texts[0])
            self.findings.tau.setdefault(name, round(tau([PromptSteps("all", told)]), 3))
            if told != decoded[0].steps:
                lengths = [
                    [step.num_accepted for step in each] for each in (told, decoded[0].steps)
                ]
                place = count_common_prefix(*lengths)
                raise Differs(f"{name}, from pass {place} of {len(told)}")


class VaryingTreeOracle(Oracle):
    """Trees of another shape for every text and place, like dynamic trees."""

    @property
    def static_nodes(self) -> int | None:
        """None: every text has another number."""
        return None

    def propose(self, roots: Roots) -> Draft:
        """Propose one of SHAPES for each text."""
        assert self.places is not None
        rows, parents, device = [], [], roots.tokens.device
        for (number, text), place in zip(self.texts, self.places.tolist(), strict=True):
            self.tree = SHAPES[(number + place) % len(SHAPES)]
            rows.append(self._draw_tree_tokens(number, text, place))
            parents.append(list(self.tree.parents[1:]))
        depth = max(shape.depth for shape in SHAPES)
        return Draft(to_device(parents, device), to_device(rows, device), depth)


def _train_head(objective: Objective, data: PackedDataset) -> None:
    """Train for a few updates on one batch.

    Raises:
        RuntimeError: the loss is not finite.
    """
    objective.train()
    rows = [data[index] for index in range(len(data.packing))]
    batch = objective.index_training_batch(
        {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    )
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


def _format_error_line(error: BaseException, folder: str) -> str:
    """Put an error on one line."""
    return " ".join(str(error).replace(folder, Path(folder).name).split())[:300]
