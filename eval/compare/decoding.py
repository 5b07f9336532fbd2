"""Texts of one way to draft, in steps that are captured where they can be."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from eval.decode.captured import Captured, CaptureError, obstacle
from eval.decode.engine import Generation, Request, decode_many
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import Sampling
from heads.target_model.model import Target


class Decoding:
    """Decodes prompts.

    Args:
        target: the target.
        make: a fresh drafter for texts with these seeds.
        max_new_tokens: of a text.
        sampling: how tokens are chosen.
        capture: whether steps may be CUDA graphs.

    Attributes:
        settings: `captured`, on a GPU: what of a step is one launch, or why nothing is.
    """

    def __init__(
        self,
        target: Target,
        make: Callable[[list[int]], Drafter],
        max_new_tokens: int,
        sampling: Sampling,
        capture: bool,
    ) -> None:
        self.target, self.make, self.sampling = target, make, sampling
        self.max_new_tokens, self.settings = max_new_tokens, dict[str, Any]()
        self._captured: Captured | None = None
        if target.device.type == "cuda":
            why = obstacle(target, sampling) if capture else "cuda_graphs=false"
            self._captured = None if why else Captured(target, make, max_new_tokens)
            self.settings["captured"] = self._captured.what if self._captured else f"no: {why}"

    def __call__(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], batch_size: int
    ) -> list[Generation]:
        """Texts of prompts, given one seed each, so many at a time."""
        requests = list(map(Request, prompts, seeds))
        if self._captured is not None:
            try:
                return self._captured.decode(requests, batch_size)
            except CaptureError as error:
                self._captured, self.settings["captured"] = None, f"no: {error}"
                Console(stderr=True).print(
                    f"steps are launched operation by operation, as CUDA does not capture them "
                    f"({error}); cuda_graphs=false does not try",
                    highlight=False,
                    markup=False,
                )
        return decode_many(
            self.target, self.make, requests, self.max_new_tokens, batch_size, self.sampling
        )
