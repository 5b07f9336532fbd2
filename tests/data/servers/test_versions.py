"""The ways in which vLLM writes hidden states, by its version."""

from pathlib import Path

import pytest

from conf.errors import InputError
from data.servers.hidden_states import WHOLE_PROMPTS, ServerFeatureLayers, choose_writing_format
from tests.data.servers.test_hidden_states import WRITTEN, engine, expected, taps
from tests.servers import EngineServer


@pytest.mark.parametrize(
    ("version", "options", "locks", "outputs", "hybrids"),
    [
        ("0.18.0", (), False, False, False),
        ("0.21.2", (), False, False, False),
        ("0.22.0", WHOLE_PROMPTS, True, False, False),
        ("0.23.1rc1", WHOLE_PROMPTS, True, False, False),
        ("0.24.0", (), True, True, False),
        ("0.25.3", (), True, True, False),
        ("0.26.0", (), True, True, True),
        ("0.32.1.dev7+gabc", (), True, True, True),
        ("1.0.0", (), True, True, True),
        ("dev", (), True, True, True),
        ("0.1.dev17+gabc", (), True, True, True),
    ],
)
def test_versions(
    version: str, options: tuple[str, ...], locks: bool, outputs: bool, hybrids: bool
) -> None:
    found = choose_writing_format(version, "here")
    assert (found.options, found.locks, found.outputs) == (options, locks, outputs)
    assert found.hybrids is hybrids
    assert taps().serve_options("/s", found)[4:] == [*options]


def test_a_version_without_hidden_states_is_refused(tmp_path: Path) -> None:
    with EngineServer(tmp_path, WRITTEN) as server:
        server.version = "0.17.1"
        with (
            pytest.raises(InputError, match=r"vLLM 0\.17\.1 writes no hidden states"),
            engine(server),
        ):
            pytest.fail("it was taken")


def test_a_version_without_locks_has_written_when_it_answers(tmp_path: Path) -> None:
    with EngineServer(tmp_path, WRITTEN) as server:
        server.version, server.locks = "0.18.0", False
        with engine(server) as states:
            assert states.request_states([7])["layers.1"].equal(expected([7])["layers.1"])
    assert list(server.folder.iterdir()) == []


def test_recurrent_targets_need_a_version_that_writes_them_right(tmp_path: Path) -> None:
    recurrent = ServerFeatureLayers(taps().layers, 4, 2, taps().final_norm, recurrent=True)
    with EngineServer(tmp_path, WRITTEN) as server:
        server.version = "0.25.0"
        with (
            pytest.raises(InputError, match="writes zeros for a target with recurrent layers"),
            engine(server, recurrent),
        ):
            pytest.fail("it was taken")
        server.version = "0.26.0"
        with engine(server, recurrent) as states:
            assert states.request_states([7]).keys() == {"layers.3", "layers.1", "hidden_states"}
