"""What a served target says behind many prompts, in and out as token ids."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from conf.errors import InputError
from data.servers.endpoint import Client, Endpoint, RowFailed, RowRefused, as_completed


def continuations(
    endpoint: Endpoint,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    told: Mapping[str, float],
    concurrency: int,
) -> list[list[int]]:
    """The answers to rendered prompts, stop tokens included, from vLLM (0.32).

    Args:
        endpoint: the server; the first model that it lists answers.
        prompts: token ids.
        seeds: of each answer, where it is sampled.
        told: `max_tokens`, `temperature`, of which 0 is greedy, and `repetition_penalty`, of which
            1 is none.
        concurrency: requests in flight.

    Raises:
        InputError: a prompt got no answer, or one without token ids.
    """
    asked: dict[str, object] = {
        **told,
        # Without these a server takes over what the target's generation_config.json draws from.
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "return_token_ids": True,
    }
    bodies = [
        asked | {"prompt": prompt} | ({"seed": seed} if told["temperature"] > 0 else {})
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    try:
        return asyncio.run(_answered(endpoint, bodies, concurrency))
    except (RowFailed, RowRefused) as error:
        raise InputError(f"{endpoint}: {error}") from error


async def _answered(
    endpoint: Endpoint, bodies: list[dict[str, object]], concurrency: int
) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    async with Client(endpoint, concurrency) as client:
        model = await client.first_model()

        async def ask(place: int) -> tuple[int, list[int]]:
            body = bodies[place] | {"model": model}
            reply = await client.request("POST", "completions", body)
            try:
                return place, list(reply["choices"][0]["token_ids"])
            except (KeyError, IndexError, TypeError) as error:
                raise RowFailed(
                    "the reply has no choices[0].token_ids: it must be vLLM, and not an old one"
                ) from error

        answers = as_completed(range(len(bodies)), ask, concurrency)
        async with contextlib.aclosing(answers):
            async for some in answers:
                found |= dict(some)
    return [found[place] for place in range(len(bodies))]
