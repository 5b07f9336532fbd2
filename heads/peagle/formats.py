"""Reader of P-EAGLE heads: EAGLE-3's names, later layers, and the learnt hidden state."""

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from heads.blocks.formats import has_architecture
from heads.eagle.formats import REQUIRED_VALUES, EagleCheckpoint, build_head_config, pop_draft_vocab
from heads.peagle.network import PEagleHeadConfig
from heads.vocab import DraftVocab

MASK_HIDDEN = "mask_hidden"
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of the mask token, in the order of vLLM."""
NUM_DRAFT_TOKENS = 8
"""Draft tokens of a head whose file names none, as in speculators' training."""
FREE = ("num_hidden_layers", "speculators_model_type")


def load_peagle_checkpoint(
    folder: Path, path: str, layers: Sequence[int] | None
) -> tuple[EagleCheckpoint, PEagleHeadConfig, DraftVocab]:
    """Read a head's folder: its content, architecture and draft vocabulary.

    Args:
        folder: local folder.
        path: name of the folder in messages.
        layers: hidden states to fuse, as indices of `output_hidden_states`, instead of those in
            `config.json`.

    Raises:
        InputError: files are missing, corrupt, pickled or foreign; settings contradict the tensors,
            or are not implemented.
    """
    found = EagleCheckpoint.from_folder(folder, path)
    only = {name: value for name, value in REQUIRED_VALUES.items() if name not in FREE}
    plain = build_head_config(found, layers, {**only, "norm_output": False})
    if not plain.layers:
        raise found.make_error(
            "config.json names no layers (eagle_aux_hidden_state_layer_ids); set head.layers"
        )
    mask = next((found.settings[key] for key in MASK_KEYS if key in found.settings), None)
    if not isinstance(mask, int) or not 0 <= mask < plain.llama.vocab_size:
        raise found.make_error(
            f"config.json says mask_token_id={mask}: must be from 0 to {plain.llama.vocab_size - 1}"
        )
    feature = found.tensors.get(MASK_HIDDEN)
    if feature is not None and feature.numel() == len(plain.layers) * plain.target_hidden_size:
        found.tensors[MASK_HIDDEN] = feature.reshape(1, 1, -1)
    config = PEagleHeadConfig(
        **vars(plain), mask_token_id=mask, num_draft_tokens=_num_draft_tokens(found)
    )
    return found, config, pop_draft_vocab(found, config.form)


def _num_draft_tokens(found: EagleCheckpoint) -> int:
    methods = found.settings.get("speculators_config", {}).get("proposal_methods") or [{}]
    trained = methods[0].get("speculative_tokens", NUM_DRAFT_TOKENS)
    return int(found.settings.get("num_depths", trained))


def is_peagle_folder(folder: Path) -> bool:
    """Tell whether a folder names P-EAGLE, or has its learnt hidden state."""
    if has_architecture(folder, (), "peagle"):
        return True
    try:
        return any(_has_feature(file) for file in folder.glob("*.safetensors"))
    except SafetensorError:
        return False  # a later reader reports the damage


def _has_feature(file: Path) -> bool:
    with safe_open(file, "pt") as opened:
        names = {name.removeprefix("model.") for name in opened.keys()}  # noqa: SIM118
    # EAGLE also has a norm of hidden states, but not inside a layer.
    return MASK_HIDDEN in names and any(name.endswith(".hidden_norm.weight") for name in names)
