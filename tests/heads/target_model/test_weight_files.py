"""A target's weight files with one tensor otherwise: loaded exactly, said, or refused."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import save_target
from transformers import LlamaConfig

from conf.errors import InputError
from conf.settings.target import Quantization, TargetConfig
from heads.mtp.families import FAMILIES
from heads.target_model import load
from heads.target_model.load import load_config, load_model
from heads.target_model.weight_files import MTP_COUNTS, MTP_WEIGHTS, can_read_quantization

Weights = dict[str, Tensor]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The files of a family, written once."""
    return cache(lambda family: save_target(tmp_path_factory.mktemp(family), family))


def loaded(folder: Path) -> Any:
    config = TargetConfig(path=str(folder))
    model = load_model(config, load_config(config), torch.float32, torch.device("cpu"), "eager")
    return model.state_dict()


def matrix(weights: Weights) -> str:
    """One of the first layer, as its file calls it."""
    return next(n for n, each in weights.items() if ".0." in n and each.dim() == 2)


def written(saved: Path, folder: Path, change: Callable[[Weights, str], None]) -> Path:
    """Its files, with other weights."""
    for file in saved.iterdir():
        if file.name != WEIGHTS:
            (folder / file.name).symlink_to(file)
    weights = load_file(saved / WEIGHTS)
    change(weights, matrix(weights))
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    return folder


def stem(name: str) -> str:
    return name.removesuffix(".weight")


ONES, FLOAT8 = torch.ones(3), torch.float8_e4m3fn
# What becomes of the weights and the first matrix among them, and the message.
REFUSED: list[tuple[Callable[[Weights, str], Any], str]] = [
    (lambda w, n: w.update({f"{stem(n)}.other_bias": ONES}), "would leave out and compute somethi"),
    (lambda w, n: w.update({f"{stem(n)}.lora_A.weight": ONES}), r"set target\.adapter to its fold"),
    (lambda w, n: w.update({f"base_model.model.{stem(n)}.lora_A.weight": ONES}),
     r"set target\.adapter to its folder"),
    (lambda w, n: w.update({f"{n.split('.0.', maxsplit=1)[0]}.0.other_norm.weight": ONES}),
     r"other_norm\.weight\. Its config\.json"),
    (lambda w, n: w.update({n: w[n].to(FLOAT8), f"{n}_scale": torch.ones(())}),
     "of a quantisation that transformers does not read"),
    (lambda w, n: w.update({n: (w[n] * 100).to(torch.int8)}), "holds codes of dtype I8"),
    (lambda w, n: w.pop(n), "its files lack weights of|cannot load it"),
    (lambda w, n: w.update({n.replace(".0.", ".0.own_"): w.pop(n)}),
     "its files lack weights of|would leave out|cannot load it"),
    (lambda w, n: w.update({n: w[n][:-1].contiguous()}), "cannot load it"),
]  # fmt: skip


EACH_KIND = (
    "llama", "gemma3_text", "gpt_neox", "gpt_oss", "lfm2", "llama4_text", "mamba2", "mixtral",
    "qwen3_moe", "qwen3_next", "falcon_h1", "gemma4_text",
)  # fmt: skip
"""Families whose layers, or files, are of kinds of their own."""
# Each change in two of them.
PAIRS = [
    (*case, EACH_KIND[place % len(EACH_KIND)])
    for number, case in enumerate(REFUSED)
    for place in (number, number + 7)
]


@pytest.mark.parametrize(("change", "message", "family"), PAIRS)
def test_what_changes_the_model_is_refused(
    saved: Callable[[str], Path], tmp_path: Path, change: Any, message: str, family: str
) -> None:
    with pytest.raises(InputError, match=rf"target\.path=.*({message})"):
        loaded(written(saved(family), tmp_path, change))


@pytest.mark.parametrize("family", EACH_KIND)
def test_what_does_not_is_loaded_exactly_and_said(
    saved: Callable[[str], Path], tmp_path: Path, family: str, capsys
) -> None:
    folder, before = tmp_path, loaded(saved(family))
    assert "left out" not in capsys.readouterr().err

    def change(weights: Weights, name: str) -> None:
        weights[name] = weights[name].double()
        layer = name.split(".0.", maxsplit=1)[0] + ".9."
        weights |= {f"{layer}{each}": torch.ones(3) for each in ("enorm.weight", "mlp.w.weight")}
        weights["value_head.weight"] = torch.ones(3)
        weights[f"{name.rpartition('.')[0]}.k_scale"] = torch.ones(1)  # of an engine's cache
        weights[name.split(".0.", maxsplit=1)[0] + ".0.rotary_emb.cos_cached"] = torch.ones(3)

    after = loaded(written(saved(family), folder, change))
    said = capsys.readouterr().err
    assert "left out, as the language model does not use them: " in said
    assert "layers.9" in said
    assert "value_head" in said
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    index = {"weight_map": dict.fromkeys(load_file(folder / WEIGHTS), "nowhere.safetensors")}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert loaded(folder).keys() == before.keys()  # one file comes first


def shortened(folder: Path, family: str, num_layers: int, **changes: Any) -> Path:
    """A folder of four layers, whose config asks for fewer."""
    save_target(folder, family, num_hidden_layers=4)
    config = json.loads((folder / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types"):
        if name in config:
            config[name] = config[name][:num_layers]
    config |= {"num_hidden_layers": num_layers, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text", "gpt_oss"])
def test_a_config_with_fewer_layers_than_the_files_is_refused(tmp_path: Path, family: str) -> None:
    folder = shortened(tmp_path / "model", family, 2)
    said = (
        rf"^target\.path={folder}: its config\.json asks for 2 layers \(model\.layers\), but its "
        r"files hold 4, .*Set num_hidden_layers=4 there, or name the right model$"
    )
    with pytest.raises(InputError, match=said):
        loaded(folder)
    whole = shortened(tmp_path / "whole", family, 4)
    assert len(loaded(whole)) > 0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
def test_two_matrices_where_the_config_says_one_are_refused(tmp_path: Path, family: str) -> None:
    """As transformers takes both, and engines the embedding for both."""
    save_target(tmp_path, family)
    config, file = tmp_path / "config.json", tmp_path / WEIGHTS
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    weights = load_file(file)
    (embedding,) = (name for name in weights if name.endswith("embed_tokens.weight"))
    same = weights | {"lm_head.weight": weights[embedding].clone()}
    save_file(same, file, {"format": "pt"})
    assert torch.equal(loaded(tmp_path)["lm_head.weight"], weights[embedding])
    save_file(same | {"lm_head.weight": weights[embedding] + 1}, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"files hold lm_head\.weight and .*embed_tokens\.weight"):
        loaded(tmp_path)


def test_layers_that_the_config_counts_for_more_tokens_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    counted = shortened(tmp_path / "model", "llama", 3, num_nextn_predict_layers=1)
    assert not any(".layers.3." in name for name in loaded(counted))
    assert "left out, as the language model does not use them: model.layers.3\n" in (
        capsys.readouterr().err
    )
    with pytest.raises(InputError, match=r"asks for 2 layers .* hold 4"):
        loaded(shortened(tmp_path / "short", "llama", 2, num_nextn_predict_layers=1))


def test_every_family_of_layers_for_more_tokens_is_known_by_its_weights_or_config() -> None:
    counts = {key for family in FAMILIES.values() for key in family.counts}
    assert counts == set(MTP_COUNTS)
    for family in FAMILIES.values():
        names = {name.partition("{n}.")[2] for name in family.names.values() if "{n}." in name}
        assert not names or names >= MTP_WEIGHTS


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_fewer_experts_than_the_files_hold_are_refused(tmp_path: Path, family: str) -> None:
    folder = shortened(tmp_path / "model", family, 4)
    config = json.loads((folder / "config.json").read_text())
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    assert config[key] > 2
    (folder / "config.json").write_text(json.dumps(config | {key: 2}))
    with pytest.raises(InputError, match=r"^target\.path="):
        loaded(folder)


def quantised(folder: Path, scales: str, how: dict[str, Any] | None) -> Path:
    save_target(folder)
    weights = load_file(folder / WEIGHTS)
    for name in [each for each in weights if "proj" in each]:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[f"{name}_{scales}"] = torch.full((1, 1), 2.0)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps(config if how is None else config | {"quantization_config": how})
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize("how", [None, {"quant_method": "modelopt", "quant_algo": "FP8"}])
def test_codes_that_nothing_reads_are_refused(tmp_path: Path, how: dict[str, Any] | None) -> None:
    with pytest.raises(InputError, match=r"holds codes of dtype F8_E4M3, of a quantisation that"):
        loaded(quantised(tmp_path, "weight_scale", how))


def test_neither_are_they_quantised_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_make_quantization_config", lambda *_: None)
    config = TargetConfig(path=str(quantised(tmp_path, "weight_scale", None)))
    config.quantization = Quantization.int8
    with pytest.raises(InputError, match=r"holds codes of dtype F8_E4M3, of a quantisation that"):
        load_model(config, load_config(config), torch.float32, torch.device("cpu"), "eager")


def test_bytes_that_nobody_reads_are_no_codes(tmp_path: Path, capsys) -> None:
    before = loaded(save_target(tmp_path, "gpt_neox"))
    weights = load_file(tmp_path / WEIGHTS)
    # Masks as older versions of transformers saved them, and layers beside the model.
    weights["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    weights["mtp.proj.weight"] = torch.ones(4, 4).to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / WEIGHTS, {"format": "pt"})
    after = loaded(tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "left out, as the language model does not use them: mtp\n" in capsys.readouterr().err


def test_codes_that_transformers_reads_are_loaded(tmp_path: Path) -> None:
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = loaded(quantised(tmp_path, "scale_inv", how))
    codes = load_file(tmp_path / WEIGHTS)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found[name].float(), 2 * codes[name].float())


@pytest.mark.parametrize(
    ("quantization", "read"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, True),
        ({"quant_method": "fp8"}, True),
        ({"quant_method": "mine"}, False),
        ({"quant_method": "bits"}, False),
        (None, False),
    ],
)
def test_quantisations_that_transformers_reads(quantization: Any, read: bool) -> None:
    assert can_read_quantization(LlamaConfig(quantization_config=quantization)) is read
