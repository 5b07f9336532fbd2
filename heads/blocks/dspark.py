"""DSpark: DFlash's blocks, whose slots read the previous token and give a confidence.

Source: arXiv 2607.05147; deepseek-ai/DeepSpec. Letters: N rows, A blocks, D slots, H hidden, r
rank, V vocabulary, W draft vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from conf.settings.blocks import DSparkConfig, Markov
from conf.settings.export import ExportFormat
from heads.blocks.block_head import BlockHead
from heads.blocks.checkpoint import BlockCheckpoint
from heads.blocks.layouts import BlockHeadConfig, BlockLayout, build_causal_key
from heads.draft_head import Variant
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.vocab import DraftVocab

CONFIDENCE, MARKOV = "confidence_head.proj.weight", "markov_head.markov_"


@dataclass(frozen=True, kw_only=True)
class DSparkHeadConfig(BlockHeadConfig):
    """Architecture of a DSpark head.

    Attributes:
        markov_rank: rank r of the Markov head.
        markov_head_type: kind of the Markov head.
        confidence: whether the head has a confidence head.
        confidence_with_markov: whether the confidence head also reads the previous token.
    """

    markov_rank: int = 256
    markov_head_type: Markov = Markov.vanilla
    confidence: bool = True
    confidence_with_markov: bool = True


class MarkovHead(nn.Module):
    """Low-rank logits: states [N, r] of the previous tokens, times `markov_w2` [W, r].

    Args:
        kind: kind of the states.
        hidden_size: width H of the outputs.
        rank: width r of the states.
        vocab_size: number V of target ids.
        num_draft_ids: number W of draft ids.
    """

    def __init__(
        self, kind: Markov, hidden_size: int, rank: int, vocab_size: int, num_draft_ids: int
    ) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_draft_ids, bias=False)
        if kind is Markov.gated:
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind is Markov.rnn:
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(
        self, outputs: Tensor, previous_ids: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the inputs [N, r] of `markov_w2` for a slot.

        Args:
            outputs: [N, H] outputs of the slot.
            previous_ids: [N] int64 target ids of the previous tokens.
            state: [N, r] state of the previous slot; None for the first.

        Returns:
            The inputs, and the state for the next slot; None for kinds without a state.
        """
        embeds = self.markov_w1(previous_ids).to(outputs)
        if self.kind is Markov.vanilla:
            return embeds, None
        if self.kind is Markov.gated:
            return embeds * self.gate_proj(torch.cat([outputs, embeds], -1)).sigmoid(), None
        state = torch.zeros_like(embeds) if state is None else state
        joint = self.joint_proj(torch.cat([state, embeds, outputs], -1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()


class ConfidenceHead(nn.Module):
    """Confidence: logit of the chance that a slot's token is accepted if the previous ones are.

    Args:
        size: width of the inputs.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute logits [...] from inputs [..., size], in float32 throughout."""
        with torch.autocast(inputs.device.type, enabled=False):
            weight, bias = self.proj.weight.float(), self.proj.bias.float()
            return nn.functional.linear(inputs.float(), weight, bias).squeeze(-1)


class DSparkHead(BlockHead):
    """DSpark head: a slot's logits depend on the previous tokens.

    Args:
        config: architecture.
        vocab: draft vocabulary.
    """

    config: DSparkHeadConfig
    config_type = DSparkHeadConfig
    is_anchored = True
    # DeepSpec's size of a block.
    variants: ClassVar = {"dspark": Variant("DSpark heads", partial(DSparkConfig, block_size=7))}
    name_with_article = "a DSpark head"
    architectures = ("Qwen3DSparkModel", "DSparkSpeculator", "DSparkDraftModel")
    layout = BlockLayout("dspark", "dspark", "DSparkDraftModel", with_embeddings_and_head=True)
    method, paper = "DSpark", "2607.05147"
    slot_description = ", each from the previous token"
    draft_id_patterns = (r"markov_head\.markov_w2\.weight",)
    target_id_patterns = (r"markov_head\.markov_w1\.weight",)

    def __init__(self, config: DSparkHeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        hidden, rank = config.llama.hidden_size, config.markov_rank
        sizes = (hidden, rank, vocab.size, len(vocab.ids))
        self.markov_head = MarkovHead(config.markov_head_type, *sizes)
        read = hidden + (rank if config.confidence_with_markov else 0)
        self.confidence_head = ConfidenceHead(read) if config.confidence else None

    @classmethod
    def parse_own_settings(cls, file: BlockCheckpoint) -> dict[str, Any]:
        """See `BlockHead.parse_own_settings`."""
        markov = file.settings.get("markov_head_type", "vanilla")
        if markov not in [each.value for each in Markov]:
            allowed = ", ".join(each.value for each in Markov)
            raise file.make_error(f"config.json says markov_head_type={markov}: must be {allowed}")
        rank = file.get_integer("markov_rank")
        if rank == 0:
            # DeepSpec calls this DFlash. Engines need a Markov head, so it gets one that adds
            # nothing.
            rank = 1
            file.tensors[f"{MARKOV}w1.weight"] = torch.zeros(file.vocab.size, rank)
            file.tensors[f"{MARKOV}w2.weight"] = torch.zeros(len(file.vocab.ids), rank)
        confidence = file.tensors.get(CONFIDENCE)
        return {
            "markov_rank": rank,
            "markov_head_type": Markov(markov),
            "confidence": confidence is not None,
            # Engines differ in the key's default; the tensor's width is certain.
            "confidence_with_markov": confidence is not None
            and confidence.shape[-1] == file.settings["hidden_size"] + rank,
        }

    @classmethod
    def choose_own_settings(cls, settings: Any, target: EmbeddingsAndOutputHead) -> dict[str, Any]:
        """See `BlockHead.choose_own_settings`."""
        del target
        return {
            "markov_rank": settings.markov_rank,
            "markov_head_type": settings.markov_head_type,
            "confidence": settings.confidence_weight > 0,
            "confidence_with_markov": settings.confidence_head_with_markov,
        }

    def compute_slot_logits(
        self, base: Tensor, outputs: Tensor, previous_ids: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Add the logits [N, W] of the Markov head to those of the output head."""
        markov_states, state = self.markov_head(outputs, previous_ids, state)
        return base + self.markov_head.markov_w2(markov_states), state

    def compute_markov_states(self, outputs: Tensor, previous_ids: Tensor) -> Tensor:
        """Compute Markov states [A, D, r] of all slots from outputs [A, D, H] and tokens [A, D]."""
        states: list[Tensor] = []
        state: Tensor | None = None
        for slot in range(outputs.shape[1]):
            slot_states, state = self.markov_head(outputs[:, slot], previous_ids[:, slot], state)
            states.append(slot_states)
        return torch.stack(states, 1)

    def compute_confidence(self, outputs: Tensor, previous_ids: Tensor) -> Tensor:
        """Compute float32 logits [...] of the slots' chance of acceptance.

        Args:
            outputs: [..., H] outputs of the slots.
            previous_ids: [...] int64 target ids of the previous tokens.
        """
        assert self.confidence_head is not None
        if not self.config.confidence_with_markov:
            return self.confidence_head(outputs)
        return self.confidence_head(
            torch.cat([outputs, self.markov_head.markov_w1(previous_ids).to(outputs)], -1)
        )

    def build_own_keys(self) -> dict[str, Any]:
        """See `BlockHead.build_own_keys`."""
        config = self.config
        return {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [index - 1 for index in config.layers],
            **build_causal_key(config, "is_causal"),
            "sample_from_anchor": config.sample_from_anchor,
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type.value,
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_with_markov,
        }

    def find_export_problem(self, engine: ExportFormat) -> str | None:
        """See `BlockHead.find_export_problem`.

        vLLM and llama.cpp always build the vanilla Markov head. From a config of speculators, vLLM
        takes `sliding_window_non_causal` over for DFlash alone, and a window makes rows causal.
        """
        config, markov = self.config, self.config.markov_head_type
        if engine is ExportFormat.speculators and config.window is not None and not config.causal:
            return (
                "has no key by which vLLM lets rows of a DSpark head with a window see later rows, "
                "and this head has head.causal=false"
            )
        vanilla_only = (ExportFormat.vllm, ExportFormat.llamacpp)
        if engine in vanilla_only and markov is not Markov.vanilla:
            return f"supports head.markov_head_type=vanilla only, and this head has {markov.value}"
        return super().find_export_problem(engine)
