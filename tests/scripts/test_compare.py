import json
from pathlib import Path

import pytest

from conf.errors import InputError
from conf.settings.scripts import CompareRun
from scripts import compare

CHECKSUMS = ("config", "tokenizer", "template", "weights", "adapter_weights", "quantization")


def prompts(*emitted: int) -> list[dict]:
    return [{"dialogue": n, "turn": 1, "emitted": [each, each]} for n, each in enumerate(emitted)]


def result(tau: float, **changes) -> dict:
    return {
        "tau": tau,
        "tau_ci95": [tau - 0.1, tau + 0.1],
        "alpha": [0.5, 0.25],
        "prompts": prompts(1, 2),
        "dynamic_tree": {"tau": tau + 0.5, "prompts": prompts(2, 3)},
        "num_prompts": 2,
        "mode": "replay",
        "num_turns": 1,
        "top_p": 1.0,
        "top_k": None,
        "seed": 0,
        "target": "models/tiny",
        "target_identity": {**dict.fromkeys(CHECKSUMS, "ab"), "name": "models/tiny"},
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


def test_what_a_head_was_trained_on_is_said_below(tmp_path: Path, capsys, no_picture) -> None:
    own = {"chat_template_kwargs": {}, "target_dtype": "float32", "sha256": "ab"}
    counts = {"head": "heads/eagle", "num_trained": 1, "num_dialogues": 2}
    eagle = result(2.0, data=own | {"trained_on": [own | counts]})
    paths = folders(tmp_path, medusa=result(1.5, data=own), eagle=eagle)
    compare.main(CompareRun(results=paths, out_dir=str(tmp_path / "out")))
    said = (
        "eagle: was trained on the first prompts of 1 of 2 dialogues, so its figures are too good; "
        "measure on other prompts."
    )
    assert said in capsys.readouterr().out.splitlines()
    assert said in (tmp_path / "out/comparison.md").read_text().splitlines()


def test_heads_stand_side_by_side(tmp_path: Path, capsys) -> None:
    medusa = result(1.5, data={"sha256": "ab", "path": "/home/ann/chats.jsonl"})
    medusa["static_tree"] = medusa.pop("dynamic_tree")
    eagle = result(2.0, prompts=prompts(2, 4))
    paths = folders(tmp_path, medusa=medusa, eagle=eagle)
    compare.main(CompareRun(results=paths, out_dir=str(tmp_path / "out")))
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["2 prompts of chats.jsonl, first turns, greedy:", ""]
    shown = shown[2:]
    assert shown[:2] == [
        "| head | tau, chain | 95% interval | more than medusa | tau, tree | more than medusa "
        "| alpha per depth of the chain |",
        "|---|---|---|---|---|---|---|",
    ]
    assert shown[2] == "| medusa | 1.500 | 1.400 to 1.600 |  | 2.000 |  | 0.50 0.25 |"
    # One token more on the first prompt, two on the other; of both trees the same.
    assert shown[3] == (
        "| eagle | 2.000 | 1.900 to 2.100 | +1.500 (+1.000 to +2.000) "
        "| 2.500 | +0.000 (+0.000 to +0.000) | 0.50 0.25 |"
    )
    assert (tmp_path / "out/comparison.md").read_text().splitlines()[2:] == shown[:4]
    assert (tmp_path / "out/comparison.png").is_file()


def test_heads_are_compared_by_mode(tmp_path: Path, capsys, no_picture) -> None:
    spans: dict = {"code block": [[3, 9]]}
    one, other = (
        [
            {**row, "emitted": list(each), "spans": spans if n else {}}
            for n, (row, each) in enumerate(zip(prompts(1, 2), emitted, strict=True))
        ]
        for emitted in (((1, 1), (2, 4)), ((3, 1), (1, 1, 2)))
    )
    # Passes of the second text begin at tokens 1 and 3; of the other head at 1, 2 and 3.
    results = {"medusa": result(1.5, prompts=one), "eagle": result(2.0, prompts=other)}
    compare.main(CompareRun(results=folders(tmp_path, **results), out_dir=str(tmp_path / "out")))
    shown = capsys.readouterr().out.splitlines()
    assert shown[7:11] == [
        "| mode, tau of chains | dialogues | medusa | eagle | more than medusa |",
        "|---|---|---|---|---|",
        "| text: code block | 1 | 4.000 | 2.000 | -2.000 (-) |",
        "| text: prose | 2 | 1.333 | 1.500 | +0.167 (-1.000 to +1.000) |",
    ]
    # A result of an earlier version does not say what its texts hold.
    old = [{key: value for key, value in row.items() if key != "spans"} for row in other]
    results["eagle"]["prompts"] = old
    assert len(compare.build_mode_comparison(results)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 9}, r"max_new_tokens was 8, is 9"),
        ({"data": {"sha256": "cd"}}, r"data\.sha256 was 'ab', is 'cd'"),
        ({"mode": "decode", "top_p": 0.5}, r"mode was 'replay', is 'decode'; top_p was 1\.0, is 0"),
        ({"num_turns": 2}, r"num_turns was 1, is 2"),
        ({"num_prompts": 3}, r"num_prompts was 2, is 3"),
        ({"top_k": 5}, r"top_k was None, is 5"),
        ({"min_p": 0.1}, r"min_p was None, is 0\.1"),
        ({"ignore_eos": True}, r"ignore_eos was None, is True"),
        ({"temperature": 0.7}, r"temperature was 0\.0, is 0\.7"),
        ({"stop": ["#"]}, r"stop was None, is \['#'\]"),
        ({"target_dtype": "bfloat16"}, r"target\.dtype was 'float32', is 'bfloat16'"),
        ({"generation_config": {"a": 1}}, r"generation_config was None, is \{'a': 1\}"),
        (
            {"config": {"data": {"chat_template_kwargs": {"enable_thinking": False}}}},
            r"data\.chat_template_kwargs was None, is \{'enable_thinking': False\}",
        ),
        (
            {"target_identity": {**dict.fromkeys(CHECKSUMS, "ab"), "weights": "cd"}},
            r"a and b measure different things: target\.weights was 'ab', is 'cd'",
        ),
    ],
)
def test_measurements_of_different_things_are_refused(tmp_path, changes, message) -> None:
    paths = folders(tmp_path, a=result(1.5), b=result(2.0, **changes))
    with pytest.raises(InputError, match=message):
        compare.main(CompareRun(results=paths, out_dir=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_results_of_other_texts_are_refused(tmp_path: Path) -> None:
    """Pairs of texts are compared, which damaged files do not have."""
    lost = result(2.0, prompts=prompts(1))
    with pytest.raises(InputError, match="a and b have different texts, so one is damaged"):
        compare.load_results(folders(tmp_path, a=result(1.5), b=lost))


def test_missing_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least two"):
        compare.load_results(folders(tmp_path, a=result(1.5)))
    with pytest.raises(InputError, match=r"cannot read .*gone.acceptance\.json"):
        compare.load_results([str(tmp_path / "a"), str(tmp_path / "gone")])


def test_a_target_is_known_by_its_checksums_not_by_its_place(tmp_path: Path) -> None:
    identity = {**dict.fromkeys(CHECKSUMS, "ab"), "name": "elsewhere"}
    moved = result(2.0, target="elsewhere", target_identity=identity)
    assert set(compare.load_results(folders(tmp_path, a=result(1.5), b=moved))) == {"a", "b"}
    nameless = {key: {"target": name} for key, name in (("c", "one"), ("d", "two"))}
    for each in nameless.values():
        each["target_identity"] = {**dict.fromkeys(CHECKSUMS), "name": each["target"]}
    with pytest.raises(InputError, match=r"target\.name was 'one', is 'two'"):
        compare.load_results(
            folders(tmp_path, **{k: result(1.5, **v) for k, v in nameless.items()})
        )


def test_sampled_results_are_of_one_seed(tmp_path: Path) -> None:
    sampled = {"temperature": 0.5, "mode": "decode"}
    paths = folders(tmp_path, a=result(1.5, **sampled), b=result(2.0, **sampled, seed=3))
    with pytest.raises(InputError, match=r"seed was 0, is 3"):
        compare.load_results(paths)
    # Greedy ones do not depend on theirs.
    assert len(compare.load_results(folders(tmp_path, c=result(1.5), d=result(2.0, seed=3)))) == 2


def test_results_of_before_hold_no_prompts(tmp_path: Path) -> None:
    old = {key: value for key, value in result(1.5).items() if key != "prompts"}
    with pytest.raises(InputError, match=r"a.acceptance\.json: holds no prompts; measure again"):
        compare.load_results(folders(tmp_path, a=old, b=result(2.0)))
