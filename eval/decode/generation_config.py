"""The generation config of a target: settings that are followed or refused, and ends of texts.

How tokens are sampled, and how many, a run says itself. The rest changes what `generate` writes.
What depends on the text alone is followed by transformers' own processors, on rows of ids whose
next token is asked for. Every node of a draft is such a row, its text and its path from the root,
so that drafts are checked by what `generate` would choose there.

Letters: B texts, L tokens, N tree nodes (root included), V vocab.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    GenerationConfig,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from conf.errors import InputError
from heads.decoding.drafting import TreeLayout, tree_layout
from heads.decoding.tree import Tree
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.target_model.model import Target

Processor = Callable[[Tensor, Tensor], Tensor]
"""Scores [R, V] for the token after rows of ids [R, L], from the logits [R, V]."""

PROCESSORS: dict[str, Callable[[Any, list[int]], Processor]] = {
    "sequence_bias": lambda bias, _: SequenceBiasLogitsProcessor(bias),
    "repetition_penalty": lambda penalty, _: RepetitionPenaltyLogitsProcessor(float(penalty)),
    "no_repeat_ngram_size": lambda size, _: NoRepeatNGramLogitsProcessor(size),
    "bad_words_ids": lambda words, stops: NoBadWordsLogitsProcessor(words, stops or None),
    "suppress_tokens": lambda tokens, _: SuppressTokensLogitsProcessor(tokens),
}
"""Makes each from its value and the stop tokens, in the order of `generate`."""
FIRST = "begin_suppress_tokens"
APPLIED = (*PROCESSORS, FIRST)


class Processors:
    """The processors that a target's generation config names.

    Args:
        asked: values by their names, all of them in APPLIED; perhaps nothing.
        stop_ids: of the target.

    Raises:
        ValueError: a value means nothing; a TypeError likewise.
    """

    def __init__(self, asked: dict[str, Any], stop_ids: list[int]) -> None:
        self.always = [make(asked[n], stop_ids) for n, make in PROCESSORS.items() if n in asked]
        first = [SuppressTokensLogitsProcessor(asked[FIRST])] if FIRST in asked else []
        self.first: list[Processor] = [*self.always, *first]

    def begin(self, logits: Tensor, prompts: list[list[int]]) -> Tensor:
        """[B, V] of the first tokens after prompts, from the logits [B, V]."""
        if not self.first:
            return logits
        longest = max(map(len, prompts))
        filled = [ids[:-1] + [0] * (longest - len(ids)) for ids in prompts]
        device, none = logits.device, logits.shape[1]
        committed = torch.tensor([[len(ids) - 1] for ids in prompts], device=device)
        last = torch.tensor([ids[-1:] for ids in prompts], device=device)
        history = torch.tensor(filled, device=device, dtype=torch.int64)
        rows = node_rows(history, committed, last, tree_layout(Tree.chain(0), device), none)
        return _processed(logits.unsqueeze(1), rows, self.first)[:, 0]

    def apply(
        self,
        logits: Tensor,
        history: Tensor,
        committed: Tensor,
        tokens: Tensor,
        layout: TreeLayout,
    ) -> Tensor:
        """[B, N, V] of the tokens after every node, in float32 where there are rules.

        Args:
            logits: [B, N, V].
            history: [B, L] int64, the tokens before the root; a shorter text is filled up.
            committed: [B, 1] int64, how many they are.
            tokens: [B, N] int64, of the trees; negative where there is no node.
            layout: of the trees.
        """
        rows = node_rows(history, committed, tokens, layout, logits.shape[2])
        return _processed(logits, rows, self.always)


def _processed(logits: Tensor, rows: Tensor, processors: list[Processor]) -> Tensor:
    """[B, N, V] by rows [B, N, L] of ids, of which V stands for none."""
    scores = pad(logits.float(), (0, 1)).flatten(0, 1)
    for process in processors:
        scores = process(rows.flatten(0, 1), scores)
    return scores[:, :-1].view(logits.shape)


def node_rows(
    history: Tensor, committed: Tensor, tokens: Tensor, layout: TreeLayout, none: int
) -> Tensor:
    """[B, N, L + N] int64, the text up to each node at the right; `none` is left of it.

    Args:
        history: [B, L] int64.
        committed: [B, 1] int64, tokens of it that count.
        tokens: [B, N] int64; negative where there is no node.
        layout: of the trees.
        none: in place of negative tokens, too.
    """
    num_texts, num_nodes = tokens.shape
    shape = (num_texts, num_nodes, num_nodes)
    depths = layout.depths.unsqueeze(1).expand(shape)
    known = torch.where(tokens < 0, none, tokens).unsqueeze(1).expand(shape)
    # What is not on the path of a node goes to a column of its own.
    place = torch.where(layout.mask, depths, num_nodes)
    path = tokens.new_full((num_texts, num_nodes, num_nodes + 1), none).scatter_(2, place, known)
    length, before = history.shape[1], committed.unsqueeze(2)
    texts = history.unsqueeze(1).expand(-1, num_nodes, -1)
    source = torch.cat([texts, path[:, :, :num_nodes]], dim=2)
    width = length + num_nodes
    # Column c of a row holds the token at that position of the node's text, its own at the end.
    own = before + layout.depths.unsqueeze(2)
    position = torch.arange(1 - width, 1, device=tokens.device) + own
    at = torch.where(position < before, position, position - before + length)
    return source.gather(2, at.clamp_min(0)).masked_fill(position < 0, none)


class Stops:
    """Ends of a response: a stop token, or a token that completes a string.

    Args:
        ids: the stop tokens.
        strings: perhaps none.
        tokenizer: of both, needed for strings.
    """

    def __init__(
        self, ids: Sequence[int], strings: Sequence[str] = (), tokenizer: Any = None
    ) -> None:
        self.ids, self.strings, self.tokenizer = frozenset(ids), tuple(strings), tokenizer
        # A token writes at least a byte, and what begins a text may lack its space.
        self.reach = max((len(text.encode()) + 1 for text in strings), default=1)

    @classmethod
    def of(cls, target: EmbeddingsAndHead) -> "Stops":
        """Those of a target."""
        ids = [] if target.ignores_stops else target.stop_ids
        return cls(ids, target.stop_strings, target.tokenizer)

    def ended(self, tokens: list[int]) -> bool:
        """Says whether a response, which had not ended before, ends with its last token."""
        if not self.strings or tokens[-1] in self.ids:
            return tokens[-1] in self.ids
        tail = self.tokenizer.decode(
            tokens[-self.reach :], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(text in tail for text in self.strings)

    def cut(self, before: list[int], tokens: list[int]) -> list[int]:
        """New tokens of a response up to and with the one that ends it."""
        text = [*before[-self.reach :], *tokens]
        first = len(text) - len(tokens)
        for end in range(first + 1, len(text) + 1):
            if self.ended(text[:end]):
                return text[first:end]
        return tokens


NOTHING = {
    **dict.fromkeys(APPLIED), "repetition_penalty": 1, "no_repeat_ngram_size": 0,
    "num_beams": 1, "num_beam_groups": 1, "guidance_scale": 1, "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0, "typical_p": 1,
    "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": 1, "penalty_alpha": 0, "dola_layers": None,
    "constraints": None, "force_words_ids": None, "token_healing": False, "max_time": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "watermarking_config": None,
    "exponential_decay_length_penalty": None, "prompt_lookup_num_tokens": None,
    "num_return_sequences": 1,
}  # fmt: skip
"""Settings that change the text of `generate`, with the value beside None that changes nothing."""


def follow(
    target: EmbeddingsAndHead,
    *,
    stop: Sequence[str] = (),
    plain: bool = False,
    ignore_eos: bool = False,
) -> None:
    """Has a target answer as its generation config says, whoever decodes.

    Args:
        target: is changed.
        stop: texts that end a response, in place of the config's.
        plain: do without all that the config asks for.
        ignore_eos: stop tokens end nothing.

    Raises:
        InputError: it asks for what drafts cannot be checked by, or for nonsense.
    """
    ours = target.generation_config
    target.logits_processing = {} if plain else asked_of(target)
    theirs = [ours.stop_strings] if isinstance(ours.stop_strings, str) else ours.stop_strings
    target.stop_strings = tuple(stop or ([] if plain else theirs or []))
    target.ignores_stops = ignore_eos
    if isinstance(target, Target):
        # What else it says, e.g. to keep no cache, `generate` would follow and nobody else.
        target.model.generation_config = GenerationConfig(
            eos_token_id=ours.eos_token_id,
            pad_token_id=ours.pad_token_id,
            **target.logits_processing,
        )


def follow_or_tell(target: EmbeddingsAndHead) -> str | None:
    """`follow`, or plain answers and a line about them, where only a figure depends on them."""
    try:
        follow(target)
    except InputError as error:
        follow(target, plain=True)
        return f"tau is of plain greedy answers: {error}"
    return None


def asked_of(target: EmbeddingsAndHead) -> dict[str, Any]:
    """The logits processing that a target's generation config asks for, by setting.

    Raises:
        InputError: it asks for what drafts cannot be checked by, or for nonsense.
    """
    config = target.generation_config
    values = {name: getattr(config, name, None) for name in NOTHING}
    asked = {name: v for name, v in values.items() if v not in (None, [], NOTHING[name])}
    refused = {name: v for name, v in asked.items() if name not in APPLIED}
    source = f"target.path={target.name}: its generation config asks for"
    if refused:
        raise InputError(
            f"{source} {_listed(refused)}, which drafts cannot be checked by; allowed besides "
            f"sampling: {', '.join(APPLIED)}; take the others out of generation_config.json, or "
            "measure and regenerate with plain=true, which does without all of them"
        )
    try:
        Processors(asked, target.stop_ids)
    except (TypeError, ValueError) as error:
        raise InputError(f"{source} {_listed(asked)}: {error}; plain=true does without") from error
    return asked


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
