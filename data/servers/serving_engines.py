"""Serving engine that is measured: its texts, their times, and its counts of draft tokens.

`ServingEngine` is the client; an `EngineProtocol` holds what differs between engines. vLLM and
llama.cpp count draft tokens in `/metrics`, over all requests; SGLang counts in the reply to each
request. All engines start to draft after the first token of a text. vLLM and SGLang also count
tokens that the last pass accepts beyond the text's end; llama.cpp's drafts end with the text.

Sources: vLLM 0.32 `v1/spec_decode/metrics.py`, `v1/core/sched/scheduler.py` and
`entrypoints/openai/completion/protocol.py`; SGLang `srt/managers/schedule_batch.py`,
`update_spec_correct_drafts_histogram`, and `srt/managers/tokenizer_manager.py`; llama.cpp b11434
`tools/server/server-context.cpp`.
"""

import asyncio
import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter, sub
from types import MappingProxyType
from typing import Any

from conf.command.clock import Stopwatch
from conf.errors import InputError
from data.rows.messages import restore_parts
from data.servers.http_client import (
    Endpoint,
    EndpointClient,
    RequestFailedError,
    RequestRefusedError,
    SyncEndpointClient,
    iter_completed,
)

METRIC = re.compile(r"^(?:vllm|llamacpp):(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
FIRST_TOKENS = 3
"""Tokens of a text with room for a draft of one token, between the first and a bonus token."""
NO_HEAD = "drafts nothing: start it with a draft head (the README of an export has the command)"
WHOLE_ENDINGS = {"stop", "length", "eos", "limit", "word"}
"""Reasons to end a text that are not an engine's failure: vLLM's and SGLang's, then llama.cpp's."""
START_HINT = "start a server there with the line that scripts/export.py prints, or name its address"


@dataclass(frozen=True)
class TextRequest:
    """Settings of a request for a text.

    Attributes:
        max_new_tokens: largest number of tokens of the text.
        sampling: `temperature`, `top_p`, `top_k`, `min_p` and `seed`, as far as they are set; None
            is greedy.
        ignore_eos: whether the text goes on after stop tokens.
        salt: name of a cache of prompts in vLLM and SGLang, which requests with other salts do not
            use. llama.cpp is asked not to cache.
    """

    max_new_tokens: int
    sampling: dict[str, float | int] | None = None
    ignore_eos: bool = False
    salt: str | None = None

    @property
    def settings(self) -> dict[str, float | int]:
        """Sampling settings, greedy if none are set, and whether stop tokens are ignored."""
        sampling = self.sampling or {"temperature": 0}
        return sampling | ({"ignore_eos": True} if self.ignore_eos else {})


@dataclass(frozen=True)
class StreamedText:
    """Streamed text and the times at which it came.

    Attributes:
        started_s: seconds from the start of the measurement to the request.
        arrivals_s: seconds from the request to each piece that held tokens.
        pieces: number of tokens of each piece.
        lengths: draft tokens that each pass accepted, if the engine returns them with the text.
        digest: digest of the token ids.
        is_whole: whether the text ended by itself or at its limit, so that nothing cut it off.
        num_cached: prompt tokens that came from the engine's cache; None if the text does not tell.
    """

    started_s: float
    arrivals_s: list[float]
    pieces: list[int]
    lengths: list[int]
    digest: str = ""
    is_whole: bool = True
    num_cached: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the text."""
        return sum(self.pieces)

    @property
    def ended_s(self) -> float:
        """Seconds from the start of the measurement to the last piece."""
        return self.started_s + self.arrivals_s[-1]


@dataclass(frozen=True)
class DraftCounts:
    """Text and the counts of its draft tokens.

    Attributes:
        text: token ids, including a stop token.
        drafts: number of passes that verified draft tokens.
        proposed: number of draft tokens that these passes verified.
        accepted: for each depth, number of passes that accepted a draft token there.
    """

    text: list[int]
    drafts: int
    proposed: int
    accepted: list[int]

    @classmethod
    def from_passes(cls, text: list[int], lengths: list[int], depth: int) -> "DraftCounts":
        """Count drafts from the accepted tokens of each pass, also beyond the text's end.

        Args:
            text: token ids.
            lengths: number of draft tokens that each pass accepted.
            depth: number of draft tokens of a pass.
        """
        accepted = [sum(length > index for length in lengths) for index in range(depth)]
        return cls(text, len(lengths), depth * len(lengths), accepted)

    @classmethod
    def from_texts(cls, texts: "Iterable[DraftCounts]", depth: int) -> "DraftCounts":
        """Sum the counts of texts; the sum has no text of its own."""
        counts = list(texts)
        return cls(
            [],
            sum(text.drafts for text in counts),
            sum(text.proposed for text in counts),
            [sum(text.accepted[index] for text in counts) for index in range(depth)],
        )

    @classmethod
    def from_passes_within_text(
        cls, text: list[int], lengths: list[int], depth: int, room: int, stop_ids: list[int]
    ) -> "DraftCounts":
        """Count drafts as llama.cpp does, which never drafts beyond the end of a text.

        A pass drafts at most as many tokens as the text has room for, less one for the bonus token.
        An accepted stop token counts as the bonus token, unless it is the last token of the draft.

        Args:
            text: token ids.
            lengths: number of draft tokens that each pass accepted, also beyond the text's end.
            depth: largest number of draft tokens of a pass.
            room: largest number of tokens of the text.
            stop_ids: token ids that end a text.
        """
        proposed, within, emitted = 0, list[int](), 1
        for length in lengths:
            size, left = min(depth, room - emitted - 1), len(text) - emitted
            if size > 0:
                proposed += size
                stopped = text[-1] in stop_ids and left <= length
                within.append(left - (left != size) if stopped else min(length, size))
            emitted += length + 1
        return replace(cls.from_passes(text, within, depth), proposed=proposed)


@dataclass(frozen=True)
class LoadMeasurement:
    """Measurement of texts that were requested many at a time.

    Attributes:
        texts: times of each text, in the order of the requests.
        seconds: seconds from the first request to the end of the last text.
        counts: counts of the draft tokens of all texts.
        processor_s: processor seconds that this process used meanwhile.
        num_generated: tokens that the engine counted, of all its users; None if it counts none.
        num_cached: prompt tokens that came from the engine's cache; None if nothing tells.
        most_running: requests that the engine ran at a time, the most of three readings; None if
            nothing tells.
    """

    texts: list[StreamedText]
    seconds: float
    counts: DraftCounts
    processor_s: float = 0.0
    num_generated: int | None = None
    num_cached: int | None = None
    most_running: int | None = None


class EngineProtocol(ABC):
    """Requests to one kind of serving engine. Each may raise as `EndpointClient.request_json` does.

    Counters of draft tokens are of all requests, so they are read before and after, unless a class
    says otherwise.

    Attributes:
        drafts_end_with_text: whether the engine never drafts beyond the end of a text.
        path: path of requests for a text, below the server's address.
        hides_counts: option with which a server counts no drafts.
        find_ids: finds the token ids of a reply, or raises any error of indexing.
        missing_ids: what a reply without token ids tells.
        load_counters: names in `/metrics` of generated tokens, of prompt tokens from the cache and
            of running requests, as far as the engine has them.
        depth: number of draft tokens of a pass; 0 without a draft head.
    """

    drafts_end_with_text = False
    path: str
    hides_counts = ""
    find_ids: Callable[[Any], list[int]]
    missing_ids: str
    load_counters: Mapping[str, str] = MappingProxyType({})

    def __init__(self, client: EndpointClient, model: str) -> None:
        self.client, self.model = client, model
        self.depth = 0

    async def find_draft_depth(self, drafts: bool) -> None:
        """Find and set `depth`, the number of draft tokens of a pass.

        Args:
            drafts: whether the engine must have a draft head.

        Raises:
            RequestFailedError: the engine must draft but does not, or drafts trees.
        """
        await self._request_counters()
        if drafts and not self.depth:
            raise RequestFailedError(f"{NO_HEAD}, and without {self.hides_counts}")

    @abstractmethod
    def build_request(self, prompt_ids: list[int], request: TextRequest) -> dict[str, Any]:
        """Build the JSON body of a request for a text."""

    def parse_token_ids(self, reply: dict) -> list[int]:
        """Parse the token ids of a reply, or of one piece of a streamed reply.

        Raises:
            RequestFailedError: the reply has no token ids.
        """
        try:
            return list(self.find_ids(reply))
        except (KeyError, IndexError, TypeError) as error:
            raise RequestFailedError(f"the reply has no {self.missing_ids} is too old") from error

    async def request_answer(self, prompt_ids: list[int], request: TextRequest) -> DraftCounts:
        """Request one text with the counts of its draft tokens."""
        before = await self.request_draft_counters()
        body = self.build_request(prompt_ids, request)
        reply = await self.client.request_json("POST", self.path, body)
        after, ids = await self.request_draft_counters(), self.parse_token_ids(reply)
        counts = self.count_drafts(before, after, self.parse_accepted_lengths(reply))
        return replace(counts, text=ids)

    async def request_draft_counters(self) -> list[int]:
        """Request the counters since the server's start; zeros without a draft head.

        Returns:
            Number of drafts, of draft tokens, and of accepted tokens at each position.
        """
        return await self._request_counters() if self.depth else [0, 0]

    async def _request_counters(self) -> list[int]:
        """Request the counters, and set `depth` to the number of positions among them."""
        totals, accepted = {"num_drafts": 0, "num_draft_tokens": 0}, dict[int, int]()
        for metric, labels, value in METRIC.findall(await self.client.request_text("metrics")):
            name = metric.removeprefix("spec_decode_").removesuffix("_total")
            if name in totals:
                totals[name] += int(float(value))
            elif name == "num_accepted_tokens_per_pos":
                position = int(POSITION.findall(labels)[0])
                accepted[position] = accepted.get(position, 0) + int(float(value))
        self.depth = len(accepted)
        return [*totals.values(), *(accepted[position] for position in sorted(accepted))]

    def count_drafts(self, before: list[int], after: list[int], _lengths: list[int]) -> DraftCounts:
        """Count drafts between two readings of the counters, or by their accepted `_lengths`."""
        drafts, proposed, *accepted = map(sub, after, before)
        return DraftCounts([], drafts, proposed, accepted)

    async def request_load_counters(self) -> dict[str, int]:
        """Request the counters of `load_counters`, of all requests; empty if there are none."""
        totals = dict[str, int]()
        with suppress(RequestFailedError, RequestRefusedError, InputError):
            page = METRIC.findall(await self.client.request_text("metrics"))
            for key, wanted in self.load_counters.items():
                if values := [float(value) for name, _, value in page if name == wanted]:
                    totals[key] = int(sum(values))
        return totals

    async def stream_text(
        self,
        prompt_ids: list[int],
        request: TextRequest,
        watch: Stopwatch,
        tell: Callable[[int], object],
    ) -> StreamedText:
        """Request one text as a stream and note when its tokens come.

        Args:
            prompt_ids: token ids of the rendered prompt.
            request: settings of the text.
            watch: clock of the measurement.
            tell: function called with the number of tokens so far, at each piece.

        Raises:
            RequestFailedError: the engine breaks the text off, or streams no token.
        """
        arrivals, pieces, token_ids = list[float](), list[int](), list[int]()
        event, ending, cached = dict[str, Any](), None, None
        body, started = self.build_request(prompt_ids, request) | {"stream": True}, watch.seconds()
        async for event in self.client.stream_events(self.path, body):
            arrived = watch.seconds() - started
            if "error" in event:
                raise RequestFailedError(f"broke a text off: {str(event['error'])[:300]}")
            token_ids = self.join_streamed_ids(token_ids, event)
            if (num_new := len(token_ids) - sum(pieces)) > 0:
                arrivals.append(arrived)
                pieces.append(num_new)
                tell(len(token_ids))
            ending = self.parse_ending(event) or ending
            cached = self.parse_cached_tokens(event) if cached is None else cached
        if not arrivals:
            raise RequestFailedError(f"streams no token at {self.path}: {str(event)[:200]}")
        digest = hashlib.sha256(repr(token_ids).encode()).hexdigest()[:16]
        lengths, is_whole = self.parse_accepted_lengths(event), ending in WHOLE_ENDINGS
        return StreamedText(started, arrivals, pieces, lengths, digest, is_whole, cached)

    def join_streamed_ids(self, before: list[int], event: dict) -> list[int]:
        """Join the token ids that came `before` and those of this streamed piece."""
        return before + self.parse_token_ids(event)

    def parse_ending(self, event: dict) -> str | None:
        """Parse why a text ended; None if this streamed piece does not tell."""
        return next((choice.get("finish_reason") for choice in event.get("choices") or []), None)

    def parse_cached_tokens(self, _event: dict) -> int | None:
        """Parse the prompt tokens that came from the cache; None if this piece does not tell."""
        return None

    def parse_accepted_lengths(self, _reply: dict) -> list[int]:
        """Parse the number of draft tokens that each pass accepted; empty if a reply has none."""
        return []


class ServingEngine(SyncEndpointClient):
    """Client of a vLLM, SGLang or llama.cpp server, as a context manager.

    Nobody else may send requests meanwhile, as vLLM and llama.cpp count over all requests.

    Attributes:
        name: `vllm`, `sglang` or `llamacpp`.
        model: name of the served model.
        adapters: names of the adapters of this model that the server lists.
        version: version of the server; None if the server gives none.
        depth: number of draft tokens of a pass; 0 without a draft head.
        within: whether drafts end with the text (see `DraftCounts.from_passes_within_text`).
        max_model_len: limit of prompt and answer in tokens; None if the server gives none.
        protocol: requests to this engine, once it is connected.
    """

    def __init__(self, endpoint: Endpoint, concurrency: int = 1, drafts: bool = True) -> None:
        """Keep the settings; connect later.

        Args:
            endpoint: server, with or without `/v1` at the end, and model. Without a model, the
                first listed one is used.
            concurrency: largest number of requests in flight.
            drafts: whether the server must have a draft head, or must have none.
        """
        root = endpoint.url.rstrip("/").removesuffix("/v1")
        # A request that is sent again is counted again.
        # One more connection reads counters meanwhile.
        super().__init__(replace(endpoint, url=root, max_retries=0), concurrency + 1)
        self.drafts = drafts
        self.name, self.model, self.depth, self.within = "", "", 0, False
        self.version: str | None = None
        self.adapters: list[str] = []
        self.max_model_len: int | None = None
        self.protocol: EngineProtocol

    def connect(self) -> None:
        """Identify the engine; refuse an unknown one, and one that drafts or not against `drafts`.

        Raises:
            InputError: the message names what the server lacks.
        """
        self._run_on_portal(self._identify_engine)

    def request_answer(
        self, prompt_ids: list[int], max_new_tokens: int, ignore_eos: bool = False
    ) -> DraftCounts:
        """Request the greedy text after a prompt, ended by the server's own stop tokens.

        Args:
            prompt_ids: token ids of the rendered prompt.
            max_new_tokens: largest number of tokens of the text.
            ignore_eos: whether the text goes on after stop tokens.

        Raises:
            InputError: no answer, or an answer without token ids and counts.
        """
        request = TextRequest(max_new_tokens, ignore_eos=ignore_eos)
        return self._run_on_portal(self.protocol.request_answer, prompt_ids, request)

    def render_prompt(
        self, messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any]
    ) -> list[int] | int:
        """Request the rendering of a conversation by the server's own chat template.

        Args:
            messages: conversation up to a message of the user.
            tools: function schemas for the template.
            kwargs: further arguments of the template.

        Returns:
            Token ids of the prompt, or their number if the server gives no ids.
        """
        body: dict[str, Any] = {
            "messages": [restore_parts(message) for message in messages],
            "max_tokens": 1,
            "return_token_ids": True,
        }
        body |= {"tools": tools} if tools else {}
        body |= {"chat_template_kwargs": kwargs} if kwargs else {}
        body |= {"model": self.model}

        async def request_rendering() -> list[int] | int:
            reply = await self.client.request_json("POST", "v1/chat/completions", body)
            try:
                ids = reply.get("prompt_token_ids")
                rendered = list(ids) if ids else int(reply["usage"]["prompt_tokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise RequestFailedError("a chat's reply has no usage.prompt_tokens") from error
            if not rendered:  # llama.cpp with a file that holds no tokenizer
                raise RequestFailedError("renders a chat as nothing")
            return rendered

        return self._run_on_portal(request_rendering)

    def stream_texts(
        self,
        jobs: Sequence[tuple[list[int], TextRequest]],
        concurrency: int,
        tell: Callable[[int], object] = lambda _: None,
        lead: float = 0.0,
    ) -> LoadMeasurement:
        """Request texts, `concurrency` at a time, and note when their tokens come.

        Args:
            jobs: token ids of each prompt and settings of its text, requested in this order.
            concurrency: number of requests in flight.
            tell: function called with the number of texts that have ended since its last call.
            lead: tokens of the first text between the starts of the first `concurrency` requests.
                Texts of one length that start together would end together, again and again, and the
                engine would read prompts in bursts and only draft in between.

        Raises:
            InputError: a prompt got no answer.
        """
        protocol, texts = self.protocol, dict[int, StreamedText]()
        marks = {share * len(jobs) // 4 for share in (1, 2, 3)}

        async def stream_all() -> LoadMeasurement:
            turns = [asyncio.Event() for _ in range(concurrency)]

            def start_requests(num_tokens: float) -> None:
                for place, turn in enumerate(turns):
                    if num_tokens >= place * lead:
                        turn.set()

            start_requests(0)
            readings = list[asyncio.Task[dict[str, int]]]()

            async def stream_one(index: int) -> tuple[int, StreamedText]:
                if index < concurrency:
                    await turns[index].wait()

                def note_tokens(num_tokens: int) -> None:
                    if index == 0:
                        start_requests(num_tokens)
                    if index in marks:
                        marks.discard(index)
                        readings.append(asyncio.create_task(protocol.request_load_counters()))

                text = await protocol.stream_text(*jobs[index], watch, note_tokens)
                if index == 0:
                    start_requests(math.inf)
                return index, text

            counted = await protocol.request_load_counters()
            before, watch = await protocol.request_draft_counters(), Stopwatch()
            async for ended in iter_completed(range(len(jobs)), stream_one, concurrency):
                texts.update(ended)
                tell(len(ended))
            seconds, processor_s = watch.seconds(), watch.processor_seconds()
            after, recounted = (
                await protocol.request_draft_counters(),
                await protocol.request_load_counters(),
            )
            ordered = [texts[index] for index in range(len(jobs))]
            lengths = [length for text in ordered for length in text.lengths]
            added = {key: recounted[key] - counted[key] for key in counted.keys() & recounted}
            told = [text.num_cached for text in ordered if text.num_cached is not None]
            running = [each.get("running") for each in await asyncio.gather(*readings)]
            return LoadMeasurement(
                ordered,
                seconds,
                protocol.count_drafts(before, after, lengths),
                processor_s,
                added.get("generated"),
                sum(told) if told else added.get("cached"),
                max((number for number in running if number is not None), default=None),
            )

        return self._run_on_portal(stream_all)

    def _run_on_portal(self, work: Any, *arguments: Any) -> Any:
        try:
            return self.portal.call(work, *arguments)
        except (RequestFailedError, RequestRefusedError) as error:
            start = "" if self.name else f"; {START_HINT}"
            raise InputError(f"{self.endpoint}: {error}{start}") from error

    async def _identify_engine(self) -> None:
        reply = await self.client.request_json("GET", "v1/models")
        try:
            by_name = {each["id"]: each for each in reply["data"]}
            model = self.endpoint.model or reply["data"][0]["id"]
            if model not in by_name:
                raise RequestFailedError(
                    f"model={model}: not served; allowed: {', '.join(map(str, by_name))}"
                )
            served = by_name[model]
            self.name, self.model = str(served["owned_by"]), str(served["id"])
            adapters = [each for each in reply["data"] if each.get("parent") == self.model]
            self.adapters = [str(each["id"]) for each in adapters]
            meta = served.get("meta") or {}  # llama.cpp names none while it loads
            self.max_model_len = served.get("max_model_len") or meta.get("n_ctx")
            self.protocol = PROTOCOLS[self.name](self.client, self.model)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise RequestFailedError(
                f"must be one of {', '.join(PROTOCOLS)}; v1/models says {reply}"
            ) from error
        self.version = await self.client.request_version()
        await self.protocol.find_draft_depth(self.drafts)
        self.depth, self.within = self.protocol.depth, self.protocol.drafts_end_with_text
        if self.depth and not self.drafts:
            raise RequestFailedError(
                f"drafts {self.depth} tokens; the baseline is the same server without a draft head"
            )


class _VllmProtocol(EngineProtocol):
    path = "v1/completions"
    hides_counts = "--disable-log-stats"
    missing_ids = "choices[0].token_ids: vLLM"
    find_ids = staticmethod(lambda r: r["choices"][0]["token_ids"] if r["choices"] else [])
    load_counters = MappingProxyType(
        {
            "generated": "generation_tokens_total",
            "cached": "prefix_cache_hits_total",
            "running": "num_requests_running",
        }
    )

    def build_request(self, prompt_ids: list[int], request: TextRequest) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": request.max_new_tokens,
            "return_token_ids": True,
            # A model's generation_config.json can ask for a penalty, which servers take over.
            "repetition_penalty": 1.0,
            **request.settings,
            **({"cache_salt": request.salt} if request.salt else {}),
        }


class _LlamaCppProtocol(EngineProtocol):
    drafts_end_with_text = True
    path = "completion"
    hides_counts = "--spec-draft-p-min"
    missing_ids = "tokens: llama.cpp"
    find_ids = itemgetter("tokens")
    load_counters = MappingProxyType(
        {"generated": "tokens_predicted_total", "running": "requests_processing"}
    )

    def __init__(self, client: EndpointClient, model: str) -> None:
        super().__init__(client, model)
        # The server ends a connection after some requests, and a thread waits at each open one.
        client.headers["Connection"] = "close"

    async def find_draft_depth(self, drafts: bool) -> None:
        """See `EngineProtocol`. A first text is drafted, as no position is counted before one."""
        first = self.build_request([0], TextRequest(FIRST_TOKENS, ignore_eos=True))
        self.parse_token_ids(await self.client.request_json("POST", self.path, first))
        try:
            await super().find_draft_depth(drafts)
        except InputError as error:
            if drafts:
                problem = f"counts nothing: start it with --metrics ({error})"
                raise RequestFailedError(problem) from error

    def build_request(self, prompt_ids: list[int], request: TextRequest) -> dict[str, Any]:
        return {
            "prompt": prompt_ids,
            "n_predict": request.max_new_tokens,
            "repeat_penalty": 1.0,
            "return_tokens": True,
            # After a cached prompt, the draft head lacks the features of the prompt.
            "cache_prompt": False,
            **request.settings,
        }

    def parse_ending(self, event: dict) -> str | None:
        return "cut" if event.get("truncated") else event.get("stop_type")

    def parse_cached_tokens(self, event: dict) -> int | None:
        return (event.get("timings") or {}).get("cache_n")


class _SglangProtocol(EngineProtocol):
    """Protocol of an engine that returns counts with each text."""

    path = "generate"
    missing_ids = "output_ids: SGLang"
    find_ids = itemgetter("output_ids")

    async def find_draft_depth(self, drafts: bool) -> None:
        settings = await self.client.request_json("GET", "get_server_info")
        if not settings.get("speculative_algorithm"):
            if drafts:
                raise RequestFailedError(NO_HEAD)
            return
        width = settings.get("speculative_eagle_topk")
        if width != 1:
            raise RequestFailedError(
                f"drafts trees, speculative_eagle_topk={width}: only chains can be compared; "
                "start it with --speculative-eagle-topk 1"
            )
        self.depth = int(settings["speculative_num_steps"])

    def build_request(self, prompt_ids: list[int], request: TextRequest) -> dict[str, Any]:
        sampling = {"max_new_tokens": request.max_new_tokens, "repetition_penalty": 1.0}
        sampling |= {key: value for key, value in request.settings.items() if key != "seed"}
        salt = {"extra_key": request.salt} if request.salt else {}
        return {"input_ids": prompt_ids, "sampling_params": sampling, **salt}

    async def request_draft_counters(self) -> list[int]:
        return []

    def count_drafts(
        self, _before: list[int], _after: list[int], lengths: list[int]
    ) -> DraftCounts:
        return DraftCounts.from_passes([], lengths, self.depth)

    def join_streamed_ids(self, before: list[int], event: dict) -> list[int]:
        # A piece holds the text so far, or its own ids with --incremental-streaming-output.
        ids, total = self.parse_token_ids(event), int(event["meta_info"]["completion_tokens"])
        return ids if len(ids) == total else before + ids

    def parse_ending(self, event: dict) -> str | None:
        return (event["meta_info"].get("finish_reason") or {}).get("type")

    def parse_cached_tokens(self, event: dict) -> int | None:
        return event["meta_info"].get("cached_tokens")

    def parse_accepted_lengths(self, reply: dict) -> list[int]:
        # The second name is the older one. A text of one token has had no pass.
        names = ("spec_correct_drafts_histogram", "spec_accept_histogram")
        meta = reply.get("meta_info") or {}
        histogram = next((meta[name] for name in names if name in meta), None)
        if histogram is None and self.depth and len(self.parse_token_ids(reply)) > 1:
            raise RequestFailedError(f"the reply's meta_info has none of {', '.join(names)}")
        return [n for n, passes in enumerate(histogram or []) for _ in range(passes)]


PROTOCOLS: dict[str, type[EngineProtocol]] = {
    "vllm": _VllmProtocol,
    "sglang": _SglangProtocol,
    "llamacpp": _LlamaCppProtocol,
}
