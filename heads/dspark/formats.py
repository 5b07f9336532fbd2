"""Reading DSpark heads: see `heads/blocks/formats.py`."""

from collections.abc import Sequence
from pathlib import Path

import torch

from conf.settings.blocks import Markov
from heads.blocks.formats import BlockFile, names_kind
from heads.dspark.head import DSparkHead, DSparkHeadConfig
from heads.storage import locate

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkSpeculator", "DSparkDraftModel")
CONFIDENCE, MARKOV = "confidence_head.proj.weight", "markov_head.markov_"


def load_dspark(
    path: str, revision: str | None = None, layers: Sequence[int] | None = None
) -> DSparkHead:
    """Loads a DSpark head, published or ours; float32, not attached.

    Args:
        path: folder or Hub id.
        revision: of a Hub id.
        layers: the target features that it fuses, as indices of `output_hidden_states`, in place
            of those in `config.json`.

    Raises:
        InputError: as `read_dspark`, or nothing is there.
    """
    return read_dspark(locate(path, revision), path, layers)


def read_dspark(folder: Path, path: str, layers: Sequence[int] | None = None) -> DSparkHead:
    """`load_dspark` of a folder that `locate` has found for `path`.

    Raises:
        InputError: missing, corrupt, pickled or foreign files; settings that contradict the
            tensors, or that this head does not compute.
    """
    found = BlockFile.open(folder, path)
    settings = found.settings
    kind = settings.get("markov_head_type", "vanilla")
    if kind not in [each.value for each in Markov]:
        allowed = ", ".join(each.value for each in Markov)
        raise found.error(f"config.json says markov_head_type={kind}: must be {allowed}")
    # speculators filled in masks before it wrote which it does, and vLLM reads such files so.
    plain = found.architecture(layers, anchored="speculators_model_type" not in settings)
    rank = found.number("markov_rank")
    if rank == 0:
        # What DeepSpec calls DFlash. Engines ask for a Markov head: one that adds nothing.
        rank = 1
        found.tensors[f"{MARKOV}w1.weight"] = torch.zeros(found.vocab.size, rank)
        found.tensors[f"{MARKOV}w2.weight"] = torch.zeros(len(found.vocab.ids), rank)
    confidence = found.tensors.get(CONFIDENCE)
    config = DSparkHeadConfig(
        **vars(plain),
        markov_rank=rank,
        markov_head_type=Markov(kind),
        confidence=confidence is not None,
        # The key's default differs between engines; the tensor's width does not.
        confidence_with_markov=confidence is not None
        and confidence.shape[-1] == plain.llama.hidden_size + rank,
    )
    head = DSparkHead(config, found.vocab)
    found.fill(head)
    return head


def holds(folder: Path) -> bool:
    """Whether a folder with a `config.json` says that it holds such a head."""
    return names_kind(folder, ARCHITECTURES, "dspark")
