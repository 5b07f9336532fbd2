"""A serving engine that is measured: its texts, its counts of draft tokens, and its waits."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conf.command.clock import Stopwatch
from conf.errors import InputError
from data.servers.http_client import (
    Endpoint,
    EndpointClient,
    RequestFailedError,
    RequestRefusedError,
    SyncEndpointClient,
    iter_completed,
)

COUNTER = re.compile(
    r"^(?:vllm|llamacpp):spec_decode_(\w+)_total(?:\{(.*)\})? (\S+)$", re.MULTILINE
)


POSITION = re.compile(r'position="(\d+)"')


# Room for a draft of one token, between the prompt's token and a bonus token.
FIRST_TOKENS = 3


NO_HEAD = "drafts nothing: start it with a draft head (the README of an export has the command)"


class ReplyError(Exception):
    """An answer that cannot be used."""


@dataclass(frozen=True)
class TextRequest:
    """How a text is to be written.

    Attributes:
        max_new_tokens: of the text at most.
        sampling: `temperature`, `top_p`, `top_k`, `min_p` and `seed`, of those that are set.
        ignore_eos: go on behind stop tokens.
        salt: vLLM shares cached beginnings only among requests of one salt. llama.cpp is told not
            to cache, and the cache of SGLang is emptied before each pass.
    """

    max_new_tokens: int
    sampling: dict[str, float | int] | None = None
    ignore_eos: bool = False
    salt: str | None = None

    @property
    def chosen_sampling(self) -> dict[str, float | int]:
        """The sampling, greedy where none is set."""
        return self.sampling or {"temperature": 0}


@dataclass(frozen=True)
class StreamedText:
    """When a text came.

    Attributes:
        num_tokens: of the text.
        arrivals_s: seconds from the request to each piece that held tokens.
        lengths: draft tokens that each pass accepted, if the engine returns them with the text.
    """

    num_tokens: int
    arrivals_s: list[float]
    lengths: list[int]


@dataclass(frozen=True)
class DraftCounts:
    """A text and the counts of its drafts.

    Attributes:
        text: token ids, including a stop token.
        drafts: passes that verified draft tokens.
        proposed: draft tokens that they verified.
        accepted: number of passes that accepted a token, per depth.
    """

    text: list[int]
    drafts: int
    proposed: int
    accepted: list[int]

    @classmethod
    def from_passes(cls, text: list[int], lengths: list[int], depth: int) -> "DraftCounts":
        """Make counts from the tokens that each pass accepted, also beyond the text's end."""
        accepted = [sum(length > place for length in lengths) for place in range(depth)]
        return cls(text, len(lengths), depth * len(lengths), accepted)

    @classmethod
    def from_texts(cls, texts: "Iterable[DraftCounts]", depth: int) -> "DraftCounts":
        """Sum over texts."""
        counted = list(texts)
        return cls(
            [],
            sum(text.drafts for text in counted),
            sum(text.proposed for text in counted),
            [sum(text.accepted[place] for text in counted) for place in range(depth)],
        )

    @classmethod
    def from_passes_within_text(
        cls, text: list[int], lengths: list[int], depth: int, room: int, stop_ids: list[int]
    ) -> "DraftCounts":
        """Make the counts of an engine whose drafts end with the text at the latest.

        A pass also emits a bonus token, so a pass with room for one token makes no draft. An
        accepted stop token counts as the bonus token, unless it was the draft's last.

        Args:
            text: token ids.
            lengths: tokens that each pass accepted, also beyond the text's end.
            depth: most draft tokens of a pass.
            room: most tokens of the text.
            stop_ids: token ids that end a text.
        """
        proposed, kept, emitted = 0, list[int](), 1
        for length in lengths:
            size, left = min(depth, room - emitted - 1), len(text) - emitted
            if size > 0:
                proposed += size
                stopped = text[-1] in stop_ids and left <= length
                kept.append(left - (left != size) if stopped else min(length, size))
            emitted += length + 1
        return replace(cls.from_passes(text, kept, depth), proposed=proposed)


class EngineProtocol(ABC):
    """The requests to one serving engine; each may raise what `Client.request` does."""

    drafts_end_with_text = False
    path: str

    def __init__(self, client: EndpointClient, model: str) -> None:
        self.client, self.model = client, model
        self.depth = 0

    @abstractmethod
    async def find_draft_depth(self, drafts: bool) -> None:
        """Find the depth, the draft tokens of a pass, of an engine that drafts."""

    @abstractmethod
    def build_request(self, prompt_ids: list[int], asked: TextRequest) -> dict[str, Any]:
        """The request."""

    @abstractmethod
    def parse_token_ids(self, reply: dict) -> list[int]:
        """Tokens of a reply, or of a piece of it that is streamed."""

    @abstractmethod
    async def request_answer(self, prompt_ids: list[int], asked: TextRequest) -> DraftCounts:
        """One text and its counts."""

    @abstractmethod
    async def request_draft_counters(self) -> list[int]:
        """Drafts, their tokens, and those accepted at each position, since the server's start."""

    @abstractmethod
    def subtract_counters(self, before: list[int], after: list[int]) -> DraftCounts | None:
        """What two counts are apart; None where counts come with the texts."""

    @abstractmethod
    async def empty_prefix_cache(self) -> None:
        """Empty the engine's memory of beginnings, where requests cannot be kept apart."""

    async def stream_text(self, prompt_ids: list[int], asked: TextRequest) -> StreamedText:
        """One text as it comes."""
        num_tokens, arrivals, event = 0, list[float](), dict[str, Any]()
        body, watch = self.build_request(prompt_ids, asked) | {"stream": True}, Stopwatch()
        async for event in self.client.stream_events(self.path, body):
            arrived = watch.seconds()
            if "error" in event:
                raise ReplyError(f"broke a text off: {str(event['error'])[:300]}")
            total = self.count_streamed_tokens(event, num_tokens)
            if total > num_tokens:
                arrivals.append(arrived)
                num_tokens = total
        if not arrivals:
            raise ReplyError(f"streams no token at {self.path}: {str(event)[:200]}")
        return StreamedText(num_tokens, arrivals, self.parse_accepted_lengths(event))

    def count_streamed_tokens(self, event: dict, before: int) -> int:
        """Tokens of a text up to a streamed piece, behind so many."""
        return before + len(self.parse_token_ids(event))

    @abstractmethod
    def parse_accepted_lengths(self, reply: dict) -> list[int]:
        """Draft tokens that each pass accepted, where a reply tells."""


class _Metered(EngineProtocol):
    """Counters before a request, and after."""

    async def request_answer(self, prompt_ids: list[int], asked: TextRequest) -> DraftCounts:
        before = await self.request_draft_counters()
        reply = await self.client.request_json(
            "POST", self.path, self.build_request(prompt_ids, asked)
        )
        found = self.subtract_counters(before, await self.request_draft_counters())
        return replace(found, text=self.parse_token_ids(reply))

    async def request_draft_counters(self) -> list[int]:
        if not self.depth:
            return []
        return await self._request_counters()

    async def _request_counters(self) -> list[int]:
        totals, accepted = {"num_drafts": 0, "num_draft_tokens": 0}, dict[int, int]()
        for name, labels, value in COUNTER.findall(await self.client.request_text("metrics")):
            if name in totals:
                totals[name] += int(float(value))
            elif name == "num_accepted_tokens_per_pos":
                position = int(POSITION.findall(labels)[0])
                accepted[position] = accepted.get(position, 0) + int(float(value))
        self.depth = len(accepted)
        return [*totals.values(), *(accepted[position] for position in sorted(accepted))]

    def subtract_counters(self, before: list[int], after: list[int]) -> DraftCounts:
        if not self.depth:
            return DraftCounts([], 0, 0, [])
        new = [count - old for count, old in zip(after, before, strict=True)]
        return DraftCounts([], new[0], new[1], new[2:])

    async def empty_prefix_cache(self) -> None:
        pass

    def parse_accepted_lengths(self, _reply: dict) -> list[int]:
        return []


class _Vllm(_Metered):
    path = "v1/completions"

    async def find_draft_depth(self, drafts: bool) -> None:
        await self._request_counters()
        if drafts and not self.depth:
            raise ReplyError(f"{NO_HEAD}, and without --disable-log-stats")

    def build_request(self, prompt_ids: list[int], asked: TextRequest) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": asked.max_new_tokens,
            "return_token_ids": True,
            # A model's generation_config.json can ask for a penalty, which servers take over.
            "repetition_penalty": 1.0,
            **asked.chosen_sampling,
            **({"ignore_eos": True} if asked.ignore_eos else {}),
            **({"cache_salt": asked.salt} if asked.salt else {}),
        }

    def parse_token_ids(self, reply: dict) -> list[int]:
        try:
            return list(reply["choices"][0]["token_ids"]) if reply["choices"] else []
        except (KeyError, IndexError, TypeError) as error:
            raise ReplyError("the reply has no choices[0].token_ids: vLLM is too old") from error


class _LlamaCpp(_Metered):
    drafts_end_with_text = True
    path = "completion"

    async def find_draft_depth(self, drafts: bool) -> None:
        """Have something drafted: before that no position is counted."""
        first = self.build_request([0], TextRequest(FIRST_TOKENS, ignore_eos=True))
        self.parse_token_ids(await self.client.request_json("POST", self.path, first))
        try:
            await self._request_counters()
        except InputError as error:
            if drafts:
                raise ReplyError(f"counts nothing: start it with --metrics ({error})") from error
        if drafts and not self.depth:
            raise ReplyError(f"{NO_HEAD}, and without --spec-draft-p-min")

    def build_request(self, prompt_ids: list[int], asked: TextRequest) -> dict[str, Any]:
        return {
            "prompt": prompt_ids,
            "n_predict": asked.max_new_tokens,
            "repeat_penalty": 1.0,
            "return_tokens": True,
            # Behind a prompt that it has read before, a head misses a feature.
            "cache_prompt": False,
            **asked.chosen_sampling,
            **({"ignore_eos": True} if asked.ignore_eos else {}),
        }

    def parse_token_ids(self, reply: dict) -> list[int]:
        try:
            return list(reply["tokens"])
        except (KeyError, TypeError) as error:
            raise ReplyError("the reply has no tokens: llama.cpp is too old") from error


class _Sglang(EngineProtocol):
    """Count that come with the text."""

    path = "generate"

    async def find_draft_depth(self, drafts: bool) -> None:
        settings = await self.client.request_json("GET", "get_server_info")
        if not settings.get("speculative_algorithm"):
            if drafts:
                raise ReplyError(NO_HEAD)
            return
        width = settings.get("speculative_eagle_topk")
        if width != 1:
            raise ReplyError(
                f"drafts trees, speculative_eagle_topk={width}: only chains can be compared; "
                "start it with --speculative-eagle-topk 1"
            )
        self.depth = int(settings["speculative_num_steps"])

    def build_request(self, prompt_ids: list[int], asked: TextRequest) -> dict[str, Any]:
        sampling = {"max_new_tokens": asked.max_new_tokens, "repetition_penalty": 1.0}
        sampling |= {key: value for key, value in asked.chosen_sampling.items() if key != "seed"}
        sampling |= {"ignore_eos": True} if asked.ignore_eos else {}
        return {"input_ids": prompt_ids, "sampling_params": sampling}

    def parse_token_ids(self, reply: dict) -> list[int]:
        try:
            return list(reply["output_ids"])
        except (KeyError, TypeError) as error:
            raise ReplyError("the reply has no output_ids: SGLang is too old") from error

    async def request_answer(self, prompt_ids: list[int], asked: TextRequest) -> DraftCounts:
        reply = await self.client.request_json(
            "POST", self.path, self.build_request(prompt_ids, asked)
        )
        return DraftCounts.from_passes(
            self.parse_token_ids(reply), self.parse_accepted_lengths(reply), self.depth
        )

    async def request_draft_counters(self) -> list[int]:
        return []

    def subtract_counters(self, _before: list[int], _after: list[int]) -> None:
        return None

    async def empty_prefix_cache(self) -> None:
        await self.client.request_text("flush_cache")

    def count_streamed_tokens(self, event: dict, _before: int) -> int:
        return int(event["meta_info"]["completion_tokens"])

    def parse_accepted_lengths(self, reply: dict) -> list[int]:
        # The second is its older name. A text of one token has had no pass.
        names = ("spec_correct_drafts_histogram", "spec_accept_histogram")
        meta = reply.get("meta_info") or {}
        histogram = next((meta[name] for name in names if name in meta), None)
        if histogram is None and self.depth and len(self.parse_token_ids(reply)) > 1:
            raise ReplyError(f"the reply's meta_info has none of {', '.join(names)}")
        return [n for n, passes in enumerate(histogram or []) for _ in range(passes)]


PROTOCOLS: dict[str, type[EngineProtocol]] = {
    "vllm": _Vllm,
    "sglang": _Sglang,
    "llamacpp": _LlamaCpp,
}


START = "start a server there with the line that scripts/export.py prints, or name its address"


@dataclass(frozen=True)
class LoadMeasurement:
    """Texts that were asked for with so many in flight.

    Attributes:
        texts: in the order of the requests.
        seconds: from the first request to the last answer.
        counts: of all their drafts.
    """

    texts: list[StreamedText]
    seconds: float
    counts: DraftCounts


class ServingEngine(SyncEndpointClient):
    """A vLLM, SGLang or llama.cpp server; a context manager.

    Nobody else may ask it anything meanwhile: vLLM and llama.cpp count over all requests.

    Attributes:
        name: `vllm`, `sglang` or `llamacpp`.
        model: name of the served model.
        adapters: names of the adapters of this model that the server lists.
        version: the server's version, if the server says it.
        depth: draft tokens of a pass; 0 without a draft head.
        within: drafts end with the text at the latest (see `DraftCounts.within`).
        max_model_len: limit of prompt and answer in tokens; None if the server does not say.
    """

    def __init__(self, endpoint: Endpoint, concurrency: int = 1, drafts: bool = True) -> None:
        """Open no connection yet.

        Args:
            endpoint: the server, with or without `/v1` at the end, and the model; None takes the
                first model that the server lists.
            concurrency: requests in flight at most.
            drafts: the server must have a draft head, or must have none.
        """
        root = endpoint.url.rstrip("/").removesuffix("/v1")
        # A request that is sent again is counted again.
        super().__init__(replace(endpoint, url=root, max_retries=0), concurrency)
        self.drafts = drafts
        self.name, self.model, self.depth, self.within = "", "", 0, False
        self.version: str | None = None
        self.adapters: list[str] = []
        self.max_model_len: int | None = None
        self._protocol: EngineProtocol | None = None

    def connect(self) -> None:
        """Refuse an unknown engine, or one that drafts against what was said.

        Raises:
            InputError: with what the server lacks.
        """
        self._run_on_portal(self._identify_engine)

    def request_answer(
        self, prompt_ids: list[int], max_new_tokens: int, ignore_eos: bool = False
    ) -> DraftCounts:
        """Ask for the greedy text after a prompt, ended by the server's own stop tokens.

        Args:
            prompt_ids: the rendered prompt.
            max_new_tokens: tokens of the text at most.
            ignore_eos: go on behind stop tokens.

        Raises:
            InputError: no answer, or one without token ids and counts.
        """
        asked = TextRequest(max_new_tokens, ignore_eos=ignore_eos)
        return self._run_on_portal(self.protocol.request_answer, prompt_ids, asked)

    def render_prompt(
        self, messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any]
    ) -> list[int] | int:
        """Render a conversation by the server's own chat template.

        Args:
            messages: up to the user's.
            tools: that the template is given.
            kwargs: further arguments of the template.

        Returns:
            Token ids of the prompt, or their number where the server tells no more.
        """
        body: dict[str, Any] = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
        body |= {"tools": tools} if tools else {}
        body |= {"chat_template_kwargs": kwargs} if kwargs else {}
        return self._run_on_portal(self._request_rendering, body | {"model": self.model})

    def stream_texts(
        self,
        jobs: Sequence[tuple[list[int], TextRequest]],
        concurrency: int,
        tell: Callable[[int], object] = lambda _: None,
    ) -> LoadMeasurement:
        """Ask for texts, so many at a time, and notes when their tokens come.

        Args:
            jobs: prompts of token ids, and how each is answered; asked for in this order.
            concurrency: requests in flight.
            tell: called with how many more texts have ended.

        Raises:
            InputError: a prompt got no answer.
        """
        return self._run_on_portal(self._stream_texts, jobs, concurrency, tell)

    @property
    def protocol(self) -> EngineProtocol:
        """The engine's requests, once this is entered."""
        assert self._protocol is not None
        return self._protocol

    def _run_on_portal(self, work: Any, *arguments: Any) -> Any:
        try:
            return self.portal.call(work, *arguments)
        except (RequestFailedError, RequestRefusedError, ReplyError) as error:
            start = "" if self.name else f"; {START}"
            raise InputError(f"{self.endpoint}: {error}{start}") from error

    async def _identify_engine(self) -> None:
        reply = await self.client.request_json("GET", "v1/models")
        try:
            served = _choose_model(reply["data"], self.endpoint.model)
            self.name, self.model = str(served["owned_by"]), str(served["id"])
            others = [each for each in reply["data"] if each.get("parent") == self.model]
            self.adapters = [str(each["id"]) for each in others]
            self.max_model_len = served.get("max_model_len")
            if self.max_model_len is None:  # llama.cpp names no `meta` while it loads
                self.max_model_len = (served.get("meta") or {}).get("n_ctx")
            self._protocol = PROTOCOLS[self.name](self.client, self.model)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ReplyError(
                f"must be one of {', '.join(PROTOCOLS)}; v1/models says {reply}"
            ) from error
        self.version = await self.client.request_version()
        await self._protocol.find_draft_depth(self.drafts)
        self.depth, self.within = self._protocol.depth, self._protocol.drafts_end_with_text
        if self.depth and not self.drafts:
            raise ReplyError(
                f"drafts {self.depth} tokens; the baseline is the same server without a draft head"
            )

    async def _request_rendering(self, body: dict[str, Any]) -> list[int] | int:
        reply = await self.client.request_json("POST", "v1/chat/completions", body)
        try:
            told = reply.get("prompt_token_ids")
            rendered = list(told) if told else int(reply["usage"]["prompt_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise ReplyError("a chat's reply has no usage.prompt_tokens") from error
        if not rendered:  # llama.cpp with a file that holds no tokenizer
            raise ReplyError("renders a chat as nothing")
        return rendered

    async def _stream_texts(
        self,
        jobs: Sequence[tuple[list[int], TextRequest]],
        concurrency: int,
        tell: Callable[[int], object],
    ) -> LoadMeasurement:
        protocol = self.protocol
        await protocol.empty_prefix_cache()
        texts: dict[int, StreamedText] = {}

        async def ask(place: int) -> tuple[int, StreamedText]:
            return place, await protocol.stream_text(*jobs[place])

        before, watch = await protocol.request_draft_counters(), Stopwatch()
        async for ended in iter_completed(range(len(jobs)), ask, concurrency):
            texts |= ended
            tell(len(ended))
        seconds = watch.seconds()
        ordered = [texts[place] for place in range(len(jobs))]
        counts = protocol.subtract_counters(before, await protocol.request_draft_counters())
        if counts is None:
            lengths = [length for text in ordered for length in text.lengths]
            counts = DraftCounts.from_passes([], lengths, self.depth)
        return LoadMeasurement(ordered, seconds, counts)


def _choose_model(listed: list[dict], model: str | None) -> dict:
    """Return the model of this name, or the first.

    Raises:
        ReplyError: the server does not list the model.
    """
    if model is None:
        return listed[0]
    for each in listed:
        if each["id"] == model:
            return each
    names = ", ".join(str(each["id"]) for each in listed)
    raise ReplyError(f"model={model}: not served; allowed: {names}")
