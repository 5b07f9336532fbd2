"""How many operations a decoding step launches, each a kernel on a GPU.

`python scripts/bench/operations.py` decodes with random Qwen3s of any width, whose operations
are as many as those of a wide one, and prints them by part of a step: views cost the host alone and
are counted apart. Of a compiled target (`--compiled-layers`, as compiling many takes long)
it counts what is still launched outside its compiled regions; what is inside, the compiler fuses.
Of a captured step, which runs here as it would be launched on a GPU, it counts what is launched
beside the graph, and the graph as one.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.launch import rest_while_waiting

rest_while_waiting()

import argparse
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import Qwen3Config, Qwen3ForCausalLM

import eval.decode.captured
from conf.settings.eagle import EagleConfig
from eval.decode.capturing import Captured
from eval.decode.engine import NoDraft, decode
from eval.decode.generation import Generation, Request
from heads.decoding.drafting import Drafter
from heads.decoding.tree import DynamicShape, usual_tree
from heads.eagle.drafter import EagleChain, EagleTree
from heads.eagle.head import EagleHead
from heads.medusa.drafter import MedusaDrafter
from heads.medusa.head import MedusaHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts.bench.apart import markdown
from scripts.bench.footprint import add_sizes

VIEWS = {
    "view", "_unsafe_view", "expand", "permute", "transpose", "t", "slice", "select", "unsqueeze",
    "squeeze", "split", "split_with_sizes", "unbind", "as_strided", "alias", "detach", "unfold",
    "_reshape_alias", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided",
}  # fmt: skip
PROMPT = [5, 17, 40, 8, 77, 23, 61]
LONGER, SHORTER = 24, 12
Way = Callable[[Target, Callable[[], Drafter], int], Generation]
CAPACITY = 128


class Operations(TorchDispatchMode):
    """Counts operations by name, composite ones by their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """One operation."""
        if torch.is_inference_mode_enabled() and func._can_decompose():
            # Autograd, which is off, is what takes such operations apart.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def random_target(num_layers: int) -> Target:
    """Grouped heads, norms of queries and keys."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, eos_token_id=None,
    )  # fmt: skip
    return Target(Qwen3ForCausalLM(config), None, "random")


def drafters(target: Target) -> dict[str, Callable[[], Drafter]]:
    """Makers of those that are counted."""
    medusa = MedusaHead.from_target(target, num_heads=4, num_layers=1)
    vocab = DraftVocab.everything(target.vocab_size)
    eagle = EagleHead.from_target(target, EagleConfig(), vocab, seed=0)
    return {
        "none": NoDraft,
        "Medusa, tree of 8": lambda: MedusaDrafter(medusa, usual_tree(8)),
        "EAGLE-3, chain of 4": lambda: EagleChain(eagle, 4),
        "EAGLE-3, tree of 8 levels, 59 nodes": lambda: EagleTree(eagle, DynamicShape(8, 10, 59)),
    }


def compiled_target(num_layers: int) -> Target:
    """One whose compiled regions, captured whole, are not counted."""
    target = random_target(num_layers)
    torch._dynamo.reset()
    usual = torch.compile

    def uncounted(run: Any, **settings: Any) -> Any:
        compiled = usual(run, fullgraph=True, **settings)

        def call(*args: Any) -> Any:
            with _disable_current_modes():
                return compiled(*args)

        return call

    with patch.object(torch, "compile", uncounted):
        target.compile(CAPACITY, backend="eager")
    return target


class Uncounted:
    """A CUDA graph that runs what it holds; counts as one operation."""

    counted: Operations

    def __init__(self, call: Callable[[], None], _pool: Any) -> None:
        self.call = call

    def launch(self) -> None:
        """All at once."""
        self.counted.counts["graph"] += 1
        with _disable_current_modes():
            self.call()


def captured(target: Target, make: Callable[[], Drafter], length: int) -> Generation:
    """A text in steps that are captured."""
    with (
        patch.object(eval.decode.captured, "Graph", Uncounted),
        patch.object(torch, "cuda", MagicMock(**{"is_available.return_value": False})),
    ):
        way = Captured(target, lambda _: make(), length)
        return way.decode([Request(PROMPT)], 1)[0]


def plain(target: Target, make: Callable[[], Drafter], length: int) -> Generation:
    """A text in steps as they are."""
    return decode(target, make(), PROMPT, length)


def of_a_step(target: Target, make: Callable[[], Drafter], how: Way) -> Counter[str]:
    """Operations of a step by name: what more steps add, by their number."""
    found: list[tuple[Counter[str], int]] = []
    for length in (SHORTER, LONGER):
        with ExitStack() as undo:
            Uncounted.counted = counted = undo.enter_context(Operations())
            text = how(target, make, length)
        found.append((counted.counts, len(text.steps)))
    (few, less), (many, more) = found
    added = {name: round((many[name] - few[name]) / (more - less)) for name in many}
    return Counter({name: count for name, count in added.items() if count})


def row(target: Target, drafter: str, make: Callable[[], Drafter], how: Way) -> tuple[str, ...]:
    """A line of the table."""
    counts = of_a_step(target, make, how)
    views = sum(count for each, count in counts.items() if each in VIEWS)
    most = [f"{each} {count}" for each, count in counts.most_common(12) if each not in VIEWS]
    return drafter, f"{counts.total() - views:,}", f"{views:,}", ", ".join(most)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_sizes(parser, layers=36, compiled_layers=36)
    options = parser.parse_args()
    for words, num_layers, made, how in (
        ("a step", options.layers, random_target, plain),
        ("a captured step", options.layers, random_target, captured),
        ("a step outside compiled regions", options.compiled_layers, compiled_target, plain),
    ):
        target = made(num_layers)
        rows = [row(target, name, make, how) for name, make in drafters(target).items()]
        print(f"Qwen3 of {num_layers} layers, one text, {words}\n")
        print(markdown(("drafter", "operations", "views", "most frequent"), rows) + "\n")


if __name__ == "__main__":
    main()
