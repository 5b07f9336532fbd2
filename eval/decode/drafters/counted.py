"""How many draft tokens a drafter proposed, per text and step."""

from typing import Any

from torch import Tensor

from heads.drafting import PAD, Draft, Drafter, Seen


class Counted:
    """A drafter that remembers its drafts; they are counted when its texts are through."""

    def __init__(self, drafter: Drafter, num_texts: int) -> None:
        self.drafter, self.reads = drafter, drafter.reads
        self._alive = list(range(num_texts))
        self._drafts: list[tuple[list[int], Tensor]] = []

    def observe(self, seen: Seen) -> None:
        """As the drafter does."""
        self.drafter.observe(seen)

    def propose(self, roots: list[int]) -> Draft:
        """The drafter's."""
        draft = self.drafter.propose(roots)
        self._drafts.append((self._alive, draft.tokens))
        return draft

    def keep(self, rows: list[int]) -> None:
        """As the drafter does."""
        self._alive = [self._alive[row] for row in rows]
        self.drafter.keep(rows)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the drafter has."""
        return getattr(self.drafter, name)

    def counts(self) -> list[list[int]]:
        """[text][step] draft tokens, empty places of a batch not counted."""
        texts = {text for alive, _ in self._drafts for text in alive} | set(self._alive)
        found: list[list[int]] = [[] for _ in sorted(texts)]
        for alive, tokens in self._drafts:
            for text, count in zip(alive, (tokens != PAD).sum(1).tolist(), strict=True):
                found[text].append(count)
        return found
