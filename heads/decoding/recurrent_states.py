"""States of recurrent layers, after every token that a text may go on from.

Letters: B texts, P pending tokens, n new tokens, w nodes.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from heads.upload import upload

CONV, RECURRENT = "conv_states", "recurrent_states"  # transformers' names
State = dict[tuple[str, int], Tensor]  # of one mixer, [b, ...] by kind and number


@dataclass(frozen=True)
class DepthNodes:
    """New tokens of one depth; a text that has fewer repeats one, which changes nothing.

    Attributes:
        nodes: [B or 1, w] int64, of the n new tokens.
        parents: [B or 1, w] int64, what each goes on from: 0 is the committed text, 1 + j
            pending token j.
    """

    nodes: Tensor
    parents: Tensor


def nodes_by_depth(mask: Tensor, depths: Tensor) -> list[DepthNodes]:
    """Draft tokens in the order in which they are run; waits for the device once.

    Args:
        mask: [B or 1, n, P] bool, the pending tokens that each of the last n sees, itself
            included.
        depths: [B or 1, P] int64; of each depth a token sees at most one.
    """
    num_new, num_pending = mask.shape[1:]
    own = torch.eye(num_pending, dtype=torch.bool, device=mask.device)[-num_new:]
    deepest, parents = ((mask & ~own) * (1 + depths).unsqueeze(1)).max(-1)
    num_texts = max(len(mask), len(depths))
    both = torch.where(deepest > 0, 1 + parents, 0), depths[:, -num_new:]
    above, below = torch.stack([rows.expand(num_texts, -1) for rows in both]).tolist()
    by_depth = []
    for depth in sorted({node_depth for row in below for node_depth in row}):
        # The first of all tokens is run before the others, so it may be repeated at any depth.
        rows = [[node for node, own in enumerate(row) if own == depth] or [0] for row in below]
        width = max(map(len, rows))
        nodes = [row + row[:1] * (width - len(row)) for row in rows]
        before = [[own[node] for node in row] for row, own in zip(nodes, above, strict=True)]
        by_depth.append(DepthNodes(*upload([nodes, before], mask.device)))
    return by_depth


class RecurrentStates:
    """The states of a model's recurrent layers, for a batch of texts.

    Args:
        config: of the model, from which transformers knows what its layers keep.
        num_texts: B.

    Attributes:
        by_depth: the draft tokens of a pass, depth after depth.
        sure: instead, how many new tokens belong to each text whatever comes; empty for a draft.
        num_earlier: pending tokens before the new ones.
    """

    def __init__(self, config: Any, num_texts: int) -> None:
        self.by_depth: list[DepthNodes] = []
        self.sure: list[int] = []
        self.num_earlier = 0
        self._num_texts, self._num_pending = num_texts, 0
        self._runs: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        self._cache: Any = DynamicCache(config=config)
        self._num_states = [getattr(held, "number_of_states", 0) for held in self._cache.layers]
        self._tables: dict[int, State] = {}  # [B, 1 + P, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that all mixers which have run keep after one token of one text."""
        tables = (states for table in self._tables.values() for states in table.values())
        return sum(states[0, 0].nbytes for states in tables)

    def begin(
        self, sure: list[int], draft: tuple[Tensor, Tensor] | None, in_order: bool = False
    ) -> None:
        """Sets which tokens the next pass runs.

        Args:
            sure: tokens of each text that are its own; empty for a draft.
            draft: mask and depths, as `nodes_by_depth` takes them.
            in_order: whether each draft token goes on from the one before it.
        """
        assert sure or draft
        self.sure, self._runs = sure, {}
        self.by_depth, self._num_pending, self.num_earlier = [], 0, 0
        if draft is not None and not sure:
            num_new, self._num_pending = draft[0].shape[1:]
            self.num_earlier = self._num_pending - num_new
            if in_order:  # which waits for nothing
                tokens = torch.arange(self._num_pending, device=draft[0].device).view(-1, 1, 1)
                pairs = zip(tokens[:num_new], tokens[-num_new:], strict=True)
                self.by_depth = [DepthNodes(*pair) for pair in pairs]
            else:
                self.by_depth = nodes_by_depth(*draft)

    def sure_runs(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Texts [m, 1] of which as many tokens are sure, and these [m, n], on a device."""
        if device not in self._runs:
            by_length = {length: list[int]() for length in sorted(set(self.sure))}
            for text, length in enumerate(self.sure):
                by_length[length].append(text)
            texts = upload([*chain.from_iterable(by_length.values())], device).unsqueeze(1)
            self._runs[device] = [
                (group, torch.arange(length, device=device).expand(len(group), -1))
                for length, group in zip(
                    by_length, texts.split(list(map(len, by_length.values()))), strict=True
                )
            ]
        return self._runs[device]

    def after(self, mixer: int, texts: Tensor, tokens: Tensor) -> State:
        """The states [m, ...] that a mixer has left behind; nothing before it has run.

        Texts and tokens are [m] int64; token 0 is the committed text, 1 + j pending token j.
        """
        table = self._tables.get(mixer, {})
        return {name: states[texts, tokens] for name, states in table.items()}

    def put(self, mixer: int, texts: Tensor, tokens: Tensor, state: State) -> None:
        """Keeps the states [m, ...] that a mixer leaves behind; arguments as of `after`."""
        table = self._tables.setdefault(mixer, {})
        for name, states in state.items():
            held = table.get(name, states.new_zeros(self._num_texts, 1, *states.shape[1:]))
            missing = 1 + self._num_pending - held.shape[1]
            if missing > 0 and not self.sure:
                more = held.new_zeros(self._num_texts, missing, *states.shape[1:])
                held = torch.cat([held, more], dim=1)
            held[texts, tokens] = states
            table[name] = held

    def commit(self, kept: list[list[int]]) -> None:
        """Goes on from the last token that each text keeps."""
        last = [1 + nodes[-1] if nodes and not self.sure else 0 for nodes in kept]
        self._pick([*range(len(kept))], last)

    def keep(self, rows: list[int]) -> None:
        """Goes on with some texts only."""
        self._num_texts = len(rows)
        self._pick(rows)

    def _pick(self, texts: list[int], tokens: list[int] | None = None) -> None:
        """Keeps the states of some texts, of one token of each if it is said which."""
        index: dict[torch.device, Tensor] = {}
        for table in self._tables.values():
            for name, states in table.items():
                device = states.device
                if device not in index:
                    index[device] = upload([texts, tokens or texts], device)
                rows, last = index[device]
                table[name] = states[rows] if tokens is None else states[rows, last].unsqueeze(1)

    def take(self, row: int, other: "RecurrentStates") -> None:
        """A text goes on in place of another, with what its mixers have left behind elsewhere."""
        for mixer, table in self._tables.items():
            for name, states in table.items():
                # Both are committed; a draft model may have read nothing of the other text yet.
                theirs = other._tables.get(mixer, {}).get(name)
                states[row] = 0 if theirs is None else theirs[0]

    def cache_with(self, layer: int, state: State) -> Cache:
        """A cache of transformers' own whose layer holds a state, or nothing yet."""
        held: Any = LinearAttentionLayer(self._num_states[layer])
        for (kind, number), states in state.items():
            getattr(held, kind)[number] = states
            getattr(held, f"is_{kind}_initialized")[number] = True
            held.has_previous_state[number] = True
            held.device, held.dtype = states.device, states.dtype
            if kind == CONV:
                held.conv_kernel_size[number] = states.shape[-1]
        self._cache.layers[layer] = held
        return self._cache

    def in_cache(self, layer: int) -> State:
        """The states that the module which was given `cache_with` has left there."""
        held = self._cache.layers[layer]
        return {
            (kind, number): states
            for kind in (CONV, RECURRENT)
            for number, states in getattr(held, kind).items()
            if states is not None
        }
