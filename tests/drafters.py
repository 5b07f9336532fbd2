"""Every drafter on one small target, and what its models read."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from feature_heads import feature_head
from toys import eagle_head, endless_target, noisy_head, random_model, tokenizer

from conf.settings.eagle import EagleForm
from eval.decode.drafters.cross_tokenizer import CrossTokenizerDrafter
from eval.decode.drafters.draft_model import DraftLength, DraftModel
from eval.decode.drafters.lookahead import Lookahead
from eval.decode.drafters.lookup import (
    NgramModel,
    PromptLookup,
    Recycling,
    SuccessorTable,
    build_recycling_tree,
)
from eval.decode.drafters.self_speculation import SelfDraft
from eval.decode.drafters.suffix import SuffixDrafter, SuffixTree
from eval.decode.engine import NoDraft, decode
from heads.blocks.block_head import BlockDrafter, BlockHead
from heads.decoding.cache import TreeCache
from heads.decoding.drafting import CommittedTokens, Drafter
from heads.decoding.sampling import GREEDY, Sampling, drafter_seeds
from heads.decoding.tree import DynamicShape, Tree
from heads.eagle.eagle import EagleHead
from heads.eagle.network import EagleDrafter
from heads.eagle.peagle import PEagleDrafter, PEagleHead
from heads.medusa import MedusaDrafter, MedusaHead
from heads.target_model.model import Target, TargetOutput

WINDOW, SHORT_WINDOW = 48, 32
"""Windows of the target, and of every model that drafts for it."""
TREE = Tree.from_paths([[0], [1], [2], [0, 0], [0, 2], [1, 0], [0, 0, 0], [0, 0, 2]])
Make = Callable[[Sampling, Sequence[int]], Drafter]


@cache
def small_target() -> Target:
    """A target that never stops by itself, with a tokenizer."""
    target = endless_target(vocab_size=300, num_hidden_layers=3, max_position_embeddings=WINDOW)
    target.tokenizer = tokenizer()
    target.tokenizer.eos_token = None
    return target


@cache
def small_models() -> tuple[EagleHead, Target, Target]:
    """A head, a draft model with the target's tokenizer, and one with another."""
    target = small_target()
    head = eagle_head(target, EagleForm.eagle3, 150, num_updates=30, layers=[1, 2, 3])
    head.max_positions = SHORT_WINDOW
    model = copy.deepcopy(target.model)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.std() * 0.1)
    model.config.max_position_embeddings = SHORT_WINDOW
    other = random_model(vocab_size=300, seed=3, max_position_embeddings=SHORT_WINDOW)
    return head, Target(model, tokenizer(), "draft"), Target(other, tokenizer(), "other")


@cache
def medusa() -> MedusaHead:
    """Heads whose drafts are sometimes right."""
    return noisy_head(small_target())


@cache
def blocks(name: str) -> BlockHead:
    """Block drafters that are sometimes right."""
    head = feature_head(small_target(), name, num_updates=25)
    head.max_positions = SHORT_WINDOW
    return head


@cache
def peagle() -> PEagleHead:
    """A head that is sometimes right."""
    head = feature_head(small_target(), "peagle", num_updates=25)
    head.max_positions = SHORT_WINDOW
    return head


def seen(token_ids: list[list[int]], read: bool = True) -> CommittedTokens:
    """As the engine shows prompts or, if `read`, what a pass over a draft has committed."""
    output = TargetOutput(torch.zeros(len(token_ids), 1, 1))
    logits = torch.zeros(len(token_ids), 1, 1) if read else None
    cache = TreeCache(len(token_ids), torch.device("cpu"), 1)
    return CommittedTokens(token_ids, output, cache, logits=logits)


def ending_early(target: Target, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The target's own texts, the second of which a stop token ends after ten tokens."""
    target.model.generation_config.eos_token_id = None
    first = decode(target, NoDraft(), prompts[1], 10).token_ids
    target.model.generation_config.eos_token_id = [first[9]]
    texts = [decode(target, NoDraft(), prompt, num_tokens).token_ids for prompt in prompts]
    assert len({len(text) for text in texts}) > 1
    return texts


def drafting(tree: Tree, length: DraftLength | None = None) -> Make:
    """A draft model of the target's vocabulary."""
    return lambda how, seeds: DraftModel(small_models()[1], tree, how, drafter_seeds(seeds), length)


EVERY_DRAFTER: dict[str, Make] = {
    "none": lambda *_: NoDraft(),
    "medusa chain": lambda *_: MedusaDrafter(medusa(), Tree.make_chain(3)),
    "medusa tree": lambda *_: MedusaDrafter(medusa(), TREE),
    "eagle chain": lambda how, seeds: EagleDrafter(small_models()[0], 5, how, drafter_seeds(seeds)),
    "eagle tree": lambda *_: EagleDrafter(small_models()[0], DynamicShape(5, 3, 8)),
    "dflash tree": lambda *_: BlockDrafter(blocks("dflash"), DynamicShape(4, 3, 8)),
    "dspark chain": lambda how, seeds: BlockDrafter(
        blocks("dspark, rnn"), 5, how, drafter_seeds(seeds)
    ),
    "peagle chain": lambda how, seeds: PEagleDrafter(peagle(), 4, how, drafter_seeds(seeds)),
    "peagle tree": lambda *_: PEagleDrafter(peagle(), DynamicShape(4, 3, 9)),
    "draft chain": drafting(Tree.make_chain(5)),
    "draft tree": drafting(TREE),
    "heuristic": drafting(Tree.make_chain(8), DraftLength(start=2)),
    "confidence": drafting(Tree.make_chain(8), DraftLength(confidence=0.2)),
    "both": drafting(Tree.make_chain(8), DraftLength(start=3, confidence=0.1)),
    "other tokenizer": lambda *_: CrossTokenizerDrafter(
        small_models()[2], tokenizer(), 4, window=8
    ),
    "prompt lookup": lambda *_: PromptLookup(),
    "ngram": lambda *_: NgramModel(),
    "lookahead": lambda *_: Lookahead(),
    "self draft": lambda how, seeds: SelfDraft(small_target(), [1], 5, how, drafter_seeds(seeds)),
}


WITHOUT_MODELS: dict[str, Callable[[], Drafter]] = {
    "prompt lookup": PromptLookup,
    "ngram": NgramModel,
    "lookahead": Lookahead,
    "small lookahead": lambda: Lookahead(1, 2, 1),
    "suffix": lambda: SuffixDrafter(SuffixTree(24), 24, 3.0),
    "recycling": lambda: Recycling(SuccessorTable(), build_recycling_tree(12)),
}
"""For any target."""


DRAWN = {
    "none", "medusa tree", "eagle chain", "dspark chain", "peagle chain", "draft chain",
    "draft tree", "heuristic", "confidence", "both", "self draft",
}  # fmt: skip
"""Drafters that draw, and a tree that does not: others draft the same, greedy or not."""


def each_way(names: Iterable[str], warm: Sampling) -> list[Any]:
    """Names with both ways to sample."""
    return [
        pytest.param(name, how, id=f"{name}-{way}", marks=[pytest.mark.slow] if slow else [])
        for way, how in (("greedy", GREEDY), ("warm", warm))
        for name in names
        for slow in [way == "warm" and name not in DRAWN]
    ]


@contextmanager
def positions_read() -> Iterator[dict[str, int]]:
    """The furthest position that each model has been given."""
    target, (head, model, other) = small_target(), small_models()
    furthest: dict[str, int] = {}

    def note(name: str, positions: torch.Tensor) -> None:
        furthest[name] = max(furthest.get(name, 0), int(positions.max()))

    def watch(name: str) -> Callable[..., None]:
        return lambda _module, _args, inputs: note(name, inputs["position_ids"])

    hooks = [
        each.decoder.register_forward_pre_hook(watch(name), with_kwargs=True)
        for name, each in (("target", target), ("draft", model), ("other", other))
    ]
    read = head.encode_context

    def reading(fused: Any, ids: Any, positions: torch.Tensor) -> Any:
        note("eagle", positions)
        return read(fused, ids, positions)

    attentions = [blocks(name).layers[0].self_attn for name in ("dflash", "dspark, rnn")]
    attentions.append(peagle().layer.self_attn)
    rotations = [each.compute_rotation for each in attentions]

    def turning(rotation: Callable[..., Any]) -> Callable[..., Any]:
        def turn(inputs: Any, positions: torch.Tensor) -> Any:
            note("blocks", positions)
            return rotation(inputs, positions)

        return turn

    head.encode_context = reading  # type: ignore[method-assign]
    for each, rotation in zip(attentions, rotations, strict=True):
        each.compute_rotation = turning(rotation)
    try:
        yield furthest
    finally:
        del head.encode_context
        for each in attentions:
            del each.compute_rotation
        for hook in hooks:
            hook.remove()
