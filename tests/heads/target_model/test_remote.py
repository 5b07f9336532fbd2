import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import FAMILIES, random_model

from conf.errors import InputError
from conf.settings.target import Dtype, Quantization, TargetConfig
from heads.target_model.decoder import decoder_of
from heads.target_model.model import Taps, Target
from heads.target_model.remote import final_norm, load_remote

CPU = torch.device("cpu")


def layerless(folder: Path, **settings):
    return load_remote(TargetConfig(path=str(folder), dtype=Dtype.float32, **settings), CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_target_with_the_layers_taken_out(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    for parameter in model.parameters():
        parameter.data.add_(0.1)  # norms of ones show nothing
    model.save_pretrained(tmp_path)
    bare = layerless(tmp_path)
    assert len(decoder_of(bare).layers) == 0
    assert bare.config.num_hidden_layers == model.config.num_hidden_layers
    for part in ("get_input_embeddings", "get_output_embeddings"):
        assert torch.equal(getattr(bare, part)().weight, getattr(model, part)().weight)
    target = Target(model, None, family)
    output = target.read_text([5, 9, 7, 11], Taps((target.num_layers,)))
    assert torch.equal(final_norm(bare)(output.layers[target.num_layers]), output.hidden_states)


def test_an_output_head_tied_to_the_embedding_is_there(tmp_path: Path) -> None:
    model = random_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert torch.equal(layerless(tmp_path).lm_head.weight, model.get_input_embeddings().weight)


def test_how_the_layers_are_quantised_does_not_matter(tmp_path: Path) -> None:
    model = random_model()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    stated = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | stated))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(4, 4, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(layerless(tmp_path).lm_head.weight, model.lm_head.weight)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lack weights of LlamaForCausalLM: model.norm.weight$"):
        layerless(tmp_path)
    with pytest.raises(InputError, match=r"target.path=.*nowhere: cannot load it"):
        layerless(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
)
def test_ends_of_another_size_are_refused(tmp_path: Path, name: str) -> None:
    random_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = tensors[name][:-4].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"{name} has shape \[(92|60).* in its files, \[(96|64)"):
        layerless(tmp_path)


@pytest.mark.parametrize("scaled", [True, False])
def test_codes_of_an_embedding_are_no_numbers(tmp_path: Path, scaled: bool) -> None:
    random_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.embed_tokens.weight"
    tensors[name] = (tensors[name] * 100).to(torch.int8)
    if scaled:
        tensors[f"{name}_scale"] = torch.full((96, 1), 0.01)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"{name}.*of a quantisation that transformers does not"):
        layerless(tmp_path)


@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [
        ("adapter", "lora", "lora"),
        ("device_map", "auto", "auto"),
        ("quantization", Quantization.int8, "int8"),
    ],
)
def test_settings_of_layers_are_the_engine_s(tmp_path: Path, setting, value, shown) -> None:
    message = f"target.{setting}={shown}: .* the engine runs those; unset it"
    with pytest.raises(InputError, match=message):
        layerless(tmp_path, **{setting: value})
