"""Cache of a batch of texts of different lengths that end in draft trees.

Each text has one row of every buffer of keys and values. Slot i of a row holds the token at
position i. After the committed tokens come pending ones, the nodes of a tree, until `commit` moves
the accepted nodes to their positions. Nothing else is copied, and wrong tokens are simply
overwritten. A recurrent layer keeps its state after every token from which a text may continue.

`TreeCache`, at the end, joins the parts: a `SlotBuffer` per attention layer, one `CacheSlots`, and
the `RecurrentStates`.

Letters: B texts, b or m some of them, S slots, P pending tokens, n tokens added, A nodes kept, w
nodes of a depth, K heads, d head size.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

from heads.devices import to_device

CONV, RECURRENT = "conv_states", "recurrent_states"  # transformers' names
State = dict[tuple[str, int], Tensor]  # of one mixer, [b, ...] by kind and number
ROUND_TO = 64  # slots


class SlotBuffer:
    """Keys and values [B, K, S, d] of one layer, by slot; None before the first write.

    With a capacity, the buffer has that many slots and never grows.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def write(
        self, keys: Tensor, values: Tensor, slots: Tensor | int, width: int, needed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values at slots; return those of all slots up to `width`.

        Args:
            keys: [B, K, n, d].
            values: [B, K, n, d].
            slots: [B, n] int64, or the first of n slots that all texts share.
            width: slots to return.
            needed: slots that later passes will need.
        """
        buffers = self._grow_buffers((keys, values), max(width, needed), len(keys))
        for buffer, new in zip(buffers, (keys, values), strict=True):
            if isinstance(slots, int):
                buffer.narrow(2, slots, new.shape[2]).copy_(new)
            else:
                texts, places = _build_slot_index(slots, buffer)
                buffer[texts, :, places] = new.transpose(1, 2)
        return buffers[0].narrow(2, 0, width), buffers[1].narrow(2, 0, width)

    def write_documents(
        self, keys: Tensor, values: Tensor, slots: "DocumentSlots", width: int, num_texts: int
    ) -> None:
        """Store keys and values [1, K, S, d] of a row of documents at the slots of their texts."""
        texts, places = slots.texts.to(keys.device), slots.places.to(keys.device)
        buffers = self._grow_buffers((keys, values), width, num_texts)
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer[texts, :, places] = new[0].transpose(0, 1)

    def reserve_slots(self, width: int) -> None:
        """Grow to at least `width` slots, after the first write."""
        self._grow_buffers(self._get_keys_values(), width, len(self._get_keys_values()[0]))

    def select_rows(self, rows: list[int]) -> None:
        """Select the rows that stay, in place."""
        self.keys, self.values = (
            _select_buffer_rows(buffer, rows) for buffer in self._get_keys_values()
        )

    def insert_row(self, row: int, other: "SlotBuffer", num_slots: int, num_texts: int) -> None:
        """Insert the first slots of a buffer of one row into a row."""
        if num_slots:
            buffers = self._grow_buffers(other._get_keys_values(), num_slots, num_texts)
            for buffer, new in zip(buffers, other._get_keys_values(), strict=True):
                buffer[row, :, :num_slots] = new[0, :, :num_slots]

    def _get_keys_values(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _grow_buffers(
        self, like: tuple[Tensor, Tensor], width: int, num_texts: int
    ) -> tuple[Tensor, Tensor]:
        if width > (0 if self.keys is None else self.keys.shape[2]):
            size = self.capacity or compute_capacity(width)
            if width > size:
                raise RuntimeError(f"{width} slots needed in a cache of {size}")
            self.keys = _enlarge_buffer(self.keys, like[0], size, num_texts)
            self.values = _enlarge_buffer(self.values, like[1], size, num_texts)
        return self._get_keys_values()


def _enlarge_buffer(old: Tensor | None, like: Tensor, size: int, num_texts: int) -> Tensor:
    # Zeros, because a masked slot enters a product with weight 0, and 0 times NaN is NaN.
    new = like.new_zeros(num_texts, like.shape[1], size, like.shape[3])
    if old is not None:
        new[:, :, : old.shape[2]] = old
    return new


def _select_buffer_rows(buffer: Tensor, rows: list[int]) -> Tensor:
    moved = [(to, row) for to, row in enumerate(rows) if to != row]
    if any(row < len(rows) for _, row in moved):
        return buffer[rows]
    # Rows from the end fill the gaps; the others stay in place.
    for to, row in moved:
        buffer[to].copy_(buffer[row])
    return buffer[: len(rows)]


def _build_slot_index(slots: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Build an index of rows [B, 1] and slots [B, n], to move whole vectors, unlike `scatter`."""
    return _make_row_index(len(slots), buffer.device), slots.to(buffer.device)


@functools.cache
def _make_row_index(num_texts: int, device: torch.device) -> Tensor:
    # Cached, as captured graphs read it at its address.
    return torch.arange(num_texts, device=device).unsqueeze(1)


def move_slots(buffers: Sequence[SlotBuffer], source: Tensor, to: Tensor) -> None:
    """Copy slots `source` [B, A] to slots `to` [B, A] of every buffer."""
    for buffer in chain.from_iterable(each._get_keys_values() for each in buffers):
        texts, from_slots = _build_slot_index(source, buffer)
        buffer[texts, :, to.to(buffer.device)] = buffer[texts, :, from_slots]


def round_up_slots(num_slots: int) -> int:
    """Round up to one of the few slot counts that drafters read; every buffer has as many.

    Texts grow with each step, and oneDNN recompiles a bfloat16 product for each new length.
    """
    return -(-num_slots // ROUND_TO) * ROUND_TO


def compute_capacity(num_slots: int) -> int:
    """Compute the slots to allocate for a needed number: an eighth more."""
    return round_up_slots(num_slots + num_slots // 8)


class KeptNodes(NamedTuple):
    """Part of a draft to keep, on the device.

    Attributes:
        nodes: [B, A] int64 pending tokens; shorter rows are padded with any node.
        counts: [B] int64 number of kept tokens.
    """

    nodes: Tensor
    counts: Tensor


class DocumentSlots(NamedTuple):
    """Where the tokens of a row of documents belong.

    Attributes:
        texts: [S] int64 row of the text of each token.
        places: [S] int64 slot of each token in its text.
    """

    texts: Tensor
    places: Tensor


class CacheSlots:
    """Slots of the tokens of a batch, and which tokens see which.

    Attributes:
        lengths: committed tokens per text.
        committed: committed tokens per text on the device, [B, 1] int64.
        fixed_width: number of slots that every pass reads. Set while passes are captured, when the
            host does not know the lengths of the texts; otherwise None.
    """

    def __init__(self, num_texts: int, device: torch.device) -> None:
        self.device = device
        self.fixed_width: int | None = None
        self._longest = 0
        self.lengths = [0] * num_texts
        self.committed = torch.zeros(num_texts, 1, dtype=torch.int64, device=device)

    def rewind_texts(self, lengths: list[int]) -> None:
        """Forget committed tokens after `lengths`; new tokens will overwrite them."""
        self.lengths = lengths
        self.committed = to_device(lengths, self.device).unsqueeze(1)

    def fix_width(self, width: int, num_pending: int) -> None:
        """Make every pass read `width` slots, of which the last are for pending tokens."""
        self.fixed_width, self._longest = width, width - num_pending

    def copy_fixed_width(self, other: "CacheSlots") -> None:
        """Copy the fixed width of another object."""
        self.fixed_width, self._longest = other.fixed_width, other._longest

    def compute_pending_slots(self, num_new: int, num_pending: int) -> Tensor:
        """Compute the slots [B, n] int64 of the last `num_new` of `num_pending` pending tokens."""
        return self.committed + torch.arange(num_pending - num_new, num_pending, device=self.device)

    def count_used_slots(self, num_pending: int) -> int:
        """Count the slots in use with a number of pending tokens."""
        return max(self.lengths) + num_pending if self.fixed_width is None else self.fixed_width

    def attention_mask(self, mask: Tensor, width: int) -> Tensor:
        """Build the mask [B, n, S] bool of the slots that n tokens see.

        A token sees the committed tokens of its text, and pending ones by the mask.

        Args:
            mask: [B or 1, n, P] bool, pending tokens that each of n tokens sees.
            width: number S of slots.
        """
        committed, (num_new, num_pending) = self.committed, mask.shape[1:]
        slots = torch.arange(width, device=self.device)
        seen = (slots < committed).unsqueeze(1).repeat(1, num_new, 1)
        pending = self.compute_pending_slots(num_pending, num_pending).unsqueeze(1)
        return seen.scatter_(
            2, pending.expand(-1, num_new, -1), mask.expand(len(committed), -1, -1)
        )

    def compute_positions(self, depths: Tensor, width: int) -> Tensor:
        """Compute the positions [B, S] int64 of the tokens in all slots.

        Args:
            depths: [B or 1, P] int64 depths of the pending tokens, from 0.
            width: number S of slots.
        """
        pending = self.committed + depths
        everything = torch.arange(width, device=self.device).repeat(len(pending), 1)
        num_pending = pending.shape[1]
        return everything.scatter_(1, self.compute_pending_slots(num_pending, num_pending), pending)

    def commit(
        self,
        kept: list[list[int]],
        buffers: Sequence[SlotBuffer] = (),
        on_device: KeptNodes | None = None,
        mover: Callable[..., None] = move_slots,
    ) -> None:
        """Add pending tokens to the texts and forget the others.

        Args:
            kept: pending tokens to keep per text, in order; not read with a fixed width.
            buffers: buffers whose entries move too.
            on_device: these tokens on the device, if available.
            mover: `move_slots`, optionally compiled.
        """
        moved = any(nodes != list(range(len(nodes))) for nodes in kept)
        longest = max(map(len, kept), default=None)
        if on_device is None:
            # Shorter rows are padded with slots that are forgotten anyway.
            rows = [nodes + list(range(len(nodes), longest or 0)) for nodes in kept]
            counts = to_device(list(map(len, kept)), self.device)
            on_device = KeptNodes(to_device(rows, self.device), counts)
        if buffers and (moved or self.fixed_width is not None):
            source = self.committed + on_device.nodes[:, :longest]
            num_kept = source.shape[1]
            mover(buffers, source, self.compute_pending_slots(num_kept, num_kept))
        self.advance(on_device.counts, kept)

    def advance(self, counts: Tensor, kept: Sequence[Sequence[int]]) -> None:
        """Add the first pending tokens to the texts, in place.

        Args:
            counts: [B] int64 number of these tokens.
            kept: these tokens per text; not read with a fixed width.
        """
        if self.fixed_width is None:
            self.lengths = [old + len(new) for old, new in zip(self.lengths, kept, strict=True)]
            self.committed = self.committed + counts.unsqueeze(1)
        else:
            # A finished text continues until another takes its row, but never beyond the buffer.
            self.committed.add_(counts.unsqueeze(1)).clamp_max_(self._longest)

    def insert_row(self, row: int, length: int) -> None:
        """Insert another text with `length` committed tokens into a row."""
        self.lengths = [*self.lengths[:row], length, *self.lengths[row + 1 :]]
        self.committed[row] = length

    def select_rows(self, rows: list[int], *buffers: SlotBuffer) -> None:
        """Select the texts that stay, in place, and their rows of the buffers."""
        for buffer in buffers:
            buffer.select_rows(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.committed = self.committed[to_device(rows, self.device)]


class RecurrentStates:
    """States of a model's recurrent layers for a batch of texts.

    Args:
        config: the model's config, from which transformers knows the layers' states.
        num_texts: B.

    Attributes:
        by_depth: draft tokens of a pass, depth by depth.
        num_certain: number of certain new tokens per text; empty for a draft.
        num_earlier: pending tokens before the new ones.
    """

    def __init__(self, config: Any, num_texts: int) -> None:
        self.by_depth: list[DepthNodes] = []
        self.num_certain: list[int] = []
        self.num_earlier = 0
        self._num_texts, self._num_pending = num_texts, 0
        self._runs: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        self._cache: Any = DynamicCache(config=config)
        self._num_states = [getattr(layer, "number_of_states", 0) for layer in self._cache.layers]
        self._tables: dict[int, State] = {}  # [B, 1 + P, ...]

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of all mixers that have run, per token of one text."""
        tables = (states for table in self._tables.values() for states in table.values())
        return sum(states[0, 0].nbytes for states in tables)

    def start_pass(
        self, num_certain: list[int], draft: tuple[Tensor, Tensor] | None, in_order: bool = False
    ) -> None:
        """Set the tokens of the next pass.

        Args:
            num_certain: number of certain tokens per text; empty for a draft.
            draft: mask and depths for `group_nodes_by_depth`.
            in_order: whether each draft token follows the one before it.
        """
        assert num_certain or draft
        self.num_certain, self._runs = num_certain, {}
        self.by_depth, self._num_pending, self.num_earlier = [], 0, 0
        if draft is not None and not num_certain:
            num_new, self._num_pending = draft[0].shape[1:]
            self.num_earlier = self._num_pending - num_new
            if in_order:  # does not wait
                tokens = torch.arange(self._num_pending, device=draft[0].device).view(-1, 1, 1)
                pairs = zip(tokens[:num_new], tokens[-num_new:], strict=True)
                self.by_depth = [DepthNodes(*pair) for pair in pairs]
            else:
                self.by_depth = group_nodes_by_depth(*draft)

    def group_by_length(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Group texts [m, 1] by their number n of certain tokens, with these tokens [m, n]."""
        if device not in self._runs:
            lengths, certain = sorted(set(self.num_certain)), torch.tensor(self.num_certain)
            groups = [to_device((certain == each).nonzero(), device) for each in lengths]
            self._runs[device] = [
                (group, torch.arange(length, device=device).expand(len(group), -1))
                for length, group in zip(lengths, groups, strict=True)
            ]
        return self._runs[device]

    def select_states(self, mixer: int, texts: Tensor, tokens: Tensor) -> State:
        """Select the states [m, ...] of a mixer after tokens; empty if the mixer has not run.

        Args:
            mixer: number of the mixer.
            texts: [m] int64 texts.
            tokens: [m] int64 tokens: 0 is the committed text, 1 + j pending token j.
        """
        table = self._tables.get(mixer, {})
        return {name: states[texts, tokens] for name, states in table.items()}

    def store_states(self, mixer: int, texts: Tensor, tokens: Tensor, state: State) -> None:
        """Store the states [m, ...] of a mixer after tokens; arguments as in `select_states`."""
        table = self._tables.setdefault(mixer, {})
        for name, states in state.items():
            stored = table.get(name, states.new_zeros(self._num_texts, 1, *states.shape[1:]))
            missing = 1 + self._num_pending - stored.shape[1]
            if missing > 0 and not self.num_certain:
                more = stored.new_zeros(self._num_texts, missing, *states.shape[1:])
                stored = torch.cat([stored, more], dim=1)
            stored[texts, tokens] = states
            table[name] = stored

    def commit(self, kept: list[list[int]]) -> None:
        """Continue from the last accepted token of each text."""
        last = [1 + nodes[-1] if nodes and not self.num_certain else 0 for nodes in kept]
        self._keep_states([*range(len(kept))], last)

    def select_rows(self, rows: list[int]) -> None:
        """Select the texts that stay, in place."""
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
        """Insert the single text of another object, with the states of its mixers, into a row."""
        for mixer, table in self._tables.items():
            for name, states in table.items():
                # Both are committed. A draft model may not have read the other text yet.
                new = other._tables.get(mixer, {}).get(name)
                states[row] = 0 if new is None else new[0]

    def make_layer_cache(self, layer: int, state: State) -> Cache:
        """Make a cache of transformers' own class whose layer holds a state, or none."""
        layer_cache: Any = LinearAttentionLayer(self._num_states[layer])
        for (kind, number), states in state.items():
            getattr(layer_cache, kind)[number] = states
            getattr(layer_cache, f"is_{kind}_initialized")[number] = True
            layer_cache.has_previous_state[number] = True
            layer_cache.device, layer_cache.dtype = states.device, states.dtype
            if kind == CONV:
                layer_cache.conv_kernel_size[number] = states.shape[-1]
        self._cache.layers[layer] = layer_cache
        return self._cache

    def collect_layer_states(self, layer: int) -> State:
        """Collect the states that a module left in the cache of `make_layer_cache`."""
        layer_cache = self._cache.layers[layer]
        return {
            (kind, number): states
            for kind in (CONV, RECURRENT)
            for number, states in getattr(layer_cache, kind).items()
            if states is not None
        }


@dataclass(frozen=True)
class DepthNodes:
    """New tokens of one depth. Texts with fewer tokens repeat one, which changes nothing.

    Attributes:
        nodes: [B or 1, w] int64 indices among the n new tokens.
        parents: [B or 1, w] int64 token that each node continues: 0 is the committed text, 1 + j
            pending token j.
    """

    nodes: Tensor
    parents: Tensor


def group_nodes_by_depth(mask: Tensor, depths: Tensor) -> list[DepthNodes]:
    """Order draft tokens by depth for running. Waits for the device once.

    Args:
        mask: [B or 1, n, P] bool, pending tokens that each of the last n tokens sees, including
            itself.
        depths: [B or 1, P] int64; a token sees at most one token of each depth.
    """
    num_new, num_pending = mask.shape[1:]
    itself = torch.eye(num_pending, dtype=torch.bool, device=mask.device)[-num_new:]
    deepest, parents = ((mask & ~itself) * (1 + depths).unsqueeze(1)).max(-1)
    num_texts = max(len(mask), len(depths))
    both = torch.where(deepest > 0, 1 + parents, 0), depths[:, -num_new:]
    above, below = torch.stack([rows.expand(num_texts, -1) for rows in both]).tolist()
    by_depth = []
    for depth in sorted({node_depth for row in below for node_depth in row}):
        # The first token runs before the others, so it can be repeated at any depth.
        rows = [
            [node for node, node_depth in enumerate(row) if node_depth == depth] or [0]
            for row in below
        ]
        width = max(map(len, rows))
        nodes = [row + row[:1] * (width - len(row)) for row in rows]
        before = [[up[node] for node in row] for row, up in zip(nodes, above, strict=True)]
        by_depth.append(DepthNodes(*to_device([nodes, before], mask.device)))
    return by_depth


class TreeCache(Cache):
    """Cache of a whole model: keys and values, and states of recurrent layers.

    Args:
        num_texts: B.
        device: device of positions and masks; keys stay with their layer.
        num_layers: layers of the model.
        capacity: see `SlotBuffer`.
        states: states of the model's recurrent layers, if any.
        mover: see `CacheSlots.commit`.

    Attributes:
        slots: slots of the committed tokens.
        num_certain: number of certain tokens per text in the next pass; empty for a draft.
        certain_lengths: tokens per text after the certain tokens, committed ones included.
        num_needed_slots: slots that the announced passes need in all.
        has_shared_slots: True if every text that has new tokens writes them to the same slot
            numbers, after the committed tokens of all texts, and no width is fixed.
        write_slots: slots [B, n] int64 that the next pass writes; with shared slots one int, the
            first of these slots; for a row of documents the slots of its tokens.
        read_width: slots that the next pass reads.
    """

    def __init__(
        self,
        num_texts: int,
        device: torch.device,
        num_layers: int,
        capacity: int | None = None,
        states: RecurrentStates | None = None,
        mover: Callable[..., None] = move_slots,
    ) -> None:
        self.capacity, self.mover, self.states = capacity, mover, states
        self.slots = CacheSlots(num_texts, device)
        self.num_certain: list[int] = []
        self.certain_lengths: list[int] = []
        self.has_shared_slots = True
        self.write_slots: Tensor | int | DocumentSlots = 0
        self.num_needed_slots = self.read_width = 0
        self._attention = [_AttentionLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._attention))

    def start_pass(self, num_new: int, num_pending: int) -> None:
        """Set where the next pass writes: the last `num_new` of `num_pending` pending slots."""
        lengths = self.slots.lengths
        counts = self.num_certain or [1] * len(lengths)
        starts = {length for length, count in zip(lengths, counts, strict=True) if count}
        # Padding of texts without new tokens is forgotten, but must not overwrite what they hold.
        is_last = len(starts) == 1 and max(lengths) in starts
        self.has_shared_slots = is_last and self.slots.fixed_width is None
        if self.has_shared_slots:
            self.write_slots = starts.pop() + num_pending - num_new
        else:
            self.write_slots = self.slots.compute_pending_slots(num_new, num_pending)
        self.read_width = self.slots.count_used_slots(num_pending)
        if self.slots.fixed_width is None and self.slots.device.type == "cuda":
            # Gives kernels few lengths; masks hide slots after the pending tokens.
            rounded = round_up_slots(self.read_width)
            self.read_width = min(rounded, self.capacity or rounded)

    def start_document_pass(self, slots: DocumentSlots) -> None:
        """Set that the next pass reads a row of documents, the first tokens of texts.

        The layers then see the keys and values of these tokens alone.
        """
        self.has_shared_slots, self.write_slots = False, slots

    def start_traced_pass(self, num_new: int, num_pending: int, width: int) -> None:
        """Begin inside compiled code, which would otherwise bake in the lengths of texts."""
        self.has_shared_slots, self.read_width, self.num_needed_slots = False, width, 0
        self.write_slots = self.slots.compute_pending_slots(num_new, num_pending)

    def reserve_slots(self, width: int) -> None:
        """Grow to at least `width` slots."""
        for buffer in self._collect_buffers():
            buffer.reserve_slots(width)

    def fix_width(self, width: int, num_pending: int, capacity: int) -> None:
        """Fix the width as `CacheSlots.fix_width` does, and a capacity whose memory stays."""
        self.slots.fix_width(width, num_pending)
        self.num_needed_slots = capacity

    def set_certain_tokens(self, num_certain: list[int], ends: list[int]) -> None:
        """Announce the certain tokens of the next pass.

        Args:
            num_certain: number of certain tokens per text.
            ends: tokens per text after all certain tokens, committed ones included.
        """
        self.num_certain, self.certain_lengths = num_certain, ends
        self.num_needed_slots = max(ends, default=0)

    def commit(self, kept: list[list[int]], on_device: KeptNodes | None = None) -> None:
        """Commit accepted tokens; see `CacheSlots.commit`."""
        self.num_certain = []
        self.slots.commit(kept, self._collect_buffers(), on_device, self.mover)
        if self.states is not None:
            self.states.commit(kept)

    def select_rows(self, rows: list[int]) -> None:
        """Select the texts that stay, in place."""
        self.slots.select_rows(rows, *self._collect_buffers())
        if self.states is not None:
            self.states.select_rows(rows)

    def overwrite_row(self, row: int, other: "TreeCache") -> None:
        """Overwrite a row with the committed tokens of a text, from a cache that may hold more."""
        lengths = self.slots.lengths
        for own, new in zip(self._attention, other._attention, strict=True):
            if new.buffer.keys is not None:
                own.buffer.insert_row(row, new.buffer, lengths[row], len(lengths))

    def insert_row(self, row: int, other: "TreeCache") -> None:
        """Insert the single text of another cache into a row."""
        self.slots.insert_row(row, other.slots.lengths[0])
        self.overwrite_row(row, other)
        if self.states is not None and other.states is not None:
            self.states.insert_row(row, other.states)

    def _collect_buffers(self) -> list[SlotBuffer]:
        return [layer.buffer for layer in self._attention if layer.buffer.keys is not None]


class _AttentionLayer(CacheLayerMixin):
    """Cache of one attention layer, with transformers' interface."""

    is_sliding = False

    def __init__(self, cache: "TreeCache") -> None:
        super().__init__()
        self.cache = cache
        self.buffer = SlotBuffer(cache.capacity)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, K, n, d] of new tokens; return those that the pass sees."""
        cache, slots = self.cache, self.cache.write_slots
        if isinstance(slots, DocumentSlots):
            size = cache.num_needed_slots, len(cache.slots.lengths)
            self.buffer.write_documents(key_states, value_states, slots, *size)
            return key_states, value_states
        return self.buffer.write(
            key_states, value_states, slots, cache.read_width, cache.num_needed_slots
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first write allocates the buffers."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the number of slots that a mask covers, from slot 0."""
        return self.cache.read_width, 0

    def get_seq_length(self) -> int:
        """Return the number of slots in use."""
        return max(self.cache.slots.lengths)

    def get_max_length(self) -> int:
        """Return the capacity; -1 without a limit."""
        return self.cache.capacity or -1

    get_max_cache_shape = get_max_length  # the name until transformers 5.17
