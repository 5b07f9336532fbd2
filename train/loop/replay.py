"""Acceptance during training: tau on held-out prompts, by exact replay.

The target answers a few held-out prompts once, greedily. Each evaluation then costs one forward
pass of the head per depth over these answers. Letters: n answer tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import accumulate, islice

from torch import Tensor

from data.features.store_format import HIDDEN_STATES
from data.features.store_reader import StoredDataset, dequantize_batch
from data.prepared.packing import PackedDataset
from eval.measure.acceptance_stats import PromptSteps, alpha, tau
from eval.measure.replay import Replayable, rank_candidates, replay_tree
from eval.measure.target_answers import AnswerSource
from heads.decoding.tree import Tree
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import FeatureLayers, TargetOutput

MAX_PROMPT_TOKENS = 256
MAX_REPLAY_TOKENS = 64
TEXT_PROMPT_TOKENS = 32


class Replay(ABC):
    """Replay of a chain of draft tokens over the target's own answers.

    Args:
        prompts: token ids up to the start of the answer.
        depth: draft tokens of the chain.
        taps: hidden states that the head reads.
    """

    def __init__(self, prompts: list[list[int]], depth: int, taps: FeatureLayers) -> None:
        self.prompts = prompts
        self.depth = depth
        self.taps = taps

    @property
    @abstractmethod
    def answers(self) -> list[tuple[list[int], TargetOutput]]:
        """Answer [n] to each prompt, and the target's hidden states of prompt and answer."""

    def __call__(self, head: Replayable) -> dict[str, float]:
        """Compute `tau` and `greedy_alpha_d1`.. of the chain."""
        chain = Tree.make_chain(self.depth)
        steps = []
        for prompt, (answer, output) in zip(self.prompts, self.answers, strict=True):
            ranked = rank_candidates(head, chain, output, prompt, answer)
            steps.append(PromptSteps("heldout", replay_tree(chain, ranked, answer)))
        rates = alpha(steps, chain.depth)
        return {"tau": tau(steps)} | {
            f"greedy_alpha_d{d}": rate for d, rate in enumerate(rates, start=1)
        }


class HeldoutReplay(Replay):
    """Replay over answers that the target writes at the first use."""

    def __init__(
        self, texts: AnswerSource, prompts: list[list[int]], depth: int, taps: FeatureLayers
    ) -> None:
        super().__init__(prompts, depth, taps)
        self.texts = texts

    @cached_property
    def answers(self) -> list[tuple[list[int], TargetOutput]]:
        """Answers and hidden states, from one decoding of each prompt."""
        return self.texts.answer_with_states(self.prompts, MAX_REPLAY_TOKENS, self.taps)


class StoredReplay(Replay):
    """Replay over the answers in the split `replay` of a feature store."""

    def __init__(
        self,
        target: EmbeddingsAndOutputHead,
        stored: StoredDataset,
        num_prompts: int,
        depth: int,
        taps: FeatureLayers,
    ) -> None:
        self.target = target
        self.rows = [stored.load_sequence(index) for index in range(min(num_prompts, len(stored)))]
        prompts = [row["input_ids"][~row["loss_mask"]].tolist() for row in self.rows]
        super().__init__(prompts, depth, taps)

    @cached_property
    def answers(self) -> list[tuple[list[int], TargetOutput]]:
        """Stored answers and hidden states."""
        return [
            (row["input_ids"][row["loss_mask"]].tolist(), self._build_target_output(row))
            for row in self.rows
        ]

    def _build_target_output(self, row: dict[str, Tensor]) -> TargetOutput:
        """Hidden states [1, S, D] of all tokens but the last. A last state not stored is empty."""
        states = {
            name: tensor[None, :-1].to(self.target.device, self.target.dtype)
            for name, tensor in dequantize_batch(row).items()
            if name == HIDDEN_STATES or name.startswith("layers.")
        }
        layers = {index: states[f"layers.{index}"] for index in self.taps.layers}
        some = next(iter(states.values()))
        return TargetOutput(states.get(HIDDEN_STATES, some[..., :0]), layers)


def select_heldout_prompts(heldout: PackedDataset, num_prompts: int) -> list[list[int]]:
    """Select the first prompts of held-out documents.

    Args:
        heldout: packed sequences.
        num_prompts: largest number of prompts; those longer than 256 tokens are left out.
    """
    prompts = (prompt for index in range(len(heldout)) for prompt in iter_prompts(heldout[index]))
    short = (prompt for prompt in prompts if len(prompt) <= MAX_PROMPT_TOKENS)
    return list(islice(short, num_prompts))


def iter_prompts(row: Mapping[str, Tensor]) -> Iterator[list[int]]:
    """Yield the tokens before the first learnt token of each document of a packed sequence.

    A plain text is learnt from its first token, so its first 32 tokens serve as prompt.
    """
    num_tokens = row["document_ids"].add(1).bincount()[1:].tolist()  # -1 is padding
    begin = 0
    for end in accumulate(num_tokens):
        ids, learnt = row["input_ids"][begin:end], row["loss_mask"][begin:end]
        begin = end
        length = int(learnt.int().argmax()) or min(TEXT_PROMPT_TOKENS, len(ids))
        yield ids[:length].tolist()
