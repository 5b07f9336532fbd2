import json
from pathlib import Path

import pytest

from conf.schema import InputError
from conf.schema_measure import CompareRun
from scripts import compare


def result(tau: float, **changes) -> dict:
    return {
        "tau": tau,
        "tau_ci95": [tau - 0.1, tau + 0.1],
        "alpha": [0.5, 0.25],
        "dynamic_tree": {"tau": tau + 0.5},
        "num_prompts": 2,
        "max_new_tokens": 8,
        "temperature": 0.0,
        "target_dtype": "float32",
        "data": {"sha256": "ab"},
        **changes,
    }


def folders(tmp_path: Path, **results: dict) -> list[str]:
    for name, content in results.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "acceptance.json").write_text(json.dumps(content))
    return [str(tmp_path / name) for name in results]


def test_heads_stand_side_by_side(tmp_path: Path, capsys) -> None:
    medusa = result(1.5)
    medusa["static_tree"] = medusa.pop("dynamic_tree")
    paths = folders(tmp_path, medusa=medusa, eagle=result(2.0))
    compare.main(CompareRun(results=paths, out_dir=str(tmp_path / "out")))
    shown = capsys.readouterr().out.splitlines()
    assert shown[2] == "| medusa | 1.500 | 1.400 to 1.600 | 2.000 | 0.50 0.25 |"
    assert shown[3] == "| eagle | 2.000 | 1.900 to 2.100 | 2.500 | 0.50 0.25 |"
    assert (tmp_path / "out/comparison.md").read_text().splitlines() == shown[:4]
    assert (tmp_path / "out/comparison.png").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 9}, r"a has max_new_tokens=8, b has 9"),
        ({"data": {"sha256": "cd"}}, r"a has data\.sha256=ab, b has cd"),
    ],
)
def test_measurements_of_different_things_are_refused(tmp_path, changes, message) -> None:
    paths = folders(tmp_path, a=result(1.5), b=result(2.0, **changes))
    with pytest.raises(InputError, match=message):
        compare.main(CompareRun(results=paths, out_dir=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_missing_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least two"):
        compare.load_results(folders(tmp_path, a=result(1.5)))
    with pytest.raises(InputError, match=r"cannot read .*gone.acceptance\.json"):
        compare.load_results([str(tmp_path / "a"), str(tmp_path / "gone")])
