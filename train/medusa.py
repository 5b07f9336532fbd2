"""Trains Medusa heads: `accelerate launch train/medusa.py target.path=... data.path=...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.medusa import MedusaRun
from eval.preflight_checks import check_training

COMMAND = Command(__doc__, MedusaRun, "medusa", check=check_training)
if __name__ == "__main__":
    COMMAND.parse_command_line()

from torch import Tensor

from conf.settings.medusa import Labels, MedusaConfig
from conf.settings.training import Schedule
from data.features.store_format import HIDDEN_STATES
from heads.medusa import MedusaHead
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.vocab import DraftVocab
from train.batch.supervision import SUPERVISION, Batch
from train.loop import command, resume
from train.loss import sizes
from train.loss.medusa import SoftLabels, compute_head_weights, compute_medusa_loss
from train.loss.sums import LossSums
from train.loss.teachers import HiddenTeacher
from train.objective import Objective


class MedusaObjective(Objective):
    """Medusa loss of a batch."""

    metric_names = ("top1", "top5")
    default_schedule = Schedule.cosine
    muon_rate = 8.4e-2
    adam_rate_times_width = 2.1

    def __init__(
        self, head: MedusaHead, target: EmbeddingsAndOutputHead, config: MedusaConfig
    ) -> None:
        super().__init__()
        self.head = head
        self.target = target
        self.soft, self.temperature = config.labels is Labels.soft, config.teacher_temperature
        self.off_path_weight = config.off_path_weight
        self.term_weights = compute_head_weights(head.num_heads, config.loss_decay)
        self.resume_settings = resume.collect_resume_settings("head", config)
        self.description = f"{head.num_heads} Medusa heads"
        self.vocab = DraftVocab.make_full(target.vocab_size).to(target.device)

    def estimate_memory(self, setting: sizes.LaunchSpec) -> sizes.MemoryEstimate:
        """N H float32 of states; per head and token 2 H e in blocks, H float32 in the loss."""
        head, hidden = self.head, self.target.hidden_size
        tokens, e = setting.tokens, setting.dtype.itemsize
        rows = tokens * hidden
        of_a_head = 2 * head.config.num_layers * e + sizes.FLOAT32_BYTES
        kept = sizes.FLOAT32_BYTES * rows + head.num_heads * rows * of_a_head
        grads = head.num_heads * rows * sizes.FLOAT32_BYTES
        one = len(head.vocab.ids), hidden
        pieces = sizes.PIECES_OF_TEACHER if self.soft else sizes.PIECES_OF_TEXT
        loss = sizes.estimate_loss_bytes(setting, tokens, one, pieces)
        if self.soft:
            loss += sizes.teacher_bytes(setting, tokens, self.target, one[0])
        # With hard labels heads run one after another, and one projection at a time is cast.
        spared = 0 if self.soft else (head.num_heads - 1) * one[0] * hidden
        copies = max(0, sizes.copied_bytes(head, setting) - e * spared)
        return sizes.MemoryEstimate(
            copies, kept, loss + grads, grads + 3 * rows * sizes.FLOAT32_BYTES
        )

    def forward(self, batch: Batch, scale: Tensor) -> LossSums:
        """Compute the loss of a prepared batch; `scale` [K] is the weight of each head."""
        hidden = batch[HIDDEN_STATES].to(next(self.head.parameters()).dtype)
        soft = None
        if self.soft:
            states = hidden.flatten(0, 1)[batch[SUPERVISION].token_indices]
            temperature = self.distillation_temperature(self.temperature)
            teacher = HiddenTeacher(self.target, self.vocab, states, temperature)
            soft = SoftLabels(teacher, self.off_path_weight)
        return compute_medusa_loss(self.head, hidden, batch, scale, soft, self.compiled)


main = command.TrainingCommand(MedusaHead, MedusaObjective, COMMAND)

if __name__ == "__main__":
    COMMAND.run(main)
