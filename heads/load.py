"""Loading a head of any kind."""

from collections.abc import Sequence

from conf.schema import InputError
from heads.eagle import EagleHead
from heads.eagle_formats import read_eagle
from heads.medusa import WEIGHTS, MedusaHead
from heads.storage import locate

Head = MedusaHead | EagleHead


def load_head(path: str, revision: str | None = None, layers: Sequence[int] | None = None) -> Head:
    """Loads a Medusa or EAGLE head; float32, not attached.

    A folder with `medusa_lm_head.safetensors` is a Medusa head, any other an EAGLE head.

    Args:
        path: folder or Hub id.
        revision: of a Hub id.
        layers: see `load_eagle`.

    Raises:
        InputError: as `MedusaHead.load` and `load_eagle`; `layers` for a Medusa head.
    """
    # Once: a second look at the Hub could find another commit.
    folder = locate(path, revision)
    if not (folder / WEIGHTS).is_file():
        return read_eagle(folder, path, layers)
    if layers is not None:
        raise InputError(
            f"head.path={path}: a Medusa head reads the last hidden state: leave head.layers unset"
        )
    return MedusaHead.read(folder, path)
