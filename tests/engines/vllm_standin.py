"""`vllm serve` without vLLM: a target's own hidden states and answers, by the options of the pages.

python tests/engines/vllm_standin.py serve FOLDER --port 8000 --speculative-config ... ...
"""

import argparse
import json
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch

from conf.settings.target import Dtype, TargetConfig
from heads.target_model.load import load_target
from tests.servers import serving


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("serve", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--speculative-config", type=json.loads, required=True)
    parser.add_argument("--kv-transfer-config", type=json.loads, required=True)
    asked, _ = parser.parse_known_args()  # others are of the engine's speed
    layers = asked.speculative_config["draft_model_config"]["hf_config"]
    extra = asked.kv_transfer_config["kv_connector_extra_config"]
    target = load_target(TargetConfig(asked.model, dtype=Dtype.float32), torch.device("cpu"))
    server = serving(
        target,
        Path(extra["shared_storage_path"]).parent,
        layers["eagle_aux_hidden_state_layer_ids"],
        (asked.host, asked.port),
    )
    server.models = ({"id": asked.model, "max_model_len": asked.max_model_len},)
    with server:
        threading.Event().wait()


if __name__ == "__main__":
    main()
