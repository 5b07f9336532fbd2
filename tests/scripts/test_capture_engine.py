"""`scripts/capture.py engine=...`: states of a serving engine are stored as the target's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stores import SHARD_BYTES, captured, save_inputs, settings
from torch import Tensor

from conf.errors import InputError
from data.features.reader import FeatureStore
from data.servers.endpoint import Endpoint
from data.servers.hidden_states import ServerTaps
from heads.layers.documents import Documents
from heads.target_model.load import load_target
from heads.target_model.model import Taps
from scripts.capture import capture
from scripts.store import states as capture_states

CPU = torch.device("cpu")


def test_states_may_come_from_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    inputs = save_inputs(tmp_path / "inputs")
    whole = captured(inputs, tmp_path / "whole")
    target = load_target(settings(inputs, tmp_path).target, CPU)

    class HiddenStatesServer:
        """Gives states before the final norm, as the real one does."""

        def __init__(self, endpoint: Endpoint, taps: ServerTaps, concurrency: int) -> None:
            assert str(endpoint) == "engine=http://here/v1"
            self.taps = taps

        def __enter__(self) -> "HiddenStatesServer":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read_rows(self, rows: list[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
            written = tuple(self.taps.written)
            for row in rows:
                ids, positions = row["input_ids"][None], row["position_ids"][None]
                documents = Documents.of(row["document_ids"][None])
                output = target.read(ids, positions, documents, Taps(written))
                yield self.taps.named(torch.stack([output.layers[i][0] for i in written], 1))

    monkeypatch.setattr(capture_states, "HiddenStatesServer", HiddenStatesServer)
    # Two sequences in a shard, so that they are asked for together.
    capture(settings(inputs, tmp_path / "store", engine="http://here/v1"), 4 * SHARD_BYTES)
    store, local = FeatureStore(tmp_path / "store"), FeatureStore(whole)
    for index in range(len(store.train)):
        expected = local.train[index]
        for name, found in store.train[index].items():
            torch.testing.assert_close(found, expected[name], rtol=2**-7, atol=1e-5)
    assert len(store.replay) == 0
    with pytest.raises(InputError, match=r"target\.by_engine was True, is False"):
        capture(settings(inputs, tmp_path / "store"), 4 * SHARD_BYTES)
