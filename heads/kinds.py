"""The table of draft heads, and what finds them: a new kind is a folder and a line here."""

from collections.abc import Sequence
from pathlib import Path

from conf.errors import InputError
from heads.dflash.head import DFlashHead
from heads.dflash2.head import DFlash2Head
from heads.dspark.head import DSparkHead
from heads.eagle.head import EagleHead
from heads.head import DraftHead
from heads.medusa.head import MedusaHead
from heads.peagle.head import PEagleHead
from heads.storage import locate
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.vocab import DraftVocab

HEADS: dict[str, type[DraftHead]] = {
    "eagle": EagleHead,  # first, so asked last: its files have no sign of their own
    "medusa": MedusaHead,
    "dflash": DFlashHead,
    "dflash2": DFlash2Head,
    "dspark": DSparkHead,
    "peagle": PEagleHead,
}
"""Kinds of heads by name: of the folder, the entry script `train/{name}.py`, the ways to draft."""


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
        path: folder or Hub id.
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
    """`load_head` of a folder that `locate` has found for `path`."""
    for kind in reversed(HEADS.values()):
        head = kind.load(folder, path, layers)
        if head is not None:
            return head
    raise InputError(f"head.path={path}: no head there; known are {', '.join(HEADS)}")


def fresh_head(variant: str, target: EmbeddingsAndHead, vocab: DraftVocab) -> DraftHead:
    """An untrained head with the usual settings, for benchmarks; `vocab` where it may choose."""
    kind = by_variant()[variant]
    return kind.untrained(target, kind.variants[variant].settings(), vocab, seed=0)
