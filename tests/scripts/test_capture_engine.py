"""`scripts/capture.py target.engine=...`: states of a serving engine are stored as the target's."""

from pathlib import Path

import pytest
import torch
from stores import NUM_LAYERS, SHARD_BYTES, captured, save_inputs, settings

from conf.errors import InputError
from data.features.store_reader import FeatureStore
from heads.target_model.load import load_target
from scripts.capture import capture
from tests.servers import relaying, serving

CPU = torch.device("cpu")


@pytest.mark.parametrize("seen", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_states_may_come_from_an_engine(
    seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its folder, or over a relay where this machine does not see it."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    inputs = save_inputs(tmp_path / "inputs")
    whole = captured(inputs, tmp_path / "whole", layers=[1, 2])
    target = load_target(settings(inputs, tmp_path).target, CPU)
    with serving(target, tmp_path, [1, 2, NUM_LAYERS]) as server, relaying(server.folder) as relay:
        config = settings(inputs, tmp_path / "store", layers=[1, 2])
        config.target.engine = [server.url]
        if not seen:
            server.told_folder = Path("/elsewhere") / server.folder.name
            config.target.relay = [relay.url]
        # Two sequences in a shard, so that they are asked for together.
        capture(config, 4 * SHARD_BYTES)
    store, local = FeatureStore(tmp_path / "store"), FeatureStore(whole)
    for index in range(len(store.train)):
        expected = local.train[index]
        for name, found in store.train[index].items():
            torch.testing.assert_close(found, expected[name], rtol=2**-7, atol=1e-5)
    for index in range(2):
        expected = local.replay.load_sequence(index)
        assert torch.equal(store.replay.load_sequence(index)["input_ids"], expected["input_ids"])
    with pytest.raises(InputError, match=r"target\.by_engine was True, is False"):
        capture(settings(inputs, tmp_path / "store", layers=[1, 2]), 4 * SHARD_BYTES)
