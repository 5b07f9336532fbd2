"""A conversation while the target replaces its answers."""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from data.rows.records import Record
from data.servers.http_client import Answer


class RowEmpty(Exception):  # noqa: N818  names what happened to the row
    """The target's answer is empty, so there is no row to learn from; this is no failure."""


class Dialogue:
    """One conversation while the target replaces its answers."""

    def __init__(self, index: int, record: Record, seed: int) -> None:
        """Start before the first question.

        Args:
            index: id of the row.
            record: conversation; the assistant's turns are dropped.
            seed: seed of the run.
        """
        self.id = index
        self.where = record.where
        self.category = record.category
        self.tools = record.tools
        self.template_kwargs = record.template_kwargs
        self.messages: list[dict] = []
        self.truncated: list[int] = []
        self.is_cut = False
        """True if it ends early, at the result of a tool call by an earlier answer."""
        self._num_answers = 0
        self._seed = seed
        self._rest = [m for m in record.messages or [] if m["role"] != "assistant"]
        self.num_questions = sum(m["role"] == "user" for m in self._rest)
        self.num_chars = sum(len(m["content"]) for m in self._rest)

    def advance_to_question(self) -> bool:
        """Move on to the next question; return False at the end."""
        while self._rest and not self.is_cut:
            message = self._rest.pop(0)
            if message["role"] == "tool":
                self.is_cut = True
                return False
            self.messages.append(message)
            if message["role"] == "user":
                return True
        return False

    def add_answer(self, answer: Answer) -> None:
        """Add the answer to the current question to the context of the next.

        Raises:
            RowEmpty: the answer is empty.
        """
        if answer.is_empty:
            raise RowEmpty(f"the target's answer {self._num_answers + 1} is empty")
        if answer.truncated:
            self.truncated.append(self._num_answers)
        ids = {} if answer.token_ids is None else {"token_ids": answer.token_ids}
        self.messages.append(answer.message | ids)
        self._num_answers += 1

    @property
    def template_messages(self) -> list[dict]:
        """The conversation so far, as a chat template takes it."""
        return [{k: v for k, v in m.items() if k != "token_ids"} for m in self.messages]

    def build_request_arguments(self, template_kwargs: Mapping[str, Any] | None) -> dict:
        """Arguments for a server besides messages: tools, and arguments of the chat template."""
        told = {
            "tools": self.tools,
            "chat_template_kwargs": {**(template_kwargs or {}), **self.template_kwargs},
        }
        return {key: value for key, value in told.items() if value}

    def compute_seed(self) -> int:
        """A seed for the current answer that depends only on the run, the row and the turn."""
        key = f"{self._seed}:{self.id}:{self._num_answers}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:4], "big") >> 1

    def build_row(self) -> dict:
        """Make the row to write; `truncated_turns` counts answers from 0."""
        own = {"tools": self.tools, "chat_template_kwargs": self.template_kwargs}
        return {
            "id": self.id,
            "messages": self.messages,
            **{key: value for key, value in own.items() if value},
            "category": self.category,
            "truncated_turns": self.truncated,
        }


class DialogueOutcome(NamedTuple):
    """The result of a conversation: a row or an error."""

    dialogue: Dialogue
    problem: Exception | None = None
