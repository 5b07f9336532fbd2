"""Draft models that share no token ids with the target, on text that both have learnt."""

import copy
import json
import random
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from toys import random_model, tokenizer
from transformers import PreTrainedTokenizerFast

from eval.decode.drafters.cross_tokenizer import CrossTokenizerDrafter, Translation, Translator
from eval.decode.engine import NoDraft, Request, decode, decode_batch, decode_many
from heads.decoding.drafting import PAD, Draft, Roots
from heads.decoding.sampling import Sampling
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target

LINES = (
    "hello there, how are you today? fine, thanks. ",
    "the quick brown fox jumps over the lazy dog, again. ",
    "größe — 数字 и буквы 🙂 mixed into one line. ",
)
TEXT = "".join(LINES)


def wordy(stop: str = "</s>", size: int = 110) -> PreTrainedTokenizerFast:
    """A tokenizer in the manner of SentencePiece: spaces are marked, the first is made up."""
    core = Tokenizer(models.BPE(unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ["<pad>", "<s>", stop]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    core.train_from_iterator([TEXT] * 4, trainer)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token=stop
    )


def permuted(target: Target) -> Target:
    """The same model, in which every token has another id."""
    made = target.tokenizer
    state = json.loads(made.backend_tokenizer.to_str())
    order = torch.randperm(len(made), generator=torch.Generator().manual_seed(0))
    vocab = state["model"]["vocab"]
    state["model"]["vocab"] = {token: int(order[index]) for token, index in vocab.items()}
    for token in state["added_tokens"]:
        token["id"] = int(order[token["id"]])
    for token in ((state["post_processor"] or {}).get("special_tokens") or {}).values():
        token["ids"] = [int(order[index]) for index in token["ids"]]
    model = copy.deepcopy(target.model)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        layer.weight.data[order] = layer.weight.data.clone()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": made.eos_token}
    core = Tokenizer.from_str(json.dumps(state))
    return Target(model, PreTrainedTokenizerFast(tokenizer_object=core, **names), "permuted")


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": tokenizer,
    "wordy": wordy,
    "letters": lambda: wordy(size=60),
    "same end": lambda: wordy("<|im_end|>"),
}
PROMPTS = ["hello", "the quick", "größe", TEXT[:60]]


def learnt(made: PreTrainedTokenizerFast, seed: int = 0) -> Target:
    """A model that knows its lines, each ending with its stop token."""
    model = random_model(vocab_size=len(made), seed=seed).train()
    rows = [[*made(line).input_ids, made.eos_token_id] for line in [*LINES, TEXT]]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    longest = max(map(len, rows))
    ids, labels = (
        torch.tensor([row + [pad] * (longest - len(row)) for row in rows]) for pad in (0, -100)
    )
    for _ in range(60):
        optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        optimizer.step()
    model.generation_config.eos_token_id = made.eos_token_id
    return Target(model, made, "learnt")


@pytest.fixture(scope="module")
def models_by_tokenizer() -> dict[str, Target]:
    return {name: learnt(TOKENIZERS[name]()) for name in ("bytes", "wordy")}


def prompts(target: Target) -> list[list[int]]:
    return [target.tokenizer(text).input_ids for text in PROMPTS]


class Checked(CrossTokenizerDrafter):
    """Compares its drafts with the draft model's own passes over the whole text."""

    proposed = 0

    def _draft_chains(self, texts: list[list[int]]) -> list[list[int]]:
        drafted = super()._draft_chains(texts)
        for text, tokens in zip(texts, drafted, strict=True):
            so_far = list(text)
            for token in tokens:
                assert token == self.model.model(torch.tensor([so_far])).logits[0, -1].argmax()
                so_far.append(token)
        return drafted

    def propose(self, roots: Roots) -> Draft:
        draft = super().propose(roots)
        self.proposed += int((draft.tokens != PAD).sum())
        return draft


@pytest.mark.parametrize("name", ["bytes", "wordy"])
def test_a_model_that_says_the_same_is_accepted(models_by_tokenizer, name: str) -> None:
    target = models_by_tokenizer[name]
    drafter = Checked(permuted(target), target.tokenizer, 5, window=8)
    texts = decode_batch(target, drafter, prompts(target), 45)
    for prompt, text in zip(prompts(target), texts, strict=True):
        assert text.token_ids == decode(target, NoDraft(), prompt, 45).token_ids
    steps = [step for text in texts for step in text.steps]
    # What is cut at the end of a text was proposed too.
    assert sum(step.num_accepted for step in steps) > 0.9 * drafter.proposed
    assert sum(step.num_emitted for step in steps) > 4.5 * len(steps)


def test_a_text_in_anothers_place_leaves_what_is_held_of_the_text_beside_it(
    models_by_tokenizer, monkeypatch
) -> None:
    """It is read in parts, while nothing is read of the other, which may be longer."""
    monkeypatch.setattr(EmbeddingsAndOutputHead, "prefill_chunk", 4)
    target, draft = (models_by_tokenizer[name] for name in ("bytes", "wordy"))
    requests = [Request(ids) for ids in prompts(target)]

    def make(_seeds: list[int]) -> Checked:
        return Checked(draft, target.tokenizer, 4, window=10)

    for request, text in zip(requests, decode_many(target, make, requests, 28, 2), strict=True):
        assert text.token_ids == decode(target, NoDraft(), request.prompt_ids, 28).token_ids


@pytest.mark.parametrize(
    ("its", "sampling"), [("wordy", Sampling()), ("bytes", Sampling(1.0, top_k=1))]
)
def test_text_that_is_none_does_no_harm(models_by_tokenizer, its: str, sampling) -> None:
    """Random tokens: pieces of characters, special tokens anywhere, ids that nobody knows."""
    made = tokenizer()
    target = Target(random_model("qwen3", vocab_size=310), made, "random")
    target.model.generation_config.eos_token_id = 2
    draft = models_by_tokenizer[its]
    luck = random.Random(0)
    starts = [[luck.randrange(310) for _ in range(n)] for n in (1, 3, 20, 80)] + [[1], [2, 0]]
    drafter = CrossTokenizerDrafter(draft, made, 3, window=6)
    for start, found in zip(
        starts, decode_batch(target, drafter, starts, 20, sampling, range(6)), strict=True
    ):
        assert found.token_ids == decode(target, NoDraft(), start, 20).token_ids


@pytest.mark.parametrize(
    ("mine", "its"),
    [("bytes", "wordy"), ("wordy", "bytes"), ("letters", "same end"), ("wordy", "letters")],
)
def test_a_window_translates_as_the_whole_text(mine: str, its: str) -> None:
    target, draft = TOKENIZERS[mine](), TOKENIZERS[its]()
    translator = Translator(target, draft)
    ids, luck = target(TEXT * 4).input_ids, random.Random(0)
    text, place = Translation(translator, 12), 0
    while place < len(ids) - 5:
        step = luck.randrange(1, 5)
        text.append_tokens(ids[place : place + step])
        place += step
        found, recent = text.translate_text(ids[place])
        whole = translator.to_draft_ids(ids[: place + 1])
        assert found == (whole if whole[:1] == translator.start else translator.start + whole)
        assert len(text.tail) <= 24
        assert found[-len(recent) + text.overlap :] == recent[text.overlap :]


def test_a_window_waits_for_a_place_where_translations_agree() -> None:
    """In a row of one letter, pairs of it are laid differently from every second place."""

    def pairs(vocab: dict[str, int], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
        core = Tokenizer(models.BPE(vocab, merges))
        core.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(tokenizer_object=core)

    one, two = pairs({"a": 0}, []), pairs({"a": 0, "aa": 1}, [("a", "a")])
    text = Translation(Translator(one, two), 4)
    for length in range(30):
        found, _ = text.translate_text(0)
        assert found == two("a" * (length + 1)).input_ids
        text.append_tokens([0])


def test_a_window_of_nothing_adds_nothing() -> None:
    made = tokenizer()
    translator = Translator(made, wordy())
    text, ids = Translation(translator, 6), made("the quick brown fox").input_ids
    for token in [*ids, *[made.convert_tokens_to_ids("<|im_start|>")] * 15, *ids]:
        text.append_tokens([token])
    # What comes after so many marks that the draft model does not know is like a new text.
    assert text.translate_text(ids[0])[0] == [
        1,
        *translator.to_draft_ids(ids),
        *translator.to_draft_ids([*ids, ids[0]]),
    ]
    # Something must be there to be read, even so.
    assert Translation(Translator(wordy(), made), 6).translate_text(2)[0] == [0]


def test_characters_come_whole() -> None:
    made, its = tokenizer(), wordy(size=60)
    translator = Translator(made, its)
    smile = made("fine 🙂").input_ids
    assert made.decode(smile[:-1]).endswith("\ufffd")
    read = translator.to_draft_ids(smile[:-1])
    assert read == its("fine ").input_ids[1:]
    # The draft model says the whole character; only its last byte is new.
    for character, found in (("🙂", smile[-1:]), ("—", [])):
        assert (
            translator.to_target_ids(smile[:-1], read, its.encode(f"fine {character}")[-1:])
            == found
        )


def test_only_what_keeps_the_ids_that_are_there_is_written() -> None:
    made, its = tokenizer(), wordy(size=60)
    translator = Translator(made, its)
    whole = made("hello there").input_ids
    assert len(whole) < 6
    for cut in range(1, len(whole)):
        read = translator.to_draft_ids(whole[:cut])
        drafted = translator.to_draft_ids(whole)[len(read) :]
        assert translator.to_target_ids(whole[:cut], read, drafted) == whole[cut:]
    letters = [made.convert_tokens_to_ids(letter) for letter in "hell"]
    read = translator.to_draft_ids(letters)
    # The target would not have written these letters so, had it meant this word.
    assert (
        translator.to_target_ids(letters, read, translator.to_draft_ids(whole)[len(read) :]) == []
    )


def test_special_tokens_are_those_of_the_same_name() -> None:
    made, same, other = tokenizer(), wordy("<|im_end|>", 60), wordy("</s>", 60)
    text = [*made("hello").input_ids, made.convert_tokens_to_ids("<|im_start|>")]
    for its, end in ((same, [made.eos_token_id]), (other, [])):
        translator = Translator(made, its)
        read = translator.to_draft_ids(text)
        assert its.decode(read) == "hello"  # it knows nothing of <|im_start|>
        more = its.convert_tokens_to_ids(list("fine"))
        found = translator.to_target_ids(text, read, [*more, its.eos_token_id])
        assert made.decode(found) == "fine" + made.decode(end)
        assert translator.start == [1]
    assert Translator(same, made).start == []
    assert Translation(Translator(made, same), 8).translate_text(made.pad_token_id)[0] == [1, 0]
