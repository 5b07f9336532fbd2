"""Decoding on an emulated GPU: texts are those of the CPU; what a step copies, and its waits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from itertools import pairwise
from typing import Any

import pytest
import torch
from emulated.device import Counts, counted, off
from feature_heads import fresh, settings_of
from torch import Tensor
from toys import noisy_head, random_model, stream, tokenizer, tree_of
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from eval.decode import cuda_graphs as captured
from eval.decode.cuda_graphs import GraphDecoder
from eval.decode.drafters.cross_tokenizer import CrossTokenizerDrafter
from eval.decode.drafters.draft_model import DraftLength, DraftModel
from eval.decode.drafters.lookahead import Lookahead
from eval.decode.drafters.lookup import (
    NgramModel,
    PromptLookup,
    Recycling,
    SuccessorTable,
    build_recycling_tree,
)
from eval.decode.drafters.self_speculation import SelfDraft
from eval.decode.drafters.suffix import HybridDrafter, SuffixDrafter, SuffixTree
from eval.decode.engine import NewTokens, NoDraft, Request, decode_many
from eval.preflight_checks import list_methods
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import GREEDY, Sampling, Typical
from heads.decoding.tree import DynamicShape, Tree, make_static_tree
from heads.layers.documents import Documents
from heads.medusa import MedusaDrafter
from heads.target_model.model import Target
from heads.target_model.recurrent import _group_documents
from tests.eval.decode.test_other_tokenizer import permuted

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
TOKENIZER = tokenizer()
VOCAB_SIZE = len(TOKENIZER)
PROMPTS = [[5, 17, 40, 8, 77, 23, 61], [9, 77, 31], [5, 17, 5, 17, 5]]
SEEDS = [3, 4, 5]
NUM_TOKENS = 14
SAMPLINGS = {"greedy": GREEDY, "sampled": Sampling(temperature=1.0, top_k=40, top_p=0.9)}


HeadMaker = Callable[[Target], Any]


@dataclass(frozen=True)
class Kind:
    """A way to draft: how it is made for texts with these seeds of its own, and what one of its
    steps copies to the device and back."""

    make: Callable[[Target, Sampling, list[int]], Drafter]
    num_up: int
    num_down: int = 1
    typical: Typical | None = None


def untrained(name: str) -> HeadMaker:
    """Makes an untrained head of a kind, on features of few layers."""
    settings: dict[str, Any] = {"layers": [0, 1], "num_layers": 2 if name == "peagle" else 1}
    if name in ("eagle1", "mtp"):
        settings = {}
    if name == "eagle3":
        settings = {"layers": [0, 1, 2], "draft_vocab_size": 120}
    return lambda target: fresh(target, settings_of(name, **settings), name)


def chain(name: str) -> Callable[..., Drafter]:
    return lambda target, *drawn: (made := untrained(name)(target)).drafter(made, 3, *drawn)


def tree(name: str) -> Callable[..., Drafter]:
    return lambda target, *_: (made := untrained(name)(target)).drafter(made, DynamicShape(3, 3, 8))


def draft_model(tree: Tree, length: DraftLength | None = None) -> Callable[..., Drafter]:
    def make(target: Target, how: Sampling, seeds: list[int]) -> Drafter:
        model = random_target(target.device, num_hidden_layers=1)
        return DraftModel(model, tree, how, seeds, length)

    return make


def random_target(device: torch.device | str, **changes: int) -> Target:
    sizes = {"num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, **HEADS, **changes}
    return Target(random_model(**sizes).to(device), TOKENIZER, "toy")


def other_tokenizer(target: Target, *_: Any) -> CrossTokenizerDrafter:
    other = permuted(random_target("cpu"))
    model = Target(other.model.to(target.device), other.tokenizer, other.name)
    return CrossTokenizerDrafter(model, target.tokenizer, 3)


def self_draft(skip: tuple[int, ...]) -> Callable[..., Drafter]:
    return lambda target, *drawn: SelfDraft(target, skip, 3, *drawn)


def medusa(tree: Tree) -> Callable[..., Drafter]:
    return lambda target, *_: MedusaDrafter(noisy_head(target), tree)


def hybrid(make: Callable[..., Drafter]) -> Callable[..., Drafter]:
    return lambda *given: HybridDrafter(make(*given), SuffixDrafter(SuffixTree(8)), 0.5)


CHAIN, BUSHY = Tree.make_chain(3), make_static_tree(3, 16)
# What is more than one copy each way says why.
KINDS = {
    "vanilla": Kind(lambda *_: NoDraft(), 0),
    "medusa_chain": Kind(medusa(CHAIN), 0),
    "medusa_tree": Kind(medusa(BUSHY), 0),
    "medusa_typical": Kind(medusa(BUSHY), 0, typical=Typical()),
    "medusa_suffix": Kind(hybrid(medusa(BUSHY)), 1),
    "eagle_chain, EAGLE-1": Kind(chain("eagle1"), 0),
    "eagle_chain, EAGLE-3": Kind(chain("eagle3"), 0),
    "eagle_tree, EAGLE-1": Kind(tree("eagle1"), 0),
    "eagle_tree, EAGLE-3": Kind(tree("eagle3"), 0),
    "eagle_suffix": Kind(hybrid(tree("eagle3")), 1),
    "dflash_chain": Kind(chain("dflash"), 0),
    "dflash_tree": Kind(tree("dflash, causal in a window"), 0),
    "dflash_suffix": Kind(hybrid(tree("dflash")), 1),
    "dflash2_chain": Kind(chain("dflash2"), 0),
    "dflash2_tree": Kind(tree("dflash2"), 0),
    "dflash2_suffix": Kind(hybrid(tree("dflash2")), 1),
    "dspark_chain": Kind(chain("dspark, rnn"), 0),
    "dspark_tree": Kind(tree("dspark, rnn"), 0),
    "dspark_suffix": Kind(hybrid(tree("dspark")), 1),
    "peagle_chain": Kind(chain("peagle"), 0),
    "peagle_tree": Kind(tree("peagle"), 0),
    "peagle_suffix": Kind(hybrid(tree("peagle")), 1),
    "mtp_chain": Kind(chain("mtp"), 0),
    "mtp_tree": Kind(tree("mtp"), 0),
    "mtp_suffix": Kind(hybrid(tree("mtp")), 1),
    "draft_chain": Kind(draft_model(CHAIN), 1),
    "draft_chain, by what was accepted": Kind(draft_model(CHAIN, DraftLength(2)), 2),
    # How sure each of three tokens was comes down; where the chains end goes up.
    "draft_chain, while it is sure": Kind(draft_model(CHAIN, DraftLength(2, 0.1)), 2, 4),
    # Up: how much of the text is read anew, what is read, the draft in the target's tokens.
    "draft_chain, other tokenizer": Kind(other_tokenizer, 3, 2),
    "draft_tree": Kind(draft_model(make_static_tree(3, 8)), 1),
    "prompt_lookup": Kind(lambda *_: PromptLookup(4), 1),
    "ngram": Kind(lambda *_: NgramModel(4), 1),
    "suffix": Kind(lambda *_: SuffixDrafter(SuffixTree(8)), 1),
    "recycling": Kind(lambda *_: Recycling(SuccessorTable(), build_recycling_tree(6)), 0),
    # The target's answers below the window come down too.
    "lookahead": Kind(lambda *_: Lookahead(3, 3, 3), 1, 2),
    "early_exit": Kind(self_draft((1,)), 0),
    "skip_layers": Kind(self_draft((0,)), 0),
}


def counted_steps(steps: Iterator[NewTokens]) -> Iterator[tuple[NewTokens, Counts]]:
    """The new tokens of each step, and what was counted in it."""
    while True:
        with counted() as counts:
            new = next(steps, None)
        if new is None:
            return
        yield new, counts


def followed(steps: Iterator[NewTokens]) -> tuple[list[list[int]], list[tuple[Counts, bool]]]:
    """Texts; what was counted in each step, and whether it began with as many texts as the last.

    Not in the first, which makes what lasts, nor in the last, which stops the clock.
    """
    texts: list[list[int]] = [[] for _ in PROMPTS]
    counts, num_alive = [], [len(PROMPTS)]
    for new, of_step in counted_steps(steps):
        counts.append(of_step)
        num_alive.append(len(new))
        for text, tokens in new.items():
            texts[text] += tokens
    steady = [now == before for before, now in pairwise(num_alive)]
    return texts, list(zip(counts, steady, strict=True))[2:-1]


def decoded(
    device: str, kind: Kind, how: Sampling, stops: list[int]
) -> tuple[list[list[int]], list[tuple[Counts, bool]]]:
    target = random_target(device)
    target.model.generation_config.eos_token_id = stops
    how = replace(how, typical=kind.typical)
    drafter = kind.make(target, how, [7, 8, 9])
    return followed(stream(target, drafter, PROMPTS, NUM_TOKENS, how, SEEDS))


# How others go besides is as these go.
BOTH = ("vanilla", "medusa_tree", "eagle_chain, EAGLE-3")
# Of which another has the same lines: a hybrid of any head, blocks as a chain or a tree.
SLOW = (
    "medusa_suffix", "dflash_suffix", "dflash2_suffix", "dspark_suffix", "peagle_suffix",
    "mtp_suffix",
    "eagle_tree, EAGLE-1", "dflash_chain",
    "dflash2_tree", "dspark_chain", "peagle_chain", "draft_chain",
    "draft_chain, by what was accepted", "early_exit",
)  # fmt: skip


def marked(name: str, how: str) -> Any:
    """Chains are drawn, trees and what is looked up are the same however the target chooses."""
    drawn = "chain" in name or name in ("early_exit", "skip_layers", "medusa_typical")
    slow = name in SLOW or (name not in BOTH and drawn != (how == "sampled"))
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(KINDS[name], SAMPLINGS[how], id=f"{how}-{name}", marks=marks)


@pytest.mark.parametrize(
    ("kind", "how"), [marked(name, how) for how in SAMPLINGS for name in KINDS]
)
def test_texts_are_those_of_the_cpu_and_a_step_copies_so_much(kind: Kind, how: Sampling) -> None:
    with off():
        whole, _ = decoded("cpu", kind, how, [])
    # One text ends before the others, which do not notice.
    stop = next(token for token in whole[1][3:] if token not in whole[0])
    texts, counts = decoded("cuda", kind, how, [stop])
    assert texts == [text[: [*text, stop].index(stop) + 1] for text in whole]
    assert any(steady for _, steady in counts)
    for step, steady in counts:
        assert step.num_up <= kind.num_up or not steady, str(step)
        assert step.num_waits <= step.num_down <= kind.num_down, str(step)


def test_every_method_of_the_engine_is_counted() -> None:
    ours = {name for name in list_methods() if not name.startswith("generate")}
    assert {name.split(",")[0] for name in KINDS} == ours


# --- Passes of recurrent and sliding targets, and of LongRoPE.

DOCUMENTS = (20, 6, 2, 19, 7, 2)  # of two sequences


def recurrent_of(device: str) -> Target:
    """A target of two layers with short convolutions, and two that attend."""
    model = random_model("lfm2", num_hidden_layers=4)
    return Target(model.to(device), None, "lfm2")


def longrope_of(device: str) -> Target:
    """A target for which some documents are longer than the switch."""
    settings = {"short_factor": [1.5] * 16, "long_factor": [3.0 + n for n in range(16)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 12}
    rope["partial_rotary_factor"] = 1.0
    model = random_model(
        "phi3", original_max_position_embeddings=12, rope_parameters=rope | settings
    )
    return Target(model.to(device), None, "phi3")


@pytest.fixture
def waiting_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers 5.17: the host decides by the largest position."""
    update = Phi3RotaryEmbedding.forward

    @wraps(update)
    def forward(module: Any, x: Tensor, position_ids: Tensor) -> Any:
        assert int(position_ids.max()) >= 0
        return update(module, x, position_ids)

    monkeypatch.setattr(Phi3RotaryEmbedding, "forward", forward)


@pytest.mark.usefixtures("waiting_rope")
@pytest.mark.parametrize("target_of", [recurrent_of, longrope_of])
def test_reading_documents_waits_for_nothing(target_of: Callable[[str], Target]) -> None:
    assert len(_group_documents(DOCUMENTS)) == 3
    numbers = torch.arange(sum(DOCUMENTS))
    owners = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
    ids = (numbers * 7 % 90).view(2, -1)
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS]).view(2, -1)
    found = {}
    for device in ("cpu", "cuda"):
        target, documents = target_of(device), Documents.from_ids(owners.view(2, -1))
        given = ids.to(device), positions.to(device), documents.to_device(torch.device(device))
        with torch.no_grad():
            target.encode_documents(*given)  # makes what lasts
            with counted() as counts:
                states = target.encode_documents(*given).hidden_states
        found[device] = states.cpu()
    torch.testing.assert_close(found["cuda"], found["cpu"], atol=1e-4, rtol=1e-4)
    assert counts.num_waits == 0, str(counts)


@pytest.mark.parametrize("tree", [False, True])
def test_a_step_waits_for_its_tree_and_for_what_is_kept(tree: bool) -> None:
    def decoded_on(device: str) -> tuple[list[list[int]], list[tuple[Counts, bool]]]:
        target = recurrent_of(device)
        target.model.generation_config.eos_token_id = []
        drafter = Recycling(SuccessorTable(), tree_of([0, 0, 1, 1])) if tree else NoDraft()
        prompts = [[token % 90 for token in ids] for ids in PROMPTS]
        return followed(stream(target, drafter, prompts, 8, GREEDY, SEEDS))

    with off():
        expected, _ = decoded_on("cpu")
    texts, steps = decoded_on("cuda")
    assert texts == expected
    for counts, _ in steps:
        assert counts.num_waits <= 1 + tree, str(counts)


def test_captured_trees_in_sliding_layers_are_those_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured, "WIDTH", 32)
    requests = [Request([token % 90 for token in ids] * 3) for ids in PROMPTS[:2]]

    def make(_seeds: list[int]) -> Drafter:
        return Recycling(SuccessorTable(), tree_of([0, 0, 1, 1]))

    def texts(device: str) -> list[list[int]]:
        target = Target(random_model("mistral").to(device), None, "mistral")
        target.model.generation_config.eos_token_id = []
        if device == "cpu":
            found = decode_many(target, make, requests, 30, 2)
        else:
            found = GraphDecoder(target, make, 30).decode_requests(requests, 2)
        return [each.token_ids for each in found]

    with off():
        expected = texts("cpu")
    assert texts("cuda") == expected
