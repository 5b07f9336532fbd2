"""EAGLE heads as a kind of draft head."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from conf.settings.eagle import EagleConfig, EagleForm
from conf.settings.export import ExportFormat
from heads.decoding.chains import Calibration
from heads.decoding.sampling import Sampling, drafter_seeds
from heads.decoding.tree import DynamicShape, Shape, usual_dynamic_shape
from heads.eagle import card, export, golden, layouts
from heads.eagle.config import default_layers
from heads.eagle.drafter import EagleChain, EagleTree
from heads.eagle.formats import read_eagle
from heads.eagle.head import EagleHead
from heads.eagle.layouts import EagleLayout
from heads.eagle.readings import readings
from heads.kind import Files, Kind
from heads.readings import flipped
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.vocab import DraftVocab

USUAL_DEPTH, LONGEST = 5, 8
Head = TypeVar("Head", bound=EagleHead)


class EagleFamily(Kind[Head]):
    """What kinds of heads of EAGLE's layers answer alike."""

    static = False

    @abstractmethod
    def layout(self, head: Head, engine: ExportFormat) -> EagleLayout | None:
        """What an engine wants of such a head; None if it loads none."""

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """EAGLE-3's low, middle and high features."""
        return default_layers(num_layers, "layers")

    def readings(self, head: Head) -> Iterator[tuple[str, Head]]:
        """See `heads/eagle/readings.py`."""
        return readings(head)

    def pruning_problem(self, head: Head) -> str | None:
        """A head without an output head of its own has no rows to lose."""
        if head.lm_head is not None:
            return None
        return (
            f"this {head.config.form.value} head drafts through the target's output head, of which "
            "no row can go; allowed: heads that project onto the ids by weights of their own"
        )

    def export_problem(self, head: Head, engine: ExportFormat) -> str | None:
        """See `heads/eagle/layouts.py`."""
        layout = self.layout(head, engine)
        if layout is None:
            return f"loads no {self.forms[self.form(head)]}"
        return layouts.problem(head, layout)

    def check_target(self, head: Head, engine: ExportFormat) -> None:
        """See `heads/eagle/layouts.py`."""
        layouts.check_target(head, engine, self._served(head, engine))

    def files(self, head: Head, engine: ExportFormat) -> Files:
        """See `heads/eagle/export.py`."""
        return export.files(head, engine, self._served(head, engine))

    def _served(self, head: Head, engine: ExportFormat) -> EagleLayout:
        layout = self.layout(head, engine)
        assert layout is not None  # `export_problem` has said so
        return layout

    copied = staticmethod(card.copied)


class EagleKind(EagleFamily[EagleHead]):
    """See `heads/kind.py`."""

    head = EagleHead
    forms: ClassVar = {form.value: title for form, title in layouts.TITLES.items()}
    phrase = "an EAGLE head"

    def form(self, head: EagleHead) -> str:
        """`eagle1` or `eagle3`."""
        return head.config.form.value

    def holds(self, folder: Path) -> bool:
        """Whatever it is, the reader says what it lacks."""
        return (folder / "config.json").is_file()

    read = staticmethod(read_eagle)

    def most_tokens(self, head: EagleHead) -> None:
        """It goes on from its own outputs to any depth."""

    def usual_depth(self, head: EagleHead) -> int:
        """As engines draft."""
        return USUAL_DEPTH

    def longest(self, head: EagleHead) -> int:
        """Beyond, drafts are hardly ever right to the end."""
        return LONGEST

    def usual_shape(self, head: EagleHead, gpu: bool | None = None) -> DynamicShape:
        """EAGLE-2's trees."""
        return usual_dynamic_shape(gpu)

    def drafter(
        self,
        head: EagleHead,
        shape: Shape,
        sampling: Sampling,
        seeds: Sequence[int],
        calibration: Calibration | None = None,
    ) -> EagleChain | EagleTree:
        """Chains draw when the target does; trees are ranked."""
        if isinstance(shape, DynamicShape):
            return EagleTree(head, shape)
        return EagleChain(head, shape.depth, sampling, drafter_seeds(seeds), calibration)

    def untrained(self, target: EmbeddingsAndHead, form: str, vocab: DraftVocab) -> EagleHead:
        """EAGLE-1 drafts through the target's output head, so all ids."""
        eagle1 = EagleForm(form) is EagleForm.eagle1
        chosen = DraftVocab.everything(vocab.size) if eagle1 else vocab
        return EagleHead.from_target(target, EagleConfig(form=EagleForm(form)), chosen, seed=0)

    def readings(self, head: EagleHead) -> Iterator[tuple[str, EagleHead]]:
        """Also of what is fed back."""
        yield from super().readings(head)
        if head.config.form is EagleForm.eagle3:
            yield flipped(head, "norm_output")

    def layout(self, head: EagleHead, engine: ExportFormat) -> EagleLayout | None:
        """What an engine wants of such a head; None if it loads none."""
        return layouts.LAYOUTS.get(engine, {}).get(head.config.form)

    serve_command = staticmethod(export.serve_command)
    hint = staticmethod(export.hint)
    drafted = staticmethod(golden.drafted)
    facts = staticmethod(card.facts)
