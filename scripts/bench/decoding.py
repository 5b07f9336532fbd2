"""Decoding with untrained heads: what steps cost, and what the engine loses.

Each drafter does its real work. Where its drafts are corrected, the target's own tokens then
replace them, so that a set share of them is accepted.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval.decode.cuda_graphs import GraphDecoder
from eval.decode.drafters.lookup import PromptLookup
from eval.decode.drafters.oracle import Oracle
from eval.decode.engine import Generation, NoDraft, Request, decode_many
from eval.decode.hf_generate import hf_generate
from heads.decoding.drafting import CommittedTokens, Draft, Drafter, Roots
from heads.decoding.sampling import GREEDY, Sampling
from heads.decoding.tree import DynamicShape, Tree, make_static_tree
from heads.kinds import HEADS, make_untrained_head
from heads.layers.fast_linear import pack_weights
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts.bench import training
from scripts.bench.harness import Figures, best_device

ACCEPTANCE = 0.8
SHAPES = {"eagle3": (4, (8, 10, 59)), "medusa": (4, None), "dflash": (7, (7, 10, 59))}
"""Depth of chains; depth, width and number of draft tokens of trees, by head."""
Maker = Callable[[Sampling, list[int]], Drafter]
"""Function that makes a drafter for texts with these seeds."""


class OracleCorrectedDrafter(Drafter):
    """Run a drafter, then propose an oracle's draft in place of the drafter's."""

    row_attributes = ("drafter", "oracle")

    def __init__(
        self, make: Maker, oracle: Callable[[], Oracle], sampling: Sampling, seeds: list[int]
    ) -> None:
        self.drafter, self.oracle = make(sampling, seeds), oracle()
        self.taps = self.drafter.taps
        # The oracle's tree is as large as the drafter's, or larger.
        self.num_static_nodes = self.drafter.num_static_nodes and self.oracle.num_static_nodes

    def observe(self, seen: CommittedTokens) -> None:
        """Show both drafters the committed tokens."""
        self.drafter.observe(seen)
        self.oracle.observe(seen)

    def propose(self, roots: Roots) -> Draft:
        """Return the oracle's draft after the drafter has done its work."""
        self.drafter.propose(roots)
        return self.oracle.propose(roots)


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
    pack_weights(model.to(best_device(), dtype))
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


def iter_drafters(target: Target, size: str) -> Iterator[tuple[str, Maker, Tree | None]]:
    """Yield untrained drafters, one after another.

    A CPU's sizes have every kind of head, with a chain of 4 and a tree of 8 draft tokens; others
    have the heads of `SHAPES`, small ones without trees.

    Yields:
        Name; function that makes a drafter; tree with which an oracle may correct its drafts.
    """
    lookup = Tree.make_chain(4)
    yield "prompt_lookup chain", lambda _sampling, _seeds: PromptLookup(4), lookup
    for name in HEADS if size == "cpu" else SHAPES:
        vocab = DraftVocab.make_full(target.vocab_size)
        if name == "eagle3":
            largest = min(target.vocab_size, 32000)
            vocab = DraftVocab.from_counts(torch.arange(target.vocab_size), largest, [])
        variant = next(reversed(HEADS[name].variants)) if size == "cpu" else name
        head = make_untrained_head(variant, target, vocab)
        pack_weights(head.attach(target, target.dtype).eval())
        depth, tree_sizes = (4, None) if size == "cpu" else SHAPES[name]
        chain = Tree.make_chain(min(depth, head.max_chain_depth))
        yield f"{name} chain", partial(head.make_drafter, chain), chain
        if size == "cpu":
            depth = min(4, head.max_chain_depth)
            tree = make_static_tree(depth, 8)
            shape = tree if head.has_static_tree else DynamicShape(depth, 2, 8)
            yield f"{name} tree", partial(head.make_drafter, shape), tree
        elif size == "8b" and tree_sizes is not None:
            shape = DynamicShape(*tree_sizes)
            yield f"{name} tree", partial(head.make_drafter, shape), None


@torch.inference_mode()
def measure_decoding(size: str) -> Figures:
    """Measure steps without drafts, and with untrained drafters, whose drafts may be corrected.

    The target is random and certain of each token: at 8B sizes of Llama-3-8B's shape, for a CPU of
    155 million parameters in 48 layers with a small vocabulary.
    """
    if size == "8b":
        target = training.make_random_target(training.SIZES[size], best_device())
        make_sure(target.model)
    else:
        sizes = (torch.bfloat16, 48) if size == "cpu" else (torch.float32, 6, 128, 256)
        target = make_certain_target(*sizes)
    num_prompt, num_tokens = {"8b": (512, 96), "cpu": (128, 96), "small": (32, 16)}[size]
    generator = torch.Generator().manual_seed(1)
    drawn: Any = torch.randint(10, target.vocab_size, (num_prompt,), generator=generator)
    prompt: list[int] = drawn.tolist()

    def decode_plainly(length: int) -> Generation:
        return decode_many(target, lambda _seeds: NoDraft(), [Request(prompt)], length, 1)[0]

    def measure(make: Maker, temperature: float = 0.0) -> Generation:
        """Decode two texts, on a GPU in captured steps, after a first one; return the faster."""
        requests, sampling = [Request(prompt)], Sampling(temperature=temperature)
        make_drafter = partial(make, sampling)
        if target.device.type == "cuda":
            decoder = GraphDecoder(target, make_drafter, num_tokens, sampling)
            run = partial(decoder.decode_requests, requests, 1)
        else:
            run = partial(decode_many, target, make_drafter, requests, num_tokens, 1, sampling)
        _, *texts = (run()[0] for _ in range(3))
        return min(texts, key=lambda text: text.times.decode)

    decode_plainly(num_tokens)
    eager = decode_plainly(num_tokens)
    yield "ms per token, launched one by one", _compute_step_ms(eager)
    for _ in range(2):
        (generated,) = hf_generate(target, [prompt], num_tokens, GREEDY, 0)
    yield "ms per token, generate", _compute_step_ms(generated)
    plain = measure(lambda _sampling, _seeds: NoDraft())
    yield "ms per token, captured", _compute_step_ms(plain)
    yield "same tokens, captured or not", float(plain.token_ids == eager.token_ids)
    sampled = measure(lambda _sampling, _seeds: NoDraft(), temperature=1.0)
    yield "ms per token, captured, temperature 1", _compute_step_ms(sampled)
    answer = decode_plainly(num_tokens + 16).token_ids
    for name, make, tree in iter_drafters(target, size):
        text = measure(make)
        yield f"ms per step, {name}", _compute_step_ms(text)
        yield f"speed-up / tau, {name}", _compute_step_ms(plain) / _compute_step_ms(text)
        if target.device.type == "cpu":
            yield f"ms of drafting, {name}", 1000 * text.times.draft / len(text.steps)
        if tree is not None:
            oracle = partial(Oracle, [answer], tree, ACCEPTANCE, target.vocab_size)
            text = measure(partial(OracleCorrectedDrafter, make, oracle))
            yield f"tau at {ACCEPTANCE:.0%}, {name}", (num_tokens - 1) / len(text.steps)
            speedup = plain.times.decode / text.times.decode
            yield f"speed-up at {ACCEPTANCE:.0%}, {name}", speedup
        if name == "eagle3 chain":
            text = measure(make, temperature=1.0)
            ratio = _compute_step_ms(sampled) / _compute_step_ms(text)
            yield f"speed-up / tau, {name}, temperature 1", ratio
    if target.device.type == "cuda":
        yield "peak, GB", torch.cuda.max_memory_allocated() / 1e9


def _compute_step_ms(text: Generation) -> float:
    return 1000 * text.times.decode / max(1, len(text.steps))
