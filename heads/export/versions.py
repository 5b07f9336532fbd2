"""Versions of engines that the project's exports and pages speak of.

A version was run, or its source was read; nothing is known of others. `docs/serving/README.md`
shows this table, and no page names another version. `make test-engines` runs the versions that were
run, and reads vLLM's newest wheel, of which there is no build for CPUs.
"""

from dataclasses import dataclass
from typing import Literal

from conf.settings.export import ExportFormat

VLLM_FORMATS = (ExportFormat.vllm, ExportFormat.speculators)


@dataclass(frozen=True)
class EngineCheck:
    """Check of a version of an engine.

    Attributes:
        engine: name of the engine, or of the repository of the authors' code.
        version: version; of a repository without versions, the commit.
        how: whether the version was run, or its source read.
        day: day of the check, as YYYY-MM-DD.
        what: what was checked.
        formats: formats that follow the loaders of this version.
    """

    engine: str
    version: str
    how: Literal["run", "read"]
    day: str
    what: str
    formats: tuple[ExportFormat, ...] = ()


CHECKS = (
    EngineCheck(
        "vLLM", "0.33.0", "read", "2026-11-28", "class names, methods, keys, loaders", VLLM_FORMATS
    ),
    EngineCheck(
        "vLLM", "0.32.0", "run", "2026-11-28", "texts, counters of each kind", VLLM_FORMATS
    ),
    EngineCheck(
        "speculators", "0.9.0", "run", "2026-11-28", "logits of EAGLE-3 and block heads",
        (ExportFormat.speculators,),
    ),
    EngineCheck(
        "SGLang", "0.5.23", "read", "2026-11-28", "class names, flags, keys, loaders",
        (ExportFormat.sglang,),
    ),
    EngineCheck(
        "llama.cpp", "b11549", "run", "2026-11-28", "texts, counters of each kind",
        (ExportFormat.llamacpp,),
    ),
    EngineCheck(
        "llama.cpp", "b11434", "read", "2026-11-25", "keys, tensors, types of targets",
        (ExportFormat.llamacpp,),
    ),
    EngineCheck(
        "TensorRT-LLM", "1.3", "read", "2026-11-28", "main: EAGLE-3's loader and settings",
        (ExportFormat.trtllm,),
    ),
    EngineCheck(
        "TensorRT-LLM", "1.1", "read", "2026-11-22", "Medusa's converter", (ExportFormat.trtllm,)
    ),
    EngineCheck(
        "SafeAILab/EAGLE", "cb7e084", "read", "2026-11-28", "loader, keys",
        (ExportFormat.original,),
    ),
    EngineCheck(
        "FasterDecoding/Medusa", "e2a5d20", "read", "2026-11-28", "names, keys",
        (ExportFormat.original,),
    ),
    EngineCheck(
        "z-lab/dflash", "44947fb", "read", "2026-11-28", "loader, keys", (ExportFormat.original,)
    ),
    EngineCheck(
        "deepseek-ai/DeepSpec", "afdfa7c", "read", "2026-11-28", "names, keys",
        (ExportFormat.original,),
    ),
)  # fmt: skip
"""Checks, an engine's newest version first."""


def format_versions(engine: ExportFormat) -> str:
    """Format the versions whose loaders a format follows: `vLLM 0.33.0 and 0.32.0`."""
    versions: dict[str, list[str]] = {}
    for check in CHECKS:
        if engine in check.formats:
            versions.setdefault(check.engine, []).append(check.version)
    return ", ".join(f"{name} {' and '.join(found)}" for name, found in versions.items())


LOADER_VERSIONS = {engine: format_versions(engine) for engine in ExportFormat}
"""Versions whose loaders each format follows, in words."""
