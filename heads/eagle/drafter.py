"""Drafting with EAGLE heads: chains, and EAGLE-2's dynamic trees.

Both read committed tokens with the target's true hidden states, keep only their keys and values,
and draft on with the head's own outputs. Only chains that may be cut wait for the device.

Letters: B texts, H hidden, W draft vocabulary, V vocabulary.
"""

from abc import abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from heads.decoding.cache import rounded
from heads.decoding.drafting import PAD, Committed, Draft, Roots
from heads.decoding.dynamic_trees import ExpandedTree, Frontier, expand_tree
from heads.decoding.head_drafter import HeadChain, HeadDrafter, HeadTree, TextCache
from heads.eagle.branches import Branches, Stretch
from heads.eagle.continuing import ContinuingHead
from heads.upload import upload


class EagleMemory(HeadDrafter):
    """Keeps keys and values of the committed texts in each of a head's layers."""

    head: ContinuingHead
    state = ("seen", "cache")

    def __init__(self, head: ContinuingHead, *how: Any) -> None:
        super().__init__(head, *how)
        self.cache = TextCache(head.num_layers)
        self.seen: Committed | None = None

    def observe(self, seen: Committed) -> None:
        """Keep committed tokens until a draft is needed; then the token after them is known."""
        if self.seen is None:
            self.seen = seen
        elif seen.logits is None:
            # Parts of a prompt are read as they arrive, which bounds the memory.
            before, self.seen = self.seen.hand_on(seen)
            first = [tokens[0] if tokens else 0 for tokens in self.seen.token_ids]
            self._read(before, upload(first, seen.output.hidden_states.device))
        else:
            self.seen = self.seen.then(seen)

    def _meet(self, other: Self) -> None:
        """Prepare to take another drafter's text: read all but its last token."""
        assert self.seen is not None
        other._read_ahead()
        states = self.seen.output.hidden_states
        self.cache.open(len(states), states.device, self.seen.cache.slots)

    def _read_ahead(self) -> None:
        """Read a prompt except its last token, which waits for the next token."""
        assert self.seen is not None
        (tokens,) = self.seen.token_ids
        if len(tokens) > 1:
            device = self.seen.output.hidden_states.device
            output = self.seen.output.at(torch.arange(len(tokens) - 1, device=device).unsqueeze(0))
            before = Committed([tokens[:-1]], output, self.seen.cache)
            self._read(before, upload(tokens[-1:], device))

    @abstractmethod
    def _read(self, seen: Committed, following: Tensor) -> Any:
        """Read tokens, each with the next; `following` [B] comes after the last of each text."""

    def _taken(self, seen: Committed, following: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fused states [B * n, H], the tokens after them [B * n], and their slots [B, n]."""
        features = self.head.features(seen.output)
        num_texts, length, _ = features.shape
        slots = self.cache.open(num_texts, features.device, seen.cache.slots)
        last = seen.counts.unsqueeze(1) - 1
        if not all(seen.token_ids):
            last = last.clamp_min(
                0
            )  # for texts without tokens in this part, whose result is dropped
        ids = seen.tokens.roll(-1, dims=1).scatter(1, last, following.unsqueeze(1))
        fused = self.head.fuse(features).flatten(0, 1)
        return fused, ids.flatten(), slots.place(length, length)

    def _remember(
        self, layer: int, keys: Tensor, values: Tensor, places: Tensor, seen: Committed
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [B * n, K, d] of a layer; return all of them, two [B, S, K, d]."""
        new_keys, new_values = (
            each.unflatten(0, places.shape).transpose(1, 2) for each in (keys, values)
        )
        width, needed = rounded(self.cache.opened.width(places.shape[1])), seen.cache.needed
        every = self.cache.buffers[layer].write(new_keys, new_values, places, width, needed)
        return every[0].transpose(1, 2), every[1].transpose(1, 2)

    def _known(self, positions: Tensor) -> Tensor:
        """Clamp positions to the head's window, beyond which no token is drafted."""
        return positions.clamp_max(self.head.window - 1)

    def _drafted(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Replace tokens [B, n] at positions [B, n or 1] beyond the window by PAD."""
        return tokens.masked_fill(positions >= self.head.window, PAD)


class _EagleDrafter(EagleMemory):
    """Drafts from the head's own outputs."""

    def _begin(self, roots: Roots) -> tuple[Tensor, Tensor, Branches]:
        """Read committed tokens up to `roots`; give the head's output [B, H] and position."""
        assert self.seen is not None
        seen, self.seen = self.seen, None
        text, branches = self._read(seen, roots.tokens)
        outputs = self.head.draft(text, last_rows(seen), branches)
        return outputs, self.cache.opened.committed[:, 0] - 1, branches

    def _read(self, seen: Committed, following: Tensor) -> tuple[Any, Branches]:
        """See above."""
        fused, ids, places = self._taken(seen, following)
        text = self.head.read(fused, ids, self._known(places.flatten()))
        keys, values = self._remember(0, text.keys, text.values, places, seen)
        self.cache.opened.advance(seen.counts, seen.token_ids)
        return text, Branches(keys, values, Stretch.up_to(self.cache.opened.committed[:, 0]))


def last_rows(seen: Committed) -> Tensor:
    """[B] row of each text's last token among all B * n."""
    places, length = seen.counts - 1, seen.output.hidden_states.shape[1]
    return places + torch.arange(len(places), device=places.device) * length


class EagleChain(HeadChain, _EagleDrafter):
    """Drafts a chain, each token from the head's output for the one before."""

    def propose(self, roots: Roots) -> Draft:
        """Draft chains of `depth` tokens."""
        outputs, positions, branches = self._begin(roots)
        draws = self.sampler()
        tokens: list[Tensor] = []
        for step in range(self.tree.depth):
            if draws.ended:
                break
            if step:
                place = self._known(positions + step)
                outputs = self.head.advance(outputs, tokens[-1], place, branches)
            tokens.append(draws.token(self.head.logits(outputs)))
        places = positions.unsqueeze(1) + torch.arange(len(tokens), device=positions.device)
        return draws.chains(self.tree, self._drafted(torch.stack(tokens, 1), places))


class EagleTree(HeadTree, _EagleDrafter):
    """Drafts EAGLE-2's tree."""

    def expand(self, roots: Roots) -> ExpandedTree:
        """See `heads.decoding.drafting.DynamicDrafter`."""
        outputs, first, branches = self._begin(roots)

        def after(grown: Frontier) -> Tensor:
            nonlocal outputs, branches
            branches = branches.select(grown.rows)
            number = len(grown.rows) // len(roots)
            positions = self._known((first + grown.level).repeat_interleave(number))
            fed = outputs[grown.rows]
            outputs = self.head.advance(fed, grown.tokens, positions, branches)
            return self.head.logits(outputs)

        def known(tokens: Tensor, level: int) -> Tensor:
            return self._drafted(tokens, first.unsqueeze(1) + level)

        return expand_tree(self.shape, self.head.vocab, self.head.logits(outputs), after, known)
