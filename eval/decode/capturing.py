"""What of a step is captured as a CUDA graph: all of it, its verify pass, or nothing."""

from collections.abc import Callable, Sequence

from eval.decode.captured import CapturedBatch, Rows
from eval.decode.generation import Generation, Request
from eval.decode.passes import PassedBatch, Passes
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import Sampling
from heads.target_model.model import Target


def obstacle(target: Target, sampling: Sampling) -> str:
    """Why passes of a target cannot be captured; empty where they can."""
    if not sampling.greedy:
        return "tokens are sampled by generators of the host"
    if len({each.device for each in target.model.parameters()}) > 1:
        return "the target's layers lie on several devices"
    if target.is_recurrent:
        return "the target's recurrent layers run by levels"
    if target.rope.switch is not None:
        return "the target reads texts beyond a length in another way"
    if target.logits_processing:
        return "the target's generation config asks for processors of logits"
    return ""


class Captured:
    """Decodes greedy texts of one way to draft; what it captures for one serves the next ones.

    Args:
        target: the target, without an `obstacle`.
        make: a fresh drafter for texts with these seeds.
        max_new_tokens: of a text.

    Attributes:
        what: is captured.
    """

    def __init__(
        self, target: Target, make: Callable[[list[int]], Drafter], max_new_tokens: int
    ) -> None:
        self.target, self.make, self.max_new_tokens = target, make, max_new_tokens
        self.what = "verify pass" if make([0]).static_nodes is None else "step"
        self._rows: Rows | None = None
        self._passes: Passes | None = None

    def decode(self, requests: Sequence[Request], batch_size: int) -> list[Generation]:
        """See `decode_many`.

        Raises:
            CaptureError: CUDA does not capture them.
        """
        # Batches give rows up as they end, and what they leave holds a cache: none is kept.
        given, single = (self.target, requests, self.max_new_tokens), batch_size == 1
        if self.what == "step":
            steps = CapturedBatch(*given, self._rows)
            found = steps.decoded(self.make, batch_size)
            self._rows = steps.rows if single else None
        else:
            passes = PassedBatch(*given, self._passes if single else None)
            found = passes.decoded(self.make, batch_size)
            self._passes = passes.passes if single else None
        return found
