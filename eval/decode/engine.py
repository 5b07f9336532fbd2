"""Decoding engine: one text, a batch, or many texts in turn, with any drafter.

A step drafts, runs the target over the draft once, accepts, and compacts the cache. The texts of a
batch advance together, each by its own number of accepted tokens. When a text ends, the next takes
its row, or the batch shrinks. A step waits for the device once, to learn which tokens were
accepted.

Letters: B texts, N tree nodes (root included), D hidden, V vocab.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from conf.command.clock import DecodingTimes, PartClock
from eval.decode.generation_config import LogitsProcessors, StopRules
from eval.decode.verification import (
    ContextLimits,
    HostStep,
    TreeOutputs,
    accept_paths,
    run_verify_pass,
)
from heads.decoding.cache import KeptNodes, TreeCache
from heads.decoding.drafting import CommittedTokens, Draft, Drafter, Roots
from heads.decoding.sampling import GREEDY, NO_DRAWS, Generators, Sampling, sample_tokens
from heads.decoding.tree import Tree
from heads.devices import to_device
from heads.target_model.model import Target, iter_prefill

ROOT_ALONE = Tree.make_chain(0)
DrafterFactory = Callable[[list[int]], Drafter]
"""Function that makes a drafter for texts with these seeds."""
NewTokens = dict[int, list[int]]
"""New tokens of texts, by the index of the text."""


@dataclass(frozen=True)
class Request:
    """Text to decode.

    Attributes:
        prompt_ids: rendered prompt, at least one token; prompt and text must fit the target's
            window.
        seed: seed of everything sampled for the text.
    """

    prompt_ids: list[int]
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """One text's share of a verify pass.

    Attributes:
        num_accepted: accepted draft tokens.
        num_emitted: emitted tokens, bonus token included; tokens after the end of the text are not
            counted.
        num_left: tokens that the text still got from this pass on; larger depths could not be
            tested. 0 until the text has ended.
    """

    num_accepted: int
    num_emitted: int
    num_left: int


@dataclass
class Generation:
    """Decoded text.

    Attributes:
        token_ids: ids of the text.
        steps: the text's share of each verify pass.
        paths: accepted nodes of each step, without the root.
        times: the text's shares of the times of its batches.
        drafted: draft tokens verified in each step.
        arrivals: seconds from the text's start to the tokens of the prompt's pass and of each step.
    """

    token_ids: list[int]
    steps: list[Step] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    times: DecodingTimes = field(default_factory=DecodingTimes)
    drafted: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)

    def count_tokens_left(self) -> None:
        """Set `num_left` of all steps, once the text has ended."""
        left = 0
        for index, step in reversed(list(enumerate(self.steps))):
            left += step.num_emitted
            self.steps[index] = replace(step, num_left=left)


def count_common_prefix(left: list[int], right: list[int]) -> int:
    """Count the tokens that two texts have in common at their starts."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))


class NoDraft(Drafter):
    """Drafter without drafts: plain decoding in the same engine, the baseline `vanilla`."""

    num_static_nodes: int | None = 1

    def observe(self, seen: CommittedTokens) -> None:
        """Do nothing."""

    def propose(self, roots: Roots) -> Draft:
        """Return the roots alone."""
        return Draft.from_tree(ROOT_ALONE, roots.tokens.new_empty(len(roots), 0))


def decode(
    target: Target,
    drafter: Drafter,
    prompt_ids: list[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Generation:
    """Run `decode_batch` on one prompt."""
    return decode_batch(target, drafter, [prompt_ids], max_new_tokens, sampling, [seed])[0]


def decode_batch(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
) -> list[Generation]:
    """Decode prompts with draft trees, without changing the target's texts.

    Greedy text equals the target's own. Sampled text has the target's distribution, unless
    `sampling` is lossy.

    Args:
        target: the frozen target.
        drafter: new drafter for these prompts.
        prompts: rendered prompts, at least one token each; with `max_new_tokens` they must fit the
            target's window.
        max_new_tokens: largest number of tokens per text; a stop token ends a text earlier and is
            kept.
        sampling: how the target chooses; greedy by default.
        seeds: seeds of everything sampled, one per text; 0 by default.
    """
    requests = list(map(Request, prompts, seeds or [0] * len(prompts)))
    return decode_many(target, lambda _: drafter, requests, max_new_tokens, len(prompts), sampling)


def decode_many(
    target: Target,
    make: DrafterFactory,
    requests: Sequence[Request],
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling = GREEDY,
) -> list[Generation]:
    """Decode texts, `batch_size` at a time; arguments as of `DecodingBatch`."""
    return DecodingBatch(target, make, requests, max_new_tokens, batch_size, sampling).decode_all()


@dataclass
class Prefilled:
    """Texts whose prompts have been read.

    Attributes:
        texts: indices of the texts.
        drafter: drafter that has observed the prompts, except `committed`.
        committed: prompts, or their last part.
        roots: [B] int64 first token of each text.
        generators: generators of the texts.
    """

    texts: list[int]
    drafter: Drafter
    committed: CommittedTokens
    roots: Tensor
    generators: Generators


class DecodingBatch:
    """Texts decoded together; used once.

    Args:
        target: the frozen target.
        make: function that makes a drafter.
        requests: texts in starting order.
        max_new_tokens: largest number of tokens per text.
        batch_size: texts decoded together.
        sampling: how the target chooses.

    Attributes:
        rows: index of the text in each row; a finished text stays until its row is taken or
            dropped.
        running: indices of the unfinished texts in `rows`.
        waiting: indices of the texts not started.
        roots: [B] int64 tokens that the target has chosen but not read yet.
    """

    def __init__(
        self,
        target: Target,
        make: DrafterFactory,
        requests: Sequence[Request],
        max_new_tokens: int,
        batch_size: int,
        sampling: Sampling = GREEDY,
    ) -> None:
        self.prompts = [request.prompt_ids for request in requests]
        self.seeds = [request.seed for request in requests]
        self.longest = max(map(len, self.prompts)) + max_new_tokens
        assert target.max_positions is None or self.longest <= target.max_positions
        self.target, self.make, self.sampling = target, make, sampling
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.stops = StopRules.from_target(target)
        self.processors = LogitsProcessors(target.logits_processing, target.stop_ids)
        self.context_limits = ContextLimits(target, self.prompts)
        self.clock = PartClock(target.device, len(requests))
        self.generations = [Generation([], times=times) for times in self.clock.times]
        self.started = [0.0] * len(requests)
        self.waiting = list(range(len(requests)))
        # Set once the first prompts have been read.
        self.rows: list[int] = []
        self.running: list[int] = []
        self.drafter: Drafter = NoDraft()
        self.roots = torch.empty(0, dtype=torch.int64)
        self.generators = NO_DRAWS

    def decode_all(self) -> list[Generation]:
        """Decode and return all texts."""
        for _ in self.stream_tokens():
            pass
        return self.generations

    @torch.inference_mode()
    def stream_tokens(self) -> Iterator[NewTokens]:
        """Yield tokens by text, after the prompts and after every step."""
        committed, new = self._start_texts()
        while True:
            self._emit_tokens(new)
            yield new
            prefilled: list[Prefilled] = []
            while self.waiting and len(self.running) + len(prefilled) < len(self.rows):
                begun, new = self._prefill_texts([self.waiting.pop(0)])
                if self._emit_tokens(new):
                    prefilled.append(begun)
                yield new
            if not self.running and not prefilled:
                self.clock.finish_timing(self.rows)
                return
            with self.clock.measure_part("accept", self.running):
                committed = self._observe_and_refill(prefilled, committed)
            committed, new = self._run_step(committed)

    def has_ended(self, text: int) -> bool:
        """Tell whether a text is finished."""
        ids = self.generations[text].token_ids
        return len(ids) >= self.max_new_tokens or self.stops.has_ended(ids)

    def _start_texts(self) -> tuple[CommittedTokens, NewTokens]:
        """Read the prompts of the first texts together; return their first tokens."""
        self.rows, self.waiting = self.waiting[: self.batch_size], self.waiting[self.batch_size :]
        begun, new = self._prefill_texts(self.rows)
        self.drafter, self.roots, self.generators = begun.drafter, begun.roots, begun.generators
        self.running = list(self.rows)
        return begun.committed, new

    def _run_step(self, committed: CommittedTokens) -> tuple[CommittedTokens, NewTokens]:
        """Draft, verify and accept; return the committed tokens, and new tokens by text."""
        cache = committed.cache
        with self.clock.measure_part("draft", self.rows):
            draft = self.drafter.propose(self._last_tokens())
        with self.clock.measure_part("verify", self.rows):
            outputs = self._run_verify_pass(draft, cache)
        with self.clock.measure_part("accept", self.rows):
            accepted = accept_paths(draft, outputs, self.sampling, self.generators)
            steps = HostStep.from_records(accepted.pack_for_host(draft).tolist())
            kept_nodes = KeptNodes(accepted.nodes, accepted.counts)
            cache.commit([step.path for step in steps], kept_nodes)
            self.roots = accepted.bonus
            return accepted.build_committed_tokens(steps, cache), self._record_steps(steps)

    def _last_tokens(self) -> Roots:
        return Roots(self.roots, [self.generations[text].token_ids[-1] for text in self.rows])

    def _prefill_texts(self, texts: list[int]) -> tuple[Prefilled, NewTokens]:
        """Read prompts with a new drafter; return the first token of each text."""
        for text in texts:
            self.started[text] = self.clock.end_lap(self.rows)
        with self.clock.measure_part("prefill", texts):
            seeds = [self.seeds[text] for text in texts]
            drafter, generators = self.make(seeds), Generators.from_seeds(seeds, self.target.device)
            prompts = [self.prompts[text] for text in texts]
            cache, last = self.target.new_cache(len(prompts)), None
            # The drafter observes all parts but the last at once, so that they are not kept.
            for tokens, output in iter_prefill(self.target, cache, prompts, drafter.taps):
                part = CommittedTokens(tokens, output, cache)
                if last is not None:
                    last, part = last.carry_last_tokens(part)
                    drafter.observe(last)
                last = part
            assert last is not None
            logits = self.target.compute_logits(last.last_output.hidden_states)
            logits = self.processors.process_logits(logits, prompts)[:, 0]
            roots = sample_tokens(logits, self.sampling, generators)
            new = {text: [root] for text, root in zip(texts, roots.tolist(), strict=True)}
        return Prefilled(texts, drafter, last, roots, generators), new

    def _run_verify_pass(self, draft: Draft, cache: TreeCache) -> TreeOutputs:
        """Run the target over the trees, and process logits as its generation config says."""
        outputs = run_verify_pass(self.context_limits, draft, self.roots, cache, self.drafter.taps)
        if not self.processors.always:
            return outputs
        texts = list(map(self._join_prompt_and_text, self.rows))
        trees = outputs.tokens, outputs.layout
        return replace(outputs, logits=self.processors.process_logits(outputs.logits, texts, trees))

    def _record_steps(self, steps: Sequence[HostStep]) -> NewTokens:
        """Record the steps of all rows; return their new tokens."""
        pairs = zip(self.rows, steps, strict=True)
        return {text: self._record_step(text, step) for text, step in pairs}

    def _record_step(self, text: int, step: HostStep) -> list[int]:
        generation = self.generations[text]
        num_left = self.max_new_tokens - len(generation.token_ids)
        tokens = [*step.tokens[1:], step.bonus][:num_left]
        new = self.stops.cut_after_end(generation.token_ids, tokens)
        generation.steps.append(Step(min(len(step.path) - 1, len(new)), len(new), num_left=0))
        generation.paths.append(tuple(step.path[1:]))
        generation.drafted.append(step.num_drafted)
        return new

    def _emit_tokens(self, new: NewTokens) -> bool:
        """Append tokens to the texts; return whether all these texts continue."""
        now = self.clock.end_lap(list(new) or self.running)
        ended = set()
        for text, tokens in new.items():
            generation = self.generations[text]
            generation.token_ids += tokens
            generation.arrivals.append(now - self.started[text])
            if self.has_ended(text):
                ended.add(text)
                generation.count_tokens_left()
        self.running = [text for text in self.running if text not in ended]
        return not ended

    def _observe_and_refill(
        self, prefilled: list[Prefilled], committed: CommittedTokens
    ) -> CommittedTokens:
        """Let the drafter observe, and give the rows of finished texts to new ones."""
        if len(self.running) + len(prefilled) < len(self.rows):
            committed = self._drop_rows(len(prefilled), committed)
        if self.context_limits.switch is not None:
            self.context_limits.recompute_long_keys(
                committed.cache, self.rows, list(map(self._join_prompt_and_text, self.rows))
            )
        self.drafter.observe(committed)
        self._insert_texts(prefilled, committed.cache)
        return committed

    def _insert_texts(self, prefilled: list[Prefilled], cache: TreeCache) -> None:
        """Give rows of finished texts to texts whose prompts were read alone."""
        free = [row for row, text in enumerate(self.rows) if text not in self.running]
        for row, begun in zip(free, prefilled, strict=False):
            begun.drafter.observe(begun.committed)
            self.drafter.insert_row(row, begun.drafter)
            cache.insert_row(row, begun.committed.cache)
            self.generators.insert_row(row, begun.generators)
            self.roots[row] = begun.roots[0]
            self.rows[row] = begun.texts[0]
            self.running += begun.texts

    def _drop_rows(self, num_new: int, committed: CommittedTokens) -> CommittedTokens:
        """Drop rows everywhere; the last rows take the free places."""
        free = [text for text in self.rows if text not in self.running]
        # The first `num_new` free rows have indices below the new batch size, so only rows at the
        # end move.
        staying = [*self.running, *free[:num_new]]
        last = [row for row in range(len(staying), len(self.rows)) if self.rows[row] in staying]
        rows = [row if self.rows[row] in staying else last.pop() for row in range(len(staying))]
        committed.cache.select_rows(rows)
        self.drafter.select_rows(rows)
        self.generators = self.generators.select_rows(rows)
        self.rows = [self.rows[row] for row in rows]
        self.roots = self.roots[to_device(rows, self.target.device)]
        return committed.select_rows(rows)

    def _compute_longest(self, texts: list[int]) -> int:
        """Count the tokens of the longest of some texts, prompts included."""
        return max(
            len(self.prompts[text]) + len(self.generations[text].token_ids) for text in texts
        )

    def _join_prompt_and_text(self, text: int) -> list[int]:
        """Join the prompt and the text so far."""
        return self.prompts[text] + self.generations[text].token_ids
