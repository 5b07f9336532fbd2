"""Make rounds of the target's own answers, which training reads instead of its data.

On-policy distillation (Draft-OPD, arXiv 2605.29343): the target answers the prompts of the data and
the head learns along these answers. Verified text is the target's own, whichever head drafts, and
draft tokens along a text depend on the text alone. A round therefore only stores text, and each
step learns from the drafts of its current head.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from conf.command.clock import Stopwatch
from conf.command.run_record import find_changed_keys, to_json
from conf.errors import InputError
from conf.settings.training import RolloutConfig
from data.prepared.packing import PackedDataset
from data.servers.http_client import Endpoint, request_continuations
from data.templates.record_encoder import Sample
from eval.decode.engine import Generation, Request, decode_many
from eval.decode.generation_config import StopRules
from eval.measure.engine_answers import build_request_settings
from eval.measure.measurement import gather_items
from heads.decoding.sampling import Sampling
from heads.decoding.tree import Tree
from heads.draft_head import DraftHead
from heads.folders import load_tensors, write_folder
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target
from train.batch import data_loader
from train.batch.data_loader import Dataset, hash_seed
from train.loop.evaluation import iter_prompts
from train.loop.sources import ServedSequences
from train.parallel import processes

GROUP = 4
"""Answers per process and group, as a multiple of the answers written at once."""
TEXTS = "texts.safetensors"
"""File of a round: `token_ids` of all texts in a row, `lengths` [n] of the texts and `prompts` [n],
the tokens of their prompts; int64."""
MADE = "made_of"
API_KEY = "OPENAI_API_KEY"
"""Environment variable with the key of the answering server."""


class Round(NamedTuple):
    """Sequences for steps `first` to `last` (excluded): data or answers.

    Attributes:
        data: packed sequences.
        first, last: optimizer steps, from 0.
        seed: seed of the order.
    """

    data: Dataset
    first: int
    last: int
    seed: int

    def draw_global_batch(self, step: int, batch_size: int) -> list[int]:
        """Draw the sequences of a step, as indices."""
        return data_loader.draw_global_batch(
            step - self.first, batch_size, len(self.data), self.seed
        )

    def iter_other_batches(self, step: int, batch_size: int) -> Iterator[list[int]]:
        """Yield batches of earlier steps, the latest first, then those of later steps."""
        for other in (*range(self.first, step)[::-1], *range(step + 1, self.last)):
            yield self.draw_global_batch(other, batch_size)


@dataclass(frozen=True)
class Rollouts:
    """Rounds of answers to the prompts that the data's own steps would read.

    Attributes:
        config: settings with `steps`.
        target: target that writes the answers.
        data: packed sequences, for prompts, and for length and padding of sequences.
        batch_size: sequences per step.
        seed: seed of the run.
        folder: folder of the rounds, which a resumed run reads again.
        server: server that writes the answers instead of the target.
        served: sequences with hidden states of engines, which write the answers if no server does.
        made_of: fingerprint of the target.
    """

    config: RolloutConfig
    target: EmbeddingsAndOutputHead
    data: PackedDataset
    batch_size: int
    seed: int
    folder: Path
    server: Endpoint | None = None
    served: ServedSequences | None = None
    made_of: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generation_settings(self) -> dict[str, Any]:
        """Return the generation config and the stop texts, on which answers depend, too."""
        asked = sorted(self.target.logits_processing.items())
        return {"generation_config": to_json(asked), "stop": to_json(self.target.stop_strings)}

    def _make_fingerprint(self) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": self.config.max_new_tokens,
            "temperature": self.config.temperature,
        }
        return {**self.made_of, **self.generation_settings, **sampling, "seed": self.seed}

    def load_or_write_round(self, step: int, head: DraftHead) -> tuple[Round, dict[str, float]]:
        """Load the round of a step, or write it on all processes.

        Args:
            step: optimizer step, from 0.
            head: head that drafts, in eval mode with whole parameters.

        Returns:
            The round, and figures of the answers written now; no figures if the round was loaded.
        """
        assert self.config.steps is not None
        number = step // self.config.steps
        first = number * self.config.steps
        prompts = self._select_prompts(first, first + self.config.steps)
        texts, figures = self._load_written_answers(number, prompts), dict[str, float]()
        processes.wait_for_processes()  # no process may write before all of them have looked
        if texts is None:
            texts, figures = self._generate_round(number, prompts, head)
            if PartialState().is_main_process:
                tensors = {
                    "token_ids": torch.tensor([token for text in texts for token in text]),
                    "lengths": torch.tensor(list(map(len, texts))),
                    "prompts": torch.tensor(list(map(len, prompts))),
                }
                metadata = {MADE: json.dumps(self._make_fingerprint())}
                write_folder(
                    self._get_round_folder(number),
                    lambda folder: save_file(tensors, folder / TEXTS, metadata=metadata),
                )
        seed = self.seed + number
        samples = (
            Sample(text, [place >= len(prompt) for place in range(len(text))])
            for text, prompt in zip(texts, prompts, strict=True)
        )
        packed = PackedDataset(samples, self.data.max_length, seed=seed, pad_id=self.data.pad_id)
        data = packed if self.served is None else replace(self.served, rows=packed)
        return Round(data, first, first + self.config.steps, seed), figures

    @staticmethod
    def format_round(figures: dict[str, float]) -> str:
        """Format the figures of new answers as a line."""
        texts, tokens, rate = (figures[f"rollout/{n}"] for n in ("texts", "tokens", "tokens_per_s"))
        tau = figures.get("rollout/tau")
        drafted = "" if tau is None else f" at a tau of {tau:.2f}"
        return (
            f"{texts:,.0f} answers of the target, {tokens:,.0f} tokens, {rate:,.0f} per "
            f"second{drafted}"
        )

    def _select_prompts(self, first: int, last: int) -> list[list[int]]:
        """Select the prompts of steps `first` to `last` that leave room for an answer."""
        drawn = Round(self.data, 0, last, self.seed)
        batches = (drawn.draw_global_batch(step, self.batch_size) for step in range(first, last))
        numbers = dict.fromkeys(number for batch in batches for number in batch)
        window = self.target.max_positions
        room = None if window is None else window - self.config.max_new_tokens
        prompts = [prompt for number in numbers for prompt in iter_prompts(self.data[number])]
        fitting = [prompt for prompt in prompts if room is None or len(prompt) <= room]
        if not fitting:
            raise InputError(
                f"rollout.max_new_tokens={self.config.max_new_tokens}: too many for every prompt "
                f"of steps {first + 1} to {last} in the {window} tokens of {self.target.name}'s "
                "window; set it lower"
            )
        return fitting

    def _get_round_folder(self, number: int) -> Path:
        return self.folder / f"round-{number:04}"

    def _load_written_answers(
        self, number: int, prompts: list[list[int]]
    ) -> list[list[int]] | None:
        """Load the texts of these prompts that a stopped run has written, if any."""
        file = self._get_round_folder(number) / TEXTS
        if not file.exists():
            return None
        with safe_open(file, "pt") as opened:
            fingerprint = (opened.metadata() or {}).get(MADE)
        # A round of an earlier version has no statement.
        if fingerprint is not None and find_changed_keys(
            json.loads(fingerprint), self._make_fingerprint()
        ):
            return None
        loaded = load_tensors(file)
        texts = [ids.tolist() for ids in loaded["token_ids"].split(loaded["lengths"].tolist())]
        lengths = loaded["prompts"].tolist()
        begins = [text[:length] for text, length in zip(texts, lengths, strict=True)]
        return texts if begins == prompts else None

    def _generate_round(
        self, number: int, prompts: list[list[int]], head: DraftHead
    ) -> tuple[list[list[int]], dict[str, float]]:
        """Generate the texts of the prompts, prompt and answer, and figures of the answers."""
        watch, state = Stopwatch(), PartialState()
        size = GROUP * self.config.batch_size
        groups = [range(begin, len(prompts))[:size] for begin in range(0, len(prompts), size)]
        # Groups are the same on any number of processes, and so are their answers.
        own_groups = groups[state.process_index :: state.num_processes]
        own_answers: list[tuple[int, Generation]] = []
        bar = tqdm(
            own_groups, desc=f"round {number + 1}", disable=not state.is_main_process, leave=False
        )
        for group in bar:
            answers_of_group = self._generate_group(number, group, prompts, head)
            own_answers += zip(group, answers_of_group, strict=True)
        processes.wait_for_processes()
        by_prompt = dict(gather_items(own_answers))
        answers = [by_prompt[index] for index in range(len(prompts))]
        texts = [prompts[index] + answer.token_ids for index, answer in enumerate(answers)]
        num_tokens = sum(len(answer.token_ids) for answer in answers)
        steps = [step for answer in answers for step in answer.steps]
        figures = {
            "rollout/texts": float(len(answers)),
            "rollout/tokens": float(num_tokens),
            "rollout/tokens_per_s": num_tokens / watch.seconds(),
        }
        if steps:
            figures["rollout/tau"] = sum(step.num_emitted for step in steps) / len(steps)
        return texts, figures

    @torch.no_grad()
    def _generate_group(
        self, number: int, group: range, prompts: list[list[int]], head: DraftHead
    ) -> list[Generation]:
        """Generate the answers to the prompts of a group, in order."""
        requests = [Request(prompts[index], hash_seed(self.seed, number, index)) for index in group]
        if self.server is not None or self.served is not None:
            return self._request_answers(requests)
        assert isinstance(self.target, Target)
        sampling = Sampling(self.config.temperature)
        make = partial(head.make_drafter, Tree.make_chain(head.default_depth), sampling)
        limits = self.config.max_new_tokens, self.config.batch_size
        return decode_many(self.target, make, requests, *limits, sampling)

    def _request_answers(self, requests: list[Request]) -> list[Generation]:
        """Request answers of a server or of engines, without figures of their drafts."""
        source = "target.engine" if self.server is None else str(self.server)
        engine_settings = build_request_settings(self.target, source, self.config.temperature)
        seeds = [{"seed": each.seed} if self.config.temperature > 0 else {} for each in requests]
        arguments = (
            [request.prompt_ids for request in requests],
            self.config.max_new_tokens,
            [engine_settings | seed for seed in seeds],
        )
        if self.server is not None:
            answers = request_continuations(self.server, *arguments, self.config.batch_size)
        else:
            assert self.served is not None
            answers = [ids for _, ids in sorted(self.served.pool.stream_answers(*arguments))]
        vocab_size, highest = self.target.vocab_size, max(map(max, answers), default=0)
        if highest >= vocab_size:
            raise InputError(
                f"{source}: answers with token {highest}, but {self.target.name} has {vocab_size} "
                "tokens, so another model is served; serve the target"
            )
        stops = StopRules.from_target(self.target)
        return [Generation(stops.cut_after_end([], answer)) for answer in answers]
