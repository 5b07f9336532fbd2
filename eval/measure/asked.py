"""What is followed of a target's generation config, and what is refused.

How is sampled, and how long, a run says itself. The rest changes what `generate` writes: what
depends on the text alone is followed (`eval/decode/rules.py`).
"""

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from conf.errors import InputError
from eval.decode.rules import APPLIED, Rules
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.target_model.model import Target

NOTHING = {
    **dict.fromkeys(APPLIED), "repetition_penalty": 1, "no_repeat_ngram_size": 0,
    "num_beams": 1, "num_beam_groups": 1, "guidance_scale": 1, "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0, "typical_p": 1,
    "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": 1, "penalty_alpha": 0, "dola_layers": None,
    "constraints": None, "force_words_ids": None, "token_healing": False, "max_time": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "watermarking_config": None,
    "exponential_decay_length_penalty": None, "prompt_lookup_num_tokens": None,
    "num_return_sequences": 1,
}  # fmt: skip
"""What changes what `generate` writes, or how, with the value beside None that changes nothing."""


def follow(
    target: Target, *, stop: Sequence[str] = (), plain: bool = False, ignore_eos: bool = False
) -> None:
    """Has a target answer as its generation config says, whoever decodes.

    Args:
        target: is changed.
        stop: texts that end a response, in place of the config's.
        plain: do without all that the config asks for.
        ignore_eos: stop tokens end nothing.

    Raises:
        InputError: it asks for what drafts cannot be checked by, or for nonsense.
    """
    ours = target.generation_config
    target.logits_processing = {} if plain else asked_of(target)
    target.stop_strings = tuple(stop or ([] if plain else _texts(ours.stop_strings)))
    # What else it says, e.g. to keep no cache, `generate` would follow and nobody else.
    target.model.generation_config = GenerationConfig(
        eos_token_id=ours.eos_token_id, pad_token_id=ours.pad_token_id, **target.logits_processing
    )
    target.ignores_stops = ignore_eos


def follow_or_tell(target: Target) -> str | None:
    """`follow`, or plain answers and what to say of them, where only a figure hangs on them."""
    try:
        follow(target)
    except InputError as error:
        follow(target, plain=True)
        return f"tau is of plain greedy answers: {error}"
    return None


def _texts(strings: str | list[str] | None) -> list[str]:
    return [strings] if isinstance(strings, str) else strings or []


def asked_of(target: EmbeddingsAndHead) -> dict[str, Any]:
    """What a target's generation config asks of its logits, by its names there.

    Raises:
        InputError: it asks for what drafts cannot be checked by, or for nonsense.
    """
    config = target.generation_config
    found = {name: getattr(config, name, None) for name in NOTHING}
    asked = {name: each for name, each in found.items() if each not in (None, [], NOTHING[name])}
    refused = {name: each for name, each in asked.items() if name not in APPLIED}
    source = f"target.path={target.name}: its generation config asks for"
    if refused:
        raise InputError(
            f"{source} {_listed(refused)}, which drafts cannot be checked by; allowed besides "
            f"sampling: {', '.join(APPLIED)}; take the others out of generation_config.json, or "
            "measure and regenerate with plain=true, which does without all of them"
        )
    try:
        Rules(asked, target.stop_ids)
    except (TypeError, ValueError) as error:
        raise InputError(f"{source} {_listed(asked)}: {error}; plain=true does without") from error
    return asked


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
