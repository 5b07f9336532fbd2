"""Greedy texts of a serving engine, and its counts of draft tokens.

vLLM and llama.cpp count in `/metrics`, over all requests; SGLang in the reply to each. All start to
draft behind the first token of a text. vLLM and SGLang count what the last pass accepts beyond the
text's end; llama.cpp's drafts end with the text.

Sources: vLLM 0.32 `v1/spec_decode/metrics.py` and `v1/core/sched/scheduler.py`; SGLang
`srt/managers/schedule_batch.py`, `update_spec_correct_drafts_histogram`, and
`srt/managers/tokenizer_manager.py`; llama.cpp b11434 `tools/server/server-context.cpp`.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from conf.errors import InputError
from data.servers.endpoint import Client, Connection, Endpoint, RowFailed, RowRefused

COUNTER = re.compile(
    r"^(?:vllm|llamacpp):spec_decode_(\w+)_total(?:\{(.*)\})? (\S+)$", re.MULTILINE
)
POSITION = re.compile(r'position="(\d+)"')
# A model's generation_config.json can ask for a penalty, which servers take over.
GREEDY = {"temperature": 0, "repetition_penalty": 1.0}
# Room for a draft of one token, between the prompt's token and a bonus token.
FIRST_TOKENS = 3
NO_HEAD = "it drafts nothing: start it with a draft head (the README of an export has the command)"


@dataclass(frozen=True)
class DraftCounts:
    """A greedy text and the drafts that were made for it.

    Attributes:
        text: token ids, a stop token included.
        drafts: passes that checked draft tokens.
        proposed: draft tokens that they checked.
        accepted: per depth, how many of them accepted a token there.
    """

    text: list[int]
    drafts: int
    proposed: int
    accepted: list[int]

    @classmethod
    def of(cls, text: list[int], lengths: list[int], depth: int) -> "DraftCounts":
        """Counts by the number of tokens that each pass accepted, beyond the text's end as well."""
        accepted = [sum(length > place for length in lengths) for place in range(depth)]
        return cls(text, len(lengths), depth * len(lengths), accepted)

    @classmethod
    def within(
        cls, text: list[int], lengths: list[int], depth: int, room: int, stop_ids: list[int]
    ) -> "DraftCounts":
        """Counts of an engine whose drafts end with the text at the latest.

        A pass also emits a bonus token, so one that has room for no more makes no draft. A stop
        token that is accepted counts as the bonus token, unless it was the draft's last.

        Args:
            text: token ids.
            lengths: tokens that each pass accepted, beyond the text's end as well.
            depth: draft tokens of a pass at most.
            room: tokens that the text may have.
            stop_ids: which end a text.
        """
        proposed, kept, emitted = 0, list[int](), 1
        for length in lengths:
            size, left = min(depth, room - emitted - 1), len(text) - emitted
            if size > 0:
                proposed += size
                stopped = text[-1] in stop_ids and left <= length
                kept.append(left - (left != size) if stopped else min(length, size))
            emitted += length + 1
        return replace(cls.of(text, kept, depth), proposed=proposed)


class _Protocol(ABC):
    """The requests to one serving engine; each may raise what `Client.request` does."""

    within = False

    def __init__(self, client: Client, model: str) -> None:
        self.client, self.model = client, model
        self.depth = 0
        self.counts: list[int] = []

    @abstractmethod
    async def start(self) -> None:
        """Finds the depth, the draft tokens of a pass."""

    @abstractmethod
    async def answer(self, prompt_ids: list[int], max_new_tokens: int) -> DraftCounts:
        """One greedy text."""


class DraftingServer(Connection):
    """A server that decodes with a draft head; a context manager.

    Nobody else may ask it anything meanwhile: vLLM and llama.cpp count over all requests.

    Attributes:
        name: `vllm`, `sglang` or `llamacpp`.
        model: that it serves.
        depth: draft tokens of a pass.
        within: drafts end with the text at the latest, see `DraftCounts.within`.
        max_model_len: tokens that it takes, its answer included; None if it does not tell.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        """Opens no connection yet.

        Args:
            endpoint: the server, with or without the `/v1` at the end.
        """
        root = endpoint.url.rstrip("/").removesuffix("/v1")
        # What is sent again is counted again.
        super().__init__(replace(endpoint, url=root, max_retries=0), concurrency=1)
        self.name, self.model, self.depth, self.within = "", "", 0, False
        self.max_model_len: int | None = None
        self._protocol: _Protocol | None = None

    def start(self) -> None:
        """Raises InputError unless this is vLLM, SGLang or llama.cpp, with a draft head."""
        self._call(self._start)

    def answer(self, prompt_ids: list[int], max_new_tokens: int) -> DraftCounts:
        """The server's greedy text after a prompt, ended by its own stop tokens.

        Args:
            prompt_ids: the rendered prompt.
            max_new_tokens: tokens of the text at most.

        Raises:
            InputError: no answer, or not with token ids and counts.
        """
        assert self._protocol is not None
        return self._call(self._protocol.answer, prompt_ids, max_new_tokens)

    def _call(self, work: Any, *arguments: Any) -> Any:
        try:
            return self.portal.call(work, *arguments)
        except (RowFailed, RowRefused, ReplyError) as error:
            raise InputError(f"{self.endpoint}: {error}") from error

    async def _start(self) -> None:
        reply = await self.client.request("GET", "v1/models")
        try:
            served = reply["data"][0]
            self.name, self.model = str(served["owned_by"]), str(served["id"])
            self.max_model_len = served.get("max_model_len")
            if self.max_model_len is None:  # llama.cpp names no `meta` while it loads
                self.max_model_len = (served.get("meta") or {}).get("n_ctx")
            self._protocol = PROTOCOLS[self.name](self.client, self.model)
        except (KeyError, IndexError, TypeError) as error:
            raise ReplyError(
                f"must be one of {', '.join(PROTOCOLS)}; v1/models says {reply}"
            ) from error
        await self._protocol.start()
        self.depth, self.within = self._protocol.depth, self._protocol.within


class ReplyError(Exception):
    """An answer that cannot be used."""


class _Metered(_Protocol):
    """Counters before a request, and after."""

    async def answer(self, prompt_ids: list[int], max_new_tokens: int) -> DraftCounts:
        text = await self.text(prompt_ids, max_new_tokens)
        before, self.counts = self.counts, await self._counts()
        drafts, proposed, *accepted = (
            new - old for new, old in zip(self.counts, before, strict=True)
        )
        return DraftCounts(text, drafts, proposed, accepted)

    @abstractmethod
    async def text(self, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
        """One greedy text."""

    async def _counts(self) -> list[int]:
        """Drafts, their tokens, and those accepted at each position, since the server's start."""
        totals, accepted = {"num_drafts": 0, "num_draft_tokens": 0}, dict[int, int]()
        for name, labels, value in COUNTER.findall(await self.client.page("metrics")):
            if name in totals:
                totals[name] += int(float(value))
            elif name == "num_accepted_tokens_per_pos":
                position = int(POSITION.findall(labels)[0])
                accepted[position] = accepted.get(position, 0) + int(float(value))
        self.depth = len(accepted)
        return [*totals.values(), *(accepted[position] for position in sorted(accepted))]


class _Vllm(_Metered):
    async def start(self) -> None:
        self.counts = await self._counts()
        if not self.depth:
            raise ReplyError(f"{NO_HEAD}, and without --disable-log-stats")

    async def text(self, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
        body = {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": max_new_tokens,
            "return_token_ids": True,
            **GREEDY,
        }
        reply = await self.client.request("POST", "v1/completions", body)
        try:
            return list(reply["choices"][0]["token_ids"])
        except (KeyError, IndexError, TypeError) as error:
            raise ReplyError("the reply has no choices[0].token_ids: vLLM is too old") from error


class _LlamaCpp(_Metered):
    within = True

    async def start(self) -> None:
        """Has something drafted: before that no position is counted."""
        await self.text([0], FIRST_TOKENS, ignore_eos=True)
        try:
            self.counts = await self._counts()
        except InputError as error:
            raise ReplyError(f"counts nothing: start it with --metrics ({error})") from error
        if not self.depth:
            raise ReplyError(f"{NO_HEAD}, and without --spec-draft-p-min")

    async def text(self, prompt_ids: list[int], max_new_tokens: int, **more: bool) -> list[int]:
        body = {
            "prompt": prompt_ids,
            "n_predict": max_new_tokens,
            "temperature": 0,
            "repeat_penalty": 1.0,
            "return_tokens": True,
            # Behind a prompt that it has read before, a head misses a feature.
            "cache_prompt": False,
        }
        reply = await self.client.request("POST", "completion", body | more)
        try:
            return list(reply["tokens"])
        except (KeyError, TypeError) as error:
            raise ReplyError("the reply has no tokens: llama.cpp is too old") from error


class _Sglang(_Protocol):
    """Counts that come with the text."""

    async def start(self) -> None:
        settings = await self.client.request("GET", "get_server_info")
        if not settings.get("speculative_algorithm"):
            raise ReplyError(NO_HEAD)
        width = settings.get("speculative_eagle_topk")
        if width != 1:
            raise ReplyError(
                f"drafts trees, speculative_eagle_topk={width}: only chains can be compared; "
                "start it with --speculative-eagle-topk 1"
            )
        self.depth = int(settings["speculative_num_steps"])

    async def answer(self, prompt_ids: list[int], max_new_tokens: int) -> DraftCounts:
        sampling = {"max_new_tokens": max_new_tokens, **GREEDY}
        body = {"input_ids": prompt_ids, "sampling_params": sampling}
        reply = await self.client.request("POST", "generate", body)
        try:
            text, meta = list(reply["output_ids"]), reply["meta_info"]
        except (KeyError, TypeError) as error:
            raise ReplyError("the reply has no output_ids: SGLang is too old") from error
        # The second is its older name. A text of one token has had no pass.
        names = ("spec_correct_drafts_histogram", "spec_accept_histogram")
        histogram = next((meta[name] for name in names if name in meta), None)
        if histogram is None and len(text) > 1:
            raise ReplyError(f"the reply's meta_info has none of {', '.join(names)}")
        lengths = [n for n, passes in enumerate(histogram or []) for _ in range(passes)]
        return DraftCounts.of(text, lengths, self.depth)


PROTOCOLS: dict[str, type[_Protocol]] = {
    "vllm": _Vllm,
    "sglang": _Sglang,
    "llamacpp": _LlamaCpp,
}
