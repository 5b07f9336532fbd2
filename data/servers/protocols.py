"""How each serving engine is asked for a text, and where it counts draft tokens.

vLLM and llama.cpp count in `/metrics`, over all requests; SGLang in the reply to each.

Sources: vLLM 0.32 `v1/spec_decode/metrics.py`, `v1/core/sched/scheduler.py` and
`entrypoints/openai/completion/protocol.py`; SGLang `srt/managers/schedule_batch.py`,
`update_spec_correct_drafts_histogram`, and `srt/managers/tokenizer_manager.py`; llama.cpp b11434
`tools/server/server-context.cpp`.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from conf.command.clock import Stopwatch
from conf.errors import InputError
from data.servers.counts import DraftCounts
from data.servers.endpoint import EndpointClient

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
