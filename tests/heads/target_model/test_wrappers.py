"""Vision-language models as targets of their text."""

import json
import logging
import re
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from toys import CHATML, SMALL, eagle_head, tokenizer
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    core_model_loading,
)

from conf.errors import InputError
from conf.settings.drafting import HeadRef
from conf.settings.eagle import EagleForm
from conf.settings.export import ExportFormat, ExportRun, MergeAdapterRun
from conf.settings.target import TargetConfig
from eval.decode.engine import NoDraft, decode_batch
from eval.decode.hf_generate import hf_generate
from heads.decoding.sampling import Sampling
from heads.target_model.decoder import find_language_class, skip_missing_towers
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.load import (
    RemoteTarget,
    load_config,
    load_target,
    load_target_tokenizer,
)
from heads.target_model.model import FeatureLayers, Target
from scripts import export, merge_adapter

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 7, 11, 23, 45, 67, 8, 4, 31], [12, 4, 90], [40, 41, 42, 43, 44, 45]]
TEXT = SMALL | {"vocab_size": 300, "num_hidden_layers": 4}
WRAPPERS = json.loads((Path(__file__).parent / "wrappers.json").read_text())
"""Configs of tiny models, each with towers of its own kind."""
TOWERS = ("vision_tower", "vision_model", "visual", "audio_tower", "projector")


def whole_model(family: str, seed: int = 3) -> Any:
    """A wrapper with its towers, its weights large enough that its text is not constant."""
    torch.manual_seed(seed)
    parts = WRAPPERS[family]
    config = AutoConfig.for_model(family, **parts | {"text_config": TEXT | parts["text_config"]})
    config.image_token_id = 299
    # Gemma 3n's tower is of a library that is not needed for text.
    with skip_missing_towers(config.get_text_config()):
        model = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    model.generation_config.eos_token_id = 2
    return model.eval()


def save_wrapper(folder: Path, family: str, template: str | None = CHATML) -> Any:
    """A loadable folder of a wrapper; returns the model with its towers."""
    model = whole_model(family)
    model.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wrapper's files."""
    path = tmp_path_factory.mktemp("wrapper")
    save_wrapper(path, "mistral3")
    return path


def loaded(folder: Path, **settings: Any) -> Target:
    return load_target(TargetConfig(path=str(folder), **settings), CPU)


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Tokens that a model's own `generate` writes."""
    ids = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    output = model.generate(ids, do_sample=False, max_new_tokens=num_tokens, **given)
    return output[0, len(prompt) :].tolist()


# Its layers are the slowest; inside other wrappers the same is dropped.
EACH = [pytest.param(f, marks=[pytest.mark.slow] if f == "qwen3_5" else []) for f in WRAPPERS]


@pytest.mark.parametrize("family", EACH)
def test_text_is_that_of_the_whole_model(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "llama4" and transformers.__version__ == "5.24.0":
        pytest.skip("whose own forward fails there on a text without images")
    whole = save_wrapper(tmp_path, family)
    warned: list[str] = []
    monkeypatch.setattr(logging.Logger, "warning", lambda _, text, *args: warned.append(str(text)))
    read, copy = [], core_model_loading._materialize_copy

    def counted(tensor: Any, *args: Any) -> Any:
        read.append(copy(tensor, *args))
        return read[-1]

    monkeypatch.setattr(core_model_loading, "_materialize_copy", counted)
    target = loaded(tmp_path)
    assert not [text for text in warned if "UNEXPECTED" in text]

    expected = [greedy(whole, prompt, 11) for prompt in PROMPTS]
    assert len({token for text in expected for token in text}) > 6
    texts = decode_batch(target, NoDraft(), PROMPTS, 11)
    assert [text.token_ids for text in texts] == expected
    baseline = hf_generate(target, PROMPTS, 11, Sampling(), 0)
    assert [text.token_ids for text in baseline] == expected

    names = dict(target.model.named_parameters())
    assert not [name for name in names if any(tower in name for tower in TOWERS)]
    num_parameters = sum(each.numel() for each in names.values())
    assert num_parameters < sum(each.numel() for each in whole.parameters())
    assert sum(each.numel() for each in read) == num_parameters


def test_towers_inside_a_decoder_are_dropped_too() -> None:
    config = AutoConfig.for_model("git", num_hidden_layers=2)
    with torch.device("meta"):
        model = find_language_class(config)(config)
    assert not hasattr(model.get_decoder(), "image_encoder")
    unused = model._keys_to_ignore_on_load_unexpected
    assert any(re.search(each, "git.image_encoder.vision_model.a.weight") for each in unused)


@pytest.mark.skipif(
    "nemotron_h_omni" not in CONFIG_MAPPING, reason="not in this version of transformers"
)
def test_an_output_head_may_lie_beside_the_layers() -> None:
    text = {"num_hidden_layers": 2, "layers_block_type": ["mamba", "attention"]}
    config = AutoConfig.for_model("nemotron_h_omni", text_config=text)
    with torch.device("meta"):
        model = find_language_class(config)(config)
    assert model.get_output_embeddings() is model.language_model.lm_head
    assert model.get_decoder() is model.language_model.model


def test_weights_that_are_not_there_are_not_drawn(folder: Path, tmp_path: Path) -> None:
    copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [name for name in tensors if "layers.3.mlp" in name and "vision" not in name]
    kept = {name: each for name, each in tensors.items() if name not in names}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    missing = "model.language_model.layers.3.mlp.down_proj.weight and 2 more"
    with pytest.raises(InputError, match=rf"lack weights of Mistral3\w+: {missing}"):
        loaded(tmp_path)


def test_stored_parts_and_engine_states_are_those_of_the_whole_model(
    folder: Path, tmp_path: Path
) -> None:
    target = loaded(folder)
    states = target.encode_text(PROMPTS[0], FeatureLayers((target.num_layers,)))
    expected = target.compute_logits(states.hidden_states)

    remote = RemoteTarget.from_config(TargetConfig(path=str(folder)), CPU)
    normed = remote.final_norm(states.layers[target.num_layers])
    torch.testing.assert_close(remote.compute_logits(normed), expected)
    assert remote.num_layers == 4

    target.save(tmp_path / "stored")
    stored = EmbeddingsAndOutputHead.from_folder(tmp_path / "stored", CPU)
    torch.testing.assert_close(stored.compute_logits(states.hidden_states), expected)
    for each in (target, remote, stored):
        assert each.architectures == ["Mistral3ForConditionalGeneration"]
        assert each.config.model_type == "mistral"


def test_a_head_is_trained_exported_and_verified(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    head = eagle_head(loaded(folder), EagleForm.eagle3, num_updates=3, layers=(1, 2, 3))
    head.save(tmp_path / "head")
    out = tmp_path / "out"
    settings = {"head": HeadRef(str(tmp_path / "head")), "out_dir": str(out)}
    export.main(ExportRun(format=ExportFormat.speculators, **settings))
    assert "parity: max |difference|" in capsys.readouterr().out
    verifier = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {
        "name_or_path": str(folder), "architectures": ["Mistral3ForConditionalGeneration"],
    }  # fmt: skip


def test_an_adapter_is_merged_into_the_whole_model(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(loaded(folder).model, LoraConfig(target_modules=["q_proj"]))
    for name, each in adapted.named_parameters():
        if "lora_B" in name:
            each.data.normal_(std=0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    settings = TargetConfig(path=str(folder), adapter=str(tmp_path / "adapter"))
    merge_adapter.main(MergeAdapterRun(target=settings, out_dir=str(tmp_path / "merged")))

    given = load_target(settings, CPU).encode_text(PROMPTS[0]).hidden_states
    merged = loaded(tmp_path / "merged").encode_text(PROMPTS[0]).hidden_states
    torch.testing.assert_close(merged, given)
    assert (given - loaded(folder).encode_text(PROMPTS[0]).hidden_states).abs().max() > 0.1
    files = [load_file(each / "model.safetensors") for each in (folder, tmp_path / "merged")]
    assert set(files[0]) == set(files[1])
    assert any("vision_tower" in name for name in files[1])


def test_the_template_of_a_processor_is_the_tokenizer_s(folder: Path, tmp_path: Path) -> None:
    save_wrapper(tmp_path, "mistral3", template=None)
    assert load_target_tokenizer(TargetConfig(path=str(tmp_path))).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert load_target_tokenizer(TargetConfig(path=str(tmp_path))).chat_template == CHATML


def test_of_a_model_that_speaks_the_thinker_is_loaded(tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen2_5_omni")
    config.architectures = ["Qwen2_5OmniModel"]
    config.save_pretrained(tmp_path)
    found = load_config(TargetConfig(path=str(tmp_path)))
    assert (found.model_type, found.architectures) == ("qwen2_5_omni_thinker", ["Qwen2_5OmniModel"])


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bert", "an encoder, whose tokens see later tokens"),
        ("t5", "an encoder-decoder, whose text depends on an input"),
        ("whisper", "an encoder-decoder, whose text depends on an input"),
        ("vit", "transformers generates no text with it; it supports image classification"),
        ("wav2vec2", "transformers generates no text with it; it supports audio classification"),
        (
            "qwen3_vl_text",
            "transformers generates no text with it, but knows it as a part of other",
        ),
        ("blip-2", "Blip2ForConditionalGeneration only generates text about an image"),
        ("diffusion_gemma", "DiffusionGemmaForBlockDiffusion does not generate token by token"),
    ],
)
def test_what_writes_no_text_is_refused_in_a_line(tmp_path: Path, family: str, reason: str) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError) as caught:
        load_config(TargetConfig(path=str(tmp_path)))
    start = f"target.path={tmp_path}: cannot load it: {family} cannot be a target: {reason}"
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


def test_a_config_that_nobody_knows_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(InputError, match="model type `nobody`") as caught:
        load_config(TargetConfig(path=str(tmp_path)))
    assert len(str(caught.value)) < len(str(tmp_path)) + 350
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_every_config_of_transformers_has_a_class_or_a_reason() -> None:
    for family in sorted(CONFIG_MAPPING):
        try:
            config = AutoConfig.for_model(family)
        except Exception:  # noqa: BLE001  a config without defaults
            continue
        try:
            assert find_language_class(config).__name__
        except ValueError as error:
            assert str(error).startswith(f"{config.model_type} cannot be a target: ")
            assert len(str(error)) < 300
