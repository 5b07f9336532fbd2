"""Every drafter on one small target, and what its models read."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from feature_heads import feature_head
from toys import endless_target, noisy_head, random_model, tokenizer

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
from eval.decode.drafters.suffix import HybridDrafter, SuffixDrafter, SuffixTree
from eval.decode.engine import NoDraft
from heads.blocks.block_head import BlockDrafter
from heads.decoding.cache import TreeCache
from heads.decoding.drafting import PAD, CommittedTokens, Draft, Drafter
from heads.decoding.sampling import Sampling, drafter_seeds
from heads.decoding.tree import DynamicShape, Tree
from heads.eagle.eagle import EagleHead
from heads.eagle.network import EagleDrafter
from heads.eagle.peagle import PEagleDrafter
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
    head = small_head("eagle3", (1, 2, 3))
    model = copy.deepcopy(target.model)
    torch.manual_seed(0)
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
def small_head(name: str, layers: tuple[int, ...] | None = None) -> Any:
    """A head that has learnt two texts of the target, in ids of its own where it has any."""
    settings: dict[str, Any] = {} if layers is None else {"layers": [*layers]}
    if name != "dflash":
        settings["draft_vocab_size"] = 280
    with torch.inference_mode(mode=False):  # which the engine makes drafters in
        head = feature_head(small_target(), name, num_updates=20, num_texts=2, **settings)
    head.max_positions = SHORT_WINDOW
    return head


def seen(token_ids: list[list[int]], read: bool = True) -> CommittedTokens:
    """As the engine shows prompts or, if `read`, what a pass over a draft has committed."""
    output = TargetOutput(torch.zeros(len(token_ids), 1, 1))
    logits = torch.zeros(len(token_ids), 1, 1) if read else None
    cache = TreeCache(len(token_ids), torch.device("cpu"), 1)
    return CommittedTokens(token_ids, output, cache, logits=logits)


def draft_paths(draft: Draft) -> list[list[tuple[int, ...]]]:
    """Per text its nodes that are there as the path to each, in their order."""
    layout, num_texts = draft.build_layout(), len(draft.tokens)
    parents = layout.parents.expand(num_texts, -1)[:, 1:].tolist()
    depths = layout.depths.expand(num_texts, -1).tolist()
    found = []
    for tokens, above, depth in zip(draft.tokens.tolist(), parents, depths, strict=True):
        nodes: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, above, strict=True):
            nodes.append((*nodes[parent], token))
        assert [len(node) for node in nodes] == depth
        found.append([node for node in nodes[1:] if PAD not in node])
    return found


def next_probs(target: Target, ids: list[int], how: Sampling) -> torch.Tensor:
    """[V] after `ids`, by the model's own pass."""
    return how.compute_probabilities(target.model(torch.tensor([ids])).logits[:, -1])[0]


def text_probs(
    target: Target, prompt: list[int], how: Sampling, num_tokens: int, score: Any = next_probs
) -> dict[tuple[int, ...], float]:
    """Probabilities of all first tokens that a target may say, by the model's own passes."""
    found = {(): 1.0}
    for _ in range(num_tokens):
        found = {
            (*said, token): share * float(probs[token])
            for said, share in found.items()
            for probs in [score(target, [*prompt, *said], how)]
            for token in probs.nonzero().flatten().tolist()
        }
    return found


def fits(counts: torch.Tensor, probs: torch.Tensor) -> bool:
    """Says whether counts may have been drawn from probabilities of the same shape.

    By chi-square, as rare as 1e-4, over cells that are counted on five times; the rest join the
    smallest of these. Cells of probability 0 must be empty.
    """
    wanted, found = (float(counts.sum()) * probs.double()).flatten(), counts.double().flatten()
    if found[wanted == 0].any():
        return False
    order = wanted.argsort(descending=True)
    last = int((wanted >= 5).sum()) - 1
    wanted, found = (
        torch.cat([each[order[:last]], each[order[last:]].sum(0, keepdim=True)])
        for each in (wanted, found)
    )
    chi_square = ((found - wanted) ** 2 / wanted).sum()
    rarity = torch.special.gammaincc(torch.tensor(last / 2).double(), chi_square / 2)
    return float(rarity) > 1e-4


def suffix() -> SuffixDrafter:
    """Copies with no answers before."""
    return SuffixDrafter(SuffixTree(8))


def drafting(tree: Tree, length: DraftLength | None = None) -> Make:
    """A draft model of the target's vocabulary."""
    return lambda how, seeds: DraftModel(small_models()[1], tree, how, drafter_seeds(seeds), length)


EVERY_DRAFTER: dict[str, Make] = {
    "none": lambda *_: NoDraft(),
    "medusa chain": lambda *_: MedusaDrafter(medusa(), Tree.make_chain(3)),
    "medusa tree": lambda *_: MedusaDrafter(medusa(), TREE),
    "eagle chain": lambda how, seeds: EagleDrafter(small_models()[0], 5, how, drafter_seeds(seeds)),
    "eagle tree": lambda *_: EagleDrafter(small_models()[0], DynamicShape(5, 3, 8)),
    "dflash tree": lambda *_: BlockDrafter(small_head("dflash"), DynamicShape(4, 3, 8)),
    "dspark chain": lambda how, seeds: BlockDrafter(
        small_head("dspark, rnn"), 5, how, drafter_seeds(seeds)
    ),
    "peagle chain": lambda how, seeds: PEagleDrafter(
        small_head("peagle"), 4, how, drafter_seeds(seeds)
    ),
    "peagle tree": lambda *_: PEagleDrafter(small_head("peagle"), DynamicShape(4, 3, 9)),
    "draft chain": drafting(Tree.make_chain(5)),
    "draft tree": drafting(TREE),
    "draft gaps": drafting(Tree.from_paths([[1], [3], [1, 2]])),
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
    "suffix": lambda *_: suffix(),
    "hybrid": lambda *_: HybridDrafter(MedusaDrafter(medusa(), Tree.make_chain(3)), suffix(), 0.4),
    "recycling": lambda *_: Recycling(SuccessorTable(), build_recycling_tree(6)),
}
DRAWN = {
    "eagle chain", "dspark chain", "peagle chain", "draft chain", "draft tree", "draft gaps",
    "heuristic", "confidence", "both", "self draft",
}  # fmt: skip
"""Drafters that draw: others draft the same, greedy or not."""


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

    attentions = [small_head(name).layers[0].self_attn for name in ("dflash", "dspark, rnn")]
    attentions.append(small_head("peagle").layer.self_attn)
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
