"""States of recurrent layers, after every token from which a text may continue.

Letters: B texts, P pending tokens, n new tokens, w nodes.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from heads.upload import to_device

CONV, RECURRENT = "conv_states", "recurrent_states"  # transformers' names
State = dict[tuple[str, int], Tensor]  # of one mixer, [b, ...] by kind and number


@dataclass(frozen=True)
class DepthNodes:
    """New tokens of one depth. Texts with fewer tokens repeat one, which changes nothing.

    Attributes:
        nodes: [B or 1, w] int64, of the n new tokens.
        parents: [B or 1, w] int64 tokens that each continues: 0 is the committed text, 1 + j
            pending token j.
    """

    nodes: Tensor
    parents: Tensor


def nodes_by_depth(mask: Tensor, depths: Tensor) -> list[DepthNodes]:
    """Order draft tokens by depth for running. Waits for the device once.

    Args:
        mask: [B or 1, n, P] bool, pending tokens that each of the last n tokens sees, including
            itself.
        depths: [B or 1, P] int64; a token sees at most one token of each depth.
    """
    num_new, num_pending = mask.shape[1:]
    own = torch.eye(num_pending, dtype=torch.bool, device=mask.device)[-num_new:]
    deepest, parents = ((mask & ~own) * (1 + depths).unsqueeze(1)).max(-1)
    num_texts = max(len(mask), len(depths))
    both = torch.where(deepest > 0, 1 + parents, 0), depths[:, -num_new:]
    above, below = torch.stack([rows.expand(num_texts, -1) for rows in both]).tolist()
    by_depth = []
    for depth in sorted({node_depth for row in below for node_depth in row}):
        # The first token runs before the others, so it can be repeated at any depth.
        rows = [[node for node, own in enumerate(row) if own == depth] or [0] for row in below]
        width = max(map(len, rows))
        nodes = [row + row[:1] * (width - len(row)) for row in rows]
        before = [[own[node] for node in row] for row, own in zip(nodes, above, strict=True)]
        by_depth.append(DepthNodes(*to_device([nodes, before], mask.device)))
    return by_depth


class RecurrentStates:
    """States of a model's recurrent layers for a batch of texts.

    Args:
        config: the model's config, from which transformers knows the layers' states.
        num_texts: B.

    Attributes:
        by_depth: draft tokens of a pass, depth by depth.
        sure: number of certain new tokens per text; empty for a draft.
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
        """Bytes of all mixers that have run, per token of one text."""
        tables = (states for table in self._tables.values() for states in table.values())
        return sum(states[0, 0].nbytes for states in tables)

    def start_pass(
        self, sure: list[int], draft: tuple[Tensor, Tensor] | None, in_order: bool = False
    ) -> None:
        """Set the tokens of the next pass.

        Args:
            sure: number of certain tokens per text; empty for a draft.
            draft: mask and depths for `nodes_by_depth`.
            in_order: whether each draft token follows the one before it.
        """
        assert sure or draft
        self.sure, self._runs = sure, {}
        self.by_depth, self._num_pending, self.num_earlier = [], 0, 0
        if draft is not None and not sure:
            num_new, self._num_pending = draft[0].shape[1:]
            self.num_earlier = self._num_pending - num_new
            if in_order:  # does not wait
                tokens = torch.arange(self._num_pending, device=draft[0].device).view(-1, 1, 1)
                pairs = zip(tokens[:num_new], tokens[-num_new:], strict=True)
                self.by_depth = [DepthNodes(*pair) for pair in pairs]
            else:
                self.by_depth = nodes_by_depth(*draft)

    def group_by_length(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Group texts [m, 1] by their number of certain tokens; return these tokens [m, n] too."""
        if device not in self._runs:
            by_length = {length: list[int]() for length in sorted(set(self.sure))}
            for text, length in enumerate(self.sure):
                by_length[length].append(text)
            texts = to_device([*chain.from_iterable(by_length.values())], device).unsqueeze(1)
            self._runs[device] = [
                (group, torch.arange(length, device=device).expand(len(group), -1))
                for length, group in zip(
                    by_length, texts.split(list(map(len, by_length.values()))), strict=True
                )
            ]
        return self._runs[device]

    def select_states(self, mixer: int, texts: Tensor, tokens: Tensor) -> State:
        """States [m, ...] of a mixer after tokens; empty if it has not run.

        Texts and tokens are [m] int64. Token 0 is the committed text, 1 + j pending token j.
        """
        table = self._tables.get(mixer, {})
        return {name: states[texts, tokens] for name, states in table.items()}

    def store_states(self, mixer: int, texts: Tensor, tokens: Tensor, state: State) -> None:
        """Store the states [m, ...] of a mixer; arguments as in `after`."""
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
        """Continue from the last accepted token of each text."""
        last = [1 + nodes[-1] if nodes and not self.sure else 0 for nodes in kept]
        self._keep_states([*range(len(kept))], last)

    def select_rows(self, rows: list[int]) -> None:
        """Keep some texts only."""
        self._num_texts = len(rows)
        self._keep_states(rows)

    def _keep_states(self, texts: list[int], tokens: list[int] | None = None) -> None:
        """Keep the states of some texts, at given tokens if named."""
        index: dict[torch.device, Tensor] = {}
        for table in self._tables.values():
            for name, states in table.items():
                device = states.device
                if device not in index:
                    index[device] = to_device([texts, tokens or texts], device)
                rows, last = index[device]
                table[name] = states[rows] if tokens is None else states[rows, last].unsqueeze(1)

    def insert_row(self, row: int, other: "RecurrentStates") -> None:
        """Replace a text by one of another object, with the states of its mixers."""
        for mixer, table in self._tables.items():
            for name, states in table.items():
                # Both are committed. A draft model may not have read the other text yet.
                theirs = other._tables.get(mixer, {}).get(name)
                states[row] = 0 if theirs is None else theirs[0]

    def make_layer_cache(self, layer: int, state: State) -> Cache:
        """Cache of transformers' own class whose layer holds a state, or none."""
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

    def collect_layer_states(self, layer: int) -> State:
        """States that a module left in the cache of `cache_with`."""
        held = self._cache.layers[layer]
        return {
            (kind, number): states
            for kind in (CONV, RECURRENT)
            for number, states in getattr(held, kind).items()
            if states is not None
        }
