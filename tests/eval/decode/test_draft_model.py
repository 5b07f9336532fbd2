import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from toys import VOCAB_SIZE, endless_target, random_target, tokenizer
from transformers import GenerationConfig

from eval.decode.drafters.draft_model import (
    DraftLength,
    DraftModel,
    has_same_tokenizer,
    match_vocab_size,
    sample_distinct,
)
from eval.decode.engine import NoDraft, decode, decode_batch
from heads.decoding.drafting import PAD, CommittedTokens, Draft, Roots
from heads.decoding.sampling import GREEDY, Generators, Sampling
from heads.decoding.tree import Tree
from heads.target_model.model import Target

PROMPTS = [[5, 17, 40, 8, 77, 23, 61], [5, 17], [61, 23, 77, 8, 40, 17, 5] * 2, [9]]
TREE = Tree.from_paths([[0], [1], [2], [0, 0], [0, 2], [1, 0], [0, 0, 0], [0, 0, 2]])
SHAPES = {
    "chain": (Tree.make_chain(4), None),
    "tree": (TREE, None),
    "heuristic": (Tree.make_chain(6), DraftLength(start=2)),
    "confidence": (Tree.make_chain(6), DraftLength(confidence=0.3)),
    "both": (Tree.make_chain(6), DraftLength(start=3, confidence=0.2)),
    "gaps": (Tree.from_paths([[1], [3], [1, 2]]), None),
}
AGAIN = pytest.param("qwen3", marks=pytest.mark.slow)  # drafts as Llama does
NEOX, EXPERTS = (pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_neox", "qwen3_moe"))
WARM = Sampling(temperature=1.5, top_k=12)


def endless(family: str = "llama") -> Target:
    return endless_target(family)


def noisy_copy(target: Target, noise: float = 0.1) -> Target:
    """A draft model that is often right."""
    model, generator = copy.deepcopy(target.model), torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            scale = noise * parameter.data.std()
            parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return Target(model, None, "draft")


def fits(counts: Tensor, probs: Tensor) -> bool:
    """Chi-square, once in 10^4 by chance; what has probability 0 must not have come."""
    possible = probs > 0
    wanted = counts.sum() * probs[possible].double()
    assert wanted.min() >= 5
    chi_square = ((counts[possible] - wanted) ** 2 / wanted).sum()
    rarity = torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2).double(), chi_square / 2)
    return float(rarity) > 1e-4 and not counts[~possible].any()


@contextmanager
def passes(target: Target) -> Iterator[list[int]]:
    """Tokens read by each pass."""
    found: list[int] = []
    module = target.decoder
    hook = module.register_forward_pre_hook(
        lambda _module, _args, inputs: found.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    yield found
    hook.remove()


@pytest.mark.parametrize(
    "family", ["llama", AGAIN, pytest.param("gemma2", marks=pytest.mark.slow), NEOX, EXPERTS]
)
def test_greedy_text_is_the_targets_alone_and_in_a_batch(family: str) -> None:
    target = endless(family)
    draft = noisy_copy(target, 0.05)
    text = decode(target, NoDraft(), PROMPTS[1], 9).token_ids
    target.model.generation_config.eos_token_id = [text[8]]
    texts = [decode(target, NoDraft(), prompt, 16).token_ids for prompt in PROMPTS]
    assert len(set(map(len, texts))) > 1
    for tree, length in SHAPES.values():
        together = decode_batch(target, DraftModel(draft, tree, length=length), PROMPTS, 16)
        for prompt, text, found in zip(PROMPTS, texts, together, strict=True):
            alone = decode(target, DraftModel(draft, tree, length=length), prompt, 16)
            assert (found.token_ids, found.steps) == (alone.token_ids, alone.steps)
            assert found.token_ids == text
        assert len({step.num_accepted for found in together for step in found.steps}) > 1


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_sampled_text_of_a_batch_is_that_of_each_alone(shape: str) -> None:
    target = endless()
    draft, (tree, length) = noisy_copy(target), SHAPES[shape]
    target.model.generation_config.eos_token_id = [10, 20, 30]
    together = decode_batch(
        target, DraftModel(draft, tree, WARM, range(10, 14), length), PROMPTS, 24, WARM, range(4)
    )
    for row, (prompt, found) in enumerate(zip(PROMPTS, together, strict=True)):
        drafter = DraftModel(draft, tree, WARM, [10 + row], length)
        alone = decode(target, drafter, prompt, 24, WARM, row)
        assert (found.token_ids, found.steps) == (alone.token_ids, alone.steps)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, top_p=0.9)], ids=["greedy", "warm"])
def test_the_target_accepts_all_that_it_drafts_itself(sampling: Sampling) -> None:
    target = endless()
    drafter = DraftModel(target, Tree.make_chain(4), sampling, range(10, 14))
    for found in decode_batch(target, drafter, PROMPTS, 31, sampling, range(4)):
        assert [step.num_emitted for step in found.steps] == [5] * 6


class Checked(DraftModel):
    """Compares every draft with what the model's own passes over the whole text say."""

    def observe(self, seen: CommittedTokens) -> None:
        old = getattr(self, "committed", [[]] * len(seen.token_ids))
        self.committed = [a + b for a, b in zip(old, seen.token_ids, strict=True)]
        super().observe(seen)

    def propose(self, roots: Roots) -> Draft:
        draft = super().propose(roots)
        for text, root, tokens in zip(
            self.committed, roots.ids, draft.tokens.tolist(), strict=True
        ):
            nodes = [[root]]
            for parent, rank, token in zip(
                draft.tree.parents[1:], draft.tree.ranks[1:], tokens, strict=True
            ):
                logits = self.model.model(torch.tensor([text + nodes[parent]])).logits[0, -1]
                assert token == logits.topk(rank + 1).indices[rank]
                nodes.append([*nodes[parent], token])
        return draft

    def select_rows(self, rows: list[int]) -> None:
        super().select_rows(rows)
        if hasattr(self, "committed"):
            self.committed = [self.committed[row] for row in rows]


@pytest.mark.parametrize("family", ["llama", "gemma2", NEOX])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_drafts_are_those_of_a_model_that_reads_everything_anew(family: str, shape: str) -> None:
    target = endless(family)
    draft, (tree, _) = noisy_copy(target, 0.02), SHAPES[shape]
    with passes(draft) as found:
        decode_batch(target, DraftModel(draft, tree), PROMPTS, 16)
    assert len(found) % tree.depth == 0  # a pass per level and step, nothing else
    assert set(found[tree.depth :: tree.depth]) <= {1, 2}  # the root, and a leaf that was kept
    assert found[1] == (1 if shape == "chain" else 2)  # of the root's children, those that have any
    drafted = decode_batch(target, Checked(draft, tree), PROMPTS, 16)
    assert any(step.num_accepted == tree.depth for text in drafted for step in text.steps)


def passes_of_generate(target: Target, draft: Target, text: list[int], **settings) -> int:
    """Passes of the target in transformers' assisted generation of all but the first token."""
    target.model.generation_config.pad_token_id = None
    draft.model.generation_config.update(pad_token_id=None, **settings)
    ids = torch.tensor([text])
    # With a padding token its assistant would not look at that token in the text.
    own = GenerationConfig(do_sample=False, max_new_tokens=39, pad_token_id=None)
    with passes(target) as found:
        output = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=own,
            assistant_model=draft.model,
        )
    assert output.shape[1] == len(text) + 39
    return len(found)


@pytest.mark.parametrize("family", ["llama", AGAIN])
@pytest.mark.parametrize(
    ("schedule", "threshold", "length"),
    [
        ("constant", 0.0, None),
        pytest.param("heuristic", 0.0, DraftLength(start=4), marks=pytest.mark.slow),
        pytest.param("constant", 0.4, DraftLength(confidence=0.4), marks=pytest.mark.slow),
        ("heuristic", 0.4, DraftLength(start=4, confidence=0.4)),  # both of them
    ],
)
def test_the_target_runs_as_often_as_in_transformers(family, schedule, threshold, length) -> None:
    target = endless(family)
    draft = noisy_copy(target)
    num_tokens = 40 if schedule == "heuristic" else 4
    counts = []
    for prompt in PROMPTS:
        found = decode(
            target, DraftModel(draft, Tree.make_chain(num_tokens), length=length), prompt, 40
        )
        counts.append(len(found.steps))
        assert counts[-1] == passes_of_generate(
            target,
            draft,
            prompt + found.token_ids[:1],
            num_assistant_tokens=4,
            num_assistant_tokens_schedule=schedule,
            assistant_confidence_threshold=threshold,
        )
    assert len(set(counts)) > 1


def test_an_unsure_model_drafts_less() -> None:
    target = endless()
    draft = noisy_copy(target)
    with passes(draft) as all_of_them:
        full = decode(target, DraftModel(draft, Tree.make_chain(6)), PROMPTS[0], 40)
    with passes(draft) as some:
        length = DraftLength(confidence=0.5)
        cut = decode(target, DraftModel(draft, Tree.make_chain(6), length=length), PROMPTS[0], 40)
    assert len(some) / len(cut.steps) < len(all_of_them) / len(full.steps)
    with passes(draft) as single:
        length = DraftLength(confidence=1.1)
        one = decode(target, DraftModel(draft, Tree.make_chain(6), length=length), PROMPTS[0], 40)
    assert len(single) == len(one.steps)
    assert max(step.num_accepted for step in one.steps) == 1


@pytest.mark.parametrize("shape", ["chain", "tree", "gaps", "both"])
def test_decoding_keeps_the_targets_distribution(shape: str) -> None:
    target, prompt = endless(), PROMPTS[0]
    # The order of draws shows where they are not all alike.
    sampling, num_tokens = (
        (Sampling(0.4, top_k=4), 2) if shape == "gaps" else (Sampling(3.0, top_k=3), 3)
    )
    (tree, length), draws = SHAPES[shape], 1500
    drafter = DraftModel(noisy_copy(target, 0.3), tree, sampling, range(9000, 9000 + draws), length)
    drawn = decode_batch(target, drafter, [prompt] * draws, num_tokens, sampling, range(draws))
    counts = Counter(tuple(text.token_ids) for text in drawn)
    exact = dict(text_probs(target, prompt, sampling, num_tokens))
    assert set(counts) <= set(exact)
    assert fits(
        torch.tensor([float(counts[text]) for text in exact]), torch.tensor(list(exact.values()))
    )
    accepted = sum(step.num_accepted for text in drawn for step in text.steps)
    assert accepted > draws / 3


def text_probs(target: Target, ids: list[int], how: Sampling, num_tokens: int) -> Iterator[tuple]:
    """All texts of some tokens after `ids`, with their probability."""
    if num_tokens == 0:
        yield (), 1.0
        return
    probs = how.compute_probabilities(target.model(torch.tensor([ids])).logits[0, -1])
    for token in probs.nonzero().flatten().tolist():
        for rest, p in text_probs(target, [*ids, token], how, num_tokens - 1):
            yield (token, *rest), float(probs[token]) * p


def test_tokens_are_drawn_without_replacement() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2, 0.0])
    rows = probs.expand(2, 4000, 4).contiguous()
    found = sample_distinct(rows, 4, Generators.from_seeds([1, 2], torch.device("cpu")))
    assert (found[:, :, 3] == PAD).all()  # only three can be drawn
    assert (found[:, :, :3].sort(-1).values == torch.arange(3)).all()
    counts = torch.zeros(3, 3)
    for first, second, *_ in found.flatten(0, 1).tolist():
        counts[first, second] += 1
    expected = probs[:3, None] * probs[:3] / (1 - probs[:3, None])
    assert fits(counts, expected.fill_diagonal_(0))


def test_a_sampled_tree_gives_what_it_was_drawn_from() -> None:
    """Rows of q stand at the nodes that have children, also if leaves come before them."""
    target = endless()
    tree = Tree.from_paths([[0], [1], [2], [2, 0], [2, 3]])
    drafter = DraftModel(target, tree, WARM)
    states = target.encode_text(PROMPTS[0])
    drafter.observe(CommittedTokens([PROMPTS[0]], states, target.new_cache(1)))
    draft = drafter.propose(Roots.from_ids([50]))
    assert draft.draft_probs.shape == (1, 4, VOCAB_SIZE)
    for node, path in [(0, []), (3, [int(draft.tokens[0, 2])])]:
        logits = target.model(torch.tensor([[*PROMPTS[0], 50, *path]])).logits[0, -1]
        torch.testing.assert_close(draft.draft_probs[0, node], WARM.compute_probabilities(logits))
    assert not draft.draft_probs[0, 1:3].any()
    assert (draft.draft_probs[0, 0, draft.tokens[0, :3]] > 0).all()
    assert len(set(draft.tokens[0, :3].tolist())) == 3


@pytest.mark.parametrize("size", [VOCAB_SIZE - 10, VOCAB_SIZE + 10])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_vocabulary_padded_otherwise_still_drafts(size: int, sampling: Sampling) -> None:
    target = endless()
    drafter = DraftModel(
        random_target(vocab_size=size), TREE, sampling, range(4, 8), vocab_size=VOCAB_SIZE
    )
    found = decode_batch(target, drafter, PROMPTS, 20, sampling, range(4))
    assert [len(text.token_ids) for text in found] == [20] * 4
    if sampling.is_greedy:
        assert found[0].token_ids == decode(target, NoDraft(), PROMPTS[0], 20).token_ids


def test_logits_are_cut_or_padded() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert match_vocab_size(logits, 2).tolist() == [[1.0, 2.0]]
    assert match_vocab_size(logits, 4).tolist() == [[1.0, 2.0, 3.0, -torch.inf]]


def with_vocab(change: Callable[[dict[str, int]], None]) -> SimpleNamespace:
    vocab = tokenizer().get_vocab()
    change(vocab)
    return SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: vocab))


def test_ids_must_mean_the_same() -> None:
    target = SimpleNamespace(tokenizer=tokenizer(), name="x/target")
    assert has_same_tokenizer(target, with_vocab(lambda vocab: None))
    assert has_same_tokenizer(target, with_vocab(lambda vocab: vocab.update({"<think>": 300})))
    assert has_same_tokenizer(target, with_vocab(lambda vocab: vocab.pop("<pad>")))
    for change in (
        lambda vocab: vocab.update({"<pad>": 300}),
        lambda vocab: vocab.update({"<s>": 0, "<pad>": 1}),
        lambda vocab: vocab.update({"other": vocab.pop("<s>")}),
    ):
        assert not has_same_tokenizer(target, with_vocab(change))
