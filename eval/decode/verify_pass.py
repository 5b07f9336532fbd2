"""One pass of the target over draft trees, with the accepted paths and their record.

Letters: B texts, N tree nodes (root included), A nodes kept, D hidden, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eval.decode.accept import AcceptedPaths, verify
from heads.decoding.cache import TreeCache
from heads.decoding.drafting import PAD, CommittedTokens, Draft
from heads.decoding.sampling import Generators, Sampling
from heads.target_model.model import FeatureLayers, Target, TargetOutput, prefill_last_states


class ContextLimits:
    """Lengths from which a target reads texts differently, or not at all.

    Up to the switch a text uses the short frequencies of LongRoPE, above it the long ones for all
    tokens, so its keys are then recomputed, as in transformers' `generate`. A draft is not accepted
    across the switch, as its later tokens were read with the wrong frequencies.

    Args:
        target: the target.
        prompts: token ids of each text.
    """

    def __init__(self, target: Target, prompts: Sequence[list[int]]) -> None:
        self.target, self.switch, self.window = (
            target,
            target.long_rope.switch,
            target.max_positions,
        )
        switch = self.switch
        self.long = {n for n, ids in enumerate(prompts) if switch is not None and len(ids) > switch}

    def recompute_long_keys(
        self, cache: TreeCache, numbers: list[int], texts: list[list[int]]
    ) -> None:
        """Recompute the keys of texts that are long from now on.

        Args:
            cache: cache of the running texts.
            numbers: index of the text in each row.
            texts: all tokens of each text, prompt and root included.
        """
        if self.switch is None:
            return
        for row, (number, length) in enumerate(zip(numbers, cache.slots.lengths, strict=True)):
            if length >= self.switch and number not in self.long:
                self.long.add(number)
                anew = self.target.new_cache(1)
                prefill_last_states(self.target, anew, [texts[row][: length + 1]])
                cache.overwrite_row(row, anew)

    def mask_beyond_limits(self, tokens: Tensor, depths: Tensor, cache: TreeCache) -> Tensor:
        """Replace tokens [B, N] of trees beyond the window or a short text's switch by PAD.

        Args:
            tokens: [B, N] int64.
            depths: [B or 1, N] int64.
            cache: cache of the texts.
        """
        committed = cache.slots.committed
        positions = committed + depths
        if self.window is not None:
            tokens = tokens.masked_fill(positions >= self.window, PAD)
        if self.switch is None:
            return tokens
        beyond = (committed < self.switch) & (positions >= self.switch)
        return tokens.masked_fill(beyond, PAD)


class HostStep(NamedTuple):
    """A text's share of a verify pass, on the host.

    Attributes:
        path: accepted nodes, root first.
        tokens: tokens of these nodes.
        bonus: token after them.
        num_drafted: draft tokens verified.
    """

    path: list[int]
    tokens: list[int]
    bonus: int
    num_drafted: int

    @classmethod
    def from_records(cls, record: list[list[int]]) -> "list[HostStep]":
        """Read the steps of the rows of a `Verified.record`."""
        steps = []
        for num_accepted, bonus, num_drafted, *rest in record:
            kept, width = num_accepted + 1, len(rest) // 2
            steps.append(cls(rest[:kept], rest[width : width + kept], bonus, num_drafted))
        return steps


@dataclass(frozen=True)
class VerifyResult:
    """Trees of which the target has accepted a path.

    Attributes:
        nodes: the trees.
        accepted: accepted paths.
        accepted_tokens: [B, N] int64 tokens of the accepted nodes.
        host_record: [B, 3 + 2 N] int64, everything that the host reads, in one tensor.
    """

    nodes: "TreeOutputs"
    accepted: AcceptedPaths
    accepted_tokens: Tensor
    host_record: Tensor

    @property
    def counts(self) -> Tensor:
        """[B] int64 number of accepted nodes, root included."""
        return self.accepted.num_accepted + 1

    def build_committed_tokens(
        self, steps: Sequence[HostStep], cache: TreeCache
    ) -> CommittedTokens:
        """Make the pass as drafters observe it, once the host knows its steps."""
        paths = [step.path for step in steps]
        longest = max(map(len, paths))
        path = self.accepted.nodes[:, :longest]
        return CommittedTokens(
            token_ids=[step.tokens for step in steps],
            output=self.nodes.output.select_tokens(path),
            cache=cache,
            logits=self.nodes.logits,
            on_device=(self.accepted_tokens[:, :longest], self.counts),
            paths=paths,
            nodes=path,
        )


@dataclass(frozen=True)
class TreeOutputs:
    """Draft trees that the target has read.

    Attributes:
        tokens: [B, N] int64 tokens, roots included; PAD for missing nodes.
        output: hidden states [B, N, D] of the target.
        logits: [B, N, V].
    """

    tokens: Tensor
    output: TargetOutput
    logits: Tensor

    def accept_paths(
        self, draft: Draft, sampling: Sampling, generators: Generators
    ) -> VerifyResult:
        """Accept a path of each tree, without waiting for the device."""
        accepted = verify(draft, self.tokens, self.logits, sampling, generators)
        on_path = self.tokens.gather(1, accepted.nodes)
        num_drafted = (draft.tokens != PAD).sum(1)
        numbers = torch.stack([accepted.num_accepted, accepted.bonus, num_drafted], dim=1)
        record = torch.cat([numbers, accepted.nodes, on_path], dim=1)
        return VerifyResult(self, accepted, on_path, record)


def run_verify_pass(
    limits: ContextLimits, draft: Draft, roots: Tensor, cache: TreeCache, taps: FeatureLayers
) -> TreeOutputs:
    """Run the target once over all trees.

    Args:
        limits: limits of the batch.
        draft: the trees.
        roots: [B] int64.
        cache: cache of the texts.
        taps: hidden states that the drafter needs.
    """
    layout, target = draft.build_layout(), limits.target
    tokens = torch.cat([roots.unsqueeze(1), draft.tokens], dim=1)
    tokens = limits.mask_beyond_limits(tokens, layout.depths, cache)
    mask = None if draft.is_chain else layout.mask
    output = target.run_pending(cache, tokens.clamp_min(0), mask, layout.depths, taps)
    return TreeOutputs(tokens, output, target.compute_logits(output.hidden_states))
