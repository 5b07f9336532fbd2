"""Servers of another target, or of other states, are found out by asking."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stores import NUM_LAYERS
from torch import Tensor
from toys import save_target

from conf.errors import InputError
from conf.settings.target import Dtype, TargetConfig
from data.servers import http_client as endpoint
from eval.measure.engine_answers import open_states_pool
from heads.target_model.load import RemoteTarget, load_early_layers, load_target
from heads.target_model.model import FeatureLayers, Target
from scripts.zoo.tiny_targets import make_tiny_target
from tests.servers import EngineServer, serving

LAYERS = [1, NUM_LAYERS]
TEXT = torch.randint(3, 18, (90,), generator=torch.Generator().manual_seed(0)).tolist()
CPU = torch.device("cpu")
Fault = Callable[[EngineServer, Target], None]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    folder = save_target(tmp_path_factory.mktemp("target") / "it", num_hidden_layers=NUM_LAYERS)
    return TargetConfig(path=str(folder), dtype=Dtype.float32)


@pytest.fixture(scope="module")
def target(config: TargetConfig) -> Target:
    """The norm's weights are not one, so that a norm that is left out shows."""
    found = load_target(config, CPU)
    found.decoder.norm.weight.data.uniform_(0.5, 2.0)
    return found


@pytest.fixture
def server(target: Target, tmp_path: Path) -> Iterator[EngineServer]:
    with serving(target, tmp_path, LAYERS) as server:
        yield server


def probed(server: EngineServer, config: TargetConfig, target: Target) -> None:
    remote = RemoteTarget.from_config(config, CPU)
    remote.final_norm.weight.data.copy_(target.decoder.norm.weight)
    with open_states_pool(replace(config, engine=[server.url]), remote, LAYERS, TEXT):
        pass


def test_the_targets_own_server_passes(
    server: EngineServer, config: TargetConfig, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    probed(server, config, target)
    line = "log-probabilities 0.0000 nats from those of its states; states at most 0.00% apart; "
    line += "an early state 0.00% from the target's own"
    assert f"target.engine={server.url}: {line}" in capsys.readouterr().out
    prompts = [body["prompt"] for body in server.bodies]
    assert TEXT in prompts
    assert prompts.count(TEXT[7:64]) == 2
    assert list(server.folder.iterdir()) == []


def other_weights(server: EngineServer, _: Target) -> None:
    right = server.log_probs
    server.log_probs = lambda ids: [nats - 0.2 for nats in right(ids)]


def behind_the_final_norm(server: EngineServer, target: Target) -> None:
    def normed(ids: list[int]) -> Tensor:
        with server.one_at_a_time:
            output = target.encode_text(ids, FeatureLayers((1,)))
        return torch.stack([output.layers[1][0], output.hidden_states[0]], 1)

    server.states = normed


def other_layers(server: EngineServer, target: Target) -> None:
    """Some tools count decoder layers from 0 where vLLM counts their outputs from 1."""

    def one_too_far(ids: list[int]) -> Tensor:
        with server.one_at_a_time:
            output = target.encode_text(ids, FeatureLayers((2, NUM_LAYERS)))
        return torch.stack([output.layers[2][0], output.layers[NUM_LAYERS][0]], 1)

    server.states = one_too_far


def wrong_when(is_wrong: Callable[[list[int], list[list[int]]], bool]) -> Fault:
    """States of a text that depend on the texts before it, which end with itself."""

    def fault(server: EngineServer, _: Target) -> None:
        right, seen = server.states, []

        def states(ids: list[int]) -> Tensor:
            seen.append(ids)
            return right(ids) * (1.1 if is_wrong(ids, seen) else 1.0)

        server.states = states

    return fault


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (other_weights, r"0\.200 nats on average .*serves other weights"),
        (behind_the_final_norm, "give other log-probabilities than the server"),
        (other_layers, r"hidden state 1 is \d+\.\d% from that of the first"),
        (wrong_when(lambda ids, _: len(ids) > 64), "of a text change when more text follows"),
        (
            wrong_when(lambda ids, seen: len(seen) > 2 and ids == TEXT[:64]),
            "the states of a text change when it is read a second time",
        ),
        # Each of the eight has been read alone before.
        (
            wrong_when(lambda ids, seen: ids != TEXT[:64] and seen.count(ids) == 2),
            "the states of a text change when 8 texts are read at once",
        ),
    ],
)
def test_a_server_of_something_else_is_found_out(
    fault: Fault, words: str, server: EngineServer, config: TargetConfig, target: Target
) -> None:
    fault(server, target)
    with pytest.raises(InputError, match=words):
        probed(server, config, target)


def test_an_early_state_is_the_target_s_own(config: TargetConfig, target: Target) -> None:
    for index in (1, 2):
        state = load_early_layers(config, index)
        assert state is not None
        expected = target.encode_text(TEXT, FeatureLayers((index,))).layers[index][0]
        torch.testing.assert_close(state(TEXT), expected, rtol=0, atol=1e-5)
    assert (
        load_early_layers(replace(config, engine=["http://a/v1"], adapter_name="tuned"), 1) is None
    )


@pytest.mark.parametrize("model_type", ["gemma4_text", "minicpm3"])
def test_first_layers_that_hang_on_later_ones_are_not_compared(
    model_type: str, tmp_path: Path
) -> None:
    """Gemma 4's share the caches of others; the number of layers scales each of MiniCPM's."""
    path = str(make_tiny_target(model_type, tmp_path))
    assert load_early_layers(TargetConfig(path=path, dtype=Dtype.float32), 2) is None


def test_a_server_that_comes_back_with_other_weights_ends_the_run(
    server: EngineServer, config: TargetConfig, target: Target
) -> None:
    remote = RemoteTarget.from_config(config, CPU)
    remote.final_norm.weight.data.copy_(target.decoder.norm.weight)
    with open_states_pool(replace(config, engine=[server.url]), remote, LAYERS, TEXT) as pool:
        assert pool.request_states([5, 6]).keys() == {f"layers.{index}" for index in LAYERS}
        other_weights(server, target)
        server.faults = [(422, {})]
        with pytest.raises(InputError, match="serves other weights"):
            pool.request_states([5, 6])
