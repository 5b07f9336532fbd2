"""Answers as vLLM's own servers gave them; the states beside them are a stand-in's."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.servers.test_hidden_states import WRITTEN, engine, expected
from tests.servers import EngineServer

NAMES = '{{"object":"list","data":[{{"id":"{id}","object":"model","created":1795670648,"owned_by":"vllm","root":"{id}","parent":null,"max_model_len":{length},"permission":[]}}]}}'  # noqa: E501
RECORDED = {
    "0.32.0": '{"id":"cmpl-8f0bc5cd0e608177","object":"text_completion","created":1795670646,"model":"target","choices":[{"index":0,"text":"\\n        self","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":[302,359],"prompt_logprobs":null,"prompt_token_ids":[5,6,7],"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-fc9d20bc","usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2,"prompt_tokens_details":null,"completion_tokens_details":null},"kv_transfer_params":{"hidden_states_path":"/dev/shm/layers-2-4-5-8/cmpl-8f0bc5cd0e608177-0-8f99cc17.safetensors"},"ec_transfer_params":null,"metrics":null}',  # noqa: E501
}


class RecordedServer(EngineServer):
    """Answers as recorded, but for the file that it names."""

    def __init__(self, folder: Path, version: str) -> None:
        super().__init__(folder, WRITTEN)
        self.version, self.recorded = version, json.loads(RECORDED[version])
        self.models = tuple(json.loads(NAMES.format(id="target", length=320))["data"])
        self.follows = lambda _ids, _num: self.recorded["choices"][0]["token_ids"] or [0]

    def answer(self, body: dict) -> dict[str, Any]:
        return self.recorded | {"kv_transfer_params": super().answer(body)["kv_transfer_params"]}


@pytest.mark.parametrize("version", RECORDED)
def test_states_are_read_by_a_recorded_answer(tmp_path: Path, version: str) -> None:
    server = RecordedServer(tmp_path, version)
    with server, engine(server) as states:
        assert (states.model, states.max_model_len) == ("target", 320)
        found = states.request_states([5, 6, 7])
        assert all(found[name].equal(tensor) for name, tensor in expected([5, 6, 7]).items())


def test_an_answer_has_the_tokens_that_were_written(tmp_path: Path) -> None:
    server = RecordedServer(tmp_path, "0.32.0")
    with server, engine(server) as states:
        ids, found = states.request_answer([5, 6, 7], 2, {"temperature": 0.0}, include_outputs=True)
    assert ids == [302, 359]
    assert found["layers.1"].equal(expected([5, 6, 7, 302])["layers.1"])
