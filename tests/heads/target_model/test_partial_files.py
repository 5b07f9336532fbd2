"""A large target on the Hub: files without a tensor that is read are never fetched."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT
from hub_server import HubServer, Repo
from toys import random_model

from tests.scripts.publish.test_push import hub_env

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
