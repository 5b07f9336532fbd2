import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import FAMILIES, random_model

from conf.errors import InputError
from conf.settings.target import Dtype, Quantization, TargetConfig
from heads.target_model.decoder import find_decoder
from heads.target_model.load import find_final_norm, load_remote
from heads.target_model.model import FeatureLayers, Target

CPU = torch.device("cpu")


def remote(folder: Path, **settings):
    return load_remote(TargetConfig(path=str(folder), dtype=Dtype.float32, **settings), CPU)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Saves a random model whose weights are changed."""
    random_model().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_target_with_the_layers_taken_out(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    for parameter in model.parameters():
        parameter.data.add_(0.1)  # norms of ones show nothing
    model.save_pretrained(tmp_path)
    bare = remote(tmp_path)
    assert len(find_decoder(bare).layers) == 0
    assert bare.config.num_hidden_layers == model.config.num_hidden_layers
    for part in ("get_input_embeddings", "get_output_embeddings"):
        assert torch.equal(getattr(bare, part)().weight, getattr(model, part)().weight)
    target = Target(model, None, family)
    output = target.encode_text([5, 9, 7, 11], FeatureLayers((target.num_layers,)))
    assert torch.equal(
        find_final_norm(bare)(output.layers[target.num_layers]), output.hidden_states
    )


def test_an_output_head_tied_to_the_embedding_is_there(tmp_path: Path) -> None:
    model = random_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert torch.equal(remote(tmp_path).lm_head.weight, model.get_input_embeddings().weight)


def test_how_the_layers_are_quantised_does_not_matter(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(4, 4, dtype=torch.int8)}))
    path = tmp_path / "config.json"
    stated = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | stated))
    assert torch.equal(remote(tmp_path).lm_head.weight, random_model().lm_head.weight)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    rewrite(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(InputError, match=r"lack weights of LlamaForCausalLM: model.norm.weight$"):
        remote(tmp_path)
    with pytest.raises(InputError, match=r"target.path=.*nowhere: cannot load it"):
        remote(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
)
def test_parts_of_another_size_are_refused(tmp_path: Path, name: str) -> None:
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name][:-4].contiguous()}))
    with pytest.raises(
        InputError, match=rf"{name} has shape \[(92|60).* in its files, but \[(96|64)"
    ):
        remote(tmp_path)


@pytest.mark.parametrize("scaled", [True, False])
def test_codes_of_an_embedding_are_no_numbers(tmp_path: Path, scaled: bool) -> None:
    name = "model.embed_tokens.weight"

    def quantise(tensors: dict[str, Tensor]) -> None:
        tensors[name] = (tensors[name] * 100).to(torch.int8)
        if scaled:
            tensors[f"{name}_scale"] = torch.full((96, 1), 0.01)

    rewrite(tmp_path, quantise)
    with pytest.raises(InputError, match=rf"{name}.*of a quantisation that transformers does not"):
        remote(tmp_path)


@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [
        ("adapter", "lora", "lora"),
        ("device_map", "auto", "auto"),
        ("quantization", Quantization.int8, "int8"),
    ],
)
def test_settings_of_layers_are_the_engine_s(tmp_path: Path, setting, value, shown) -> None:
    message = f"target.{setting}={shown}: concerns layers, which the engine runs; leave it unset"
    with pytest.raises(InputError, match=message):
        remote(tmp_path, **{setting: value})
