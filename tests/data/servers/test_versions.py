"""The versions of vLLM whose hidden states are read."""

from pathlib import Path

import pytest

from conf.errors import InputError
from data.servers.hidden_states import check_version
from tests.data.servers.test_hidden_states import WRITTEN, engine
from tests.servers import EngineServer


@pytest.mark.parametrize(
    "version", ["0.26.0", "0.31.0rc1", "0.32.1.dev7+gabc", "1.0.0", "dev", "0.1.dev17+gabc"]
)
def test_versions_that_write_as_it_is_read_pass(version: str) -> None:
    check_version(version, "here")


@pytest.mark.parametrize("version", ["0.1.0", "0.17.1", "0.25.3", "0.25.1.dev3+gabc"])
def test_an_older_version_is_refused(tmp_path: Path, version: str) -> None:
    with EngineServer(tmp_path, WRITTEN) as server:
        server.version = version
        with (
            pytest.raises(InputError, match=rf"vLLM {version.replace('+', '.')} writes hidden"),
            engine(server),
        ):
            pytest.fail("it was taken")
