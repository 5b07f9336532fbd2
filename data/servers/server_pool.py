"""Servers of one target's hidden states that share its documents.

Letters: S tokens of a document, T tokens of a packed sequence, D hidden.
"""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial
from operator import methodcaller
from typing import Self, TypeVar

import torch
from torch import Tensor

from conf.errors import InputError
from data.servers.hidden_states import HiddenStatesClient, RequestSettings, ServerUnavailableError
from data.servers.state_files import HiddenStatesError

Result = TypeVar("Result")

NUM_ATTEMPTS = 3
"""Attempts per document on servers that answer unusably, the least busy server first."""
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Seconds between attempts while no server answers, as they may be restarting."""
MOST_FAILURES = 16
"""Largest number of consecutive failures, over all documents and servers."""
REST_S = 60.0
"""Seconds in which a failed server is used only if all others failed too."""


class HiddenStatesPool:
    """Servers that share the documents of a run, as a context manager that tries each server.

    Args:
        servers: at least one; a server listed twice gets twice the documents.
        check: function that raises an InputError for a server of another target. Called again for a
            server that failed, as it may have been restarted.

    Attributes:
        concurrency: number of documents in flight.
        taps: hidden states that the servers write.
        server_lines: one line per server.
    """

    def __init__(
        self,
        servers: Sequence[HiddenStatesClient],
        check: Callable[[HiddenStatesClient], object] = lambda _: None,
    ) -> None:
        self.servers, self.check, self.taps = servers, check, servers[0].taps
        self.server_lines: list[str] = []
        self._failed_at: dict[int, float] = {}
        self._checking = threading.Lock()
        self._num_failures_in_a_row = 0
        self._busy: Counter[int] = Counter()
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._stack = ExitStack()
        self.concurrency = sum(server.concurrency for server in servers)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server)
            self._threads = ThreadPoolExecutor(self.concurrency, "headsmith-engine")
            stack.callback(self._threads.shutdown, cancel_futures=True)
            stack.callback(self._closing.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def submit(self, token_ids: list[int]) -> "Future[dict[str, Tensor]]":
        """Start a request for the hidden states of a document, as `request_states` returns them."""
        return self._threads.submit(self.request_states, token_ids)

    def request_states(self, token_ids: list[int]) -> dict[str, Tensor]:
        """Request the hidden states [S, D] of a document, as `HiddenStatesClient.request_states`.

        Raises:
            HiddenStatesError: all attempts failed.
            InputError: a server serves something else, or too many attempts failed in a row.
        """
        return self._try_servers(methodcaller("request_states", token_ids))

    def request_answers_with_states(
        self, prompts: Iterable[list[int]], max_new_tokens: int, request_settings: RequestSettings
    ) -> list[tuple[list[int], dict[str, Tensor]]]:
        """Request answers to prompts, each with its hidden states, in the order of the prompts.

        Answers are as from `HiddenStatesClient.request_answer`, with outputs included. Raises as
        `request_states` does.
        """
        settings = max_new_tokens, request_settings, True
        requests = (methodcaller("request_answer", prompt, *settings) for prompt in prompts)
        return list(self._threads.map(self._try_servers, requests))

    def stream_answers(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        request_settings: Sequence[RequestSettings],
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the index of each prompt with its answer, as the answers end.

        Raises as `request_states` does.

        Args:
            prompts: token ids of each prompt.
            max_new_tokens: largest number of tokens per answer.
            request_settings: settings of each request, see `HiddenStatesClient.request_answer`.
        """

        def answer(number: int, server: HiddenStatesClient) -> tuple[int, list[int]]:
            arguments = prompts[number], max_new_tokens, request_settings[number]
            return number, server.request_answer(*arguments)[0]  # states would fill the memory

        requests = (partial(answer, number) for number in range(len(prompts)))
        futures = [self._threads.submit(self._try_servers, request) for request in requests]
        for future in as_completed(futures):
            yield future.result()

    def _try_servers(self, request: Callable[[HiddenStatesClient], Result]) -> Result:
        """Send a request to one server after another; if none answers, to all again for a while."""
        tried: set[int] = set()
        failures, waits_s = 0, iter(WAITS_S)
        while True:
            number = self._choose_least_busy(tried)
            tried.add(number)
            try:
                return self._try_server(number, request)
            except ServerUnavailableError as error:
                if len(tried) < len(self.servers):
                    continue
                wait_s = next(waits_s, None)
                if wait_s is None or self._closing.wait(wait_s):
                    self._count_failure(error)
                    raise
                tried.clear()
            except HiddenStatesError as error:
                self._count_failure(error)
                failures += 1
                if failures == NUM_ATTEMPTS:
                    raise

    def _try_server(self, number: int, request: Callable[[HiddenStatesClient], Result]) -> Result:
        try:
            with self._checking:  # once for all threads that wait for this server
                if number in self._failed_at:
                    self.check(self.servers[number])
                    with self._lock:
                        self._failed_at.pop(number, None)
            result = request(self.servers[number])
        except HiddenStatesError:
            with self._lock:
                self._failed_at[number] = time.monotonic()
            raise
        else:
            self._num_failures_in_a_row = 0
            return result
        finally:
            with self._lock:
                self._busy[number] -= 1

    def _count_failure(self, error: HiddenStatesError) -> None:
        """Count a failure; raise an InputError after too many in a row."""
        with self._lock:
            self._num_failures_in_a_row += 1
            if self._num_failures_in_a_row >= MOST_FAILURES:
                raise InputError(
                    f"{error} ({self._num_failures_in_a_row} attempts in a row have failed)"
                ) from error

    def _choose_least_busy(self, tried: set[int]) -> int:
        """Choose the index of a server for a request, and count the request.

        Servers that were not tried come first, then those that have not failed lately, then the
        least busy one.
        """
        with self._lock:
            recent = time.monotonic() - REST_S
            failed = {each for each, time_s in self._failed_at.items() if time_s > recent}
            number = min(
                range(len(self.servers)),
                key=lambda each: (each in tried, each in failed, self._busy[each]),
            )
            self._busy[number] += 1
        return number

    def stream_states(self, documents: Iterable[list[int]]) -> Iterator[dict[str, Tensor]]:
        """Yield the hidden states of each document in order, with several in flight."""
        pending: deque[Future[dict[str, Tensor]]] = deque()
        queue = iter(documents)
        try:
            while True:
                for document in itertools.islice(queue, self.concurrency - len(pending)):
                    pending.append(self.submit(document))
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

    def stream_sequence_states(
        self, rows: Iterable[dict[str, Tensor]]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the hidden states of packed sequences, with later documents in flight.

        One sequence often has too few documents to keep the servers busy.

        Args:
            rows: items of `data.prepared.packing.PackedDataset`, of T tokens.

        Yields:
            For each sequence in order, tensors as from `request_states`, but [T, D], with zeros on
            padding.
        """
        rows, ahead = itertools.tee(rows)
        states = self.stream_states(document for row in ahead for document in split_documents(row))
        for row in rows:
            documents = list(itertools.islice(states, len(split_documents(row))))
            yield {name: join_documents(row, [d[name] for d in documents]) for name in documents[0]}


def split_documents(row: dict[str, Tensor]) -> list[list[int]]:
    """Split a packed sequence into the token ids of each document, in order."""
    is_token = row["document_ids"] >= 0
    lengths = torch.unique_consecutive(row["document_ids"][is_token], return_counts=True)[1]
    return [part.tolist() for part in row["input_ids"][is_token].split(lengths.tolist())]


def join_documents(row: dict[str, Tensor], documents: list[Tensor]) -> Tensor:
    """Join the states [S, D] of a packed sequence's documents to [T, D], with zeros on padding."""
    states = documents[0].new_empty(len(row["document_ids"]), documents[0].shape[1])
    num_tokens = sum(map(len, documents))
    torch.cat(documents, out=states[:num_tokens])
    states[num_tokens:] = 0
    return states
