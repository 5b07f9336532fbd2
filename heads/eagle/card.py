"""What a model card says of an EAGLE head."""

from typing import Any

from conf.settings.eagle import EagleForm, OutputHead
from heads.eagle.config import EagleHeadConfig
from heads.eagle.head import EagleHead
from heads.kind import HeadFacts, trained_with

BIAS_PROBLEM = (
    "its fusion layer has a bias (`fc.bias`), for which vLLM has no place. A head trained with "
    "head.fc_bias=false loads."
)


def facts(
    head: EagleHead, provenance: dict[str, Any], acceptance: dict[str, Any] | None
) -> HeadFacts:
    """What a card says of a head."""
    settings = trained_with(provenance)
    config = head.config
    tag = "eagle3" if config.form is EagleForm.eagle3 else "eagle"
    method, paper = _eagle_method(config, settings)
    drafted = min(max(settings.get("num_steps", 3), 3), 5)
    return HeadFacts(
        tag=tag,
        name=f"{method} head",
        method=method,
        paper=paper,
        description=(
            f"one decoder layer {_eagle_parts(head)}. It drafts one token after another, to any "
            "depth, each from its own last output"
        ),
        num_draft_tokens=len(acceptance["alpha"]) if acceptance else drafted,
        # vLLM builds the fusion layer without a bias and fails on the tensor.
        vllm_method=None if config.fc_bias else tag,
        vllm_problem=BIAS_PROBLEM,
    )


def _eagle_method(config: EagleHeadConfig, settings: dict[str, Any]) -> tuple[str, str]:
    """Name and arXiv number."""
    if config.form is EagleForm.eagle1:
        # The same head: only its training tells HASS from EAGLE-1, and its use EAGLE-2.
        hass = settings.get("top_k_weight") or settings.get("detach_features")
        return ("HASS", "2408.15766") if hass else ("EAGLE-1/2", "2401.15077")
    if config.fc_norm and config.norm_output:
        return "EAGLE-3.1", "2605.09992"
    return "EAGLE-3", "2503.01840"


def _eagle_parts(head: EagleHead) -> str:
    config = head.config
    size = f"hidden size {config.llama.hidden_size}"
    if config.form is EagleForm.eagle1:
        return f"({size}, {head.vocab.described()}) on the target's last hidden state"
    *most, last = map(str, config.layers) if config.layers else ("low", "middle", "high")
    fused = f"{', '.join(most)} and {last}" if most else last
    counted = " (as `output_hidden_states` counts them)" if config.layers else ""
    return (
        f"({size}, {head.vocab.described()}) on the target's hidden states {fused}{counted}, fused"
    )


def copied(head: EagleHead, provenance: dict[str, Any]) -> list[str]:
    """What of a target's weights a head holds, in words."""
    found, start = [], trained_with(provenance).get("output_head")
    if head.lm_head is not None and start == OutputHead.frozen.value:
        found.append("rows of its output head")
    if head.lm_head is not None and start == OutputHead.copy.value:
        found.append("an output head that started as rows of its own")
    if head.embed_tokens is not None:
        found.append("its token embedding")
    return found
