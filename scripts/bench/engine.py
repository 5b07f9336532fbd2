"""Overhead of the decoding engine: speed-up / tau with drafts of a set acceptance.

`python scripts/bench/engine.py` makes a random target of 105 million parameters with the
proportions of a large one (32 layers, a small vocabulary). Each drafter does its real work; then
the target's own tokens replace its draft tokens, so that a set share of them is accepted. `python
scripts/bench/engine.py bfloat16 0.8 48` sets dtype, acceptance and layers.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.environment import set_passive_wait_policy

set_passive_wait_policy()

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from eval.compare.methods import PromptDecoder
from eval.decode.drafters.lookup import PromptLookup
from eval.decode.drafters.oracle import Oracle
from eval.decode.engine import Generation, NoDraft, decode
from eval.measure.acceptance_stats import PromptSteps, tau
from eval.report.plots import STEP_PARTS
from heads.decoding.drafting import CommittedTokens, Draft, Drafter, Roots
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import DraftShape, DynamicShape, Tree, make_static_tree
from heads.kinds import HEADS, make_untrained_head
from heads.layers.fast_linear import pack_weights
from heads.target_model.model import Target
from heads.vocab import DraftVocab

PROMPT_LENGTH, NUM_TOKENS, NUM_REPEATS = 128, 96, 3
PARTS = STEP_PARTS if torch.cuda.is_available() else [p for p in STEP_PARTS if p != "step"]


class OracleCorrectedDrafter:
    """Run a drafter, then propose an oracle's draft in place of the drafter's."""

    def __init__(self, drafter: Drafter, oracle: Oracle) -> None:
        self.drafter, self.oracle = drafter, oracle
        self.taps = drafter.taps
        # The oracle's tree is as large as the drafter's, or larger.
        self.num_static_nodes = drafter.num_static_nodes and oracle.num_static_nodes

    def observe(self, seen: CommittedTokens) -> None:
        """Show both drafters the committed tokens."""
        self.drafter.observe(seen)
        self.oracle.observe(seen)

    def propose(self, roots: Roots) -> Draft:
        """Return the oracle's draft after the drafter has done its work."""
        self.drafter.propose(roots)
        return self.oracle.propose(roots)

    def select_rows(self, rows: list[int]) -> None:
        """Keep some rows of both drafters."""
        self.drafter.select_rows(rows)
        self.oracle.select_rows(rows)

    def insert_row(self, row: int, other: "OracleCorrectedDrafter") -> None:
        """Replace a row of both drafters by the first row of another object's drafters."""
        self.drafter.insert_row(row, other.drafter)
        self.oracle.insert_row(row, other.oracle)


def make_certain_target(
    dtype: torch.dtype, num_layers: int = 32, width: int = 512, vocab: int = 4096
) -> Target:
    """Make a packed target that is certain of each token, by default of 105M parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=num_layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 128, max_position_embeddings=1024, eos_token_id=None,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    make_sure(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pack_weights(model.to(device, dtype))
    return Target(model, None, "random")


def make_sure(model: Any) -> None:
    """Change a random model so that each token follows from the last one by a wide margin.

    The output head becomes the embedding in another order. Rounding in low precision must not
    change the text that the oracle knows.
    """
    embedding = model.get_input_embeddings().weight.data
    embedding.mul_(50)  # larger than what random layers add to it
    order = torch.randperm(len(embedding)).to(embedding.device)
    model.lm_head.weight.data = embedding[order].clone()


def make_drafters(target: Target, text: list[int], rate: float) -> dict[str, Callable[[], Drafter]]:
    """Make a function for each kind of drafter, which makes one with acceptance `rate`."""

    def corrected(make: Callable[[], Drafter], tree: Tree) -> Callable[[], Drafter]:
        return lambda: OracleCorrectedDrafter(make(), Oracle([text], tree, rate, target.vocab_size))

    makes = {
        "prompt lookup, 4": corrected(lambda: PromptLookup(4), Tree.make_chain(4)),
        "prompt lookup, 10": corrected(lambda: PromptLookup(10), Tree.make_chain(10)),
    }
    vocab = DraftVocab.make_full(target.vocab_size)
    for name, kind in HEADS.items():
        head = make_untrained_head(next(reversed(kind.variants)), target, vocab)
        pack_weights(head.attach(target, target.dtype).eval())
        depth = min(4, head.max_chain_depth)
        tree = make_static_tree(depth, 8)
        shapes: dict[str, DraftShape] = {
            f"chain of {depth}": Tree.make_chain(depth),
            "tree of 8": tree if head.has_static_tree else DynamicShape(depth, 2, 8),
        }
        for shape_name, shape in shapes.items():
            make = partial(head.make_drafter, shape, GREEDY, [0])
            makes[f"{name} {shape_name}"] = corrected(
                make, shape if isinstance(shape, Tree) else tree
            )
    return makes


def decode_texts(
    target: Target, prompt: list[int], makes: dict[str, Callable[[], Drafter]]
) -> dict[str, list[Generation]]:
    """Decode texts with every drafter, in turn, after a warm-up; on a GPU in captured steps."""
    texts: dict[str, list[Generation]] = {name: [] for name in makes}

    def decoding(make: Callable[[], Drafter]) -> PromptDecoder:
        return PromptDecoder(target, lambda _: make(), NUM_TOKENS, GREEDY, capture=True)

    runs = {name: decoding(make) for name, make in makes.items()}
    for repeat in tqdm(range(NUM_REPEATS + 1), unit="repeat"):
        for name, run in runs.items():
            [text] = run([prompt], [0], 1)
            if repeat:
                texts[name].append(text)
    return texts


def format_row(name: str, texts: list[Generation], base: list[Generation]) -> list[str]:
    """Format a row: name, tau, speed-up over the baseline, their ratio, milliseconds of parts."""

    def median(part: str, samples: list[Generation]) -> float:
        return statistics.median(getattr(text.times, part) for text in samples)

    speedup = median("decode", base) / median("decode", texts)
    num_steps = len(texts[0].steps)
    parts = [f"{1000 * median(part, texts) / num_steps:.2f}" for part in PARTS]
    mean = tau([PromptSteps("", texts[0].steps)])
    return [name, f"{mean:.2f}", f"{speedup:.2f}", f"{speedup / mean:.2f}", *parts]


@torch.no_grad()
def measure_drafters(
    dtype: str, rate: float, num_layers: int
) -> tuple[Target, dict[str, list[Generation]]]:
    """Decode with every drafter; return the target, and the texts by name of the drafter."""
    target = make_certain_target(getattr(torch, dtype), num_layers)
    generator = torch.Generator().manual_seed(1)
    prompt: Any = torch.randint(10, 4096, (PROMPT_LENGTH,), generator=generator).tolist()
    text = decode(target, NoDraft(), prompt, NUM_TOKENS + 16).token_ids
    makes: dict[str, Callable[[], Drafter]] = {"no drafting": NoDraft}
    return target, decode_texts(target, prompt, makes | make_drafters(target, text, rate))


def main(dtype: str = "float32", rate: str = "0.8", num_layers: str = "32") -> None:
    """Print the table of all drafters."""
    target, texts = measure_drafters(dtype, float(rate), int(num_layers))
    size = sum(p.numel() for p in target.model.parameters()) / 1e6
    machine = f"{target.device.type}, {torch.get_num_threads()} threads"
    table = Table(
        title=f"{size:.0f}M parameters, {num_layers} layers, {dtype}, {machine}; accepted at {rate}"
    )
    for column in ("drafter", "tau", "speed-up", "efficiency", *(f"{p} ms" for p in PARTS)):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for name in texts:
        table.add_row(*format_row(name, texts[name], texts["no drafting"]))
    Console(width=100).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
