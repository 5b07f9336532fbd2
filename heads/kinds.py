"""The table of draft heads, and what finds them: a new kind is a folder and a line here."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from conf.errors import InputError
from heads.blocks import gguf as blocks_gguf
from heads.dflash.head import DFlashHead
from heads.dflash2.head import DFlash2Head
from heads.dspark.head import DSparkHead
from heads.eagle import gguf as eagle_gguf
from heads.eagle.head import EagleHead
from heads.export.gguf import GgufFile, Value
from heads.folders import PROVENANCE, gguf_in
from heads.head import WEIGHTS, DraftHead
from heads.medusa.head import MedusaHead
from heads.mtp.head import MtpHead
from heads.peagle.head import PEagleHead
from heads.storage import locate, save_head
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.vocab import DraftVocab

HEADS: dict[str, type[DraftHead]] = {
    "eagle": EagleHead,  # first, so asked last: its files have no sign of their own
    "medusa": MedusaHead,
    "dflash": DFlashHead,
    "dflash2": DFlash2Head,
    "dspark": DSparkHead,
    "peagle": PEagleHead,
    "mtp": MtpHead,
}
"""Kinds of heads by name: of the folder, the entry script `train/{name}.py`, the ways to draft."""
ARCHITECTURES = {eagle_gguf.ARCH: eagle_gguf.opened, blocks_gguf.ARCH: blocks_gguf.opened}
"""Openers of heads' GGUF files, by what llama.cpp calls the architecture."""


def name_of(head: DraftHead) -> str:
    """The name of a head's line in the table."""
    return next(name for name, kind in HEADS.items() if type(head) is kind)


def by_variant() -> dict[str, type[DraftHead]]:
    """The head of each variant, as files and benchmarks name it: `medusa`, `eagle1`, `eagle3`."""
    return {variant: head for head in HEADS.values() for variant in head.variants}


def load_head(
    path: str, revision: str | None = None, layers: Sequence[int] | None = None
) -> DraftHead:
    """Loads a head, trained, exported or published; float32, not attached.

    Args:
        path: folder, GGUF file or Hub id.
        revision: of a Hub id: branch, tag, commit or `refs/pr/1`.
        layers: the target features that it fuses, as indices of `output_hidden_states`, in place
            of those in `config.json`. Those are taken to count as vLLM, speculators and we do;
            heads of SGLang, SpecForge and ModelOpt may count the layer whose output is read, which
            is one less: they need `layers` with 1 added to each.

    Raises:
        InputError: nothing there, or nothing that any kind of head reads; missing, corrupt,
            pickled or foreign files; a tensor too many, too few or misshapen; settings that
            contradict the tensors; an architecture that is not served.
    """
    # Once: a second look at the Hub could find another commit.
    return read_head(locate(path, revision), path, layers)


def read_head(folder: Path, path: str, layers: Sequence[int] | None = None) -> DraftHead:
    """`load_head` of a folder or GGUF file that `locate` has found for `path`."""
    if (file := gguf_in(folder)) is not None:
        with TemporaryDirectory() as native:
            _unpack(file, folder, path, Path(native))
            return read_head(Path(native), path, layers)
    for kind in reversed(HEADS.values()):
        head = kind.load(folder, path, layers)
        if head is not None:
            return head
    raise InputError(f"head.path={path}: no head there; known are {', '.join(HEADS)}")


def _unpack(file: Path, folder: Path, path: str, native: Path) -> None:
    """Fills a folder with what a GGUF file holds, as the authors of such heads name it.

    Raises:
        InputError: of another architecture, quantised, or without what makes a head.
    """
    opened, what = GgufFile(file, "head.path"), f"head.path={path}"
    architecture = opened.metadata.get("general.architecture", Value.of("none")).content
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"{what}: a GGUF file of the architecture {architecture}; heads are of "
            f"{', '.join(ARCHITECTURES)}"
        )
    record = folder / PROVENANCE
    export = json.loads(record.read_text()).get("export", {}) if record.is_file() else {}
    config, tensors = ARCHITECTURES[architecture](opened, what, export.get("added", []))
    save_head(native, WEIGHTS, tensors, {"config.json": config})


def fresh_head(variant: str, target: EmbeddingsAndHead, vocab: DraftVocab) -> DraftHead:
    """An untrained head with the usual settings, for benchmarks; `vocab` where it may choose."""
    kind = by_variant()[variant]
    return kind.untrained(target, kind.variants[variant].settings(), vocab, seed=0)
