"""Drafting with a smaller language model of the same vocabulary: chains and static trees.

The draft model reads the texts like the target, with its own cache. Accepted draft tokens stay in
that cache, so a draft of depth D costs D passes. A chain may end earlier, by earlier acceptance or
by the model's confidence.

Letters: B texts, N tree nodes (root included), n nodes read in one pass, P nodes read so far, C
children, V vocab.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from heads.decoding.cache import KeptNodes, TreeCache
from heads.decoding.drafting import (
    PAD,
    CommittedTokens,
    Draft,
    Drafter,
    Roots,
    build_tree_layout,
)
from heads.decoding.sampling import GREEDY, Generators, Sampling
from heads.decoding.tree import Tree
from heads.devices import to_device
from heads.target_model.model import Target, prefill_last_states


@dataclass(frozen=True)
class DraftLength:
    """Rule that ends a chain before its full depth.

    Attributes:
        start: draft tokens of a text's first draft. The next draft has 2 more if all were accepted,
            otherwise 1 fewer, from 1 to the full depth. None always drafts the full depth.
        confidence: a chain ends with the first token below this probability, which is still
            proposed. 0 never ends a chain; other values wait for the device at every draft token.

    Source: transformers `generation/candidate_generator.py`, the schedule "heuristic", which has no
        upper bound, and `generation/stopping_criteria.py`, `ConfidenceCriteria`.
    """

    start: int | None = None
    confidence: float = 0.0


class DraftModel(Drafter):
    """Drafts with a language model.

    It proposes its likeliest tokens; when sampling, it draws from its distribution, the children of
    a node without replacement.

    Args:
        model: draft model on the target's device.
        tree: tree to draft; for drawn children only the order counts.
        sampling: the target's sampling, also used for draft tokens.
        seeds: seeds of the draws, one per text, other than the target's.
        length: rule for ending a chain before the tree's depth.
        vocab_size: V of the target, if not the draft model's.
    """

    def __init__(
        self,
        model: Target,
        tree: Tree,
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] = (1,),
        length: DraftLength | None = None,
        vocab_size: int | None = None,
    ) -> None:
        assert tree.width == 1 or length is None
        self.model, self.tree, self.sampling = model, tree, sampling
        self.length, self.vocab_size = length or DraftLength(), vocab_size or model.vocab_size
        self.generators = Generators.from_seeds(seeds, model.device)
        self.row_attributes = ("cache", "unread", "lengths", "limits", "drafted")
        if not sampling.is_greedy:
            self.row_attributes += ("generators",)
        self.levels = _build_levels(tree, sampling.is_greedy, model.device)
        self.order = [node for level in self.levels[1:] for node in level.nodes]
        numbers = {node: number for number, node in enumerate(self.order)}
        self.numbers = to_device([numbers.get(n, -1) for n in range(tree.num_nodes)], model.device)
        self.cache: TreeCache | None = None
        self.draws = self.generators
        # Per text: tokens missing in the cache, committed tokens, draft tokens at most and now.
        self.unread: list[list[int]] = []
        self.lengths: list[int] = []
        self.limits: list[int] = []
        self.drafted: list[int] = []
        self.tokens, self.depth = torch.empty(0, dtype=torch.int64), 0

    def observe(self, seen: CommittedTokens) -> None:
        """Keep the accepted draft tokens in the cache."""
        if self.cache is None:
            self.cache = self.model.new_cache(len(seen.token_ids))
            self.unread = seen.token_ids
            self.lengths = [len(tokens) for tokens in seen.token_ids]
            first = min(self.length.start or self.tree.depth, self.tree.depth)
            self.limits = [first] * len(seen.token_ids)
            return
        self.lengths = [n + len(ids) for n, ids in zip(self.lengths, seen.token_ids, strict=True)]
        if seen.logits is None:
            pairs = zip(self.unread, seen.token_ids, strict=True)
            self.unread = [before + tokens for before, tokens in pairs]
            return
        assert seen.nodes is not None
        read = self.order[: sum(len(level.nodes) for level in self.levels[1 : self.depth])]
        paths = [[read.index(n) for n in path if n in read] for path in seen.paths]
        numbers = self.numbers[seen.nodes[:, 1:]]
        counts = ((numbers >= 0) & (numbers < len(read))).sum(1)
        self.cache.commit(paths, KeptNodes(numbers.clamp_min(0), counts))
        accepted = [tokens[1:] for tokens in seen.token_ids]
        self.unread = [tokens[len(path) :] for tokens, path in zip(accepted, paths, strict=True)]
        if self.length.start is not None:
            self.limits = [
                min(limit + 2, self.tree.depth) if len(tokens) == drafted else max(limit - 1, 1)
                for limit, tokens, drafted in zip(self.limits, accepted, self.drafted, strict=True)
            ]

    def propose(self, roots: Roots) -> Draft:
        """Draft trees below `roots`, one pass per depth."""
        assert self.cache is not None
        rows = [[*tokens, root] for tokens, root in zip(self.unread, roots.ids, strict=True)]
        logits = commit_tokens(self.model, self.cache, rows)
        if not self.sampling.is_greedy:
            # The longest draft of a batch decides how often each text draws.
            self.draws = self.generators.next_step()
        rooms = [count_draftable_tokens(self.model, length + 1) for length in self.lengths]
        self.drafted, self.depth = list(map(min, self.limits, rooms)), 0
        probs: list[Tensor] = []
        self.tokens = torch.empty(len(roots), 0, dtype=torch.int64, device=logits.device)
        while self.depth < max(self.drafted):
            level = self.levels[self.depth]
            if self.depth > 0:
                fed = self.tokens[:, level.places].clamp_min(0)
                mask = level.mask if self.tree.width > 1 else None
                output = self.model.run_pending(self.cache, fed, mask, level.depths)
                logits = self.model.compute_logits(output.hidden_states)
            tokens = self._choose_children(match_vocab_size(logits, self.vocab_size), level, probs)
            self.tokens = torch.cat([self.tokens, tokens], dim=1)
            self.depth += 1
        q = _order_by_node(self.levels, probs) if probs else None
        if min(self.drafted) == self.tree.depth:
            return Draft.from_tree(self.tree, self.tokens, q)
        tree = self.tree.down_to(self.depth)
        depths = build_tree_layout(tree, self.tokens.device).depths[:, 1:]
        over = depths > to_device(self.drafted, self.tokens.device).unsqueeze(1)
        return Draft.from_tree(tree, self.tokens.masked_fill(over, PAD), q)

    def _prepare_insert(self, other: "DraftModel") -> None:
        """Read the other text's prompt."""
        assert other.cache is not None
        *prompt, last = other.unread[0]
        if prompt:
            commit_tokens(self.model, other.cache, [prompt])
        other.unread = [[last]]

    def _choose_children(self, logits: Tensor, level: "_Level", probs: list[Tensor]) -> Tensor:
        """Choose the children [B, C] of nodes by logits [B, n, V].

        When sampling, the distribution q [B, n, V] of the children is appended to `probs`.
        """
        if self.sampling.is_greedy:
            candidates = logits.topk(level.num_candidates).indices
        else:
            probs.append(self.sampling.compute_probabilities(logits))
            candidates = sample_distinct(probs[-1], level.num_candidates, self.draws)
        tokens = candidates[:, level.parents, level.picks]
        if self.length.confidence > 0:
            # Unsure chains end with this token.
            q = probs[-1] if probs else logits.float().softmax(-1)
            for row, confidence in enumerate(q[:, 0].gather(1, tokens)[:, 0].tolist()):
                if confidence < self.length.confidence:
                    self.drafted[row] = min(self.drafted[row], self.depth + 1)
        return tokens


def count_draftable_tokens(model: Target, length: int) -> int:
    """Count the tokens that a draft model can draft in a row after a text of this length.

    The model reads all of these tokens but the last.
    """
    return sys.maxsize if model.max_positions is None else max(model.max_positions + 1 - length, 0)


def commit_tokens(model: Target, cache: TreeCache, rows: list[list[int]]) -> Tensor:
    """Commit tokens, at least one per text; return logits [B, 1, V] after each text's last token.

    Tokens beyond the model's window are not read, as no token is drafted there.
    """
    rooms = [max(1, count_draftable_tokens(model, length) - 1) for length in cache.slots.lengths]
    rows = [row[:most] for row, most in zip(rows, rooms, strict=True)]
    # Tokens that only the target knows may lie beyond the draft model's vocabulary.
    known = [[min(token, model.vocab_size - 1) for token in row] for row in rows]
    return model.compute_logits(prefill_last_states(model, cache, known))


def sample_distinct(probs: Tensor, num_tokens: int, generators: Generators) -> Tensor:
    """Sample [B, n, num_tokens] int64 ids without replacement from [B, n, V], in drawing order.

    Like `Generators.sample_indices`, but several of the best are taken. PAD stands where no
    probability is left.
    """
    keys, tokens = (probs / generators.draw_exponential(probs)).topk(num_tokens)
    return tokens.masked_fill(keys == 0, PAD)


def match_vocab_size(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or pad logits to [..., V] if the vocabularies are padded differently."""
    logits = logits[..., :vocab_size]
    return pad(logits, (0, vocab_size - logits.shape[-1]), value=-torch.inf)


def has_same_tokenizer(target: Target, draft: Target) -> bool:
    """Tell whether both models share the meaning of token ids.

    Additional tokens of one model are allowed if the other does not use their ids.
    """
    target_vocab, draft_vocab = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    names = {index: token for token, index in draft_vocab.items()}
    return all(
        draft_vocab.get(token, index) == index and names.get(index, token) == token
        for token, index in target_vocab.items()
    )


@dataclass(frozen=True)
class _Level:
    """Nodes of one depth with children, read in one pass, and how their children are chosen.

    Attributes:
        nodes: indices of the nodes.
        places: [n] int64 positions among the draft tokens.
        mask: [1, n, P] bool, nodes that each node sees.
        depths: [1, P] int64 depths below the root's children.
        parents: [C] int64 index in `nodes` of each child's parent.
        picks: [C] int64 rank of each child among its parent's candidates.
        num_candidates: number of candidates needed.
    """

    nodes: list[int]
    places: Tensor
    mask: Tensor
    depths: Tensor
    parents: Tensor
    picks: Tensor
    num_candidates: int


def _build_levels(tree: Tree, ranked: bool, device: torch.device) -> list[_Level]:
    """Build the levels from the root down.

    Of children that are not ranked, the first is drawn first.
    """
    levels, mask, read = [], tree.build_mask(), []
    for depth in range(tree.depth):
        nodes = [n for n, d in enumerate(tree.depths) if d == depth and tree.children[n]]
        # The root belongs to the text, not to the pending nodes.
        read += nodes if depth else []
        children = [node for node, d in enumerate(tree.depths) if d == depth + 1]
        parents = [tree.parents[child] for child in children]
        picks = [
            tree.ranks[child] if ranked else tree.children[parent].index(child)
            for child, parent in zip(children, parents, strict=True)
        ]
        levels.append(
            _Level(
                nodes,
                torch.tensor([node - 1 for node in nodes], device=device),
                mask[nodes][:, read].unsqueeze(0).to(device),
                torch.tensor([[tree.depths[node] - 1 for node in read]], device=device),
                torch.tensor([nodes.index(parent) for parent in parents], device=device),
                torch.tensor(picks, device=device),
                1 + max(picks),
            )
        )
    return levels


def _order_by_node(levels: list[_Level], probs: list[Tensor]) -> Tensor:
    """Order q [B, n, V] of each depth by node: [B, N', V].

    N' - 1 is the last node with children.
    """
    last = levels[len(probs) - 1].nodes[-1]
    nodes = torch.cat([level.places for level in levels[: len(probs)]]) + 1
    q = torch.cat(probs, dim=1)
    return q.new_zeros(len(q), last + 1, q.shape[2]).index_copy(1, nodes, q)
