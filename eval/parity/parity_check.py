"""Parity check: an export, read as its serving engine reads it, gives the trained head's logits.

This package does not use the code that trains or exports heads. Names, keys and defaults are those
of vLLM, SGLang and others, so that the check cannot repeat an exporter's mistake.

Letters: S rows, D depths, R compared ids.
"""

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from conf.errors import InputError
from eval.parity import readers
from eval.parity.decoder import ServedHead
from eval.parity.export_files import Export, ReferenceLogits, load_export, load_reference_logits

FORMATS = ("vllm", "sglang", "trtllm", "speculators", "original", "llamacpp")
TOLERANCE = 1e-4
"""Allowed difference as a share of the largest logit. Both sides sum in different order: trained
heads differ by 1e-6 of it, random weights by 4e-5 at most; rounding a single tensor to bfloat16
changes it by 1e-4 to 1e-3."""


@dataclass(frozen=True)
class ParityResult:
    """Result for an export that equals the trained head.

    Attributes:
        lines: one line per check.
        max_difference: largest difference of logits.
        scale: largest |logit|.
    """

    lines: list[str]
    max_difference: float
    scale: float


class Reader(Protocol):
    """Module of `eval/parity/readers/`."""

    FORMATS: dict[str, tuple[str, ...]]
    """Formats that the module reads, by kind of head."""

    def build_head(self, export: Export, golden: ReferenceLogits) -> ServedHead:
        """Read the head of an export.

        Raises:
            InputError: the serving engine would refuse the files, guess, or serve another head.
        """


def load_readers() -> dict[str, dict[str, Reader]]:
    """Load all modules in the folder of readers, by kind of head and format."""
    by_kind: dict[str, dict[str, Reader]] = {}
    for module in pkgutil.iter_modules(readers.__path__, f"{readers.__name__}."):
        reader = cast(Reader, importlib.import_module(module.name))
        for kind, formats in reader.FORMATS.items():
            by_kind.setdefault(kind, {}).update(dict.fromkeys(formats, reader))
    return by_kind


@torch.no_grad()
def check_parity(folder: Path, engine: str | None = None) -> ParityResult:
    """Read an export as its serving engine does, and compare its logits with the trained head's.

    Args:
        folder: folder of the export.
        engine: one of `FORMATS`, if `headsmith.json` does not name it.

    Raises:
        InputError: the serving engine would refuse, ignore, guess or compute something differently;
            names the file and the tensor or key.
    """
    by_kind = load_readers()
    golden = load_reference_logits(folder, sorted(by_kind))
    export = load_export(folder, engine, golden)
    reader = by_kind[export.kind].get(export.format)
    if reader is None:
        raise InputError(
            f"{folder}: format {export.format} has no heads of kind {export.kind}; allowed: "
            f"{sorted(by_kind[export.kind])}"
        )
    served = reader.build_head(export, golden)
    difference, scale = _compare_logits(golden, list(served.iter_logits()))
    read = f"{folder}: format {export.format}, head {export.kind}"
    return ParityResult([read, *served.report_lines], difference, scale)


def _compare_logits(
    golden: ReferenceLogits, served: list[tuple[Tensor, Tensor | None]]
) -> tuple[float, float]:
    """Compare logits; return their largest difference, and the largest |logit|."""
    all_ids = golden.require_tensor("ids", (None,))
    trained = golden.require_tensor("logits", (len(served), None, len(all_ids)))
    logits = torch.stack([of_depth for of_depth, _ in served])
    finite = trained.isfinite()
    other = (finite != logits.isfinite()).flatten(0, 1).any(dim=0)
    if other.any():
        ids = all_ids[other]
        raise InputError(
            f"{golden.file}: logits: the served head drafts other ids than the trained one; "
            f"{len(ids)} of those compared differ, the first {ids[:5].tolist()}. Check d2t"
        )
    if not finite.any(dim=-1).all():
        raise InputError(f"{golden.file}: logits: a whole row is -inf; export again")
    scale = trained[finite].abs().max().item()
    difference = torch.where(finite, logits - trained, 0.0).abs()
    _check_difference(golden, "logits", difference, scale)
    sums = [of_depth for _, of_depth in served if of_depth is not None]
    # Absent if the trained head used the target's output head, whose rows are incomplete.
    if sums and "output_head" not in golden.tensors:
        trained_sums = golden.require_tensor("logsumexp", tuple(trained.shape[:2]))
        _check_difference(
            golden, "logsumexp", (torch.stack(sums) - trained_sums).abs()[..., None], scale
        )
    return difference.max().item(), scale


def _check_difference(golden: ReferenceLogits, name: str, difference: Tensor, scale: float) -> None:
    """Raise an error with the worst depth and row of [D, S, R] if a difference is too large."""
    worst = difference.max().item()
    if worst <= TOLERANCE * scale:
        return
    _, num_rows, num_ids = difference.shape
    depth, place = divmod(int(difference.argmax()), num_rows * num_ids)
    depths = [f"{worst_of_depth:.1e}" for worst_of_depth in difference.amax(dim=(1, 2)).tolist()]
    raise InputError(
        f"{golden.file}: {name} of the served head differ from the trained head's by up to "
        f"{worst:.2e} at depth {depth}, row {place // num_ids}; allowed {TOLERANCE * scale:.1e} of "
        f"logits up to {scale:.3g}; by depth {', '.join(depths)}. Its weights, RoPE, layers or "
        "norms are not the trained head's; export again"
    )
