"""Baselines: transformers' own `generate`, observed through the target's passes."""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from conf.command.clock import PartClock
from eval.decode.engine import Generation, Step
from eval.decode.generation_config import StopRules
from heads.decoding.sampling import Sampling
from heads.target_model.decoder import find_cache_argument
from heads.target_model.model import Target


class _PassRecorder:
    """Records each pass of the target; the prompt's lasts until the second begins."""

    def __init__(self, clock: PartClock, num_texts: int, drafting: bool) -> None:
        self.clock, self.texts, self.drafting = clock, range(num_texts), drafting
        self.widths: list[int] = []
        self.cached: list[int] = []
        self.arrivals: list[float] = []
        self._prompt = ExitStack()
        self._prompt.enter_context(clock.measure_part("prefill", self.texts))

    def record_pass_start(
        self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record the start of a pass: a hook before the target's forward."""
        if self.widths:
            self.end_prompt()
            self.record_arrival()
        if not self.drafting:
            self.widths.append(1)
            return
        given = (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        self.widths.append(next(tensor.shape[1] for tensor in given if tensor is not None))
        self.cached.append(int(kwargs[find_cache_argument(kwargs)].get_seq_length()))

    def end_prompt(self) -> None:
        """End the prompt's part; may be called repeatedly."""
        self._prompt.close()

    def record_arrival(self) -> None:
        """Record that a pass has given its tokens."""
        self.arrivals.append(self.clock.end_lap(self.texts))

    def record_token(self, input_ids: Any, scores: Any, **_features: Any) -> Any:  # noqa: ARG002
        """Record a token where a hook would become part of compiled code; never end a text."""
        self.end_prompt()
        self.record_arrival()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def build_steps(self, num_prompt: int, num_tokens: int) -> tuple[list[Step], list[int]]:
        """Build steps and draft tokens of the passes after the prompt's, for a single text.

        Between two passes the cache holds all but the last token of the text.
        """
        # A text is cut where it should have ended, as transformers may continue past that.
        ends = [min(cached - num_prompt + 1, num_tokens) for cached in self.cached[1:]] + [
            num_tokens
        ]
        steps = [
            Step(after - before - 1, after - before, num_tokens - before)
            for before, after in pairwise(ends)
            if after > before
        ]
        return steps, [width - 1 for width in self.widths[1 : len(steps) + 1]]


class StopTexts(StoppingCriteria):
    """Ends answers at a text; transformers' own criterion also searches the prompt.

    Args:
        target: target whose `stop_strings` end an answer.
        num_prompt: number of tokens of every row before the answer.
        num_texts: number of rows.
    """

    def __init__(self, target: Target, num_prompt: int, num_texts: int) -> None:
        self.stops = StopRules((), target.stop_strings, target.tokenizer)
        self.num_prompt = num_prompt
        self.seen, self.done = num_prompt, [False] * num_texts

    def __call__(self, input_ids: Any, scores: Any, **_features: Any) -> Any:  # noqa: ARG002
        """Tell for each row, [B] bool, whether its new tokens end its answer.

        With a draft, a row has several new tokens.
        """
        begin = max(self.num_prompt, self.seen - self.stops.reach)
        first = self.seen - begin
        for row, ids in enumerate(input_ids[:, begin:].tolist()):
            new = self.stops.cut_after_end(ids[:first], ids[first:])
            self.done[row] |= len(new) < len(ids) - first or self.stops.has_ended(ids)
        self.seen = input_ids.shape[1]
        return torch.tensor(self.done, device=input_ids.device)


@torch.no_grad()
def hf_generate(
    target: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    **assistance: Any,
) -> list[Generation]:
    """Decode with `generate`, and derive the steps from its passes.

    Tokens that a drafting `generate` accepts in the prompt's pass belong to that pass. With a
    compiled target, `generate` without drafts is compiled too, with transformers' static cache,
    which drafting does not support.

    Args:
        target: target that decodes.
        prompts: rendered prompts, which are left-padded to one length here.
        max_new_tokens: largest number of tokens per text.
        sampling: sampling, not typical.
        seed: seed of torch's global generator.
        assistance: further settings of `generate`: `assistant_model`, `prompt_lookup_num_tokens`
            and related ones; transformers then takes one prompt only.
    """
    longest = max(map(len, prompts))
    pad = (target.stop_ids or [0])[0]
    rows = [[pad] * (longest - len(ids)) + list(ids) for ids in prompts]
    real = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    ids, mask = (torch.tensor(values, device=target.device) for values in (rows, real))
    torch.manual_seed(seed)
    never, choice = target.vocab_size, dict[str, Any](do_sample=False)
    if not sampling.is_greedy:
        choice = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p,
        }
    # `generate` takes what stays None from the target's config.
    settings = GenerationConfig(
        **choice,
        max_new_tokens=max_new_tokens,
        eos_token_id=never if target.ignores_stops else target.stop_ids or never,
        pad_token_id=pad,
    )
    ends = StoppingCriteriaList()
    if target.stop_strings:
        ends.append(StopTexts(target, longest, len(prompts)))
    clock = PartClock(target.device, len(prompts))
    with ExitStack() as undo:
        passes = _PassRecorder(clock, len(prompts), drafting=bool(assistance))
        undo.callback(passes.end_prompt)
        if target.capacity is not None and not assistance:
            how: Any = CompileConfig()
            how._compile_all_devices = True  # otherwise only on a GPU
            # One length for all, as each length is compiled separately.
            settings.update(
                cache_implementation="static", max_cache_len=target.capacity, compile_config=how
            )
            ends.append(passes.record_token)
        else:
            begin = target.decoder.register_forward_pre_hook(
                passes.record_pass_start, with_kwargs=True
            )
            undo.callback(begin.remove)
        output = target.model.generate(
            ids, attention_mask=mask, generation_config=settings, **assistance,
            stopping_criteria=ends,
        )  # fmt: skip
    # Padding of a finished text in a batch comes after its stop token.
    stops = StopRules.from_target(target)
    texts = [stops.cut_after_end([], row) for row in output[:, longest:].tolist()]
    passes.record_arrival()
    clock.finish_timing(passes.texts)
    generations = []
    for text, times in zip(texts, clock.times, strict=True):
        if assistance:
            steps, drafted = passes.build_steps(longest, len(text))
        else:
            steps = [Step(0, 1, num_left) for num_left in range(len(text) - 1, 0, -1)]
            drafted = [0] * len(steps)
        arrivals = passes.arrivals[: len(steps) + 1]
        generations.append(Generation(text, steps, [], times, drafted, arrivals))
    return generations
