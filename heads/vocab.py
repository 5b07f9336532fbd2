"""Draft vocabularies: the target's token ids that a draft head can propose.

Source: EAGLE-3, arXiv 2503.01840; SafeAILab/EAGLE `eagle/traineagle3/cnets.py`, `scandata`. Unlike
there, special tokens are always included. Letters: V ids of the target, Vd of the draft head.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import InputError

MIN_COVERED = 0.95
"""Share of held-out tokens below which a draft vocabulary is too small for its data."""


# Tensors have no single truth value, so a generated `==` would raise.
@dataclass(frozen=True, eq=False)
class DraftVocab:
    """Draft vocabulary: draft id i stands for target id `ids[i]`.

    Example: ids (0, 1, 5, 9) of 10 are saved as d2t (0, 0, 3, 6) and t2d 1100010001.

    Attributes:
        ids: [Vd] int64, sorted and unique target ids.
        size: V.
    """

    ids: Tensor
    size: int

    def describe_size(self) -> str:
        """Describe the size of the vocabulary in words."""
        if self.is_full:
            return f"vocabulary {self.size}"
        return f"draft vocabulary {len(self.ids)} of the target's {self.size}"

    @classmethod
    def make_full(cls, size: int) -> "DraftVocab":
        """Make the vocabulary of all `size` ids, on the CPU."""
        return cls(torch.arange(size), size)

    @classmethod
    def from_offsets(
        cls, d2t: Tensor, size: int, t2d: Tensor | None = None
    ) -> tuple["DraftVocab", Tensor]:
        """Make the vocabulary of a published head, whose ids may be in any order.

        Args:
            d2t: [Vd] integers, target id minus draft id.
            size: V of the target.
            t2d: [V] bool, marks the included target ids.

        Returns:
            The vocabulary, and [Vd] int64 the row of the head's tensors for each of its ids.

        Raises:
            InputError: `d2t` is no such mapping, or `t2d` contradicts it.
        """
        if d2t.ndim != 1 or not len(d2t) or d2t.is_floating_point():
            raise InputError(f"head.path: d2t is {d2t.dtype} {list(d2t.shape)}: must be [Vd] int64")
        d2t = d2t.to(torch.int64)
        ids = d2t + torch.arange(len(d2t), device=d2t.device)
        problem, may_be_ids = _find_problem(ids, size, t2d), _find_problem(d2t, size, t2d) is None
        in_order, rows = ids.sort()
        if problem is None and (t2d is not None or ids.equal(in_order) or not may_be_ids):
            return cls(in_order, size), rows
        if problem is None:
            problem = "d2t does not rise, and may hold offsets or target ids: add t2d, which tells"
        elif may_be_ids:
            problem += "; it seems to hold target ids: subtract the draft id from each"
        raise InputError(f"head.path: {problem}")

    @classmethod
    def from_counts(cls, counts: Tensor, size: int | None, always: Iterable[int]) -> "DraftVocab":
        """Choose the ids of `always`, then the most frequent ids, low ids first among equals.

        Args:
            counts: [V] int64 on the CPU, count of each target id.
            size: Vd; None, or at least V, takes every id.
            always: special and end tokens; ids that the target cannot emit are skipped.

        Raises:
            InputError: `size` is too small for `always`.
        """
        if size is None or size >= len(counts):
            return cls.make_full(len(counts))
        always_kept = _select_emitted(always, len(counts))
        if size < len(always_kept):
            raise InputError(
                f"head.draft_vocab_size={size}: must be at least {len(always_kept)}, the number of "
                "special and end tokens, which are always included"
            )
        ranked = counts.clone()
        ranked[always_kept] = counts.max() + 1
        order = ranked.argsort(descending=True, stable=True)
        return cls(order[:size].sort().values, len(counts))

    def choose_subset(self, counts: Tensor, size: int, always: Iterable[int]) -> "DraftVocab":
        """Choose the most frequent of these ids, like `from_counts`, on the CPU.

        Args:
            counts: [V] int64, on the CPU.
            size: size Vd of the result, at most this one's.
            always: as in `from_counts`; ids outside this vocabulary are skipped.
        """
        on_cpu = self.to("cpu")
        places = on_cpu.to_draft_ids(torch.tensor(on_cpu.filter_ids(always), dtype=torch.int64))
        chosen = DraftVocab.from_counts(counts[on_cpu.ids], size, places.tolist())
        return DraftVocab(on_cpu.ids[chosen.ids], self.size)

    def filter_ids(self, target_ids: Iterable[int]) -> list[int]:
        """Return the target ids that are in this vocabulary, sorted."""
        return sorted(set(target_ids) & set(self.ids.tolist()))

    @property
    def is_full(self) -> bool:
        """Tell whether every target id is included (Vd = V)."""
        return len(self.ids) == self.size

    def to(self, device: torch.device | str) -> "DraftVocab":
        """Copy the vocabulary with its ids on `device`."""
        return DraftVocab(self.ids.to(device), self.size)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map draft ids [...] int64, from 0 to Vd - 1, to target ids."""
        return self.ids[draft_ids]

    def to_draft_ids(self, target_ids: Tensor) -> Tensor:
        """Map target ids [...] int64 to draft ids, or -1 for ids outside the vocabulary."""
        places = torch.searchsorted(self.ids, target_ids.contiguous()).clamp(max=len(self.ids) - 1)
        return torch.where(self.ids[places] == target_ids, places, -1)

    def spread_logits(self, draft_logits: Tensor) -> Tensor:
        """Spread logits [..., Vd] of the draft ids over all target ids, [..., V]; -inf elsewhere.

        The vocabulary may be on another device than the logits.
        """
        logits = draft_logits.new_full((*draft_logits.shape[:-1], self.size), -torch.inf)
        logits[..., self.ids.to(logits.device)] = draft_logits
        return logits

    def build_mask(self) -> Tensor:
        """Build t2d [V] bool, which marks the included target ids."""
        mask = torch.zeros(self.size, dtype=torch.bool, device=self.ids.device)
        mask[self.ids] = True
        return mask

    def compute_offsets(self) -> Tensor:
        """Compute d2t [Vd] int64, the target id minus the draft id of each draft id."""
        return self.ids - torch.arange(len(self.ids), device=self.ids.device)


def format_coverage(counts: Tensor, chosen: DraftVocab, always: Iterable[int]) -> list[str]:
    """Format lines about the tokens that `chosen` covers, and V/16, V/8, V/4, V/2 and V ids.

    Args:
        counts: [V] int64 on the CPU, count of each target id.
        chosen: draft vocabulary on the CPU.
        always: ids that every size includes; sizes too small for them are left out.
    """
    always_kept = _select_emitted(always, len(counts))
    fractions = []
    for size in (len(counts) >> n for n in (4, 3, 2, 1, 0)):
        if size >= max(1, len(always_kept)):
            vocab = DraftVocab.from_counts(counts, size, always_kept)
            fractions.append(f"{size:,} {compute_covered_fraction(counts, vocab):.1%}")
    return [
        f"draft vocabulary: {len(chosen.ids):,} of {chosen.size:,} ids cover "
        f"{compute_covered_fraction(counts, chosen):.2%} of the learnt tokens",
        f"  by size: {', '.join(fractions)}",
    ]


def format_heldout_coverage(counts: Tensor, chosen: DraftVocab) -> str:
    """Format the share of held-out tokens that a draft vocabulary on the CPU covers.

    Args:
        counts: [V] int64 on the CPU, count of each target id in held-out text.
        chosen: draft vocabulary.
    """
    share = compute_covered_fraction(counts, chosen)
    advice = "; a larger head.draft_vocab_size, or more data, covers more"
    line = f"draft vocabulary: covers {share:.2%} of {int(counts.sum()):,} held-out tokens"
    return f"{line}{advice}" if share < MIN_COVERED else line


def _select_emitted(always: Iterable[int], size: int) -> list[int]:
    # Some tokenizers have special tokens beyond the target's output head (Gemma 3's
    # <image_soft_token>, huggingface/transformers#37011), which the target never emits.
    return sorted({token for token in always if token < size})


def compute_covered_fraction(counts: Tensor, vocab: DraftVocab) -> float:
    """Compute the fraction of the counted tokens ([V] int64, not all 0) in a vocabulary.

    Counts and vocabulary are on the CPU.
    """
    return int(counts[vocab.ids].sum()) / int(counts.sum())


def _find_problem(ids: Tensor, size: int, t2d: Tensor | None) -> str | None:
    """Find a problem of target ids [Vd] int64 from d2t, or of t2d; None without one."""
    outside = ((ids < 0) | (ids >= size)).nonzero()
    if len(outside):
        i = int(outside[0])
        return f"d2t maps draft id {i} to target id {int(ids[i])}, outside 0 to {size - 1}"
    in_order, rows = ids.sort(stable=True)
    again = (in_order.diff() == 0).nonzero()
    if len(again):
        i = int(again[0])
        return f"d2t maps draft ids {rows[i]} and {rows[i + 1]} to the same target id {in_order[i]}"
    return None if t2d is None else _find_disagreement(ids, size, t2d)


def _find_disagreement(ids: Tensor, size: int, t2d: Tensor) -> str | None:
    if t2d.shape != (size,):
        return f"t2d has shape {list(t2d.shape)}: must be [{size}], the target's vocabulary"
    if int(t2d.sum()) != len(ids):
        return f"t2d marks {int(t2d.sum())} target ids, but d2t maps to {len(ids)}"
    missing = ids[~t2d[ids].bool()]
    if len(missing):
        return f"t2d does not mark target id {int(missing[0])}, to which d2t maps"
    return None
