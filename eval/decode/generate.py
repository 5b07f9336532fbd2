"""transformers' own `generate` as baselines, whole and timed as one part."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from eval.clock import Stopwatch, Times
from eval.decode.engine import Generation
from eval.decode.texts import truncated
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
    texts = [truncated(row, target.stop_ids) for row in output[:, longest:].tolist()]
    times = Times(total=watch.seconds())
    return [Generation(text, times=times, num_passes=passes) for text in texts]


def _settings(
    target: Target, max_new_tokens: int, sampling: Sampling, pad: int
) -> GenerationConfig:
    drawn = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
    }
    return GenerationConfig(
        **({"do_sample": False} if sampling.greedy else drawn),
        max_new_tokens=max_new_tokens,
        eos_token_id=target.stop_ids or None,
        pad_token_id=pad,
    )
