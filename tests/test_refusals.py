"""Refusals before anything is loaded or made, with what is here alone."""

import errno
import json
import os
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doors import COMMANDS
from omegaconf import OmegaConf
from safetensors.numpy import save_file

from conf import files as places
from conf.command.jsonl_store import JsonlStore
from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.drafting import HeadRef
from conf.settings.measure import AcceptanceRun, SpeedupRun
from conf.settings.target import TargetConfig
from data.embedded import CONVERSATIONS, PROMPTS, TARGET_PATH
from data.rows.data_files import check_data_paths, find_source
from eval.preflight_checks import adopt_head_target, check_measurement
from heads.folders import check_head_files, check_target_files, locate_head
from scripts.publish.model_card import is_hub_id

SIZES = {"model_type": "llama", "hidden_size": 8, "vocab_size": 32}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In an empty folder, at home there, without the Hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def folder(name: str, config: dict[str, Any], *files: str) -> str:
    path = Path(name)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    for file in files:
        (path / file).touch()
    return name


def test_what_is_here_is_meant_and_else_an_id_of_the_hub() -> None:
    Path("gpt2").mkdir()
    Path("chat.jsonl").touch()
    assert places.find_local_path("k", "gpt2") == Path("gpt2")
    assert places.find_local_path("k", "~/gpt2") == Path.home() / "gpt2"
    assert places.find_local_path("k", "chat.jsonl", (".jsonl",)) == Path("chat.jsonl")
    for path in ("gpt3", "openai-community/gpt2", "a-b.c_d/e.f-1_2"):
        assert places.find_local_path("k", path) is None


@pytest.mark.parametrize("path", ["./gpt2", "/gone", "~/gone", "../gone", "a/b/c", "a b", "a/", ""])
def test_what_is_neither_here_nor_an_id_is_refused(path: str) -> None:
    with pytest.raises(InputError, match=r"^k=.*: no such folder, and not a Hub id; type"):
        places.find_local_path("k", path)
    assert not is_hub_id(path)


def test_every_judge_of_paths_takes_both_forms_of_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "heads.folders._download_snapshot", lambda path, _: Path(folder(f"got/{path}", {}))
    )
    for path in ("gpt2", "openai-community/gpt2"):
        assert find_source(path).files == ()
        check_data_paths(DataConfig(path=path))
        assert locate_head(path, None) == Path("got") / path
        assert is_hub_id(path) == ("/" in path)
        with pytest.raises(InputError, match=f"target.path={path}: no such folder here, no config"):
            check_target_files(TargetConfig(path))


def test_data_that_are_not_there_are_refused() -> None:
    Path("rows.txt").touch()
    for config, message in (
        (DataConfig(path="gone.jsonl"), r"data\.path=gone\.jsonl: no such file or folder"),
        (DataConfig(eval_path="./gone"), r"data\.eval_path=\./gone: no such file or folder"),
        (DataConfig(path="rows.txt"), r"rows\.txt: ends in '\.txt'; allowed"),
        (DataConfig(features="gone"), r"data\.features=gone: no such folder"),
    ):
        with pytest.raises(InputError, match=message):
            check_data_paths(config)
    with pytest.raises(InputError, match=r"^prompts\.path=gone\.json: "):
        check_data_paths(DataConfig(path="gone.json"), "prompts")


def test_a_target_is_whole_or_refused() -> None:
    check_target_files(TargetConfig(folder("whole", SIZES, "model.safetensors")))
    check_target_files(TargetConfig("~/whole"))
    assert TargetConfig("~/whole").path == str(Path.home() / "whole")
    Path("file").touch()
    Path("empty").mkdir()
    Path(folder("broken", SIZES, "model.safetensors"), "config.json").write_text("{")
    folder("parts", SIZES, "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    Path("parts/model.safetensors.index.json").write_text(json.dumps(index))
    folder("bare", SIZES)
    folder("nameless", {}, "model.safetensors")
    for path, message in (
        ("file", r"target\.path=file: is a file; name its folder"),
        ("empty", r"target\.path=empty: no config\.json there; found \[\]"),
        ("broken", r"target\.path=broken: broken/config\.json: not JSON: "),
        ("bare", r"target\.path=bare: no weights there; must have \*\.safetensors or"),
        ("parts", r"target\.path=parts: 1 of 2 files of weights are missing, e\.g\. model-2\.saf"),
        ("nameless", r"has no model_type"),
    ):
        with pytest.raises(InputError, match=message):
            check_target_files(TargetConfig(path))
    with pytest.raises(InputError, match=r"target\.adapter=bare: no adapter_config\.json there"):
        check_target_files(TargetConfig(adapter="bare"))


def test_without_the_hub_a_target_of_it_must_be_in_the_cache(monkeypatch) -> None:
    with pytest.raises(InputError, match="HF_HUB_OFFLINE forbids"):
        check_target_files(TargetConfig("me/model"))
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache",
        lambda *_, **__: folder("cached", SIZES) + "/config.json",
    )
    check_target_files(TargetConfig("me/model"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("heads.folders.getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        url = f"http://127.0.0.1:{hub.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        check_target_files(TargetConfig("me/model"))  # whether it is there is asked later
    with pytest.raises(InputError, match=rf"{url} cannot be reached .*; name a folder, or connect"):
        check_target_files(TargetConfig("me/model"))
    monkeypatch.setattr("heads.folders.getproxies", lambda: {"https": "http://proxy"})
    check_target_files(TargetConfig("me/model"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8, "vocab_size": 32}, None),
        ({"hidden_size": 4, "target_hidden_size": 8}, None),
        ({"hidden_size": 8, "target_hidden_size": 4}, None),
        ({"hidden_size": 16, "target": "a/b"}, "hidden_size=16 (trained for a/b)"),
        ({"hidden_size": 8, "vocab_size": 31}, "vocab_size=31 (trained for another target)"),
    ],
)
@pytest.mark.parametrize("outer", [{}, {"text_config": SIZES}])
def test_a_head_of_another_target_is_refused(config, message, outer) -> None:
    target = TargetConfig(folder("target", outer or SIZES))
    head = HeadRef(folder("head", config))
    check_head_files(head, target)  # somebody else's: its config may count otherwise
    Path("head/headsmith.json").touch()
    check_head_files(head, None)
    if message is None:
        check_head_files(head, target)
        return
    with pytest.raises(InputError) as refused:
        check_head_files(head, target)
    assert f"head.path: this head has {message}, but target.path=target has" in str(refused.value)


def model_folder(name: str, architecture: str, *tensors: str, **config: Any) -> str:
    """A folder of a head or a model of others, with tensors of these names."""
    path = Path(folder(name, {**SIZES, "architectures": [architecture], **config}))
    save_file({each: np.zeros(1, np.float32) for each in tensors}, path / "model.safetensors")
    return name


LLAMA = "LlamaForCausalLM"
LAYER = "layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("architecture", "tensors", "config", "is_head"),
    [
        (LLAMA, ["model.embed_tokens.weight", f"model.{LAYER}"], {"num_hidden_layers": 24}, False),
        (LLAMA, ["model.embed_tokens.weight", f"model.{LAYER}"], {"num_hidden_layers": 1}, False),
        ("Qwen2ForCausalLM", ["model.embed_tokens.weight"], {"num_hidden_layers": 2}, False),
        ("Gemma4ForConditionalGeneration", ["language_model.embed.weight"], {}, False),
        ("GPT2LMHeadForCausalLM", ["wte.weight", "h.0.mlp.c_fc.weight"], {}, False),
        (LLAMA, ["embed_tokens.weight", LAYER, "fc.weight"], {"num_hidden_layers": 1}, True),
        ("LlamaForCausalLMEagle3", ["midlayer.mlp.up_proj.weight"], {}, True),
        ("EagleLlamaForCausalLM", [f"model.{LAYER}", "model.fc.weight"], {}, True),
        ("DFlashDraftModel", [LAYER, "fc.weight"], {"num_hidden_layers": 5}, True),
        ("Eagle3Speculator", [LAYER], {"speculators_model_type": "eagle3"}, True),
        ("MedusaModel", ["0.0.linear.weight"], {"medusa_num_heads": 4}, True),
    ],
)
def test_a_whole_model_is_no_head_and_a_head_no_model(
    architecture: str, tensors: list[str], config: dict[str, Any], is_head: bool
) -> None:
    path = model_folder("x", architecture, *tensors, **config)
    if is_head:
        check_head_files(HeadRef(path), None)
        with pytest.raises(InputError, match=r"^target\.path=x: a head, give it as head\.path=x, "):
            check_target_files(TargetConfig(path))
    else:
        check_target_files(TargetConfig(path))
        with pytest.raises(InputError, match=r"^head\.path=x: a whole model, give it as target\.p"):
            check_head_files(HeadRef(path), None)


def test_a_model_with_an_mtp_layer_is_a_target_and_a_head() -> None:
    embed = "model.embed_tokens.weight"
    for path in (
        model_folder("a", "Qwen3NextForCausalLM", embed, "mtp.fc.weight"),
        model_folder("b", "DeepseekV3ForCausalLM", embed, num_nextn_predict_layers=1),
        model_folder("c", "Qwen3_5ForCausalLM", embed, text_config={"mtp_num_hidden_layers": 1}),
    ):
        check_target_files(TargetConfig(path))
        check_head_files(HeadRef(path), None)


def test_a_folder_of_a_run_is_answered_with_its_head() -> None:
    Path(folder("run/head", SIZES), "headsmith.json").touch()
    folder("hub/snapshots/abc", SIZES)
    Path("empty").mkdir()
    for path in ("run", "run/"):
        with pytest.raises(InputError, match=r"no config\.json there; type head\.path=run/head$"):
            check_head_files(HeadRef(path), None)
    with pytest.raises(InputError, match=r"target\.path=run: no config.*; type head\.path=run/h"):
        check_target_files(TargetConfig("run"))
    with pytest.raises(InputError, match=r"no config.*; type target\.path=hub/snapshots/abc$"):
        check_target_files(TargetConfig("hub"))
    with pytest.raises(InputError, match=r"no config\.json there; found \[\]; name the folder"):
        check_head_files(HeadRef("empty"), None)
    with pytest.raises(InputError, match=r"^target\.path=run/head: a head, give it as head\.path="):
        check_target_files(TargetConfig("run/head"))


@pytest.mark.parametrize(
    ("identity", "given", "taken"),
    [
        ({"name": "models/mine"}, {}, ("models/mine", None, None)),
        ({"name": "me/x", "revision": "abc"}, {}, ("me/x", "abc", None)),
        ({"name": "x", "adapter": "a", "adapter_weights": "1f"}, {}, ("x", None, "a")),
        ({"name": "x", "adapter": "served", "adapter_weights": None}, {}, ("x", None, None)),
        ({"name": "models/mine"}, {"path": "other"}, ("other", None, None)),
        ({"name": "/elsewhere/data/embedded/model"}, {}, (None, None, None)),
        (None, {}, (None, None, None)),
    ],
)
def test_an_unset_target_is_the_one_that_the_head_names(identity, given, taken) -> None:
    Path(folder("head", SIZES), "headsmith.json").write_text(
        json.dumps({"target_identity": identity})
    )
    run = AcceptanceRun(TargetConfig(**given), head=HeadRef("head"))
    said = adopt_head_target(run)
    assert (run.target.path, run.target.revision, run.target.adapter) == taken
    told = f"target.path={taken[0]}: from headsmith.json of head, as target.path is unset"
    assert said == (told if taken[0] and not given else None)


def test_a_measurement_looks_for_the_target_that_the_head_names() -> None:
    record = Path(folder("head", SIZES), "headsmith.json")
    record.write_text(json.dumps({"target_identity": {"name": "./gone"}}))
    with pytest.raises(InputError, match=r"^target\.path=\./gone: no such folder"):
        check_measurement(SpeedupRun(head=HeadRef("head")), "speedup.json")


OWN = "target.path=own", "data.path is unset: target.path=own is a target of your own"


@pytest.mark.parametrize(
    ("entry", "given", "message"),
    [
        ("train/eagle.py", *OWN),
        ("scripts/capture.py", *OWN),
        ("scripts/regenerate.py", *OWN),
        ("scripts/prune.py", "target.path=own head.path=head sizes=[8]", OWN[1]),
        ("scripts/contest/run.py", "target.path=own tokens=9", OWN[1]),
        (
            "scripts/contest/run.py",
            "target.path=own tokens=9 data.path=chats.jsonl",
            OWN[1].replace("data", "prompts"),
        ),
        ("eval/speedup.py", *OWN),
        ("eval/acceptance.py", "head.path=head", OWN[1]),
        ("eval/tree_search.py", "head.path=head", OWN[1]),
        ("eval/acceptance.py", f"head.path=head data.path={PROMPTS}", None),
        ("train/eagle.py", f"target.path=own data.path={CONVERSATIONS}", None),
        ("train/eagle.py", f"target.path={TARGET_PATH}", None),
        ("train/eagle.py", "data.features=store target.path=own", None),
        ("eval/speedup.py", "seed=1", None),
    ],
)
def test_a_target_of_ones_own_gets_no_embedded_data(entry, given, message) -> None:
    folder("own", SIZES, "model.safetensors")
    Path(folder("head", SIZES), "headsmith.json").write_text('{"target_identity": {"name": "own"}}')
    Path("chats.jsonl").touch()
    Path("store").mkdir()
    command = COMMANDS[entry]
    run = OmegaConf.to_object(command.compose_settings(given.split()))
    assert command.check is not None
    if message is None:
        command.check(run)
        return
    with pytest.raises(InputError, match=f"^{message}.*; type {message.split()[0]}=FILE"):
        command.check(run)


def test_a_folder_to_write_to_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    places.check_out_dir("new/folder")
    Path("file").touch()
    with pytest.raises(InputError, match=r"out_dir=file/x: .*file is a file; name a folder"):
        places.check_out_dir("file/x")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2e6))
    with pytest.raises(InputError, match=r"out_dir=new: 2 MB are free there; make room for at le"):
        places.check_out_dir("new")


def test_a_folder_to_write_to_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("link").symlink_to("nowhere")
    for path in ("link", "link/x"):
        with pytest.raises(InputError, match=rf"out_dir={path}: .*link is a link to nowhere; name"):
            places.check_out_dir(path)
    with pytest.raises(InputError, match=r"cannot be written \(.*File name too long\)"):
        places.check_out_dir("n" * 300)
    assert [each.name for each in Path().iterdir()] == ["link"]  # nothing is left of a trial

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(InputError, match=r"cannot be written \(.*Read-only file system\)"):
        places.check_out_dir("new")
    with pytest.raises(InputError, match="new: cannot be made: Read-only file system"):
        JsonlStore(Path("new"), {})


@pytest.mark.parametrize(
    ("entry", "given", "message"),
    [
        ("train/medusa.py", "target.path=./nowhere", "target.path=./nowhere: no such folder"),
        ("train/eagle.py", "out_dir=.", "out_dir=.: is not empty; name another folder"),
        ("train/peagle.py", "out_dir=done/tree_search.json/x", "out_dir=done/tree_search.json/x: "),
        ("train/medusa2.py", "train.resume=gone", "train.resume=gone: no such folder"),
        ("train/dflash.py", "head.path=./gone", "head.path=./gone: no such folder"),
        ("eval/acceptance.py", "seed=1", "head.path is unset: this command needs a head"),
        ("eval/speedup.py", "heads=[./gone]", "heads=./gone: no such folder"),
        ("eval/speedup.py", "methods=[medussa]", "methods=['medussa']: unknown; allowed: all, "),
        ("eval/speedup.py", "draft.path=./gone", "draft.path=./gone: no such folder"),
        (
            "eval/tree_search.py",
            "head.path=./gone out_dir=done",
            "out_dir=done: already holds tree_search.json",
        ),
        ("scripts/capture.py", "data.path=gone.csv", "data.path=gone.csv: no such file or folder"),
        ("scripts/regenerate.py", "data.path=gone.csv", "data.path=gone.csv: no such file"),
        ("scripts/contest/run.py", "recipes=[medusa]", "tokens is unset; it has no default: type"),
        ("scripts/export.py", "format=vllm", "head.path is unset"),
        (
            "scripts/export.py",
            "dtype=float16",
            "format is unset; allowed: vllm, sglang, trtllm, spec",
        ),
        ("scripts/prune.py", "sizes=[8]", "head.path is unset"),
        ("scripts/merge_adapter.py", "target.adapter=x", "target.path is unset; name a folder or"),
        ("scripts/push.py", "repo_id=head", "repo_id=head: must be user/name"),
        ("scripts/repair.py", "head.path=./gone", "head.path=./gone: no such folder"),
    ],
)
def test_refused_at_the_door(entry, given, message, tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "done").mkdir()
    (tmp_path / "done/tree_search.json").touch()
    there = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", [entry, *given.split()])
    with pytest.raises(SystemExit, match=r"^2$"):
        COMMANDS[entry].parse_command_line()
    assert f"error: {message}" in capfd.readouterr().err
    assert sorted(tmp_path.rglob("*")) == there


@pytest.mark.parametrize("entry", ["train/medusa.py", "eval/speedup.py", "scripts/capture.py"])
def test_several_processes_do_not_spread_a_target_each(entry, monkeypatch, capfd) -> None:
    monkeypatch.setattr(sys, "argv", [entry, "target.device_map=auto"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match=r"^2$"):
        COMMANDS[entry].parse_command_line()
    told = capfd.readouterr().err
    assert "target.device_map=auto: each of 2 processes (WORLD_SIZE) would spread" in told


@pytest.mark.parametrize(("setting", "size"), [("target.device_map=auto", "1"), ("seed=1", "2")])
def test_one_process_may_spread_it_and_several_need_not(setting, size, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train/medusa.py", setting])
    monkeypatch.setenv("WORLD_SIZE", size)
    COMMANDS["train/medusa.py"].parse_command_line()
