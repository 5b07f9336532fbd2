"""Drafting by the target itself, with some of its decoder layers left out.

A draft token is a pass of the remaining layers over the target's own keys and values of the text.
The verify pass overwrites the draft token's entries, so there is no second model, no second cache
and nothing to undo.

Sources: LayerSkip, arXiv 2404.16710 (leaves out the last layers); Draft & Verify, arXiv 2309.08168,
and SWIFT, arXiv 2410.06916 (leave out any layers). Differs: whole layers only.

Letters: B texts, S tokens of a text, n roots, V vocab.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.decoding.cache import TreeCache
from heads.decoding.drafting import CommittedTokens, Draft, Drafter, Roots
from heads.decoding.sampling import GREEDY, Generators, Sampling
from heads.decoding.tree import Tree
from heads.devices import to_device
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target


def list_skipped_layers(target: Target, num_layers: int) -> tuple[int, ...]:
    """List the layers that are left out if only the first `num_layers` run."""
    return tuple(range(num_layers, target.num_layers))


class SelfDraft(Drafter):
    """Drafts chains with some layers left out.

    Args:
        target: target that drafts for itself; no layer may use another layer's keys and values.
        skip: decoder layers, from 0, to leave out.
        num_tokens: draft tokens, at least one.
        sampling: the target's sampling, also used for draft tokens.
        seeds: seeds of the draws, one per text, other than the target's.
        output_head: output head for drafting, if not the target's.
    """

    row_attributes = ("generators",)

    def __init__(
        self,
        target: Target,
        skip: Sequence[int],
        num_tokens: int,
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] = (1,),
        output_head: EmbeddingsAndOutputHead | None = None,
    ) -> None:
        assert num_tokens > 0
        self.target, self.skip, self.num_tokens = target, tuple(skip), num_tokens
        self.output_head = output_head or target
        self.sampling = sampling
        self.num_static_nodes = 1 + num_tokens
        self.generators = Generators.from_seeds(seeds, target.device)
        self.cache: TreeCache | None = None

    def observe(self, seen: CommittedTokens) -> None:
        """Take the cache in which the target keeps the texts, and selects and inserts them."""
        self.cache = seen.cache

    def propose(self, roots: Roots) -> Draft:
        """Draft chains of `num_tokens` tokens, one pass each."""
        assert self.cache is not None
        tokens, probs = [roots.tokens], []
        for depth in range(self.num_tokens):
            output = self.target.run_pending(
                self.cache,
                tokens[-1].unsqueeze(1),
                depths=torch.arange(depth + 1, device=self.target.device).unsqueeze(0),
                skip=self.skip,
            )
            logits = self.output_head.compute_logits(output.hidden_states[:, 0])
            if self.sampling.is_greedy:
                tokens.append(logits.argmax(-1))
            else:
                probs.append(self.sampling.compute_probabilities(logits))
                tokens.append(self.generators.sample_indices(probs[-1]))
        draft_probs = torch.stack(probs, 1) if probs else None
        return Draft.from_tree(
            Tree.make_chain(self.num_tokens), torch.stack(tokens[1:], 1), draft_probs
        )


class ReplayText:
    """One of the target's texts, read once, on which many sets of layers can be tried.

    A chain is drafted below every root at once. As an accepted draft token is the text's own,
    chains are fed from the text: token r + e of the text, in the chain of root r, sees the target's
    keys and values before r, and its own chain's from r on.

    Args:
        target: target that reads the text.
        token_ids: [S] ids of prompt and answer.
        first: place of the first root; later tokens are roots too, n = S - first.
    """

    def __init__(self, target: Target, token_ids: list[int], first: int) -> None:
        self.target, self.first = target, first
        self.ids = to_device(token_ids, target.device)
        self.places = torch.arange(len(token_ids), device=target.device)
        self.cache = target.new_cache(1)
        causal = self.places.unsqueeze(1) >= self.places
        # The text stays pending, as a committed token would be visible everywhere.
        target.run_pending(self.cache, self.ids[None], causal[None], self.places[None])

    def draft_all_places(self, skip: Sequence[int], depth: int) -> Tensor:
        """Draft a chain at every root: [depth, n, 1] int64 best token of each depth.

        Entries after a chain leaves the text are meaningless.

        Args:
            skip: decoder layers to leave out.
            depth: draft tokens per chain.
        """
        roots = self.places[self.first :]
        mask, positions, drafted = self.places < roots.unsqueeze(1), self.places, []
        own = torch.eye(len(roots), dtype=torch.bool, device=mask.device)
        for below in range(depth):
            fed = (roots + below).clamp_max(len(self.ids) - 1)
            mask = torch.cat([mask, own], dim=1)
            positions = torch.cat([positions, roots + below])
            output = self.target.run_pending(
                self.cache, self.ids[fed][None], mask[None], positions[None], skip=skip
            )
            logits = self.target.compute_logits(output.hidden_states[0])
            drafted.append(logits.argmax(-1, keepdim=True))
        return torch.stack(drafted)
