import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
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
CHAIN = Tree.make_chain(4)
WARM = Sampling(temperature=1.5, top_k=12)


def noisy_copy(target: Target, noise: float = 0.1) -> Target:
    """A draft model that is often right."""
    model, generator = copy.deepcopy(target.model), torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            scale = noise * parameter.data.std()
            parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return Target(model, None, "draft")


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


@pytest.mark.parametrize(
    ("family", "tree"), [("gemma2", CHAIN), ("llama", TREE)], ids=["chain", "tree"]
)
def test_drafts_are_those_of_a_model_that_reads_everything_anew(family: str, tree: Tree) -> None:
    target = endless_target(family)
    draft = noisy_copy(target, 0.02)
    with passes(draft) as found:
        decode_batch(target, DraftModel(draft, tree), PROMPTS, 16)
    assert len(found) % tree.depth == 0  # a pass per level and step, nothing else
    assert set(found[tree.depth :: tree.depth]) <= {1, 2}  # the root, and a leaf that was kept
    assert found[1] == (1 if tree is CHAIN else 2)  # of the root's children, those that have any
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


@pytest.mark.parametrize(
    ("schedule", "threshold", "length"),
    [("constant", 0.0, None), ("heuristic", 0.4, DraftLength(start=4, confidence=0.4))],
)
def test_the_target_runs_as_often_as_in_transformers(schedule, threshold, length) -> None:
    target = endless_target()
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


@pytest.mark.parametrize(
    ("size", "sampling"),
    [(VOCAB_SIZE - 10, GREEDY), (VOCAB_SIZE + 10, GREEDY), (VOCAB_SIZE - 10, WARM)],
)
def test_a_vocabulary_padded_otherwise_still_drafts(size: int, sampling: Sampling) -> None:
    target = endless_target()
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


def test_no_token_is_drawn_twice_or_without_a_probability() -> None:
    rows = torch.tensor([0.5, 0.3, 0.2, 0.0]).repeat(2, 50, 1)
    found = sample_distinct(rows, 4, Generators.from_seeds([1, 2], torch.device("cpu")))
    assert (found[..., :3].sort(-1).values == torch.arange(3)).all()
    assert (found[..., 3] == PAD).all()


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
