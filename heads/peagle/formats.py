"""Reading P-EAGLE heads: EAGLE-3's names, layers behind the first, and the learnt feature."""

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from heads.blocks.formats import names_kind
from heads.eagle.formats import ONLY, Checkpoint, architecture, vocabulary
from heads.peagle.network import PEagleHeadConfig
from heads.vocab import DraftVocab

MASK_HIDDEN = "mask_hidden"
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of the mask token, in the order in which vLLM looks for them."""
NUM_DRAFT_TOKENS = 8
"""Draft tokens of a head whose file does not say, as speculators trains heads."""
FREE = ("num_hidden_layers", "speculators_model_type")


def opened(
    folder: Path, path: str, layers: Sequence[int] | None
) -> tuple[Checkpoint, PEagleHeadConfig, DraftVocab]:
    """A file, and what it says of the head.

    Args:
        folder: on this machine.
        path: what the user calls it.
        layers: the target features that it fuses, as indices of `output_hidden_states`, in place
            of those in `config.json`.

    Raises:
        InputError: missing, corrupt, pickled or foreign files; settings that contradict the
            tensors, or that this head does not compute.
    """
    found = Checkpoint.open(folder, path)
    only = {name: value for name, value in ONLY.items() if name not in FREE}
    plain = architecture(found, layers, {**only, "norm_output": False})
    if not plain.layers:
        raise found.error("config.json names no layers (eagle_aux_hidden_state_layer_ids)")
    mask = next((found.settings[key] for key in MASK_KEYS if key in found.settings), None)
    if not isinstance(mask, int) or not 0 <= mask < plain.llama.vocab_size:
        raise found.error(
            f"config.json says mask_token_id={mask}: must be from 0 to {plain.llama.vocab_size - 1}"
        )
    feature = found.tensors.get(MASK_HIDDEN)
    if feature is not None and feature.numel() == len(plain.layers) * plain.target_hidden_size:
        found.tensors[MASK_HIDDEN] = feature.reshape(1, 1, -1)
    config = PEagleHeadConfig(
        **vars(plain), mask_token_id=mask, num_draft_tokens=_num_draft_tokens(found)
    )
    return found, config, vocabulary(found, config.form)


def _num_draft_tokens(found: Checkpoint) -> int:
    methods = found.settings.get("speculators_config", {}).get("proposal_methods") or [{}]
    trained = methods[0].get("speculative_tokens", NUM_DRAFT_TOKENS)
    return int(found.settings.get("num_depths", trained))


def holds(folder: Path) -> bool:
    """True for a folder that names P-EAGLE, or has the feature that such a head learns."""
    if names_kind(folder, (), "peagle"):
        return True
    try:
        return any(_has_feature(file) for file in folder.glob("*.safetensors"))
    except SafetensorError:
        return False  # who is asked last says what is wrong


def _has_feature(file: Path) -> bool:
    with safe_open(file, "pt") as opened:
        names = {name.removeprefix("model.") for name in opened.keys()}  # noqa: SIM118
    # The norm of features in a layer, not behind their fusion, is EAGLE's.
    return MASK_HIDDEN in names and any(name.endswith(".hidden_norm.weight") for name in names)
