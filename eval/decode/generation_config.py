"""Generation config of a target: settings that are applied or refused, and ends of texts.

A run itself sets how and how many tokens are sampled. Other settings change what `generate` writes.
Settings that depend on the text alone are applied with transformers' own processors, on rows of ids
whose next token is needed. Every node of a draft is such a row, the text and the path from the
root, so drafts are verified against what `generate` would choose there.

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
from heads.decoding.drafting import TreeLayout, build_tree_layout
from heads.decoding.tree import Tree
from heads.devices import to_device
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target

Processor = Callable[[Tensor, Tensor], Tensor]
"""Function from rows of ids [R, L] and logits [R, V] to scores [R, V] of the next token."""

PROCESSORS: dict[str, Callable[[Any, list[int]], Processor]] = {
    "sequence_bias": lambda bias, _: SequenceBiasLogitsProcessor(bias),
    "repetition_penalty": lambda penalty, _: RepetitionPenaltyLogitsProcessor(float(penalty)),
    "no_repeat_ngram_size": lambda size, _: NoRepeatNGramLogitsProcessor(size),
    "bad_words_ids": lambda words, stops: NoBadWordsLogitsProcessor(words, stops or None),
    "suppress_tokens": lambda tokens, _: SuppressTokensLogitsProcessor(tokens),
}
"""Makers of processors from a value and the stop tokens, in the order of `generate`."""
FIRST = "begin_suppress_tokens"
APPLIED = (*PROCESSORS, FIRST)


class LogitsProcessors:
    """Processors that a target's generation config names.

    Args:
        asked: values by name, all in APPLIED; may be empty.
        stop_ids: stop tokens of the target.

    Raises:
        ValueError: an invalid value; a TypeError likewise.
    """

    def __init__(self, asked: dict[str, Any], stop_ids: list[int]) -> None:
        self.always = [make(asked[n], stop_ids) for n, make in PROCESSORS.items() if n in asked]
        first = [SuppressTokensLogitsProcessor(asked[FIRST])] if FIRST in asked else []
        self.first: list[Processor] = [*self.always, *first]

    def process_logits(
        self,
        logits: Tensor,
        texts: list[list[int]],
        trees: tuple[Tensor, TreeLayout] | None = None,
    ) -> Tensor:
        """Compute scores [B, N, V] of the token after every node, float32 if there are processors.

        Args:
            logits: [B, N, V].
            texts: tokens of each text, the root last.
            trees: tokens [B, N] int64 of the trees, negative for missing nodes, and their layout;
                None for roots alone, the last tokens of prompts.
        """
        processors = self.first if trees is None else self.always
        if not processors:
            return logits
        device, longest = logits.device, max(map(len, texts))
        if trees is None:
            last = to_device([ids[-1:] for ids in texts], device)
            trees = last, build_tree_layout(Tree.make_chain(0), device)
        filled = [ids[:-1] + [0] * (longest - len(ids)) for ids in texts]
        # An empty list would give floats.
        history = to_device(torch.tensor(filled, dtype=torch.int64), device)
        committed = to_device([[len(ids) - 1] for ids in texts], device)
        # The id beyond the vocabulary means no id.
        rows = build_node_rows(history, committed, *trees, logits.shape[2]).flatten(0, 1)
        scores = pad(logits.float(), (0, 1)).flatten(0, 1)
        for process in processors:
            scores = process(rows, scores)
        return scores[:, :-1].view(logits.shape)


def build_node_rows(
    history: Tensor, committed: Tensor, tokens: Tensor, layout: TreeLayout, none: int
) -> Tensor:
    """Build the text up to each node: [B, N, L + N] int64, right-aligned, with `none` before it.

    Args:
        history: [B, L] int64.
        committed: [B, 1] int64 number of valid tokens.
        tokens: [B, N] int64 tokens; negative for missing nodes.
        layout: layout of the trees.
        none: id that pads rows and replaces negative tokens.
    """
    num_texts, num_nodes = tokens.shape
    shape = (num_texts, num_nodes, num_nodes)
    depths = layout.depths.unsqueeze(1).expand(shape)
    known = torch.where(tokens < 0, none, tokens).unsqueeze(1).expand(shape)
    # Nodes off a node's path go to a separate column.
    place = torch.where(layout.mask, depths, num_nodes)
    path = tokens.new_full((num_texts, num_nodes, num_nodes + 1), none).scatter_(2, place, known)
    length, before = history.shape[1], committed.unsqueeze(2)
    texts = history.unsqueeze(1).expand(-1, num_nodes, -1)
    source = torch.cat([texts, path[:, :, :num_nodes]], dim=2)
    width = length + num_nodes
    # Column c holds the token at that position of the node's text, with its own at the end.
    own = before + layout.depths.unsqueeze(2)
    position = torch.arange(1 - width, 1, device=tokens.device) + own
    column = torch.where(position < before, position, position - before + length)
    return source.gather(2, column.clamp_min(0)).masked_fill(position < 0, none)


class StopRules:
    """Ends of an answer: a stop token, or a token that completes a stop text.

    Args:
        ids: stop tokens.
        strings: stop texts, if any.
        tokenizer: tokenizer, needed for stop texts.
    """

    def __init__(
        self, ids: Sequence[int], strings: Sequence[str] = (), tokenizer: Any = None
    ) -> None:
        self.ids, self.strings, self.tokenizer = frozenset(ids), tuple(strings), tokenizer
        # A token has at least one byte, and the first token of a text may lack its space.
        self.reach = max((len(text.encode()) + 1 for text in strings), default=1)

    @classmethod
    def from_target(cls, target: EmbeddingsAndOutputHead) -> "StopRules":
        """Read the stop rules of a target's answers."""
        ids = [] if target.ignores_stops else target.stop_ids
        return cls(ids, target.stop_strings, target.tokenizer)

    def has_ended(self, tokens: list[int]) -> bool:
        """Tell whether an answer, which had not ended before, ends with its last token."""
        if not self.strings or tokens[-1] in self.ids:
            return tokens[-1] in self.ids
        tail = self.tokenizer.decode(tokens[-self.reach :], clean_up_tokenization_spaces=False)
        return any(text in tail for text in self.strings)

    def cut_after_end(self, before: list[int], tokens: list[int]) -> list[int]:
        """Cut the new tokens of an answer after the token that ends the answer."""
        text = [*before[-self.reach :], *tokens]
        first = len(text) - len(tokens)
        for end in range(first + 1, len(text) + 1):
            if self.has_ended(text[:end]):
                return text[first:end]
        return tokens


NEUTRAL_VALUES = {
    **dict.fromkeys(APPLIED), "repetition_penalty": 1, "no_repeat_ngram_size": 0,
    "num_beams": 1, "num_beam_groups": 1, "guidance_scale": 1, "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0, "typical_p": 1,
    "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": 1, "penalty_alpha": 0, "dola_layers": None,
    "constraints": None, "force_words_ids": None, "token_healing": False, "max_time": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "watermarking_config": None,
    "exponential_decay_length_penalty": None, "prompt_lookup_num_tokens": None,
    "num_return_sequences": 1,
}  # fmt: skip
"""Settings that change the text of `generate`, with the value (besides None) that does nothing."""


def apply_generation_config(
    target: EmbeddingsAndOutputHead,
    *,
    stop: Sequence[str] = (),
    plain: bool = False,
    ignore_eos: bool = False,
) -> None:
    """Let a target answer as its generation config says, under every method.

    Args:
        target: target to change.
        stop: texts that end an answer, instead of the config's.
        plain: whether to ignore the config's changes.
        ignore_eos: whether answers go on after stop tokens.

    Raises:
        InputError: the config has settings that drafts cannot be verified with, or invalid values.
    """
    config = target.generation_config
    target.logits_processing = {} if plain else parse_logits_settings(target)
    own_stops = (
        [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings
    )
    target.stop_strings = tuple(stop or ([] if plain else own_stops or []))
    target.ignores_stops = ignore_eos
    if isinstance(target, Target):
        # `generate` alone would follow other settings, e.g. to keep no cache.
        target.model.generation_config = GenerationConfig(
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            **target.logits_processing,
        )


def try_generation_config(
    target: EmbeddingsAndOutputHead, *checks: Callable[[Any], object], required: bool = False
) -> str | None:
    """Apply a target's generation config, or plain answers if it cannot be followed.

    Args:
        target: target to change.
        checks: functions of the target that refuse a config too.
        required: whether more than a figure depends on the config.

    Returns:
        A line about plain answers; None if the config is applied.

    Raises:
        InputError: a required config cannot be followed.
    """
    try:
        for apply in (apply_generation_config, *checks):
            apply(target)
    except InputError as error:
        if required:
            raise
        apply_generation_config(target, plain=True)
        return f"tau is measured on plain greedy answers: {error}"
    return None


def parse_logits_settings(target: EmbeddingsAndOutputHead) -> dict[str, Any]:
    """Read the changes of logits in a target's generation config, by setting.

    Raises:
        InputError: the config has settings that drafts cannot be verified with, or invalid values.
    """
    config = target.generation_config
    values = {name: getattr(config, name, None) for name in NEUTRAL_VALUES}
    asked = {name: v for name, v in values.items() if v not in (None, [], NEUTRAL_VALUES[name])}
    refused = {name: v for name, v in asked.items() if name not in APPLIED}
    source = f"target.path={target.name}: its generation config asks for"
    if refused:
        raise InputError(
            f"{source} {_format_settings(refused)}, which drafts cannot be verified with; allowed "
            f"besides sampling: {', '.join(APPLIED)}. Remove the others from "
            "generation_config.json, or set plain=true, which ignores them all"
        )
    try:
        LogitsProcessors(asked, target.stop_ids)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{source} {_format_settings(asked)}: {error}; plain=true ignores it"
        ) from error
    return asked


def _format_settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
