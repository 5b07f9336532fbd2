"""`scripts/mtp.py`: the layer in a target's files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_targets import saved, target_with_layer
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from toys import save_target
from transformers import AutoModelForCausalLM

from conf.errors import InputError
from conf.settings.drafting import HeadRef
from conf.settings.export import MergeAdapterRun, MtpAction, MtpFilesRun
from conf.settings.target import TargetConfig
from heads.folders import load_model_config
from heads.kinds import load_head
from heads.mtp import stitch
from heads.mtp.mtp import MtpHead
from scripts import merge_adapter, mtp


def run(action: MtpAction, target: Path, out_dir: Path, head: Path | None = None) -> None:
    ref = HeadRef(None if head is None else str(head))
    mtp.main(MtpFilesRun(action, TargetConfig(path=str(target)), ref, str(out_dir)))


def trained(folder: Path, architecture: str) -> Path:
    """A folder of a layer with other weights."""
    target, head = target_with_layer(architecture)
    other = MtpHead(head.config, head.vocab)
    other.load_state_dict({name: 2.0 * tensor for name, tensor in head.state_dict().items()})
    other.attach(target).save(folder)
    return folder


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    held = {name: load_file(folder / name) for name in set(index.values())}
    assert {name: file for file, tensors in held.items() for name in tensors} == index
    return {name: held[file][name] for name, file in index.items()}


def assert_same_layer(found: Path, expected: Path) -> None:
    mine, theirs = (load_head(str(each)).build_files().tensors for each in (found, expected))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "MiMoV2FlashForCausalLM"])
def test_a_trained_layer_is_stitched_and_nothing_else_changes(architecture, tmp_path) -> None:
    target, layer = target_with_layer(architecture)
    folder, head = saved(tmp_path / "model", architecture), trained(tmp_path / "head", architecture)
    before = all_tensors(folder)
    run(MtpAction.stitch, folder, tmp_path / "whole", head)
    after = all_tensors(tmp_path / "whole")
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        is_own = layer.config.family_entry.to_own_name(name, target.num_layers) is not None
        expected = 2.0 * before[name] if is_own else before[name]
        assert torch.equal(tensor, expected), name
    shard = "model-00001-of-00002.safetensors"
    assert (tmp_path / "whole" / shard).read_bytes() == (folder / shard).read_bytes()
    kept = {file.name for file in folder.iterdir()}
    assert {file.name for file in (tmp_path / "whole").iterdir()} == kept
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert torch.equal(model.get_output_embeddings().weight, target.output_head.weight)
    assert_same_layer(tmp_path / "whole", head)


def test_experts_that_are_joined_in_the_file_stay_so(tmp_path: Path) -> None:
    architecture = "Qwen3_5MoeForCausalLM"
    folder = saved(tmp_path / "model", architecture, joined=True)
    run(MtpAction.stitch, folder, tmp_path / "whole", trained(tmp_path / "head", architecture))
    before, after = all_tensors(folder), all_tensors(tmp_path / "whole")
    assert after.keys() == before.keys()
    name = "mtp.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(after[name], 2.0 * before[name])


def test_more_layers_stay_counted_and_what_does_not_come_back_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model", "MiMoForCausalLM")
    head = trained(tmp_path / "head", "MiMoForCausalLM")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    run(MtpAction.stitch, folder, tmp_path / "whole", head)
    assert json.loads((tmp_path / "whole/config.json").read_text()) == config
    named = stitch._name_stored_tensors
    wrong = {"model.mtp_layers.0.input_proj.weight": torch.zeros(64, 128)}
    monkeypatch.setattr(stitch, "_name_stored_tensors", lambda *given: named(*given) | wrong)
    with pytest.raises(InputError, match=r"fc\.weight was written with other values"):
        run(MtpAction.stitch, folder, tmp_path / "other", head)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "head", "whole"}


SKIPPED = "llm_int8_skip_modules"


@pytest.mark.parametrize(
    ("quantisation", "key", "before"),
    [
        ({"ignore": ["lm_head", "model.norm"]}, "ignore", {"lm_head", "model.norm"}),
        ({"quant_method": "bitsandbytes", SKIPPED: None}, SKIPPED, {"lm_head"}),
        ({"quant_method": "compressed-tensors"}, "ignore", {"lm_head"}),
        ({"quant_method": "fp8"}, "modules_to_not_convert", {"lm_head"}),
    ],
)
def test_a_model_that_lost_its_layer_gets_that_of_the_original(
    quantisation: dict[str, Any], key: str, before: set[str], tmp_path: Path
) -> None:
    """As after `save_pretrained`: one file, and a quantisation's list of what it left alone."""
    architecture = "Qwen3NextForCausalLM"
    original = saved(tmp_path / "original", architecture)
    target, _ = target_with_layer(architecture)
    robbed = tmp_path / "robbed"
    target.model.save_pretrained(robbed)
    config = json.loads((robbed / "config.json").read_text())
    config |= {"architectures": [architecture], "quantization_config": quantisation}
    (robbed / "config.json").write_text(json.dumps(config))
    run(MtpAction.stitch, robbed, tmp_path / "whole", original)
    changed = json.loads((tmp_path / "whole/config.json").read_text())
    assert changed["num_nextn_predict_layers"] == 1
    ignored = set(changed["quantization_config"][key])
    assert before | {"mtp.fc", "mtp.layers.0.self_attn.q_proj"} <= ignored
    stored = all_tensors(tmp_path / "whole")
    whole = load_file(robbed / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in whole.items())
    assert {name for name in stored if name not in whole} == {
        name for name in all_tensors(original) if name.startswith("mtp.")
    }
    assert_same_layer(tmp_path / "whole", original)


COPIES = ["model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"]


@pytest.mark.parametrize("is_tied", [False, True])
def test_copies_of_the_targets_ends_come_back_with_the_layer(is_tied, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "DeepseekV3ForCausalLM", dict.fromkeys(COPIES))
    ends = ["model.embed_tokens.weight", "lm_head.weight"]
    if is_tied:
        stored = load_file(folder / "model-00001-of-00002.safetensors")
        del stored[ends.pop()]
        save_file(stored, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
        index = folder / "model.safetensors.index.json"
        listed = json.loads(index.read_text())
        del listed["weight_map"]["lm_head.weight"]
        index.write_text(json.dumps(listed))
        ends *= 2
    run(MtpAction.stitch, folder, tmp_path / "whole", folder)
    after = all_tensors(tmp_path / "whole")
    assert all(torch.equal(after[c], after[e]) for c, e in zip(COPIES, ends, strict=True))


def test_copies_that_are_there_stay(tmp_path: Path) -> None:
    own = {name: torch.full((300, 64), 7.0, dtype=torch.float16) for name in COPIES}
    folder = saved(tmp_path / "model", "DeepseekV3ForCausalLM", own)
    run(MtpAction.stitch, folder, tmp_path / "whole", folder)
    after = all_tensors(tmp_path / "whole")
    assert all(torch.equal(after[name], own[name]) for name in COPIES)
    assert {after[name].dtype for name in COPIES} == {torch.float16}


def test_a_merge_names_the_command_that_gives_the_layer_back(tmp_path, capsys) -> None:
    base = saved(tmp_path / "base", "Glm4MoeForCausalLM")
    lora = LoraConfig(target_modules=["q_proj"])
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.01)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    target = TargetConfig(path=str(base), adapter=str(tmp_path / "adapter"))
    merge_adapter.main(MergeAdapterRun(target, str(tmp_path / "merged")))
    command = capsys.readouterr().out.splitlines()[-1]
    stitch, head = f"target.path={tmp_path}/merged", f"head.path={base}"
    out = f"out_dir={tmp_path}/merged-mtp"
    assert command == f"python scripts/mtp.py action=stitch {stitch} {head} {out}"
    with pytest.raises(InputError, match="but no file holds them"):
        load_head(str(tmp_path / "merged"))
    run(MtpAction.stitch, tmp_path / "merged", tmp_path / "merged-mtp", base)
    assert_same_layer(tmp_path / "merged-mtp", base)


def test_the_layer_is_taken_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "model", "Glm4MoeForCausalLM")
    run(MtpAction.check, folder, tmp_path / "none")
    assert "an MTP layer of Glm4MoeForCausalLM, 0.1 M numbers, complete" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
    run(MtpAction.extract, folder, tmp_path / "layer")
    assert_same_layer(tmp_path / "layer", folder)


def test_norms_shifted_twice_are_refused(tmp_path: Path) -> None:
    """Weights of norms that multiply by 1 + weight, as a converter of other norms writes them."""
    architecture = "Qwen3NextForCausalLM"
    target, head = target_with_layer(architecture)
    own = {f"mtp.layers.0.{name}": t for name, t in head.layer.state_dict().items()}
    norms = [name for name in own if name.endswith("norm.weight")]
    near_zero = {name: torch.full_like(own[name], 0.1) for name in norms}
    for name, weight in target.model.named_parameters():
        if name.endswith("layernorm.weight"):
            assert weight.abs().max() < 1e-6
    more = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    near_zero |= {f"mtp.{name}.weight": torch.full((64,), 0.1) for name in more}
    run(MtpAction.check, saved(tmp_path / "right", architecture, near_zero), tmp_path / "none")
    twice = {name: 1.0 + tensor for name, tensor in near_zero.items()}
    folder = saved(tmp_path / "twice", architecture, twice)
    with pytest.raises(InputError, match=r"weights around 1\.10, .* around 0\.00; a converter"):
        run(MtpAction.check, folder, tmp_path / "none")


def test_a_layer_is_written_in_the_dtype_of_most_of_the_models_floats(tmp_path: Path) -> None:
    codes, scales = torch.zeros(64, 64, dtype=torch.int8), torch.zeros(8)
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    save_file({"a.weight": codes, "a.SCB": scales}, first)
    norm = torch.zeros(4, dtype=torch.bfloat16)
    save_file({"norm": norm, "embed": torch.zeros(16, 16, dtype=torch.float16)}, second)
    assert stitch._find_common_dtype([first, second]) is torch.float16
    assert stitch._find_common_dtype([first]) is torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, r"hidden_size=64 .*, but target.path|hidden_size=64"),
        ({"vocab_size": 999}, r"vocab_size=300"),
        ({"architectures": ["LlamaForCausalLM"]}, r"MTP layer is unknown; allowed: .*DeepseekV3"),
        ({"architectures": ["Glm4MoeForCausalLM"]}, r"name a layer of its own kind"),
    ],
)
def test_another_model_is_refused_and_nothing_is_written(changes, message, tmp_path) -> None:
    folder = saved(tmp_path / "model", "MiMoForCausalLM")
    head = trained(tmp_path / "head", "MiMoForCausalLM")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=message):
        run(MtpAction.stitch, folder, tmp_path / "whole", head)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "head"}


@pytest.mark.parametrize(
    ("listed", "missing"),
    [
        (["mtp"], 0),
        (["lm_head", "re:.*mtp.*"], 0),
        (["mtp.*"], 0),
        (["mtp.layers.0"], 1),
        # q, k, v and o, the router, 4 experts and a shared one of 3 matrices, its gate, and fc.
        (["model.layers.0.mlp"], 4 + 1 + 3 * 5 + 1 + 1),
    ],
)
def test_a_quantised_model_must_say_that_the_layer_is_none(listed, missing, tmp_path) -> None:
    folder = saved(tmp_path / "model", "Qwen3NextForCausalLM")
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"ignore": listed}}
    file.write_text(json.dumps(config))
    if missing:
        more = rf"does not name mtp\.fc and {missing - 1} more modules"
        with pytest.raises(InputError, match=more):
            run(MtpAction.check, folder, tmp_path / "none")
        run(MtpAction.stitch, folder, tmp_path / "whole", folder)
        folder = tmp_path / "whole"
        ignored = load_model_config(folder)["quantization_config"]["ignore"]
        assert len(ignored) == len(listed) + missing
    run(MtpAction.check, folder, tmp_path / "none")


@pytest.mark.parametrize("action", [MtpAction.check, MtpAction.extract])
def test_a_target_without_a_layer_is_named(tmp_path: Path, action: MtpAction) -> None:
    plain = save_target(tmp_path / "plain", num_hidden_layers=8)
    with pytest.raises(InputError, match=rf"^target\.path={plain}: has no MTP layer; name a model"):
        run(action, plain, tmp_path / "out")
    gone = saved(tmp_path / "gone", "MiMoForCausalLM")
    index = json.loads((gone / "model.safetensors.index.json").read_text())["weight_map"]
    kept = {name: file for name, file in index.items() if ".mtp_layers." not in name}
    (gone / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept}))
    (gone / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=rf"^target\.path={gone}: config\.json names 1 MTP layers"):
        run(action, gone, tmp_path / "out")
    with pytest.raises(InputError, match=rf"^head\.path={plain}: a whole model, give it as"):
        run(MtpAction.stitch, gone, tmp_path / "out", plain)


def test_settings_that_say_nothing_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "MiMoForCausalLM")
    with pytest.raises(InputError, match=r"only stitch takes a head\.path"):
        run(MtpAction.stitch, folder, tmp_path / "whole")
    with pytest.raises(InputError, match="for check and extract leave it unset"):
        run(MtpAction.check, folder, tmp_path / "whole", folder)
    with pytest.raises(InputError, match="is not an empty folder; choose another"):
        run(MtpAction.extract, folder, tmp_path)
