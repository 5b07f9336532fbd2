"""DSpark: DFlash's blocks, whose slots hear of the token before them and say how sure they are.

Source: arXiv 2607.05147; deepseek-ai/DeepSpec. Letters: N rows, D slots, H hidden, r rank, W draft
vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conf.settings.blocks import Markov
from heads.blocks.config import BlockHeadConfig, causal_key, shared_keys
from heads.blocks.head import BlockHead
from heads.dspark.markov import ConfidenceHead, MarkovHead
from heads.vocab import DraftVocab


@dataclass(frozen=True)
class DSparkHeadConfig(BlockHeadConfig):
    """Architecture of a DSpark head.

    Attributes:
        markov_rank: r.
        markov_head_type: how a slot hears of the token before it.
        confidence: whether it has a confidence head.
        confidence_with_markov: whether that reads the token before, too.
    """

    markov_rank: int = 256
    markov_head_type: Markov = Markov.vanilla
    confidence: bool = True
    confidence_with_markov: bool = True


class DSparkHead(BlockHead):
    """A DSpark head.

    Args:
        config: the architecture.
        vocab: the ids it can draft.
    """

    config: DSparkHeadConfig

    def __init__(self, config: DSparkHeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        hidden, rank = config.llama.hidden_size, config.markov_rank
        sizes = (hidden, rank, vocab.size, len(vocab.ids))
        self.markov_head = MarkovHead(config.markov_head_type, *sizes)
        read = hidden + (rank if config.confidence_with_markov else 0)
        self.confidence_head = ConfidenceHead(read) if config.confidence else None

    def step(
        self, base: Tensor, outputs: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[N, W] with what the tokens before add."""
        told, state = self.markov_head(outputs, before, state)
        return base + self.markov_head.markov_w2(told), state

    def told(self, outputs: Tensor, before: Tensor) -> Tensor:
        """[A, D, r] what all slots hear along a text: outputs [A, D, H], tokens before [A, D]."""
        found: list[Tensor] = []
        state: Tensor | None = None
        for slot in range(outputs.shape[1]):
            heard, state = self.markov_head(outputs[:, slot], before[:, slot], state)
            found.append(heard)
        return torch.stack(found, 1)

    def confidence(self, outputs: Tensor, before: Tensor) -> Tensor:
        """[...] float32 logits of the chance that slots are accepted.

        Args:
            outputs: [..., H].
            before: [...] int64 target ids of the tokens right before.
        """
        assert self.confidence_head is not None
        if not self.config.confidence_with_markov:
            return self.confidence_head(outputs)
        return self.confidence_head(
            torch.cat([outputs, self.markov_head.markov_w1(before).to(outputs)], -1)
        )

    def sure(self, outputs: Tensor, before: Tensor) -> Tensor | None:
        """See `BlockHead.sure`: by its confidence head, if it has one."""
        return None if self.confidence_head is None else self.confidence(outputs, before)

    def embeddings(self) -> list[Tensor]:
        """See `DraftHead.embeddings`: both factors of what is added to the logits."""
        return [self.markov_head.markov_w1.weight, self.markov_head.markov_w2.weight]

    def rows_by_id(self) -> Iterator[tuple[str, Tensor]]:
        """See `BlockHead.rows_by_id`."""
        yield from super().rows_by_id()
        yield "markov_head.markov_w2.weight", self.markov_head.markov_w2.weight

    def config_json(self) -> dict[str, Any]:
        """The authors' keys, which vLLM and SGLang read."""
        config = self.config
        return {
            "architectures": ["Qwen3DSparkModel"],
            **shared_keys(config, len(self.vocab.ids)),
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [index - 1 for index in config.layers],
            **causal_key(config, "is_causal"),
            "sample_from_anchor": config.sample_from_anchor,
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type.value,
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_with_markov,
        }
