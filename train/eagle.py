"""Trains EAGLE heads: `accelerate launch train/eagle.py head=eagle3 target.path=... ...`.

`head=` names a recipe of `conf/head/`: eagle1, eagle3, eagle3_1 or hass.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from collections.abc import Iterator
from zlib import crc32

import torch
from torch import Tensor
from torch.profiler import record_function

from conf import entry
from conf.schema import InputError
from conf.schema_eagle import EagleConfig, EagleForm, EagleRun, OutputHead, TokenNormalizer
from data.features import StoredDataset
from data.layout import HIDDEN, TEACHER_IDS, TEACHER_LOG_PROBS
from data.pack import PackedDataset
from heads.branch_attention import Branches, causal_rows
from heads.eagle import EagleHead
from heads.eagle_formats import load_eagle
from heads.ends import TargetEnds
from heads.vocab import DraftVocab, coverage_lines
from train import command, same
from train.eagle_losses import MEASURES, EagleCriterion, Step, eagle_loss, step_weights
from train.fused import Teacher
from train.losses import Batch, Sums, answered, supervised, supervised_counts
from train.objective import Objective
from train.states import states_of, with_states
from train.teachers import HiddenTeacher, TopKTeacher


class EagleObjective(Objective):
    """The training-time test of a batch."""

    measures = MEASURES

    def __init__(self, head: EagleHead, target: TargetEnds, config: EagleConfig) -> None:
        super().__init__()
        self.head = head
        self.target = target
        self.config = config
        self.weights = step_weights(config)
        self.criterion = EagleCriterion(config, head.vocab)
        self.same = same.settings("head", config, "path", "revision")
        self.same["checksum of the draft vocabulary"] = crc32(
            head.vocab.ids.cpu().numpy().tobytes()
        )

    def compile_parts(self) -> None:
        """From now on compiles the loss, and the parts of the layer that fuse well."""
        self.criterion.compiled = True
        self.head.compile_layers()

    def counts(self, batch: Batch) -> Tensor:
        """[J] float32, what the summed loss of each step is divided by."""
        if self.config.token_normalizer is TokenNormalizer.supervised:
            return supervised_counts(batch, self.config.num_steps)
        num_tokens = (batch["document_ids"] >= 0).sum().float()
        return num_tokens.expand(self.config.num_steps)

    def prepare(self, batch: Batch) -> Batch:
        """The batch with the target's states."""
        return with_states(self.target, batch, self.head.reads)

    def forward(self, batch: Batch, scale: Tensor) -> Sums:
        """What the head gives on a prepared batch; `scale` [J] weighs the losses of the steps."""
        sequences = []
        for index in range(len(batch["input_ids"])):
            one = {name: rows[index : index + 1] for name, rows in batch.items()}
            sequences.append(self._sequence(one, scale))
        return Sums(*(torch.stack(column).sum(0) for column in zip(*sequences, strict=True)))

    def _sequence(self, batch: Batch, scale: Tensor) -> Sums:
        """One packed sequence."""
        config, head = self.config, self.head
        learnt = [supervised(batch, d)[0] for d in range(1, config.num_steps + 1)]
        # One row that nothing is learnt from keeps every parameter in the graph.
        rows = torch.stack(learnt).any(0).nonzero().squeeze(1)
        rows = rows if len(rows) else rows.new_zeros(1)
        places, number = answered(batch)
        with record_function("head"):
            outputs = self._unrolled(batch, rows)
            steps = [
                Step(next(outputs)[mask[rows]], number[mask.nonzero().squeeze(1) + d])
                for d, mask in enumerate(learnt, start=1)
            ]
        with record_function("loss"):
            teacher, features = self._teacher(batch, places)
            return eagle_loss(self.criterion, head, steps, teacher, features, scale)

    def _unrolled(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        """[N, H] outputs of each step at rows of a sequence."""
        head, ids = self.head, batch["input_ids"][0]
        features = self._noisy(head.features(states_of(batch))[0], batch)
        text = head.read(head.fuse(features), ids.roll(-1), batch["position_ids"][0])
        allowed = causal_rows(batch["document_ids"][0], rows)
        branches = Branches(text.keys[None], text.values[None], allowed)
        return head.unroll(text, ids, rows, branches, self.config.detach_features)

    def _teacher(self, batch: Batch, places: Tensor) -> tuple[Teacher, Tensor | None]:
        """What the target says after some tokens, and its features there if it was stored."""
        vocab = self.head.vocab
        if TEACHER_IDS in batch:
            kept = (batch[name][0, places] for name in (TEACHER_IDS, TEACHER_LOG_PROBS))
            return TopKTeacher(vocab, *kept), None
        hidden = batch[HIDDEN][0, places]
        return HiddenTeacher(self.target, vocab, hidden), hidden

    def _noisy(self, features: Tensor, batch: Batch) -> Tensor:
        """Adds U(-noise / 2, noise / 2) * 512 / T while training (EAGLE, `train/main.py`)."""
        if not self.training or not self.config.noise:
            return features
        width = self.config.noise * 512 / len(features)
        generator = torch.Generator(features.device).manual_seed(int(batch["noise_seed"]))
        draws = torch.rand(features.shape, generator=generator, device=features.device)
        return features + (draws - 0.5).to(features) * width


def main(config: EagleRun) -> None:
    """Trains to `out_dir/head`."""

    def build(
        target: TargetEnds, train: PackedDataset | StoredDataset
    ) -> tuple[EagleObjective, list[str]]:
        head, lines = make_head(config, target, train)
        return EagleObjective(head, target, config.head), lines

    command.train(config, build)


def make_head(
    config: EagleRun, target: TargetEnds, train: PackedDataset | StoredDataset
) -> tuple[EagleHead, list[str]]:
    """An untrained head, or a saved one that fits the target; and what to say about it.

    Raises:
        InputError: it does not fit, or is of another form than the recipe.
    """
    settings = config.head
    counts = train.token_counts(target.vocab_size)
    always = target.special_ids
    if settings.path is not None:
        head = load_eagle(settings.path, settings.revision, settings.layers).attach(target)
        if head.config.form is not settings.form:
            raise InputError(
                f"head.path={settings.path} is an {head.config.form.value} head, but the recipe "
                f"is for head.form={settings.form.value}: choose another head=..."
            )
        if head.lm_head is not None:
            head.lm_head.requires_grad_(settings.output_head is not OutputHead.frozen)
    else:
        size = settings.draft_vocab_size if settings.form is EagleForm.eagle3 else None
        vocab = DraftVocab.choose(counts, size, always)
        head = EagleHead.from_target(target, settings, vocab, config.seed)
    if head.lm_head is None and not target.output_head.weight.is_floating_point():
        raise InputError(
            f"target.path={target.name}: its output head is quantised, and this head is trained "
            "through it; name the model before quantisation (target.quantization leaves it alone)"
        )
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    lines = coverage_lines(counts, head.vocab.to("cpu"), always) if not head.vocab.full else []
    name = head.config.form.value
    lines.append(f"head: {name}, {settings.num_steps} steps, {trained / 1e6:.1f} M parameters")
    return head, lines


if __name__ == "__main__":
    entry.run(main, EagleRun, "eagle")
