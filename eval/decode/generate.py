"""transformers' own `generate` as baselines, whole and timed as one part."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from eval.clock import Stopwatch, Times
from eval.decode.engine import Generation
from eval.decode.texts import Stops
from heads.sampling import Sampling
from heads.target.model import Target


@torch.no_grad()
def hf_generate(
    target: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    **assistance: Any,
) -> list[Generation]:
    """Texts by `generate`, with the number of target passes counted.

    Args:
        target: the target.
        prompts: rendered prompts, filled up on the left to one length.
        max_new_tokens: tokens to emit at most per text.
        sampling: not typical.
        seed: of torch's global generator.
        assistance: more settings of `generate`: `assistant_model`, `prompt_lookup_num_tokens`
            and their own; transformers then takes one prompt only.
    """
    longest = max(map(len, prompts))
    pad = (target.stop_ids or [0])[0]
    rows = [[pad] * (longest - len(ids)) + list(ids) for ids in prompts]
    real = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    ids, mask = (torch.tensor(each, device=target.device) for each in (rows, real))
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    torch.manual_seed(seed)
    if target.stop_strings:
        assistance |= {"tokenizer": target.tokenizer}
    hook = target.decoder.register_forward_hook(count)
    watch = Stopwatch(target.device)
    try:
        output = target.model.generate(
            ids,
            attention_mask=mask,
            generation_config=_settings(target, max_new_tokens, sampling, pad),
            **assistance,
        )
    finally:
        hook.remove()
    # What fills up a text that ended before others of its batch comes after its stop token.
    stops = Stops.of(target)
    texts = [stops.cut([], row) for row in output[:, longest:].tolist()]
    times = Times(total=watch.seconds())
    return [Generation(text, times=times, num_passes=passes) for text in texts]


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
        stop_strings=list(target.stop_strings) or None,
    )
