"""What the files of EAGLE heads may say wrongly; see `heads/readings.py`."""

from typing import Any

from conf.settings.eagle import EagleForm
from heads.eagle.config import default_layers
from heads.readings import Readings, flipped, layers, orders, parts, reread, rotations, vocabularies


def readings(head: Any) -> Readings:
    """Of any head of EAGLE's layers."""
    if head.config.form is EagleForm.eagle1:
        swapped = {"fc.weight": parts(head.fc.weight.detach(), (1, 0))}
        yield "fc reads the feature before the embedding", reread(head, tensors=swapped)
    else:
        yield from layers(head, default_layers)
        yield from orders(head)
        yield flipped(head, "norm_before_residual")
    yield from rotations(head)
    yield from vocabularies(head)
