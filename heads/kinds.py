"""Loading a head of any kind."""

from collections.abc import Sequence
from pathlib import Path

from conf.schema import InputError
from heads.eagle.formats import read_eagle
from heads.eagle.head import EagleHead
from heads.medusa.head import MedusaHead, is_medusa
from heads.storage import locate

Head = MedusaHead | EagleHead


def kind_of(head: Head) -> str:
    """`medusa`, `eagle1` or `eagle3`."""
    return "medusa" if isinstance(head, MedusaHead) else head.config.form.value


def load_head(path: str, revision: str | None = None, layers: Sequence[int] | None = None) -> Head:
    """Loads a Medusa or EAGLE head, trained, exported or published; float32, not attached.

    Args:
        path: folder or Hub id.
        revision: of a Hub id.
        layers: see `load_eagle`.

    Raises:
        InputError: as `MedusaHead.load` and `load_eagle`; `layers` for a Medusa head.
    """
    # Once: a second look at the Hub could find another commit.
    return read_head(locate(path, revision), path, layers)


def read_head(folder: Path, path: str, layers: Sequence[int] | None = None) -> Head:
    """`load_head` of a folder that `locate` has found for `path`."""
    if not is_medusa(folder):
        return read_eagle(folder, path, layers)
    if layers is not None:
        raise InputError(
            f"head.path={path}: a Medusa head reads the last hidden state: leave head.layers unset"
        )
    return MedusaHead.read(folder, path)
