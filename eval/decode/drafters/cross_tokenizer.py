"""Drafting with a model of another tokenizer: both exchange text.

The text so far is read in the draft model's tokens, and its draft is written in the target's. Each
step translates only a window of last tokens. When the window moves, the translations of the old and
of the new window are aligned at their common end. The first tokens of the new window begin in the
middle of a text and may be split differently, so they are not used.

Source: universal assisted generation, transformers `generation/candidate_generator.py`,
`AssistedCandidateGeneratorDifferentTokenizers`, whose look-behind windows are joined by the
longest run of tokens that agree anywhere. Letters: B texts, V vocab.
"""

from typing import Any

import torch

from eval.decode.drafters.draft_model import commit_tokens, count_draftable_tokens
from eval.decode.engine import count_common_prefix
from heads.decoding.cache import KeptNodes, TreeCache
from heads.decoding.drafting import CommittedTokens, Draft, Drafter, Roots
from heads.target_model.model import Target

CUT = "\ufffd"  # how decoders write a character with missing bytes
MAX_CHARACTER_BYTES = 4


class Translator:
    """Translates between the ids of two tokenizers, by text.

    Special tokens are equal if they are written equally. The draft model does not see special
    tokens of the target that it lacks, and its draft ends at special tokens that the target lacks.

    Args:
        target: the target's tokenizer.
        draft: the draft model's tokenizer.
    """

    def __init__(self, target: Any, draft: Any) -> None:
        self.target, self.draft = target, draft
        self.unread = _unknown_specials(target, draft)
        self.ends = _unknown_specials(draft, target)
        start = draft("").input_ids[:1]
        self.start = start if start == [draft.bos_token_id] else []

    def to_draft_ids(self, target_ids: list[int]) -> list[int]:
        """Translate a piece of text to the draft model's ids, less an incomplete last character."""
        whole, _ = self._split_incomplete_character(target_ids)
        text = _decode_ids(self.target, [i for i in whole if i not in self.unread])
        return _encode_text(self.draft, text)

    def to_target_ids(
        self, target_ids: list[int], read: list[int], drafted: list[int]
    ) -> list[int]:
        """Translate drafted tokens to the target's ids.

        Args:
            target_ids: text so far, in the target's ids.
            read: text so far as the draft model read it.
            drafted: tokens that the draft model drafted after `read`.

        Returns:
            Ids of the target after `target_ids`; empty if the text cannot continue with the draft
            without changing existing ids.
        """
        for place, token in enumerate(drafted):
            if token in self.ends:
                drafted = drafted[:place]
                break
        before = _decode_ids(self.draft, read)
        after = _decode_ids(self.draft, read + drafted).rstrip(CUT)
        if not after.startswith(before):
            return []
        whole, cut = self._split_incomplete_character(target_ids)
        text = _decode_ids(self.target, whole)
        existing = _encode_text(self.target, text) + cut
        ids = _encode_text(self.target, text + after[len(before) :])
        return ids[len(existing) :] if ids[: len(existing)] == existing else []

    def _split_incomplete_character(self, target_ids: list[int]) -> tuple[list[int], list[int]]:
        """Split ids into those of whole characters and those of an incomplete last one."""
        for end in range(len(target_ids), max(len(target_ids) - MAX_CHARACTER_BYTES, 0), -1):
            if not _decode_ids(self.target, target_ids[:end]).endswith(CUT):
                return target_ids[:end], target_ids[end:]
        return target_ids, []


class Translation:
    """One text, growing in the target's ids and followed in the draft model's.

    Args:
        translator: translator of both tokenizers.
        window: number of target ids; at most twice as many are translated at a time.
    """

    def __init__(self, translator: Translator, window: int) -> None:
        self.translator, self.window = translator, window
        self.done: list[int] = []  # ids of the draft model that later text cannot change
        self.tail: list[int] = []  # target ids of the window
        self.overlap = 0  # first ids in the window's translation that `done` already holds

    def append_tokens(self, target_ids: list[int]) -> None:
        """Append tokens; start a later window if most of its translation agrees with this one's."""
        self.tail += target_ids
        if len(self.tail) <= 2 * self.window:
            return
        long = self.translator.to_draft_ids(self.tail)
        short = self.translator.to_draft_ids(self.tail[-self.window :])
        same = count_common_prefix(long[::-1], short[::-1])
        if 2 * same >= len(short):
            self.done += long[self.overlap : len(long) - same]
            self.overlap = len(short) - same
            self.tail = self.tail[-self.window :]

    def translate_text(self, root: int) -> tuple[list[int], list[int]]:
        """Translate the text up to `root` to the draft model's ids.

        Returns the ids of the whole text, and the ids that the window alone gives.
        """
        recent = self.translator.to_draft_ids([*self.tail, root])
        ids = self.done + recent[self.overlap :]
        start = self.translator.start
        if ids[: len(start)] != start:
            ids = start + ids
        return ids or [0], recent


class CrossTokenizerDrafter(Drafter):
    """Drafts the likeliest tokens of a model with another tokenizer.

    Every step waits for the device once more, as text is made on the host.

    Args:
        model: draft model with its tokenizer, on the target's device.
        target_tokenizer: the target's tokenizer.
        num_tokens: draft tokens per step, in the draft model's tokens.
        window: target tokens at the end of the text that may still be tokenised anew.
    """

    row_attributes = ("cache", "texts", "read")

    def __init__(
        self, model: Target, target_tokenizer: Any, num_tokens: int, window: int = 32
    ) -> None:
        self.model, self.num_tokens, self.window = model, num_tokens, window
        self.translator = Translator(target_tokenizer, model.tokenizer)
        self.cache: TreeCache | None = None
        self.texts: list[Translation] = []
        self.read: list[list[int]] = []

    def observe(self, seen: CommittedTokens) -> None:
        """Append the committed tokens to the texts."""
        if self.cache is None:
            num_texts = len(seen.token_ids)
            self.cache = self.model.new_cache(num_texts)
            self.texts = [Translation(self.translator, self.window) for _ in range(num_texts)]
            self.read = [[] for _ in range(num_texts)]
        for text, tokens in zip(self.texts, seen.token_ids, strict=True):
            text.append_tokens(tokens)

    def propose(self, roots: Roots) -> Draft:
        """Draft chains from the draft model's text, of different lengths, possibly empty."""
        texts = [
            text.translate_text(root) for text, root in zip(self.texts, roots.ids, strict=True)
        ]
        drafted = self._draft_chains([ids for ids, _ in texts])
        rows = [
            self.translator.to_target_ids([*text.tail, root], recent, tokens)
            for text, root, (_, recent), tokens in zip(
                self.texts, roots.ids, texts, drafted, strict=True
            )
        ]
        return Draft.from_chains(rows, self.model.device)

    def _prepare_insert(self, other: "CrossTokenizerDrafter") -> None:
        # The row keeps its cache, of which tokens that differ are read anew.
        other.cache, other.read = None, []

    def _draft_chains(self, texts: list[list[int]]) -> list[list[int]]:
        """Read the new tokens of the texts, and draft the likeliest tokens after them."""
        assert self.cache is not None
        rooms = [
            min(self.num_tokens, count_draftable_tokens(self.model, len(text))) for text in texts
        ]
        if not any(rooms):
            return [[] for _ in texts]
        # The last token is always read, for the logits after it.
        known = [
            min(count_common_prefix(old, new), len(new) - 1)
            for old, new in zip(self.read, texts, strict=True)
        ]
        self.cache.slots.rewind_texts(known)
        new = [text[num:] for text, num in zip(texts, known, strict=True)]
        chosen = [commit_tokens(self.model, self.cache, new).argmax(-1)]
        one = torch.ones(1, 1, 1, dtype=torch.bool, device=self.model.device)
        first = torch.zeros_like(chosen[0])
        for _ in range(max(rooms) - 1):
            output = self.model.run_pending(self.cache, chosen[-1], one, first[:1])
            self.cache.commit([[0]] * len(texts), KeptNodes(first, first[:, 0] + 1))
            chosen.append(self.model.compute_logits(output.hidden_states).argmax(-1))
        drafted = torch.cat(chosen, dim=1).tolist()
        self.read = [text + tokens[:-1] for text, tokens in zip(texts, drafted, strict=True)]
        return [tokens[:most] for tokens, most in zip(drafted, rooms, strict=True)]


def _decode_ids(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _encode_text(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _unknown_specials(tokenizer: Any, other: Any) -> set[int]:
    """List ids of special tokens that the other tokenizer does not write equally."""
    known = other.get_vocab()
    added = tokenizer.added_tokens_decoder.items()
    special = {index for index, token in added if token.special} | set(tokenizer.all_special_ids)
    names = dict(zip(special, tokenizer.convert_ids_to_tokens(list(special)), strict=True))
    return {index for index, name in names.items() if name not in known}
