import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import ROOT
from hub_server import HubServer, Repo
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import random_model

from conf.errors import InputError
from conf.settings.target import Dtype, Quantization, TargetConfig
from heads.target_model.decoder import find_decoder
from heads.target_model.load import find_final_norm, load_remote
from heads.target_model.model import FeatureLayers, Target
from tests.scripts.publish.test_push import hub_env

CPU = torch.device("cpu")


def remote(folder: Path, **settings):
    return load_remote(TargetConfig(path=str(folder), dtype=Dtype.float32, **settings), CPU)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Saves a random model whose weights are changed."""
    random_model().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma2", "gemma4_text", "gpt_neox", "llama4_text", "lfm2", "qwen3_next", "mamba2"],
)
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


# --- A large target on the Hub: files without a tensor that is read are never fetched.


NUM_LAYERS = 6
LOADED = """
import sys
from pathlib import Path

import torch
from toys import random_model

from conf.settings.target import Dtype, TargetConfig
from heads.target_model.load import load_early_layers, load_remote

config, cpu = TargetConfig(path="me/toy", dtype=Dtype.float32), torch.device("cpu")
bare, whole = load_remote(config, cpu), random_model(num_hidden_layers=6)
assert torch.equal(bare.lm_head.weight, whole.lm_head.weight)
assert torch.equal(bare.model.embed_tokens.weight, whole.model.embed_tokens.weight)
assert torch.equal(bare.model.norm.weight, whole.model.norm.weight)
assert bare.generation_config.eos_token_id == whole.generation_config.eos_token_id
files = lambda: {path.name for path in Path(sys.argv[1]).rglob("model-*.safetensors")}
before = files()
load_early_layers(config, 1)([5, 6])
print(len(before), len(files()))
"""


@pytest.mark.slow
def test_only_files_that_are_read_are_fetched(tmp_path: Path) -> None:
    model = random_model(num_hidden_layers=NUM_LAYERS)
    model.save_pretrained(tmp_path / "toy", max_shard_size="40KB")
    index = json.loads((tmp_path / "toy/model.safetensors.index.json").read_text())
    num_files = len({*index["weight_map"].values()})
    of_layers = {
        file
        for name, file in index["weight_map"].items()
        if not name.startswith(("model.embed", "model.norm", "lm_head"))
    }
    others = {file for name, file in index["weight_map"].items() if "layers." not in name}
    first = {file for name, file in index["weight_map"].items() if "layers.0." in name}
    assert len(others) < num_files - NUM_LAYERS < len(of_layers)
    with HubServer() as hub:
        files = {path.name: path.read_bytes() for path in (tmp_path / "toy").iterdir()}
        repo = hub.repos["me/toy"] = Repo(private=False)
        repo.commit(files)
        done = subprocess.run(
            [sys.executable, "-c", LOADED, tmp_path / "home"],
            env=hub_env(hub, tmp_path / "home") | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Blobs and links to them.
    before, after = map(int, done.stdout.split()[-2:])
    assert (before, after) == (len(others), len(others | first))
