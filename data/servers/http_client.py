"""Client of an OpenAI-compatible server, with many requests in flight and retries.

This module needs no torch.
"""

import asyncio
import email.utils
import itertools
import json
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from conf.errors import InputError
from data.rows.field_checks import MalformedRowError
from data.rows.messages import format_call_arguments, parse_call_arguments, restore_parts

Job = TypeVar("Job")
Result = TypeVar("Result")
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 60.0
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
REFUSED = frozenset({400, 413, 422})
WHOLE_DISTRIBUTION = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Request settings that keep a server from applying the target's generation_config.json."""
COMPLETE_REASONS = frozenset({None, "stop", "eos", "eos_token", "tool_calls", "function_call"})
"""Values of `finish_reason` of complete answers. `length` and `abort` are not among them."""
RELAY_TOKEN_VARIABLE = "HEADSMITH_RELAY_TOKEN"
"""Environment variable of the token that a relay of hidden states and its readers share."""


class RequestRefusedError(Exception):
    """The server can never answer this conversation: too long, or refused."""


class RequestFailedError(Exception):
    """All attempts for this conversation failed; another start may succeed."""


@dataclass(frozen=True)
class Answer:
    """The target's answer to one turn."""

    message: dict
    """Message with `role`, `content` and, if present, `reasoning_content` and `tool_calls`."""
    truncated: bool
    """Whether `max_new_tokens` or the server cut the answer, so that its end-of-turn token
    lacks."""
    token_ids: list[int] | None = None
    """Token ids as written, including the end-of-turn token; None if unknown."""

    @property
    def is_empty(self) -> bool:
        """Tell whether the answer has no content."""
        parts = (self.message.get(key) for key in ("content", "reasoning_content", "tool_calls"))
        return not any(part.strip() if isinstance(part, str) else part for part in parts)


@dataclass(frozen=True)
class Endpoint:
    """OpenAI-compatible server, with settings of its client."""

    url: str
    """Base URL that ends before `/chat/completions`."""
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    max_retries: int = 5
    timeout_s: float = 300.0
    setting: str = "endpoint"
    """Setting that `url` came from, for messages."""

    def __post_init__(self) -> None:
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise InputError(f"{self}: {error}") from error
        if parsed.userinfo:
            raise InputError(
                f"{self.setting}: must not hold a password; name the variable with the key in "
                "api_key_env"
            )
        if parsed.scheme not in {"http", "https"} or not parsed.host:
            raise InputError(f"{self}: must be like http://localhost:8000/v1")

    def __str__(self) -> str:
        return f"{self.setting}={self.url}"


class EndpointClient(httpx.AsyncClient):
    """Connection pool to one endpoint, as an asynchronous context manager."""

    def __init__(self, endpoint: Endpoint, concurrency: int) -> None:
        """Keep the endpoint; connect later.

        Args:
            endpoint: the server.
            concurrency: number of connections to keep.
        """
        key = endpoint.api_key
        super().__init__(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=endpoint.timeout_s,
            limits=httpx.Limits(max_connections=concurrency),
        )
        self.endpoint, self.num_retries = endpoint, 0

    async def request_models(self) -> list[dict]:
        """Request the models that the server lists, at least one, each with an `id`.

        Raises:
            InputError: the server does not answer, or lists no model.
        """
        try:
            listed = (await self.request_json("GET", "models"))["data"]
            named = [m for m in listed if isinstance(m, dict) and "id" in m]
        except (RequestFailedError, RequestRefusedError) as error:
            raise InputError(f"{self.endpoint}: {error}") from error
        except (KeyError, TypeError):
            named = []
        if not named:
            raise InputError(f"{self.endpoint}: lists no model; set model=NAME")
        return named

    async def request_version(self) -> str | None:
        """Request the server's version, which vLLM gives beside its base URL; None if unknown."""
        root = self.endpoint.url.rstrip("/").removesuffix("/v1")
        try:
            response = await self.get(f"{root}/version")
            reply = response.json() if response.is_success else {}
        except (httpx.RequestError, ValueError):
            return None
        return str(reply["version"]) if isinstance(reply, dict) and "version" in reply else None

    async def request_answer(self, messages: list[dict], settings: dict[str, object]) -> Answer:
        """Request the next assistant message.

        Args:
            messages: conversation so far, ending with a turn of the user.
            settings: sampling fields of the request.

        Raises:
            RequestRefusedError: the server refuses these messages.
            RequestFailedError: all attempts failed.
            InputError: the server refuses every request, as address, key or model is wrong.
        """
        body = {
            "model": self.endpoint.model,
            "messages": [format_call_arguments(restore_parts(message)) for message in messages],
            "stream": False,
            **settings,
        }
        reply = await self.request_json("POST", "chat/completions", body)
        try:
            choice = reply["choices"][0]
            message = _parse_message(choice["message"])
        except (KeyError, IndexError, TypeError) as error:
            raise RequestFailedError("the reply has no choices[0].message.content") from error
        is_complete = choice.get("finish_reason") in COMPLETE_REASONS
        return Answer(message, not is_complete, choice.get("token_ids"))

    async def request_continuation(
        self, prompt: list[int], settings: Mapping[str, Any]
    ) -> tuple[list[int], bool]:
        """Request what vLLM (0.32) writes after a rendered prompt.

        Args:
            prompt: token ids.
            settings: fields of the request, with `max_tokens`.

        Returns:
            Token ids, including the stop token, and whether the answer was cut off.

        Raises:
            RequestRefusedError: the server refuses this prompt.
            RequestFailedError: all attempts failed, or the reply has no token ids.
            InputError: the server refuses every request.
        """
        body = {"model": self.endpoint.model, "prompt": prompt, **settings}
        reply = await self.request_json("POST", "completions", body | {"return_token_ids": True})
        try:
            choice = reply["choices"][0]
            return list(choice["token_ids"]), choice.get("finish_reason") not in COMPLETE_REASONS
        except (KeyError, IndexError, TypeError) as error:
            raise RequestFailedError(
                "the reply has no choices[0].token_ids: the server must be a recent vLLM"
            ) from error

    async def request_json(self, method: str, path: str, body: dict | None = None) -> dict:
        """Send a request until it succeeds.

        Args:
            method: HTTP method.
            path: path below the base URL.
            body: JSON body.

        Returns:
            The reply's JSON.

        Raises:
            RequestRefusedError: the server refuses this request.
            RequestFailedError: all attempts failed.
            InputError: the server refuses every request.
        """
        return await self._send_request(method, path, body, httpx.Response.json)

    async def request_text(self, path: str) -> str:
        """Request the text at a path below the base URL. Raises as `request_json` does."""
        return await self._send_request("GET", path, None, lambda response: response.text)

    async def stream_events(self, path: str, body: dict) -> AsyncGenerator[dict, None]:
        """Yield the pieces of a streamed reply as they come. A failed request is not sent again.

        Args:
            path: path below the base URL.
            body: JSON body, which asks for a stream.

        Raises:
            RequestRefusedError: the server refuses this body.
            RequestFailedError: the connection failed, or a piece is not JSON.
            InputError: the server refuses every request.
        """
        url = f"{self.endpoint.url.rstrip('/')}/{path}"
        try:
            async with self.stream("POST", url, json=body) as response:
                if not response.is_success:
                    await response.aread()
                    raise _make_final_error(
                        response.status_code, url, self._format_problem(response)
                    )
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data != "[DONE]":
                        yield json.loads(data)
        except httpx.RequestError as error:
            raise RequestFailedError(f"{type(error).__name__}: {error}") from error
        except json.JSONDecodeError as error:
            raise RequestFailedError(f"a streamed piece is not JSON ({error})") from error

    def _format_problem(self, response: httpx.Response) -> str:
        text = " ".join(response.text.split())
        if self.endpoint.api_key:  # some servers echo it
            text = text.replace(self.endpoint.api_key, "***")
        return f"HTTP {response.status_code}: {text[:300]}"

    async def _send_request(
        self, method: str, path: str, body: dict | None, parse: Callable[[httpx.Response], Result]
    ) -> Result:
        """Send a request until it succeeds, and parse the reply. Raises as `request_json` does."""
        url = f"{self.endpoint.url.rstrip('/')}/{path}"
        for attempt in itertools.count():
            wait_s = min(FIRST_DELAY_S * 2**attempt, MAX_DELAY_S)
            try:
                response = await self.request(method, url, json=body)
                if response.is_success:
                    return parse(response)
                problem = self._format_problem(response)
                if response.status_code not in RETRIED:
                    raise _make_final_error(response.status_code, url, problem)
                wait_s = max(wait_s, retry_after_s(response.headers.get("Retry-After")))
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
            except ValueError as error:
                if isinstance(error, InputError):
                    raise
                problem = f"the reply is not JSON ({error})"
            if attempt >= self.endpoint.max_retries:
                raise RequestFailedError(f"{problem} ({attempt + 1} attempts)")
            if wait_s > max(self.endpoint.timeout_s, MAX_DELAY_S):
                raise RequestFailedError(
                    f"{problem}; the server asks to wait {wait_s:.0f} s, more than timeout_s"
                )
            self.num_retries += 1
            await asyncio.sleep(wait_s)
        raise AssertionError


def _parse_message(reply: dict) -> dict:
    """Parse content, reasoning and tool calls of an assistant's message in a reply."""
    content, calls = reply["content"], reply.get("tool_calls")
    reasoning = reply.get("reasoning_content") or reply.get("reasoning")
    if not isinstance(content, str) and (content is not None or not (reasoning or calls)):
        raise RequestFailedError(f"the reply's content is {type(content).__name__}, not text")
    message: dict = {"role": "assistant", "content": content or ""}
    if reasoning:
        message["reasoning_content"] = str(reasoning)
    if calls:
        message["tool_calls"] = [_parse_call(call) for call in calls]
    try:
        "".join((message["content"], message.get("reasoning_content", ""))).encode()
    except UnicodeEncodeError as error:
        raise RequestFailedError("the reply holds half of a surrogate pair") from error
    return message


def _parse_call(call: dict) -> dict:
    function = call["function"]
    try:
        arguments = parse_call_arguments(function.get("arguments"), "arguments")
    except MalformedRowError as error:
        raise RequestFailedError(f"a call of {function['name']}: {error}") from error
    function = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def _make_final_error(status: int, url: str, problem: str) -> Exception:
    if status in REFUSED:
        return RequestRefusedError(problem)
    hint = {
        401: "set the key in the environment variable named by api_key_env",
        403: "the key may not use this model",
        404: "check endpoint (it usually ends in /v1) and model",
    }.get(status, "check endpoint and model")
    return InputError(f"{url}: {problem}: {hint}")


def retry_after_s(value: str | None) -> float:
    """Parse the seconds of a Retry-After header, a number or HTTP date; 0 if it gives none."""
    with suppress(ValueError):
        return max(0.0, float(value or "0"))
    with suppress(ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(value or "").timestamp() - time.time())
    return 0.0


class SyncEndpointClient:
    """Client for synchronous code, as a context manager.

    Attributes:
        endpoint: the server.
        client: asynchronous client.
        portal: thread of the client, inside the context.
    """

    def __init__(self, endpoint: Endpoint, concurrency: int) -> None:
        """Keep the endpoint; connect later. See `EndpointClient`."""
        self.endpoint = endpoint
        self.client = EndpointClient(endpoint, concurrency)
        self.portal: BlockingPortal
        self._stack = ExitStack()

    def connect(self) -> None:
        """Try the server, as a subclass needs. An error closes the connection."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(self.portal.wrap_async_context_manager(self.client))
            self.connect()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]


async def iter_completed(
    jobs: Iterable[Job], work: Callable[[Job], Awaitable[Result]], concurrency: int
) -> AsyncGenerator[list[Result], None]:
    """Run `work` on every job, at most `concurrency` at a time, and yield results as they come.

    Args:
        jobs: arguments of `work`, started in this order.
        work: asynchronous function of one job.
        concurrency: largest number of jobs that run at a time.

    Yields:
        Results of the jobs that ended since the last list. If a job raises, the results of jobs
        that ended with it come first, then its error.
    """
    queue = iter(jobs)
    pending: set[asyncio.Future[Result]] = set()
    try:
        while True:
            for job in itertools.islice(queue, concurrency - len(pending)):
                pending.add(asyncio.ensure_future(work(job)))
            if not pending:
                return
            ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            errors = [error for task in ended if (error := task.exception())]
            yield [task.result() for task in ended if not task.exception()]
            if errors:
                raise errors[0]
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def request_continuations(
    endpoint: Endpoint,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    request_settings: Sequence[Mapping[str, Any]],
    concurrency: int,
) -> list[list[int]]:
    """Request answers to rendered prompts from vLLM (0.32).

    Args:
        endpoint: server; its first listed model answers.
        prompts: token ids of each prompt.
        max_new_tokens: largest number of tokens per answer.
        request_settings: further settings of each request, e.g. `temperature`.
        concurrency: number of requests in flight.

    Returns:
        Token ids of each answer, including its stop token.

    Raises:
        InputError: a prompt got no answer, or an answer without token ids.
    """
    shared = {**WHOLE_DISTRIBUTION, "max_tokens": max_new_tokens}

    def request_one(prompt: list[int], settings: Mapping[str, Any]) -> list[int]:
        asked = {**shared, **settings, "model": model}
        return server.portal.call(server.client.request_continuation, prompt, asked)[0]

    with (
        ThreadPoolExecutor(concurrency) as threads,
        SyncEndpointClient(endpoint, concurrency) as server,  # its end cancels what is in flight
    ):
        model = server.portal.call(server.client.request_models)[0]["id"]
        try:
            return list(threads.map(request_one, prompts, request_settings))
        except (RequestFailedError, RequestRefusedError) as error:
            raise InputError(f"{endpoint}: {error}") from error


def find_relay_token() -> str | None:
    """Find the relay's token in the environment of this machine; None if unset.

    Raises:
        InputError: the token cannot be sent.
    """
    token = os.environ.get(RELAY_TOKEN_VARIABLE)
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise InputError(
            f"{RELAY_TOKEN_VARIABLE}: cannot be sent; allowed are ASCII letters, digits and "
            "signs, without spaces"
        )
    return token or None
