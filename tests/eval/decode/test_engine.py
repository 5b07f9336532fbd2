import pytest
import torch
from torch.overrides import TorchFunctionMode
from toys import FAMILIES, Clock, endless_target, noisy_head, random_target, stream
from transformers import GenerationConfig

from conf.command import clock as eval_clock
from conf.settings.eagle import EagleConfig
from eval.decode import engine
from eval.decode.drafters.lookup import PromptLookup
from eval.decode.engine import (
    DrafterFactory,
    Generation,
    NoDraft,
    Request,
    Step,
    decode,
    decode_batch,
    decode_many,
)
from eval.measure.replay import (
    build_steps,
    compare_first_choices,
    compute_accepted_lengths,
    replay_response,
)
from heads.decoding.drafting import CommittedTokens, Draft, Roots
from heads.decoding.sampling import Sampling
from heads.decoding.tree import DynamicShape, Tree, make_static_tree
from heads.eagle.eagle import EagleHead
from heads.eagle.network import EagleDrafter
from heads.medusa import MedusaDrafter
from heads.target_model.model import FeatureLayers
from heads.vocab import DraftVocab

PROMPT = [5, 17, 40, 8, 77, 23, 61]
ALIKE = ("qwen2", "qwen3", "mistral", "phi3", "mixtral")
"""Families whose caches are those of others."""
OWN = [
    pytest.param(each, marks=[pytest.mark.slow] if each in ALIKE else [])
    for each in sorted(FAMILIES)
]


class Oracle:
    """Drafts the target's own texts on the nodes of rank 1, a wrong token on the others."""

    taps = FeatureLayers()

    def __init__(self, texts: list[list[int]], prompts: list[list[int]], tree: Tree) -> None:
        self.texts, self.tree = texts, tree
        self.seen = [-len(prompt) for prompt in prompts]

    def observe(self, seen: CommittedTokens) -> None:
        assert seen.output.hidden_states.shape[1] >= max(map(len, seen.token_ids))
        self.seen = [n + len(ids) for n, ids in zip(self.seen, seen.token_ids, strict=True)]

    def propose(self, roots: Roots) -> Draft:
        rows = []
        for root, text, seen in zip(roots.ids, self.texts, self.seen, strict=True):
            assert root == text[seen]
            rows.append(
                [
                    text[min(seen + depth, len(text) - 1)] if rank == 1 else 3
                    for depth, rank in zip(self.tree.depths[1:], self.tree.ranks[1:], strict=True)
                ]
            )
        return Draft.from_tree(self.tree, torch.tensor(rows))

    def select_rows(self, rows: list[int]) -> None:
        self.texts, self.seen = [self.texts[r] for r in rows], [self.seen[r] for r in rows]


def greedy_by_generate(target, num_tokens: int) -> list[int]:
    settings = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
    ids = torch.tensor([PROMPT])
    output = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=settings
    )
    return output[0, len(PROMPT) :].tolist()


PROMPTS = [PROMPT, PROMPT[::-1] * 2, [9]]
TREE = Tree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize("family", OWN)
def test_texts_are_those_of_generate_whoever_drafts_and_replay_equals_decoding(family: str) -> None:
    """In batches of other prompts, accepted lengths and ends, in which new texts take places."""
    target = endless_target(family)
    assert decode(target, NoDraft(), PROMPT, 10).token_ids == greedy_by_generate(target, 10)
    target.model.generation_config.eos_token_id = decode(target, NoDraft(), [9], 7).token_ids[6:]
    texts = [decode(target, NoDraft(), prompt, 10).token_ids for prompt in PROMPTS]
    assert len({len(text) for text in texts}) > 1

    def together(make: DrafterFactory) -> list[Generation]:
        return decode_many(target, make, list(map(Request, PROMPTS)), 10, 2)

    head = noisy_head(target)
    chain = Tree.make_chain(3)
    assert [text.token_ids for text in together(lambda _: MedusaDrafter(head, chain))] == texts
    found, accepted = together(lambda _: MedusaDrafter(head, TREE)), []
    for prompt, text, one in zip(PROMPTS, texts, found, strict=True):
        alone = decode(target, MedusaDrafter(head, TREE), prompt, 10)
        assert (one.token_ids, one.steps) == (alone.token_ids, alone.steps)
        assert (text, replay_response(target, head, TREE, prompt, text)) == (
            alone.token_ids, alone.steps,
        )  # fmt: skip
        accepted += [step.num_accepted for step in one.steps]
    assert any(accepted)
    vocab = DraftVocab.make_full(target.vocab_size)
    eagle = EagleHead.from_settings(target, EagleConfig(layers=[0, 1, 2]), vocab, seed=0)
    for make in (
        lambda _: NoDraft(),
        lambda seeds: EagleDrafter(eagle, 3, seeds=seeds),
        lambda _: EagleDrafter(eagle, DynamicShape(3, 3, 8)),
    ):
        assert [text.token_ids for text in together(make)] == texts
    # The right tokens hang behind wrong siblings, so compaction really moves entries.
    drafted = decode_batch(target, Oracle(texts, PROMPTS, TREE), PROMPTS, 10)
    assert [text.token_ids for text in drafted] == texts
    assert max(step.num_accepted for text in drafted for step in text.steps) == 3


def test_every_second_is_booked_to_what_took_it(monkeypatch) -> None:
    target, clock, drafter = random_target(), Clock(), NoDraft()
    target.model.generation_config.eos_token_id = None

    def pass_seconds(_cache, tokens: torch.Tensor, *_: object, **__: object) -> float:
        return 100.0 if tokens.shape[1] > 1 else 10.0

    for owner, name, seconds in (
        (target, "run_pending", pass_seconds),
        (target, "new_cache", lambda _: 0.5),
        (drafter, "propose", lambda _: 2.0),
        (drafter, "observe", lambda _: 0.25),
        (engine, "accept_paths", lambda *_: 0.125),
    ):
        monkeypatch.setattr(owner, name, clock.taking(seconds, getattr(owner, name)))
    monkeypatch.setattr(eval_clock, "time", clock)
    passes = 5
    times = decode(target, drafter, PROMPT, passes + 1).times
    assert (times.prefill, times.verify, times.draft) == (100.5, passes * 10, passes * 2)
    assert times.accept == passes * 0.375
    assert times.total == 100.5 + passes * 12.375
    assert (times.decode, times.host) == (passes * 12.375, 0)


def test_tokens_are_streamed_as_they_are_accepted() -> None:
    target = endless_target()
    prompts = [PROMPT, PROMPT[::-1]]
    texts = [decode(target, NoDraft(), prompt, 12).token_ids for prompt in prompts]
    tree = Tree.from_paths([[0], [1], [1, 1]])
    pieces = list(stream(target, Oracle(texts, prompts, tree), prompts, 12))
    assert [len(piece[0]) for piece in pieces] == [1, 3, 3, 3, 2]
    for row in (0, 1):
        assert [token for piece in pieces for token in piece[row]] == texts[row]


def test_a_text_ends_inside_an_accepted_run_with_a_stop_token_or_when_it_is_long_enough() -> None:
    target = endless_target()
    text = decode(target, NoDraft(), PROMPT, 30).token_ids
    stop = next(t for i, t in enumerate(text) if i >= 6 and t not in text[:i])
    end = text.index(stop) + 1
    target.model.generation_config.eos_token_id = [stop]
    tree = Tree.from_paths([[1], [1, 1], [1, 1, 1], [1, 1, 1, 1], [0]])
    drafted = decode(target, Oracle([text], [PROMPT], tree), PROMPT, 30)
    assert drafted.token_ids == text[:end]
    assert sum(step.num_emitted for step in drafted.steps) == end - 1
    for most in (1, 2, 5):
        cut = decode(target, Oracle([text], [PROMPT], tree), PROMPT, most)
        assert cut.token_ids == text[:most]


def test_agreement_asks_at_every_token() -> None:
    text = [7, 1, 2, 3]
    # Best two candidates of depths 1 and 2 after each token of the text.
    ranked = [[[1, 0], [9, 2]], [[5, 2], [3, 0]], [[3, 0], [0, 0]], [[8, 8], [8, 8]]]
    assert compare_first_choices(ranked, text) == [[True, False, True], [False, True]]
    assert compute_accepted_lengths(Tree.make_chain(2), ranked, text) == [1, 0, 1, 0]


def test_walk_counts_what_each_pass_emits() -> None:
    # Token 0 comes from the prefill; root 0 accepts 1 and 2 and emits 3; root 3 may still give 2.
    assert build_steps([2, 0, 0, 5, 0, 0], 6) == [Step(2, 3, 5), Step(2, 2, 2)]
    assert build_steps([0, 0, 0], 3) == [Step(0, 1, 2), Step(0, 1, 1)]
    assert build_steps([4], 1) == []


class Waits(TorchFunctionMode):
    """Counts what makes the host wait for a device."""

    NAMES = ("tolist", "item", "cpu", "nonzero", "numpy", "__bool__", "__int__", "__float__")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in self.NAMES
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["none", "medusa", "eagle chain", "eagle tree", "lookup"])
def test_a_step_waits_for_the_device_once(kind: str) -> None:
    target, sampling = endless_target(), Sampling(0.8, top_p=0.9)
    vocab = DraftVocab.make_full(target.vocab_size)
    eagle = EagleHead.from_settings(target, EagleConfig(layers=[0, 1, 2]), vocab, seed=0)
    drafter = {
        "none": NoDraft(),
        "medusa": MedusaDrafter(noisy_head(target), make_static_tree(3, 16)),
        "eagle chain": EagleDrafter(eagle, 3, sampling, [5, 6]),
        "eagle tree": EagleDrafter(eagle, DynamicShape(3, 3, 8)),
        "lookup": PromptLookup(3),
    }[kind]
    steps = iter(stream(target, drafter, [PROMPT, PROMPT[::-1]], 20, sampling))
    next(steps)
    with Waits() as waits:
        for number in range(1, 5):
            next(steps)
            assert waits.count == number


def test_the_seed_of_a_text_is_0_unless_told() -> None:
    target, warm = random_target(), Sampling(temperature=1.5)
    target.model.generation_config.eos_token_id = None

    def text(*how: object) -> list[int]:
        return decode_batch(target, NoDraft(), [PROMPT], 12, warm, *how)[0].token_ids

    assert text() == text([0]) == decode(target, NoDraft(), PROMPT, 12, warm).token_ids
    assert text([1]) != text([0]) != text([7])
    assert text([7]) == decode(target, NoDraft(), PROMPT, 12, warm, 7).token_ids
    given = stream(target, NoDraft(), [PROMPT], 12, warm, [7])
    assert text([7]) == [token for step in given for token in step[0]]
