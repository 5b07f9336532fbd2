"""Batched answers of a target in this process: left padding, greedy or sampled.

Letters: B conversations, T prompt tokens, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
)  # fmt: skip

from conf.errors import InputError
from data.prepared.pack import check_ids
from data.servers.endpoint import Answer, RowRefused
from data.templates.encoder import Encoder
from data.templates.replies import parse_reply
from eval.decode.generate import StopTexts
from eval.decode.generation_config import Processors, Stops
from heads.target_model.model import Target
from scripts.answers.dialogue import Dialogue


class GumbelNoise(LogitsProcessor):
    """Turns a greedy choice into a sample of softmax(logits / temperature), a seed per row.

    The sample of a row depends on its own seed and logits alone, not on its batch, so that a
    resumed run repeats it: argmax(logits / temperature + Gumbel noise) has that distribution.
    """

    def __init__(self, temperature: float, seeds: list[int], device: torch.device) -> None:
        self.temperature = temperature
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002  their name
        """[B, V] float32 scores plus fresh noise."""
        uniform = torch.stack(
            [
                torch.rand(scores.shape[1], generator=generator, device=scores.device)
                for generator in self.generators
            ]
        )
        tiny = torch.finfo(uniform.dtype).tiny
        exponential = -torch.log1p(-uniform)
        return scores / self.temperature - torch.log(exponential.clamp_min(tiny))


class AskedFor(LogitsProcessor):
    """Rules of a target's generation config, for each row without its padding."""

    def __init__(self, target: Target, prompts: list[list[int]]) -> None:
        self.processors = Processors(target.logits_processing, target.stop_ids)
        self.longest = max(map(len, prompts))
        self.begins = [self.longest - len(prompt) for prompt in prompts]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[B, V] scores, as alone."""
        first = input_ids.shape[1] == self.longest
        processors = self.processors.first if first else self.processors.always
        rows = []
        for row, begin in enumerate(self.begins if processors else ()):
            own = scores[row : row + 1]
            for process in processors:
                own = process(input_ids[row : row + 1, begin:], own)
            rows.append(own)
        return torch.cat(rows) if rows else scores


class LocalAnswers:
    """A target that answers several conversations at once, following its generation config.

    Effects:
        Replaces the generation config of the target's model.
    """

    def __init__(
        self, target: Target, encoder: Encoder, max_new_tokens: int, temperature: float
    ) -> None:
        encoder.template({}, None)  # refuses a tokenizer that cannot render, before any work
        self.target = target
        self.encoder = encoder
        self.temperature = temperature
        self.stop_ids, self.stops = target.stop_ids, Stops.of(target)
        pads = (target.tokenizer.pad_token_id, *self.stop_ids, 0)
        self.pad_id = next(i for i in pads if i is not None and i < target.num_embeddings)
        target.model.generation_config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=self.stop_ids or None,
            pad_token_id=self.pad_id,
        )
        window = getattr(target.config, "max_position_embeddings", None)
        self.max_prompt_tokens = None if window is None else window - max_new_tokens
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise InputError(
                f"max_new_tokens={max_new_tokens}: leaves no room for a prompt in the window of "
                f"{target.name}, {window} tokens"
            )

    def prompt_ids(self, dialogue: Dialogue) -> list[int]:
        """Renders a conversation up to the target's turn.

        Raises:
            RowRefused: the template refuses it, it leaves no room for the answer, or it has tokens
                that the target does not have.
        """
        try:
            ids = self.encoder.prompt(dialogue.asked, dialogue.tools, dialogue.template_kwargs)
            check_ids(ids, self.target, "its prompt".format)
        except InputError as error:
            raise RowRefused(str(error)) from error
        if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
            raise RowRefused(
                f"{len(ids)} prompt tokens leave no room for max_new_tokens in the target's "
                f"window (at most {self.max_prompt_tokens})"
            )
        return ids

    def answer(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        """Generates one answer per prompt.

        Args:
            prompts: token ids, B lists.
            seeds: one per prompt; not used at temperature 0.

        Returns:
            Token ids of each, up to and with the one that ends the turn.

        Raises:
            InputError: the batch does not fit in memory.
        """
        length = max(len(prompt) for prompt in prompts)
        padded = [[self.pad_id] * (length - len(prompt)) + prompt for prompt in prompts]
        seen = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self.target.device
        noise = LogitsProcessorList([AskedFor(self.target, prompts)])
        stops = StoppingCriteriaList()
        if self.target.stop_strings:
            stops.append(StopTexts(self.target, length, len(prompts)))
        if self.temperature > 0:
            noise.append(GumbelNoise(self.temperature, seeds, device))
        try:
            output = self.target.model.generate(
                input_ids=torch.tensor(padded, device=device),
                attention_mask=torch.tensor(seen, device=device),
                logits_processor=noise,
                stopping_criteria=stops,
            )
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"batch_size={len(prompts)}: out of device memory; lower it and start again "
                "(finished rows are kept)"
            ) from error
        return [self.stops.cut([], row) for row in output[:, length:].tolist()]

    def read(self, ids: list[int], dialogue: Dialogue) -> Answer:
        """Takes an answer apart: thinking, text and calls of tools.

        Args:
            ids: of one of `answer`.
            dialogue: the conversation that it answers.
        """
        written = str(self.target.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        template = self.encoder.template(dialogue.template_kwargs, dialogue.tools)
        message = parse_reply(written, dialogue.asked, template, dialogue.tools)
        return Answer(message, truncated=ids[-1] not in self.stop_ids, token_ids=ids)
