"""`train/mtp.py`: a target's own layer trained on, a fresh one, and what commands take it for."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mtp_targets import saved
from stores import save_inputs, settings

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.drafting import HeadRef
from conf.settings.eagle import MtpConfig, MtpRun
from conf.settings.measure import SpeedupRun
from conf.settings.target import Dtype, TargetConfig
from conf.settings.training import TrainConfig
from eval import speedup
from heads.kinds import load_head
from heads.mtp.mtp import MtpHead
from train import mtp
from train.loop import evaluation as replay

FAMILY = "MiMoForCausalLM"


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setattr(replay, "MAX_REPLAY_TOKENS", 12)
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, a Llama target, and one with a layer of its own in `own`."""
    folder = save_inputs(tmp_path_factory.mktemp("inputs"))
    saved(folder / "own", FAMILY)
    return folder


def trained(
    out_dir: Path, target: TargetConfig, data: DataConfig, max_steps: int = 4, rate: float = 1e-2
) -> None:
    train = TrainConfig(
        max_steps=max_steps, batch_size=2, warmup_steps=0, log_steps=1, num_eval_sequences=2,
        num_replay_prompts=1, learning_rate=rate, adam_learning_rate=rate,
    )  # fmt: skip
    mtp.main(MtpRun(head=MtpConfig(), train=train, target=target, data=data, out_dir=str(out_dir)))


def test_training_goes_on_from_the_targets_own_layer(inputs: Path, tmp_path: Path, capsys) -> None:
    own = str(inputs / "own")
    target = TargetConfig(path=own, dtype=Dtype.float32)
    trained(tmp_path / "out", target, settings(inputs, tmp_path).data, max_steps=1, rate=1e-7)
    assert f"head: MTP layer of {FAMILY}, from {own}, 3 steps" in capsys.readouterr().out
    before, after = load_head(own), load_head(str(tmp_path / "out/head"))
    assert isinstance(after, MtpHead)
    tensors = before.collect_tensors()
    for name, tensor in after.collect_tensors().items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=1e-4)
    assert any(not torch.equal(t, tensors[name]) for name, t in after.collect_tensors().items())


def test_a_target_that_has_lost_its_layer_is_not_given_a_fresh_one(
    inputs: Path, tmp_path: Path
) -> None:
    lost = tmp_path / "lost"
    shutil.copytree(inputs / "own", lost)
    index = lost / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    kept = {name: file for name, file in places.items() if ".mtp_layers." not in name}
    index.write_text(json.dumps({"weight_map": kept}))
    (lost / "model-00002-of-00002.safetensors").unlink()
    target = TargetConfig(path=str(lost), dtype=Dtype.float32)
    with pytest.raises(InputError, match=r"names 1 MTP layers, .* set head\.path to the original"):
        trained(tmp_path / "out", target, settings(inputs, tmp_path).data)
    assert not (tmp_path / "out").exists()


def test_an_indexer_stays_as_it_is(inputs: Path, tmp_path: Path) -> None:
    """All else of the layer learns, the experts' balance apart, which no gradient moves."""
    own = str(saved(tmp_path / "own", "GlmMoeDsaForCausalLM"))
    data = settings(inputs, tmp_path).data
    trained(tmp_path / "out", TargetConfig(path=own, dtype=Dtype.float32), data, max_steps=2)
    before, after = (
        load_head(path).build_files().tensors for path in (own, str(tmp_path / "out/head"))
    )
    same = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    kept = {name for name in after if ".indexer." in name or "correction_bias" in name}
    assert (same, len(kept)) == (kept, 6)


@pytest.mark.usefixtures("no_picture")
def test_a_targets_own_layer_is_measured_beside_every_other_way(
    inputs: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello number 3"}\n')
    run = SpeedupRun(
        target=TargetConfig(path=str(inputs / "own"), dtype=Dtype.float32),
        data=DataConfig(path=str(prompts)), head=HeadRef(), methods=["mtp_chain", "mtp_tree"],
        max_new_tokens=8, num_repeats=1, num_warmups=0, out_dir=str(tmp_path / "speed"),
    )  # fmt: skip
    speedup.main(run)
    result = json.loads((tmp_path / "speed/speedup.json").read_text())
    assert {"vanilla", "generate", "mtp_chain", "mtp_tree"} == set(result["methods"])
    assert result["lossless"]["num_equal"] == 1
