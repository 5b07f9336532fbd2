"""Answers of a target in this process, many at a time, greedy or sampled."""

from collections.abc import Iterator

import torch

from conf.errors import InputError
from data.prepared.packing import check_token_ids
from data.servers.http_client import Answer, RequestRefusedError
from data.templates.record_encoder import RecordEncoder
from data.templates.reply_parser import parse_reply
from eval.decode.engine import Request
from eval.measure.target_answers import stream_answers
from heads.decoding.sampling import Sampling
from heads.target_model.model import Target
from scripts.answers.dialogue import Dialogue


class ConversationAnswerer:
    """A target that answers several conversations at once, and applies its generation config."""

    def __init__(
        self,
        target: Target,
        encoder: RecordEncoder,
        batch_size: int,
        max_new_tokens: int,
        temperature: float,
    ) -> None:
        encoder.build_template({}, None)  # refuses a tokenizer that cannot render, before any work
        self.target, self.encoder = target, encoder
        self.batch_size, self.max_new_tokens = batch_size, max_new_tokens
        self.sampling = Sampling(temperature)
        self.max_prompt_tokens = (
            None if target.max_positions is None else target.max_positions - max_new_tokens
        )
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise InputError(
                f"max_new_tokens={max_new_tokens}: leaves no room for a prompt in the window of "
                f"{target.name}, {target.max_positions} tokens"
            )

    def encode_prompt(self, dialogue: Dialogue) -> list[int]:
        """Render a conversation up to the target's turn.

        Raises:
            RowRefused: the template refuses it, it leaves no room for the answer, or the target
                lacks some of its tokens.
        """
        try:
            ids = self.encoder.encode_prompt(
                dialogue.template_messages, dialogue.tools, dialogue.template_kwargs
            )
            check_token_ids(ids, self.target, "its prompt".format)
        except InputError as error:
            raise RequestRefusedError(str(error)) from error
        if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
            raise RequestRefusedError(
                f"{len(ids)} prompt tokens leave no room for max_new_tokens in the target's "
                f"window (at most {self.max_prompt_tokens})"
            )
        return ids

    def answer_with_states(
        self, prompts: list[list[int]], seeds: list[int]
    ) -> Iterator[tuple[int, list[int]]]:
        """Answer `batch_size` prompts at a time; when one answer ends, the next prompt starts.

        Args:
            prompts: token ids of each prompt.
            seeds: one seed per prompt; unused at temperature 0.

        Yields:
            Prompt number and token ids of each answer, including the token that ends the turn, as
            answers end.

        Raises:
            InputError: the batch does not fit in memory.
        """
        requests = list(map(Request, prompts, seeds))
        limits = self.max_new_tokens, self.batch_size
        try:
            yield from stream_answers(self.target, requests, *limits, self.sampling)
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"batch_size={self.batch_size}: out of device memory; lower batch_size and start "
                "again (finished rows are kept)"
            ) from error

    def encode_response(self, ids: list[int], dialogue: Dialogue) -> Answer:
        """Split an answer into thinking, text and tool calls.

        Args:
            ids: token ids of an answer from `answers`.
            dialogue: the conversation that it answers.
        """
        written = str(self.target.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        template = self.encoder.build_template(dialogue.template_kwargs, dialogue.tools)
        message = parse_reply(written, dialogue.template_messages, template, dialogue.tools)
        return Answer(message, truncated=ids[-1] not in self.target.stop_ids, token_ids=ids)
