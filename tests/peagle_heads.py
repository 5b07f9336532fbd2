"""Small P-EAGLE heads that are often right."""

from typing import Any

import torch
from toys import packed, texts

from conf.settings.eagle import PEagleConfig
from heads.peagle.head import PEagleHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from train.peagle import PEagleObjective

MASK = 3


def settings_of(**changes: Any) -> PEagleConfig:
    """Small."""
    common = {"num_layers": 2, "num_steps": 4, "layers": [1, 2], "mask_token_id": MASK}
    return PEagleConfig(**{**common, "draft_vocab_size": 64, **changes})


def fresh(target: Target, config: PEagleConfig) -> PEagleHead:
    """An untrained head."""
    # The commonest ids lie scattered, so that draft ids and target ids differ.
    counts = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(0))
    vocab = DraftVocab.choose(counts, config.draft_vocab_size, [0, 1, 2])
    return PEagleHead.untrained(target, config, vocab, seed=0)


def peagle_head(
    target: Target, num_updates: int = 60, num_texts: int = 6, **changes: Any
) -> PEagleHead:
    """A head trained for some steps on the target's own texts."""
    config = settings_of(**changes)
    head = fresh(target, config)
    objective = PEagleObjective(head, target, config)
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
