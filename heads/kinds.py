"""Table of draft heads and their loader. A new kind needs a file or folder, and a line here."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from conf.errors import InputError
from heads.blocks import layouts as block_layouts
from heads.blocks.dflash import DFlashHead
from heads.blocks.dflash2 import DFlash2Head
from heads.blocks.dspark import DSparkHead
from heads.draft_head import WEIGHTS, DraftHead
from heads.eagle import layouts as eagle_layouts
from heads.eagle.eagle import EagleHead
from heads.eagle.peagle import PEagleHead
from heads.export.gguf import GgufFile, Value
from heads.folders import find_head_gguf, load_export_record, locate_head, write_head_folder
from heads.medusa import MedusaHead
from heads.mtp.mtp import MtpHead
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.vocab import DraftVocab

HEADS: dict[str, type[DraftHead]] = {
    "eagle": EagleHead,  # tried last, as its files have no mark of their own
    "medusa": MedusaHead,
    "dflash": DFlashHead,
    "dflash2": DFlash2Head,
    "dspark": DSparkHead,
    "peagle": PEagleHead,
    "mtp": MtpHead,
}
"""Kinds of heads by name; `train/{name}.py` trains a kind."""
GGUF_READERS = {
    eagle_layouts.ARCH: eagle_layouts.load_gguf_tensors,
    block_layouts.ARCH: block_layouts.load_gguf_tensors,
}
"""Readers of heads' GGUF files by llama.cpp's architecture."""


def find_kind_name(head: DraftHead) -> str:
    """Find the name of a head's kind in `HEADS`."""
    return next(name for name, kind in HEADS.items() if type(head) is kind)


def build_variant_table() -> dict[str, type[DraftHead]]:
    """Build the table of heads by variant: `medusa`, `eagle1`, `eagle3`, ..."""
    return {variant: head for head in HEADS.values() for variant in head.variants}


def load_head(
    path: str, revision: str | None = None, layers: Sequence[int] | None = None
) -> DraftHead:
    """Load a head in float32, not attached: trained, exported or published.

    Args:
        path: folder, GGUF file or Hub id.
        revision: branch, tag, commit or `refs/pr/1` of a Hub id.
        layers: hidden states that the head fuses, as indices of `output_hidden_states`; None for
            the layers in `config.json`, read as vLLM, speculators and Headsmith count. Heads of
            SGLang, SpecForge and ModelOpt may count the layer whose output is read: name `layers`
            with 1 added to each.

    Raises:
        InputError: no head that any kind can read; files are missing, corrupt, pickled or foreign;
            a tensor is missing, unknown or of another shape; settings contradict the tensors, or
            are not implemented.
    """
    # Located once, as the Hub might return another commit the second time.
    return load_local_head(locate_head(path, revision), path, layers)


def load_local_head(folder: Path, path: str, layers: Sequence[int] | None = None) -> DraftHead:
    """Load a head like `load_head` from a folder or file that `locate_head` found."""
    if (file := find_head_gguf(folder)) is not None:
        opened = GgufFile(file, "head.path")
        architecture = opened.metadata.get("general.architecture", Value.from_content("none"))
        if architecture.content not in GGUF_READERS:
            raise InputError(
                f"head.path={path}: a GGUF file of architecture {architecture.content}; allowed: "
                f"{', '.join(GGUF_READERS)}"
            )
        added = load_export_record(folder).get("added", [])
        config, tensors = GGUF_READERS[architecture.content](opened, added)
        with TemporaryDirectory() as native:  # in the authors' layout
            write_head_folder(Path(native), WEIGHTS, tensors, {"config.json": config})
            return load_local_head(Path(native), path, layers)
    for kind in reversed(HEADS.values()):
        head = kind.from_folder(folder, path, layers)
        if head is not None:
            return head
    raise InputError(f"head.path={path}: no head there; known kinds: {', '.join(HEADS)}")


def make_untrained_head(
    variant: str, target: EmbeddingsAndOutputHead, vocab: DraftVocab
) -> DraftHead:
    """Make a new head with default settings, for benchmarks.

    Args:
        variant: name of the variant.
        target: the frozen target.
        vocab: draft vocabulary, if the head can restrict it.
    """
    kind = build_variant_table()[variant]
    return kind.from_settings(target, kind.variants[variant].settings(), vocab, seed=0)
