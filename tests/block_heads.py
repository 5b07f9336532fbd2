"""Small block drafters that are often right."""

from typing import Any

import torch
from toys import packed, texts

from conf.settings.blocks import BlockConfig, DFlash2Config, DFlashConfig, DSparkConfig, Markov
from conf.settings.eagle import Divergence
from heads.blocks.config import block_config
from heads.blocks.head import BlockHead
from heads.dflash.head import DFlashHead
from heads.dflash2.head import DFlash2Head, DFlash2HeadConfig
from heads.dspark.head import DSparkHead, DSparkHeadConfig
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from train.blocks.objective import BlockObjective
from train.dflash import DFlashObjective
from train.dflash2 import DFlash2Objective
from train.dspark import DSparkObjective

MASK = 3
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash, causal in a window": {"causal": True, "window": 9},
    "dflash, reduced": {"own_output_head": True, "draft_vocab_size": 64},
    "dflash2": {},
    "dspark": {"markov_head_type": Markov.vanilla},
    "dspark, gated": {"markov_head_type": Markov.gated, "confidence_head_with_markov": False},
    "dspark, rnn": {
        "markov_head_type": Markov.rnn,
        "own_output_head": True,
        "draft_vocab_size": 64,
    },
}


def settings_of(name: str, **changes: Any) -> BlockConfig:
    """Small settings of a head."""
    common = {
        "num_layers": 2,
        "block_size": 5,
        "layers": [1, 2],
        "mask_token_id": MASK,
        "text_weight": 0.5,
        "divergence_weight": 1.0,
    }
    chosen = {**common, **KINDS[name], **changes}
    if name == "dflash2":
        small = {"conv_group_size": 8, "conv_kernel_size": 3, "selector_rank": 4}
        return DFlash2Config(**chosen, **small, selector_top_k=9)
    if name.startswith("dflash"):
        return DFlashConfig(**chosen)
    return DSparkConfig(divergence=Divergence.kl, markov_rank=8, **chosen)


def fresh(target: Target, config: BlockConfig) -> BlockHead:
    """An untrained head."""
    # The commonest ids lie scattered, so that draft ids and target ids differ.
    counts = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(0))
    vocab = DraftVocab.choose(counts, config.draft_vocab_size, [0, 1, 2])
    dspark = isinstance(config, DSparkConfig)
    shape = block_config(config, target, sample_from_anchor=dspark)
    if isinstance(config, DFlash2Config):
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        second = DFlash2HeadConfig(**vars(shape), **{name: getattr(config, name) for name in names})
        return DFlash2Head(second, vocab).begin(target, seed=0)
    if not isinstance(config, DSparkConfig):
        return DFlashHead(shape, vocab).begin(target, seed=0)
    more = DSparkHeadConfig(
        **vars(shape),
        markov_rank=config.markov_rank,
        markov_head_type=config.markov_head_type,
        confidence_with_markov=config.confidence_head_with_markov,
    )
    return DSparkHead(more, vocab).begin(target, seed=0)


def objective_of(head: BlockHead, target: Target, config: BlockConfig) -> BlockObjective:
    """The objective that trains a head."""
    if isinstance(head, DSparkHead):
        return DSparkObjective(head, target, config)  # type: ignore[arg-type]
    if isinstance(head, DFlash2Head):
        return DFlash2Objective(head, target, config)  # type: ignore[arg-type]
    return DFlashObjective(head, target, config)  # type: ignore[arg-type]


def block_head(
    target: Target, name: str, num_updates: int = 60, num_texts: int = 6, **changes: Any
) -> BlockHead:
    """A head trained for some steps on the target's own texts."""
    config = settings_of(name, **changes)
    head = fresh(target, config)
    objective = objective_of(head, target, config)
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], 3e-3)
    batch = objective.indexed(packed(texts(target, num_texts, 40)))
    scale = objective.weights / objective.counts(batch).clamp_min(1)
    batch = objective.prepare(batch)
    for _ in range(num_updates):
        optimizer.zero_grad()
        objective(batch, scale).total.backward()
        optimizer.step()
    optimizer.zero_grad()
    return head.eval()
