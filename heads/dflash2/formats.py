"""Reading DFlash-2 heads: see `heads/blocks/formats.py`."""

from collections.abc import Sequence
from pathlib import Path

from heads.blocks.formats import BlockFile, names_kind
from heads.dflash2.head import SCALES, DFlash2Head, DFlash2HeadConfig
from heads.storage import locate

ARCHITECTURES = ("DFlash2DraftModel", "DFlash2Speculator")


def load_dflash2(
    path: str, revision: str | None = None, layers: Sequence[int] | None = None
) -> DFlash2Head:
    """Loads a DFlash-2 head, published or ours; float32, not attached.

    Args:
        path: folder or Hub id.
        revision: of a Hub id.
        layers: the target features that it fuses, as indices of `output_hidden_states`, in place
            of those in `config.json`.

    Raises:
        InputError: as `read_dflash2`, or nothing is there.
    """
    return read_dflash2(locate(path, revision), path, layers)


def read_dflash2(folder: Path, path: str, layers: Sequence[int] | None = None) -> DFlash2Head:
    """`load_dflash2` of a folder that `locate` has found for `path`.

    Raises:
        InputError: missing, corrupt, pickled or foreign files; settings that contradict the
            tensors, or that this head does not compute.
    """
    found = BlockFile.open(folder, path, SCALES)
    if not found.vocab.full or "lm_head.weight" in found.tensors:
        raise found.error("an output head of its own: a DFlash-2 head drafts with the target's")
    plain = found.architecture(layers, anchored=False)
    if plain.sample_from_anchor:
        raise found.error("config.json says sample_from_anchor=True: allowed: false")
    scales = {name: found.settings.get(name, usual) for name, usual in SCALES.items()}
    if not all(isinstance(each, int | float) for each in scales.values()):
        raise found.error(f"config.json has {scales}: must be numbers")
    config = DFlash2HeadConfig(
        **vars(plain),
        **scales,
        conv_kernel_size=found.number("conv_kernel_size"),
        conv_group_size=found.number("conv_group_size"),
        selector_rank=found.number("selector_rank"),
        selector_top_k=found.number("selector_top_k"),
    )
    head = DFlash2Head(config, found.vocab)
    found.fill(head)
    return head


def holds(folder: Path) -> bool:
    """Whether a folder with a `config.json` says that it holds such a head."""
    return names_kind(folder, ARCHITECTURES, "dflash2")
