"""Small heads over features that are often right."""

from functools import cache
from typing import Any

import torch
from toys import endless_target, texts, trained

from conf.settings.blocks import DFlash2Config, DFlashConfig, DSparkConfig, Markov
from conf.settings.eagle import (
    Divergence,
    EagleConfig,
    EagleForm,
    MtpConfig,
    OutputHead,
    PEagleConfig,
)
from heads.blocks.dflash import DFlashHead
from heads.blocks.dflash2 import DFlash2Head
from heads.blocks.dspark import DSparkHead
from heads.decoding.drafting import CommittedTokens, Drafter
from heads.eagle.eagle import EagleHead
from heads.eagle.peagle import PEagleHead
from heads.mtp.mtp import MtpHead, build_mtp_config
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from train.block_objective import BlockObjective
from train.dflash2 import DFlash2Objective
from train.dspark import DSparkObjective
from train.eagle import EagleObjective
from train.mtp import MtpObjective
from train.peagle import PEagleObjective

MASK = 3
EAGLES: dict[str, dict[str, Any]] = {
    "eagle1": {"form": EagleForm.eagle1, "regression_weight": 1.0},
    "eagle3": {},
    "eagle3, reduced": {"draft_vocab_size": 64},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
}
BLOCKS: dict[str, dict[str, Any]] = {
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
MTPS = {"mtp": "MiMoForCausalLM", "mtp, fed back before the norm": "Glm4MoeForCausalLM"}
"""Families by whose rows of the table the layer is used; its kind is the target's."""
CLASSES: dict[type, tuple[Any, Any]] = {
    EagleConfig: (EagleHead, EagleObjective),
    PEagleConfig: (PEagleHead, PEagleObjective),
    DFlashConfig: (DFlashHead, BlockObjective),
    DFlash2Config: (DFlash2Head, DFlash2Objective),
    DSparkConfig: (DSparkHead, DSparkObjective),
    MtpConfig: (MtpHead, MtpObjective),
}


def settings_of(name: str, **changes: Any) -> Any:
    """Small settings of a head: a name of `EAGLES`, `BLOCKS` or `MTPS`, or `peagle`."""
    if name in MTPS:
        return MtpConfig(**{"num_steps": 3, **changes})
    if name in EAGLES:
        usual = {"num_steps": 3, "output_head": OutputHead.copy}
        return EagleConfig(**{**usual, **EAGLES[name], **changes})
    common = {"num_layers": 2, "layers": [1, 2], "mask_token_id": MASK}
    if name == "peagle":
        return PEagleConfig(**{**common, "num_steps": 4, "draft_vocab_size": 64, **changes})
    blocks = {"block_size": 5, "text_weight": 0.5, "divergence_weight": 1.0}
    chosen = {**common, **blocks, **BLOCKS[name], **changes}
    if name == "dflash2":
        small = {"conv_group_size": 8, "conv_kernel_size": 3, "selector_rank": 4}
        return DFlash2Config(**{**small, "selector_top_k": 9, **chosen})
    if name.startswith("dflash"):
        return DFlashConfig(**chosen)
    return DSparkConfig(divergence=Divergence.kl, markov_rank=8, **chosen)


def fresh(target: Target, config: Any, name: str = "") -> Any:
    """An untrained head."""
    if name in MTPS:
        shape = build_mtp_config(target.config, MTPS[name], "toy", sparse=False)
        return MtpHead(shape, DraftVocab.make_full(target.vocab_size)).initialise(target, seed=0)
    # The commonest ids lie scattered, so that draft ids and target ids differ.
    counts = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(0))
    vocab = DraftVocab.from_counts(counts, config.draft_vocab_size, [0, 1, 2])
    return CLASSES[type(config)][0].from_settings(target, config, vocab, seed=0)


def objective_of(head: Any, target: Target, config: Any) -> Any:
    """The objective that trains a head."""
    return CLASSES[type(config)][1](head, target, config)


def feature_head(
    target: Target, name: str, num_updates: int = 24, num_texts: int = 6, **changes: Any
) -> Any:
    """A head trained for some steps on the target's own texts."""
    config = settings_of(name, **changes)
    objective = objective_of(fresh(target, config, name), target, config)
    return trained(objective, texts(target, num_texts, 32), num_updates)


@cache
def shared_target() -> Target:
    """A target of four layers that never stops by itself."""
    return endless_target(num_hidden_layers=4)


@cache
def texts_of_target(num_texts: int, num_tokens: int) -> list[list[int]]:
    """Texts of that target, from prompts of four tokens."""
    return texts(shared_target(), num_texts, num_tokens)


@cache
def prompts() -> list[list[int]]:
    """Two that heads have learnt from, and one that they have not."""
    return [*(text[:4] for text in texts_of_target(2, 1)), [61, 23, 77]]


@cache
def learnt(name: str) -> Any:
    """A head of that target that has learnt its first two texts."""
    with torch.inference_mode(mode=False):
        return feature_head(shared_target(), name, num_updates=20, num_texts=2)


def observed(drafter: Drafter, text: list[int]) -> None:
    """Gives a drafter a text, whose last token is the root of what it drafts next."""
    output = shared_target().encode_response(text[:1], text[1:], drafter.taps)
    drafter.observe(CommittedTokens([text[:-1]], output, shared_target().new_cache(1)))
