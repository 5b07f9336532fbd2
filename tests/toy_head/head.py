"""A head of one linear layer and one draft token: the token after the next."""

from dataclasses import dataclass

from torch import nn

from conf.settings.drafting import HeadRef
from conf.settings.export import ExportFormat
from heads.decoding.chains import ChainSampler
from heads.decoding.drafting import Draft
from heads.decoding.head_drafter import HeadDrafter
from heads.head import DraftHead, Export, Golden, HeadFacts, Variant
from heads.target_model.model import Taps


@dataclass(frozen=True)
class ToyConfig:
    hidden_size: int
    vocab_size: int
    target: str
    num_draft_tokens: int = 1


class ToyDrafter(HeadDrafter):
    state, hidden = ("hidden",), None

    def observe(self, seen) -> None:
        self.hidden = seen.last.hidden_states[:, 0]

    def propose(self, roots) -> Draft:
        logits, vocab = self.head.out(self.hidden), self.head.vocab
        if self.calibration is not None:
            draws = ChainSampler(vocab, calibration=self.calibration)
            return draws.chains(self.shape, draws.token(logits).unsqueeze(1))
        best = vocab.to_target(logits.topk(self.shape.width).indices)
        return Draft.of(self.shape, best[:, list(self.shape.ranks[1:])])


class ToyHead(DraftHead):
    config_type, variants = ToyConfig, {"toy": Variant("Toy heads", HeadRef)}
    phrase, static, taps, output_rows = "a toy head", True, Taps(), (r"out\.weight",)

    def __init__(self, config, vocab) -> None:
        super().__init__(config, vocab)
        self.out = nn.Linear(config.hidden_size, len(vocab.ids), bias=False)

    @classmethod
    def untrained(cls, target, settings, vocab, seed):
        head = cls(ToyConfig(target.hidden_size, target.vocab_size, target.name), vocab)
        head.out.weight.data.copy_(target.output_head.weight[vocab.ids])
        return head.attach(target)

    def candidates(self, output, token_ids, first, depth, width):
        logits = self.out(output.hidden_states[0, first:])
        return self.vocab.to_target(logits.topk(width).indices)[None]

    def drafter(self, shape, sampling, seeds, calibration=None) -> ToyDrafter:
        return ToyDrafter(self, shape, calibration)

    def export(self, engine, folder="DIR") -> Export:
        own = Export(None, self.files, f"play {folder}")
        return own if engine is ExportFormat.original else Export("loads no toys")

    def golden(self, target, states, token_ids, places) -> Golden:
        return Golden(self.out(states[-1])[None], {})

    def card(self, provenance, acceptance) -> HeadFacts:
        return HeadFacts("toy", "Toy heads", "Toy", "", "one layer", 1, None, "it loads no toys.")
