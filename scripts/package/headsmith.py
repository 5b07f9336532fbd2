"""Headsmith trains, measures and publishes draft heads for speculative decoding.

The names below are its public Python. `headsmith --help` lists its commands.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from scripts.package import console

if TYPE_CHECKING:
    from train.api import (
        Acceptance,
        Answer,
        InputError,
        StepLoss,
        TargetOutput,
        acceptance,
        engine_tensors,
        frozen_parts,
        generate,
        load_head,
        load_target,
        training_objective,
        training_step,
    )

__all__ = (
    "Acceptance", "Answer", "InputError", "StepLoss", "TargetOutput", "acceptance",
    "engine_tensors", "frozen_parts", "generate", "load_head", "load_target",
    "training_objective", "training_step",
)  # fmt: skip
__version__ = version("headsmith")
main = console.main


if not TYPE_CHECKING:  # so that mypy and editors refuse other names

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used, as torch takes seconds."""
        if name not in __all__:
            raise AttributeError(f"module 'headsmith' has no attribute {name!r}")
        from train import api

        return getattr(api, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
