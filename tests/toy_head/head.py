"""A head of one linear layer and one draft token: the token after the next."""

from dataclasses import dataclass

from torch import nn

from conf.settings.drafting import HeadRef
from conf.settings.export import ExportFormat
from heads.decoding.drafting import Draft, HeadDrafter
from heads.draft_head import DraftHead, ExportPlan, HeadFacts, ReferenceLogits, Variant
from heads.target_model.model import FeatureLayers


@dataclass(frozen=True)
class ToyConfig:
    hidden_size: int
    vocab_size: int
    target: str
    num_draft_tokens: int = 1


class ToyDrafter(HeadDrafter):
    row_attributes, hidden = ("hidden",), None

    def observe(self, seen) -> None:
        self.hidden = seen.last_output.hidden_states[:, 0]

    def propose(self, roots) -> Draft:
        logits, vocab = self.head.out(self.hidden), self.head.vocab
        best = vocab.to_target_ids(logits.topk(self.shape.width).indices)
        return Draft.from_tree(self.shape, best[:, list(self.shape.ranks[1:])])


class ToyHead(DraftHead):
    config_type, variants, taps = ToyConfig, {"toy": Variant("Toy heads", HeadRef)}, FeatureLayers()
    name_with_article, has_static_tree, output_head_patterns = "a toy head", True, ("out.weight",)

    def __init__(self, config, vocab) -> None:
        super().__init__(config, vocab)
        self.out = nn.Linear(config.hidden_size, len(vocab.ids), bias=False)

    @classmethod
    def from_settings(cls, target, settings, vocab, seed):
        head = cls(ToyConfig(target.hidden_size, target.vocab_size, target.name), vocab)
        head.out.weight.data.copy_(target.output_head.weight[vocab.ids])
        return head.attach(target)

    def compute_candidates(self, output, token_ids, first, depth, width):
        best = self.out(output.hidden_states[0, first:]).topk(width).indices
        return self.vocab.to_target_ids(best)[None]

    def make_drafter(self, shape, sampling, seeds) -> ToyDrafter:
        return ToyDrafter(self, shape)

    def plan_export(self, engine, folder="DIR") -> ExportPlan:
        own = ExportPlan(None, self.build_files, f"play {folder}")
        return own if engine is ExportFormat.original else ExportPlan("loads no toys")

    def compute_reference_logits(self, target, states, token_ids, places) -> ReferenceLogits:
        return ReferenceLogits(self.out(states[-1])[None], {})

    def build_card_facts(self, provenance) -> HeadFacts:
        return HeadFacts("toy", "Toy heads", "Toy", "", "one layer", 1, None, "it loads no toys.")
