"""A serving engine that is measured: its texts, its counts of draft tokens, and its waits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conf.command.clock import Stopwatch
from conf.errors import InputError
from data.servers.counts import DraftCounts
from data.servers.endpoint import (
    Endpoint,
    RequestFailedError,
    RequestRefusedError,
    SyncEndpointClient,
    iter_completed,
)
from data.servers.protocols import PROTOCOLS, EngineProtocol, ReplyError, StreamedText, TextRequest

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
