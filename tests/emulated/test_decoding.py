"""Decoding on an emulated GPU: texts are those of the CPU, and a step waits once."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from emulated.device import Counts, counted, off
from test_eval_other_tokenizer import permuted
from toys import noisy_head, random_model, tokenizer

from conf.schema_eagle import EagleConfig, EagleForm
from eval.decode.drafters.draft_model import DraftLength, DraftModel
from eval.decode.drafters.hybrid import Hybrid
from eval.decode.drafters.lookahead import Lookahead
from eval.decode.drafters.lookup import Ngram, PromptLookup
from eval.decode.drafters.other_tokenizer import OtherTokenizer
from eval.decode.drafters.recycling import Recycling, Successors, recycling_tree
from eval.decode.drafters.self_speculation import SelfDraft, early_exit
from eval.decode.drafters.suffix import Suffix, SuffixTree
from eval.decode.engine import NoDraft, stream
from heads.drafting import Drafter
from heads.eagle.drafter import EagleChain, EagleTree
from heads.eagle.head import EagleHead
from heads.medusa.drafter import MedusaDrafter
from heads.sampling import GREEDY, Sampling
from heads.target.model import Target
from heads.tree import DynamicShape, Tree, default_tree
from heads.vocab import DraftVocab

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
TOKENIZER = tokenizer()
VOCAB_SIZE = len(TOKENIZER)
PROMPTS = [[5, 17, 40, 8, 77, 23, 61], [9, 77, 31], [5, 17, 5, 17, 5]]
SEEDS = [3, 4, 5]
NUM_TOKENS = 9
SAMPLINGS = {"greedy": GREEDY, "sampled": Sampling(temperature=1.0, top_k=40, top_p=0.9)}


@dataclass(frozen=True)
class Kind:
    """A way to draft: how it is made, and how often one of its steps waits."""

    make: Callable[[Target, Sampling], Drafter]
    num_waits: int = 1


def eagle_head(target: Target, form: EagleForm) -> EagleHead:
    size = 120 if form is EagleForm.eagle3 else None
    vocab = DraftVocab.choose(torch.arange(target.vocab_size), size, [0, 1, 2])
    layers = [0, 1, 2] if form is EagleForm.eagle3 else None
    return EagleHead.from_target(target, EagleConfig(form=form, layers=layers), vocab, seed=0)


def chain(form: EagleForm) -> Kind:
    return Kind(lambda target, how: EagleChain(eagle_head(target, form), 3, how, [7, 8, 9]))


def tree(form: EagleForm) -> Kind:
    shape = DynamicShape(3, 3, 8)
    return Kind(lambda target, _: EagleTree(eagle_head(target, form), shape))


def drafted(tree: Tree, length: DraftLength | None = None) -> Callable[..., Drafter]:
    def make(target: Target, how: Sampling) -> Drafter:
        model = random_target(target.device, num_hidden_layers=1)
        return DraftModel(model, tree, how, [7, 8, 9], length)

    return make


def random_target(device: torch.device | str, **changes: int) -> Target:
    sizes = {"num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, **HEADS, **changes}
    return Target(random_model(**sizes).to(device), TOKENIZER, "toy")


def other_tokenizer(target: Target, _how: Sampling) -> OtherTokenizer:
    other = permuted(random_target("cpu"))
    model = Target(other.model.to(target.device), other.tokenizer, other.name)
    return OtherTokenizer(model, target.tokenizer, 3)


def hybrid(target: Target, _how: Sampling) -> Hybrid:
    head = EagleTree(eagle_head(target, EagleForm.eagle3), DynamicShape(3, 3, 8))
    return Hybrid(head, Suffix(SuffixTree(8)), 0.5)


KINDS = {
    "nothing": Kind(lambda _target, _how: NoDraft()),
    "medusa chain": Kind(lambda target, _: MedusaDrafter(noisy_head(target), Tree.chain(3))),
    "medusa tree": Kind(lambda target, _: MedusaDrafter(noisy_head(target), default_tree(3, 16))),
    "eagle-1 chain": chain(EagleForm.eagle1),
    "eagle-1 tree": tree(EagleForm.eagle1),
    "eagle-3 chain": chain(EagleForm.eagle3),
    "eagle-3 tree": tree(EagleForm.eagle3),
    "prompt lookup": Kind(lambda _target, _how: PromptLookup(4)),
    "n-grams": Kind(lambda _target, _how: Ngram(4)),
    "suffix": Kind(lambda _target, _how: Suffix(SuffixTree(8))),
    "recycling": Kind(lambda _target, _how: Recycling(Successors(), recycling_tree(6))),
    "hybrid": Kind(hybrid),
    "draft model": Kind(drafted(Tree.chain(3))),
    "early exit": Kind(
        lambda target, how: SelfDraft(target, early_exit(target, 1), 3, how, [7, 8, 9])
    ),
    # Each of these says why it waits once more, or at every token.
    "draft model, tree": Kind(drafted(default_tree(3, 8)), 2),
    "draft model, sure": Kind(drafted(Tree.chain(3), DraftLength(2, 0.1)), 4),
    "lookahead": Kind(lambda _target, _how: Lookahead(3, 3, 3), 2),
    "other tokenizer": Kind(other_tokenizer, 2),
}


def decoded(
    device: str, kind: Kind, how: Sampling, stops: list[int]
) -> tuple[list[list[int]], list[Counts]]:
    """Texts, and what was counted in each step.

    Not in the first, which makes what lasts, nor in the last, which stops the clock.
    """
    target = random_target(device)
    target.model.generation_config.eos_token_id = stops
    texts: list[list[int]] = [[] for _ in PROMPTS]
    steps = stream(target, kind.make(target, how), PROMPTS, NUM_TOKENS, how, SEEDS)
    counts = []
    while True:
        with counted() as of_step:
            new = next(steps, None)
        if new is None:
            return texts, counts[2:-1]
        counts.append(of_step)
        for text, tokens in new.items():
            texts[text] += tokens


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("how", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_texts_are_those_of_the_cpu_and_a_step_waits_once(kind: Kind, how: Sampling) -> None:
    with off():
        whole, _ = decoded("cpu", kind, how, [])
    # One text ends before the others, which do not notice.
    stop = next(token for token in whole[1][3:] if token not in whole[0])
    texts, counts = decoded("cuda", kind, how, [stop])
    assert texts == [text[: [*text, stop].index(stop) + 1] for text in whole]
    assert counts
    for step in counts:
        assert step.num_waits <= kind.num_waits, str(step)
