"""transformers' own `generate` as baselines, seen from outside: the passes of its target."""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria

from eval.clock import PartClock
from eval.decode.engine import Generation, Step
from eval.decode.texts import Stops
from heads.sampling import Sampling
from heads.target.model import Target


class _Passes:
    """What each pass of the target was given; the prompt's own lasts until the second begins."""

    def __init__(self, clock: PartClock, drafting: bool) -> None:
        self.drafting = drafting
        self.widths: list[int] = []
        self.cached: list[int] = []
        self._prompt = ExitStack()
        self._prompt.enter_context(clock.part("prefill"))

    def begin(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook before the target's pass."""
        if self.widths:
            self.end_prompt()
        if not self.drafting:
            self.widths.append(1)
            return
        given = (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        self.widths.append(next(each.shape[1] for each in given if each is not None))
        self.cached.append(int(kwargs["past_key_values"].get_seq_length()))

    def end_prompt(self) -> None:
        """Once or more often."""
        self._prompt.close()

    def steps(self, num_prompt: int, num_tokens: int) -> tuple[list[Step], list[int]]:
        """Of a text that was alone: what each pass after the prompt's own gave and checked.

        Between two passes the cache holds all but the last token of the text.
        """
        # A text is cut where it should have ended, which transformers may have passed over.
        strings = list(target.stop_strings)

    ends = [StopStringCriteria(target.tokenizer, strings)] if strings else []
    clock = PartClock(target.device)
    passes = _Passes(clock, drafting=bool(assistance))
    hook = target.decoder.register_forward_pre_hook(passes.begin, with_kwargs=True)
    try:
        output = target.model.generate(
            ids,
            attention_mask=mask,
            generation_config=_settings(target, max_new_tokens, sampling, pad),
            **assistance,
            stopping_criteria=StoppingCriteriaList(ends),
        )
    finally:
        hook.remove()
        passes.end_prompt()
    # What fills up a text that ended before others of its batch comes after its stop token.
    stops = Stops.of(target)
    texts = [stops.cut([], row) for row in output[:, longest:].tolist()]
    clock.stop()
    if assistance:
        steps, drafted = passes.steps(longest, len(texts[0]))
        return [Generation(texts[0], steps, times=clock.times, drafted=drafted)]
    return [
        Generation(text, _plain(len(text) - 1), times=clock.times, drafted=[0] * (len(text) - 1))
        for text in texts
    ]


def _plain(num_steps: int) -> list[Step]:
    return [Step(0, 1, num_left) for num_left in range(num_steps, 0, -1)]


def _settings(
    target: Target, max_new_tokens: int, sampling: Sampling, pad: int
) -> GenerationConfig:
    """Of the run; what is None here `generate` takes from the target's generation config."""
    drawn = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
    }
    never = target.vocab_size
    return GenerationConfig(
        **({"do_sample": False} if sampling.greedy else drawn),
        max_new_tokens=max_new_tokens,
        eos_token_id=never if target.ignores_stops else target.stop_ids or never,
        pad_token_id=pad,
    )
