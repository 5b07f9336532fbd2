"""Every method on every kind of target, alone and in batches: the text is the target's own."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from toys import eagle_head, noisy_head, random_model, save_target, tokenizer

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.drafting import (
    DraftModelConfig,
    HeadRef,
    LookaheadConfig,
    LookupConfig,
    SelfDraftConfig,
)
from conf.settings.eagle import EagleForm
from conf.settings.measure import SpeedupRun
from conf.settings.target import Dtype, TargetConfig
from data.templates.record_encoder import RecordEncoder
from eval import speedup
from eval.compare import methods
from eval.compare.methods import MethodBuilder, PromptDecoder
from eval.tune import skip_search
from heads.decoding.sampling import GREEDY
from heads.devices import this_processor
from heads.kinds import load_head
from heads.layers import fast_linear as packed
from heads.target_model.load import load_target
from tests.chats import write_rows

FAMILIES = [
    "llama",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma4_text", "lfm2")),
]
OF_TRANSFORMERS = {"generate_lookup", "generate_assisted"}
LEFT_OUT = {
    "lfm2": OF_TRANSFORMERS,
    "gemma4_text": {"early_exit", "skip_layers"},
}
SHARED = [
    "vanilla", "generate", "medusa_chain", "medusa_tree", "medusa_suffix", "eagle_chain",
    "eagle_tree", "eagle_suffix", "draft_chain", "draft_tree", "prompt_lookup", "ngram", "suffix",
    "recycling", "lookahead", "early_exit", "skip_layers",
]  # fmt: skip
LEARNING = {"suffix", "recycling", "medusa_suffix", "eagle_suffix", "skip_layers"}
"""Their drafts depend on the prompts before, or on those that are searched."""


def given(folder: Path, family: str) -> dict:
    """A target with a head of each kind, and a draft model: the target with other weights."""
    save_target(folder / "target", family, num_hidden_layers=4)
    target = load_target(TargetConfig(path=str(folder / "target")), torch.device("cpu"))
    noisy_head(target).save(folder / "medusa")
    eagle_head(target, EagleForm.eagle3, 150, num_updates=8).save(folder / "eagle")
    model = random_model(family, vocab_size=300, num_hidden_layers=4)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.std() * 0.05)
    model.save_pretrained(folder / "draft")
    tokenizer().save_pretrained(folder / "draft")
    turns = [["hello there, how are there?", "and now?"], ["hello you, how are you?"]]
    turns += [["so there?"], ["so you?"]]  # to search on
    rows = [{"category": "chat", "turns": each} for each in turns]
    write_rows(folder / "prompts.jsonl", rows)
    return {
        "target": TargetConfig(path=str(folder / "target")),
        "data": DataConfig(path=str(folder / "prompts.jsonl"), num_prompts=2),
        "head": HeadRef(path=str(folder / "medusa")),
        "heads": [str(folder / "eagle")],
        "draft": DraftModelConfig(path=str(folder / "draft")),
        "max_new_tokens": 6,
        "num_repeats": 1,
        "num_warmups": 0,
    }


pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return given(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures and costs of passes are checked elsewhere."""
    monkeypatch.setattr(skip_search, "NUM_REPEATS", 1)
    monkeypatch.setattr(speedup, "plot_speedup", lambda *_: None)


def measured(settings: dict, out_dir: Path, **changes) -> dict:
    speedup.main(SpeedupRun(**{**settings, **changes}, out_dir=str(out_dir)))
    return json.loads((out_dir / "speedup.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_gives_the_targets_own_text(family: str, llama: dict, tmp_path: Path) -> None:
    settings = llama if family == "llama" else given(tmp_path, family)
    alone = measured(settings, tmp_path / "1")
    left_out = LEFT_OUT.get(family, set())
    assert set(alone["methods"]) == {*SHARED, *OF_TRANSFORMERS} - left_out
    if "skip_layers" not in left_out:  # one search is enough
        settings = settings | {"self_draft": SelfDraftConfig(skip=[1])}
    together = measured(settings, tmp_path / "2", batch_size=2)
    assert set(together["methods"]) == set(SHARED) - left_out
    for result in (alone, together):
        assert result["lossless"] == {"num_prompts": 3, "num_equal": 3, "first_divergences": []}
    for name, row in together["methods"].items():
        # What a text accepts does not depend on its neighbours.
        assert row["tau"] == pytest.approx(alone["methods"][name]["tau"]) or name in LEARNING
    assert alone["methods"]["draft_chain"]["tau"] > 1.2


def test_settings_of_drafts_from_text_reach_them(monkeypatch) -> None:
    made: list[tuple] = []
    for kind in ("PromptLookup", "NgramModel", "Lookahead"):
        monkeypatch.setattr(methods, kind, lambda *given, kind=kind: made.append((kind, *given)))
    attention = SimpleNamespace(shares_keys=True)
    target = SimpleNamespace(
        device=torch.device("cpu"), is_recurrent=False, attention_pattern=attention
    )
    config = SpeedupRun(lookup=LookupConfig(5, 4, 2), lookahead=LookaheadConfig(6, 3, 8))
    builder = MethodBuilder(SimpleNamespace(target=target, sampling=GREEDY, heads=[]), config)
    monkeypatch.setattr(builder, "_build_engine_method", lambda make: make([]))
    makers = builder.list_makers()
    for name in ("prompt_lookup", "ngram", "lookahead"):
        makers[name]()
    assert made == [("PromptLookup", 5, 4, 2), ("NgramModel", 5, 4, 2), ("Lookahead", 6, 3, 8)]
    of_transformers = makers["generate_lookup"].keywords
    assert of_transformers == {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 4}
    assert builder.obstacles == {}
    loaded: list[TargetConfig] = []
    monkeypatch.setattr(methods, "load_target", lambda model, _: loaded.append(model) or 1 / 0)
    config.draft, config.target.dtype = DraftModelConfig("small", "v2"), Dtype.bfloat16
    with pytest.raises(ZeroDivisionError):
        builder.list_makers()
    assert loaded == [TargetConfig("small", "v2", dtype=Dtype.bfloat16)]


def test_a_draft_model_padded_otherwise_leaves_out_transformers_own(
    llama: dict, tmp_path: Path, capsys
) -> None:
    folder = shutil.copytree(llama["draft"].path, tmp_path / "draft")
    random_model("llama", vocab_size=320, num_hidden_layers=2).save_pretrained(folder)
    settings = llama | {"draft": DraftModelConfig(path=str(folder))}
    why = "transformers' assisted generation refuses vocabularies of 300 and 320 rows; name another"
    with pytest.raises(InputError, match=rf"generate_assisted: {why} .*available here: .*draft_ch"):
        measured(settings, tmp_path / "o", methods=["generate_assisted"])
    assert "left out" not in capsys.readouterr().err
    found = measured(settings, tmp_path / "o", methods=["all"], max_new_tokens=2, num_turns=1)
    assert "draft_tree" in found["methods"]
    assert "generate_assisted" not in found["methods"]
    said = " ".join(capsys.readouterr().err.split())
    assert f"generate_assisted is left out: {why}" in said


def test_a_draft_model_drafts_whatever_its_generation_config_says(
    llama: dict, tmp_path: Path
) -> None:
    """Stop texts, for one, end transformers' own drafting in a traceback."""
    folder = shutil.copytree(llama["draft"].path, tmp_path / "draft")
    file = folder / "generation_config.json"
    asks = {"stop_strings": ["no such text"], "cache_implementation": "static"}
    file.write_text(json.dumps(json.loads(file.read_text()) | asks))
    settings = llama | {"draft": DraftModelConfig(path=str(folder)), "num_turns": 1}
    found = measured(settings, tmp_path / "o", methods=["generate_assisted"])
    assert found["methods"]["generate_assisted"]["tau"] > 1.2


def test_a_search_for_layers_changes_no_other_draft(
    llama: dict, tmp_path: Path, monkeypatch
) -> None:
    class OnGpu(PromptDecoder):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            self.settings["captured"] = "step"

    found = {"skip": [1], "num_tokens": 2}
    monkeypatch.setattr(methods, "_search_layers_to_skip", lambda *_: found)
    monkeypatch.setattr(methods, "PromptDecoder", OnGpu)
    result = measured(llama, tmp_path / "o", methods=["early_exit", "skip_layers"])
    rows, settings = result["methods"], result["config"]["self_draft"]
    assert rows["skip_layers"]["tree"]["parents"] == [-1, 0, 1]
    known = {"captured": "step", "skip": [1], "chain": 2}
    assert known.items() <= rows["skip_layers"].items()  # what decoding said of itself stays
    assert rows["early_exit"]["tree"]["parents"] == [-1, 0, 1, 2, 3]
    assert settings == {"num_layers": None, "num_tokens": None, "skip": None}


def test_sampled_methods_and_the_lossy_one(llama: dict, tmp_path: Path) -> None:
    settings = llama | {"temperature": 0.8}
    names = ["vanilla", "generate", "eagle_chain", "draft_tree"]
    both = [*names, "medusa_typical"]
    result = measured(settings, tmp_path / "o", batch_size=2, methods=both)
    assert result["lossless"] is None
    lossy = {name for name, row in result["methods"].items() if row["lossy"]}
    assert lossy == {"medusa_typical"}
    assert "lossy" in (tmp_path / "o/speedup.html").read_text()
    again = measured(settings, tmp_path / "p", batch_size=1, methods=names)
    for name, row in again["methods"].items():
        assert result["methods"][name]["tau"] == pytest.approx(row["tau"])
    assert list(again["methods"]) == names


def test_a_draft_model_with_another_tokenizer(llama: dict, tmp_path: Path) -> None:
    shutil.copytree(llama["draft"].path, tmp_path / "draft")
    settings = llama | {"draft": DraftModelConfig(path=str(tmp_path / "draft"))}
    content = json.loads((tmp_path / "draft/tokenizer.json").read_text())
    words = content["model"]["vocab"]
    swapped = {"a": words["b"], "b": words["a"]}
    content["model"]["vocab"] = {token: swapped.get(token, i) for token, i in words.items()}
    (tmp_path / "draft/tokenizer.json").write_text(json.dumps(content))
    result = measured(settings, tmp_path / "o", methods=["draft_chain"], max_new_tokens=6)
    assert result["lossless"]["num_equal"] == 3
    with pytest.raises(InputError, match=r"draft_tree: the tokenizer of draft\.path is not"):
        measured(settings, tmp_path / "p", methods="draft_tree")


def test_layers_are_searched_for_on_prompts_that_are_not_measured(llama, tmp_path) -> None:
    seen: list[list[list[int]]] = []
    search = methods.search_skipped_layers

    def watch(target, texts, lengths):
        seen.append([text[:n] for text, n in zip(texts, lengths, strict=True)])
        return search(target, texts, lengths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "search_skipped_layers", watch)
        result = measured(llama, tmp_path / "o", methods="skip_layers", max_new_tokens=6)
    token_ids = [llama_ids(llama, f"so {word}?") for word in ("there", "you")]
    assert seen == [token_ids]
    row = result["methods"]["skip_layers"]
    assert row["skip"]
    assert row["chain"] == len(row["tree"]["parents"]) - 1


def llama_ids(settings: dict, question: str) -> list[int]:
    own = load_target(settings["target"], torch.device("cpu")).tokenizer
    encoder = RecordEncoder(own)
    return encoder.encode_prompt([{"role": "user", "content": question}])


def test_where_all_prompts_are_measured_layers_must_be_given(llama, tmp_path) -> None:
    every = {**llama, "data": DataConfig(path=llama["data"].path)}
    why = r"skip_layers: it searches layers on prompts that are not measured.* data\.num_prompts"
    with pytest.raises(InputError, match=why):
        measured(every, tmp_path / "o", methods="skip_layers")
    given_layers = every | {"self_draft": SelfDraftConfig(skip=[1]), "max_new_tokens": 4}
    result = measured(given_layers, tmp_path / "p", methods="skip_layers")
    assert result["methods"]["skip_layers"]["skip"] == [1]


@pytest.mark.skipif(not this_processor().packs, reason="oneDNN packs for x86")
def test_target_heads_and_draft_model_multiply_over_packed_weights(
    llama: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, found = packed._can_be_packed, {}

    def can_be_packed(layer: nn.Module) -> bool:
        if usual(layer):
            found[layer] = tuple(layer.weight.shape)
        return usual(layer)

    monkeypatch.setattr(packed, "_can_be_packed", can_be_packed)
    monkeypatch.setattr(packed, "FEWEST_NUMBERS", 1)
    names = ["medusa_chain", "eagle_chain", "draft_chain"]
    measured(llama, tmp_path, methods=names, max_new_tokens=2)
    targets = llama["target"].path, llama["draft"].path
    models = [load_target(TargetConfig(path), torch.device("cpu")).model for path in targets]
    models += [load_head(path) for path in (llama["head"].path, *llama["heads"])]
    linear = [each for model in models for each in model.modules() if type(each) is nn.Linear]
    assert sorted(found.values()) == sorted(tuple(each.weight.shape) for each in linear)
