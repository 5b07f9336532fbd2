"""EAGLE as a drafter: chains, and EAGLE-2's dynamic trees.

Both read what the target committed with its true features, keep keys and values of that alone,
and draft on from there with features of their own.

Letters: N rows, H hidden, W draft vocabulary, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.accept import GREEDY, Sampling
from eval.engine import Draft
from heads.eagle import EagleHead, Text
from heads.eagle_layer import Branches
from heads.target import TargetOutput
from heads.tree import Tree


@dataclass(frozen=True)
class DynamicShape:
    """How far EAGLE-2 looks and how much of it is checked.

    Attributes:
        depth: draft tokens of the longest path.
        top_k: nodes expanded per level, and children drawn from each.
        num_tokens: draft tokens kept, the likeliest of all that were drawn.
    """

    depth: int
    top_k: int
    num_tokens: int


class _Reader:
    """The head's own memory of the committed text.

    Args:
        head: attached to the target.
    """

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self.reads = head.reads
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.num_read = 0
        self._tokens: list[int] = []
        self._features: list[Tensor] = []

    def observe(self, token_ids: list[int], output: TargetOutput) -> None:
        """Keeps committed tokens and their features until the token after them is known."""
        self._tokens += token_ids
        self._features.append(self.head.features(output)[0])

    def _begin(self, root: int) -> tuple[Text, Tensor, Branches]:
        """Reads what was committed, up to `root`; the head's output [1, H] there."""
        features = torch.cat(self._features)
        device = features.device
        ids = torch.tensor([*self._tokens[1:], root], device=device)
        positions = torch.arange(self.num_read, self.num_read + len(ids), device=device)
        text = self.head.read(self.head.fuse(features), ids, positions)
        self.keys = _joined(self.keys, text.keys)
        self.values = _joined(self.values, text.values)
        self.num_read += len(ids)
        self._tokens, self._features = [], []
        everything = torch.ones(1, len(self.keys), dtype=torch.bool, device=device)
        branches = Branches(self.keys, self.values, everything)
        last = torch.tensor([len(ids) - 1], device=device)
        return text, self.head.draft(text, last, branches), branches


def _joined(old: Tensor | None, new: Tensor) -> Tensor:
    return new if old is None else torch.cat([old, new])


class EagleChain(_Reader):
    """Drafts a chain, the best token or, when sampling, one drawn from its distribution.

    Args:
        head: attached to the target.
        depth: draft tokens.
        sampling: the target's, applied to the drafts too.
        seed: of the draws; another one than the target's.
    """

    def __init__(
        self, head: EagleHead, depth: int, sampling: Sampling = GREEDY, seed: int = 1
    ) -> None:
        super().__init__(head)
        self.tree = Tree.chain(depth)
        self.sampling = sampling
        self.generator = torch.Generator(head.fc.weight.device).manual_seed(seed)

    def propose(self, root: int) -> Draft:
        """A chain of `depth` tokens."""
        _, outputs, branches = self._begin(root)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(self.tree.depth):
            if step:
                position = torch.tensor([self.num_read - 1 + step], device=outputs.device)
                outputs = self.head.advance(outputs, tokens[-1], position, branches)
            tokens.append(self._choose(self.head.logits(outputs), probs))
        return Draft(self.tree, torch.cat(tokens), torch.cat(probs) if probs else None)

    def _choose(self, logits: Tensor, probs: list[Tensor]) -> Tensor:
        """[1] target id by [1, W] logits; when sampling, `probs` gets its [1, V] distribution."""
        vocab = self.head.vocab
        if self.sampling.greedy:
            return vocab.to_target(logits.argmax(-1))
        q = self.sampling.probabilities(logits)
        probs.append(q.new_zeros(1, vocab.size).index_copy(1, vocab.ids, q))
        return vocab.to_target(torch.multinomial(q, 1, generator=self.generator)[0])


class EagleTree(_Reader):
    """Drafts EAGLE-2's tree: expand the likeliest nodes, then keep the likeliest of all.

    A node's score is the log-probability of its path, so a child never scores above its
    parent and what is kept is a tree.

    Args:
        head: attached to the target.
        shape: its limits.

    Source: EAGLE-2, arXiv 2406.16858, section 4; SafeAILab/EAGLE `model/cnets.py`,
    `topK_genrate`.
    """

    def __init__(self, head: EagleHead, shape: DynamicShape) -> None:
        super().__init__(head)
        self.shape = shape

    def propose(self, root: int) -> Draft:
        """A tree of at most `num_tokens` nodes below the root."""
        _, outputs, branches = self._begin(root)
        device, width = outputs.device, min(self.shape.top_k, len(self.head.vocab.ids))
        scores = torch.zeros(1, device=device)  # of the nodes expanded now
        nodes = torch.zeros(1, dtype=torch.int64, device=device)  # their numbers; 0 is the root
        drawn: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, scores and parents per level
        num_nodes = 1
        for level in range(self.shape.depth):
            log_q = self.head.logits(outputs).float().log_softmax(-1)
            best = log_q.topk(width)
            tokens = self.head.vocab.to_target(best.indices).flatten()
            all_scores = (scores.unsqueeze(1) + best.values).flatten()
            parents = nodes.repeat_interleave(width)
            drawn.append((tokens, all_scores, parents))
            if level + 1 == self.shape.depth:
                break
            scores, chosen = all_scores.topk(min(self.shape.top_k, len(all_scores)))
            rows = chosen // width
            branches = branches.select(rows)
            position = torch.full_like(rows, self.num_read + level)
            outputs = self.head.advance(outputs[rows], tokens[chosen], position, branches)
            nodes = num_nodes + chosen
            num_nodes += len(all_scores)
        return self._ranked(drawn)

    def _ranked(self, drawn: list[tuple[Tensor, Tensor, Tensor]]) -> Draft:
        """The best of all drawn nodes; a stable sort puts a parent before an equal child."""
        tokens, scores, parents = (torch.cat(column) for column in zip(*drawn, strict=True))
        order = scores.sort(descending=True, stable=True).indices[: self.shape.num_tokens]
        kept = order.sort().values
        old = [0, *(kept + 1).tolist()]
        place = {node: index for index, node in enumerate(old)}
        shape = tuple(place[parent] for parent in parents[kept].tolist())
        return Draft(Tree.from_parents(shape), tokens[kept])
