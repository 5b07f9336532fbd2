"""Trains EAGLE heads: `accelerate launch train/eagle.py head=eagle3 target.path=... ...`.

`head=` names a recipe of `conf/head/`: eagle1, eagle3, eagle3_1 or hass.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

import torch
from torch import Tensor, nn

from conf import entry
from conf.schema import InputError
from conf.schema_eagle import EagleConfig, EagleForm, EagleRun, OutputHead, TokenNormalizer
from data.pack import PackedDataset
from heads.branch_attention import Branches, causal_rows
from heads.eagle import EagleHead
from heads.eagle_formats import load_eagle
from heads.target import Target, TargetOutput
from heads.vocab import DraftVocab, coverage_lines
from train import command
from train.eagle_losses import StepSums, Teacher, step_loss, step_weights
from train.losses import Batch, supervised, supervised_counts


class EagleObjective(nn.Module):
    """The training-time test of a batch, with features taken from the target on the way."""

    measures = StepSums._fields[2:]

    def __init__(self, head: EagleHead, target: Target, config: EagleConfig) -> None:
        super().__init__()
        self.head = head
        self.target = target
        self.config = config
        self.weights = step_weights(config)

    def counts(self, batch: Batch) -> Tensor:
        """[J] float32, what the summed loss of each step is divided by."""
        if self.config.token_normalizer is TokenNormalizer.supervised:
            return supervised_counts(batch, self.config.num_steps)
        num_tokens = (batch["document_ids"] >= 0).sum().float()
        return num_tokens.expand(self.config.num_steps)

    def forward(self, batch: Batch) -> StepSums:
        """The sums of each step over `batch`, a dict of [B, T] tensors."""
        output = self.target.read(
            batch["input_ids"], batch["position_ids"], batch["document_ids"], self.head.reads
        )
        sequences = []
        for index in range(len(batch["input_ids"])):
            one = {name: rows[index : index + 1] for name, rows in batch.items()}
            sequences.append(self._sequence(one, _pick(output, index)))
        return StepSums(*(torch.stack(column).sum(0) for column in zip(*sequences, strict=True)))

    def _sequence(self, batch: Batch, output: TargetOutput) -> StepSums:
        """The sums of each step over one packed sequence."""
        config, head = self.config, self.head
        learnt = [supervised(batch, d)[0] for d in range(1, config.num_steps + 1)]
        # One row that nothing is learnt from keeps every parameter in the graph.
        rows = torch.stack(learnt).any(0).nonzero().squeeze(1)
        rows = rows if len(rows) else rows.new_zeros(1)
        ids, documents = batch["input_ids"][0], batch["document_ids"][0]
        features = self._noisy(head.features(output))
        text = head.read(head.fuse(features), ids.roll(-1), batch["position_ids"][0])
        branches = Branches(text.keys[None], text.values[None], causal_rows(documents, rows))
        outputs = head.unroll(text, ids, rows, branches, config.detach_features)
        before_learnt = batch["loss_mask"][0, 1:].nonzero().squeeze(1)
        teacher = Teacher(self.target, head, output.hidden_states, before_learnt)
        steps = []
        for d, (mask, found) in enumerate(zip(learnt, outputs, strict=False), start=1):
            mine = mask[rows]
            loss, top1, alpha = step_loss(config, head, found[mine], teacher, rows[mine] + d)
            steps.append((loss, mine.sum().float(), top1, alpha))
        return StepSums(*(torch.stack(column) for column in zip(*steps, strict=True)))

    def _noisy(self, features: Tensor) -> Tensor:
        """Adds U(-noise / 2, noise / 2) * 512 / T while training (EAGLE, `train/main.py`)."""
        if not self.training or not self.config.noise:
            return features
        width = self.config.noise * 512 / len(features)
        return features + (torch.rand_like(features) - 0.5) * width


def _pick(output: TargetOutput, index: int) -> TargetOutput:
    layers = {layer: states[index] for layer, states in output.layers.items()}
    return TargetOutput(output.hidden_states[index], layers)


def main(config: EagleRun) -> None:
    """Trains to `out_dir/head`."""

    def build(target: Target, train: PackedDataset) -> tuple[EagleObjective, list[str]]:
        head, lines = make_head(config, target, train)
        return EagleObjective(head, target, config.head), lines

    command.train(config, build)


def make_head(
    config: EagleRun, target: Target, train: PackedDataset
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
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    lines = coverage_lines(counts, head.vocab.to("cpu"), always) if not head.vocab.full else []
    name = head.config.form.value
    lines.append(f"head: {name}, {settings.num_steps} steps, {trained / 1e6:.1f} M parameters")
    return head, lines


if __name__ == "__main__":
    entry.run(main, EagleRun, "eagle")
