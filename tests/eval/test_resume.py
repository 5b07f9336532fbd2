"""A measurement that was killed goes on; one of something else does not."""

import json
import shutil
from pathlib import Path

import pytest

from conf.command.jsonl_store import JsonlStore
from conf.errors import InputError
from conf.settings.drafting import DraftModelConfig
from conf.settings.measure import AcceptanceRun, Mode, SpeedupRun
from eval import acceptance, speedup
from tests.eval.test_commands import made, settings


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> dict:
    return made(tmp_path_factory.mktemp("resume"), "llama")


class KilledError(Exception):
    """In place of a signal."""


def killed_after(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next measurement writes so many rows."""
    append, left = JsonlStore.append, [num_rows]

    def limited(journal: JsonlStore, rows: list[dict]) -> None:
        if not left[0]:
            raise KilledError
        left[0] -= 1
        append(journal, rows)

    monkeypatch.setattr(JsonlStore, "append", limited)


@pytest.mark.parametrize("mode", list(Mode))
def test_acceptance_goes_on_where_it_was_killed(setting, tmp_path, monkeypatch, mode) -> None:
    def run(name: str, max_new_tokens: int = 12) -> dict:
        own = settings(setting, tmp_path / name)
        own["data"].num_prompts, own["max_new_tokens"] = 2, max_new_tokens
        acceptance.main(AcceptanceRun(**own, mode=mode))
        return json.loads((tmp_path / name / "acceptance.json").read_text())

    whole = run("whole")
    with monkeypatch.context() as patch:
        killed_after(3, patch)
        with pytest.raises(KilledError):
            run("killed")
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["acceptance.partial"]
    measured = []
    one = acceptance._build_prompt_row
    monkeypatch.setattr(
        acceptance, "_build_prompt_row", lambda *given: measured.append(given[2]) or one(*given)
    )
    with pytest.raises(InputError, match=r"delete .*/killed/acceptance.partial to begin anew, or"):
        run("killed", max_new_tokens=13)
    again = run("killed")
    assert [(prompt.dialogue, prompt.turn) for prompt in measured] == [(1, 2)]
    for key in ("tau", "tau_ci95", "alpha", "by_category", "prompts", "static_tree"):
        assert again[key] == whole[key]
    assert again.get("agreement") == whole.get("agreement")
    assert not (tmp_path / "killed/acceptance.partial").exists()


@pytest.mark.slow
def test_speedup_goes_on_with_the_same_layers(setting, tmp_path, monkeypatch, capsys) -> None:
    def run(**changes) -> None:
        own = settings(setting, tmp_path)
        own["data"].num_prompts = 2
        own |= {"methods": "skip_layers", "num_turns": 1, "num_repeats": 1, "num_warmups": 0}
        own["draft"] = DraftModelConfig(path=str(draft))
        speedup.main(SpeedupRun(**own | changes))

    draft = shutil.copytree(setting["target"], tmp_path / "draft")
    with monkeypatch.context() as patch:
        killed_after(3, patch)
        with pytest.raises(KilledError):
            run()
    before = (tmp_path / "speedup.partial/0/runs.jsonl").read_text().splitlines()
    assert json.loads(before[0])["id"] == -1
    with pytest.raises(InputError, match=r"config\.max_new_tokens was 24, is 25"):
        run(max_new_tokens=25)
    for folder, what in ((setting["head"], r"heads was \[\["), (draft, r"draft_weights was \[")):
        weights = next(Path(folder).glob("*.safetensors"))
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + b"x")
        with pytest.raises(InputError, match=rf"in another way: {what}'[0-9a-f]{{64}}'\]+, is "):
            run()
        weights.write_bytes(content)
    monkeypatch.setattr("eval.compare.methods.search_skipped_layers", None)  # not searched again
    run()
    assert "continuing with 3 runs of an earlier start" in " ".join(capsys.readouterr().err.split())
    result = json.loads((tmp_path / "speedup.json").read_text())
    assert result["methods"]["skip_layers"]["skip"] == json.loads(before[0])["skip"]
    assert result["lossless"]["num_equal"] == 2
    assert not (tmp_path / "speedup.partial").exists()


def test_a_list_of_numbers_takes_one_line(setting, tmp_path) -> None:
    own = settings(setting, tmp_path)
    own["data"].num_prompts = 1
    acceptance.main(AcceptanceRun(**own))
    text = (tmp_path / "acceptance.json").read_text()
    row = json.loads(text)["prompts"][0]
    assert f'"emitted": {json.dumps(row["emitted"])}' in text
    assert len(row["emitted"]) == len(row["accepted"]) == len(row["drafted"]) > 1
    assert json.loads(text)["tau_ci95"] is None
