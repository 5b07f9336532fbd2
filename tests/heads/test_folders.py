"""Weight files of heads, models and adapters: all that an index names is there, and is all."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from feature_heads import fresh, settings_of
from mtp_targets import saved
from safetensors.torch import load_file, save_file
from toys import noisy_head, random_target, save_target

from conf.errors import InputError
from conf.settings.target import TargetConfig
from heads.folders import check_target_files, find_weight_files
from heads.kinds import load_head

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
OWN = {"own_output_head": True}
CHANGES = {
    "eagle1": {}, "eagle3": {}, "peagle": {"draft_vocab_size": None}, "dflash": OWN,
    "dflash2": {}, "dspark": {}, "mtp": {},
}  # fmt: skip


def divided(folder: Path, name: str = "model") -> Path:
    """Divides a folder's only weight file into two, with an index."""
    tensors, places = load_file(folder / f"{name}.safetensors"), {}
    (folder / f"{name}.safetensors").unlink()
    for number, file in enumerate((FIRST, SECOND)):
        part = dict(sorted(tensors.items(), reverse=True)[number::2])
        save_file(part, folder / file.replace("model", name), {"format": "pt"})
        places |= dict.fromkeys(part, file.replace("model", name))
    (folder / f"{name}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.fixture(params=[*CHANGES, "a model's mtp layer", "medusa"])
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A head with one weight file."""
    target, kind = random_target(num_hidden_layers=4), request.param
    if kind == "a model's mtp layer":
        folder = saved(tmp_path / "model", "MiMoForCausalLM")
        parts = [load_file(folder / name) for name in (FIRST, SECOND)]
        save_file(parts[0] | parts[1], folder / "model.safetensors", {"format": "pt"})
        for name in (FIRST, SECOND, INDEX):
            (folder / name).unlink()
        return folder
    if kind == "medusa":
        noisy_head(target).save(tmp_path / "head")
        (tmp_path / "head/medusa_lm_head.safetensors").rename(tmp_path / "head/model.safetensors")
        return tmp_path / "head"
    fresh(target, settings_of(kind, **CHANGES[kind]), kind).save(tmp_path / "head")
    return tmp_path / "head"


def test_a_head_in_shards_is_the_head_in_one_file(whole: Path) -> None:
    expected = load_head(str(whole)).state_dict()
    shards = divided(whole)
    # The index does not name the file, which an older run may have left.
    stray = {"lm_head.weight": torch.ones(96, 32), "mask_hidden": torch.ones(1, 1, 96)}
    save_file(stray, shards / "model-old.safetensors")
    found = load_head(str(shards)).state_dict()
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())


def lose_shard(folder: Path) -> None:
    (folder / SECOND).unlink()


def lose_shard_and_index(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / INDEX).unlink()


def lose_tensor(folder: Path) -> None:
    tensors = load_file(folder / SECOND)
    tensors.pop(sorted(tensors)[-1])
    save_file(tensors, folder / SECOND, {"format": "pt"})


def join_without_a_tensor(folder: Path) -> None:
    tensors = {**load_file(folder / FIRST), **load_file(folder / SECOND)}
    tensors.pop(sorted(tensors)[-1])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def cut(folder: Path) -> None:
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(content[:-4])


def break_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": []}')


DAMAGES = {
    lose_shard: rf"1 of 2 files of weights are missing, e\.g\. {SECOND}; download it again",
    lose_shard_and_index: rf"1 of 2 files of weights are missing, e\.g\. {SECOND}",
    lose_tensor: rf"{INDEX} names .*, which no file of weights there holds \(1 of \d+ tensors are",
    join_without_a_tensor: rf"{INDEX} names .*, which no file of weights there holds",
    cut: rf"{SECOND}: corrupt or truncated safetensors file",
    break_index: rf"cannot read .*{INDEX}: AttributeError",
}
damaged = pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)


# Of each reader of files.
@pytest.mark.parametrize("whole", ["eagle3", "medusa", "mtp", "a model's mtp layer"], indirect=True)
@damaged
def test_a_head_that_lacks_what_its_files_promise_is_refused(
    whole: Path, damage: Callable[[Path], None]
) -> None:
    damage(divided(whole))
    with pytest.raises(InputError, match=DAMAGES[damage]):
        load_head(str(whole))


@damaged
def test_so_are_a_target_and_an_adapter(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = divided(save_target(tmp_path / "target"))
    check_target_files(TargetConfig(path=str(folder)))
    damage(folder)
    with pytest.raises(InputError, match=DAMAGES[damage]):
        check_target_files(TargetConfig(path=str(folder)))
    if damage is lose_shard:
        adapter = folder.rename(tmp_path / "adapter")
        (adapter / "adapter_config.json").write_text("{}")
        for file in [*adapter.glob("model*")]:
            content = file.read_bytes().replace(b"model-", b"adapter_model-")
            (adapter / f"adapter_{file.name}").write_bytes(content)
            file.unlink()
        with pytest.raises(InputError, match=r"^target\.adapter=.*adapter: 1 of 2 files"):
            check_target_files(TargetConfig(adapter=str(adapter)))


def test_one_file_with_all_tensors_needs_no_shards(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "target")
    shutil.copyfile(folder / "model.safetensors", tmp_path / "kept")
    divided(folder)
    for name in (FIRST, SECOND):
        (folder / name).unlink()
    shutil.copyfile(tmp_path / "kept", folder / "model.safetensors")
    assert find_weight_files("x", folder) == [folder / "model.safetensors"]
    check_target_files(TargetConfig(path=str(folder)))
