import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exports import config_of, eagle
from ggufs import save_gguf
from safetensors.torch import load_file
from toys import eagle_head, noisy_head, save_target, tokenizer

from conf.command.run_record import PROMPTS_PLACEHOLDER
from conf.errors import InputError
from conf.settings.drafting import HeadRef
from conf.settings.eagle import EagleForm
from conf.settings.export import ExportDtype, ExportFormat, ExportRun
from conf.settings.target import TargetConfig
from data.embedded import TARGET_PATH
from eval.measure.verdict import UNMEASURED
from heads.eagle.layouts import QUANTISED_HINT
from heads.export.gguf import GgufFile, Value, build_vocab_metadata, write_gguf
from heads.folders import PROFILE, PROVENANCE
from heads.kinds import load_head
from heads.target_model.identity import identify_target
from heads.target_model.load import load_target, load_target_tokenizer
from scripts import export
from tests.conf.command.test_entry import command
from tests.conf.command.test_following import pasted
from tests.eval.measure.test_results import result
from tests.eval.measure.test_results import text as measured_text

ACCEPTED = [[0, 1, 2], [0, 1, 3], [0, 0, 1, 2]]
TEXTS = [measured_text(number, accepted) for number, accepted in enumerate(ACCEPTED)]
PASSED = SimpleNamespace(lines=["model.safetensors: 15 tensors"], max_difference=3e-6, scale=12.0)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and heads that were trained for it."""
    folder = tmp_path_factory.mktemp("export")
    path = str(save_target(folder / "target", num_hidden_layers=8))
    target = load_target(TargetConfig(path=path), torch.device("cpu"))
    eagle(target).save(folder / "eagle", {"git": "abc", "config": {"seed": 3}})
    noisy_head(target, num_heads=2).save(folder / "medusa")
    return folder


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that the reader was given; it finds nothing wrong."""
    seen: list[Path] = []

    def verify(folder: Path) -> Any:
        seen.append(folder)
        return PASSED

    monkeypatch.setattr(export, "check_parity", verify)
    return seen


def run(heads: Path, kind: str, engine: str, out_dir: Path, **settings: Any) -> None:
    ref = HeadRef(str(heads / kind))
    chosen = {"head": ref, "format": ExportFormat(engine), "out_dir": str(out_dir)}
    export.main(ExportRun(**(chosen | settings)))


def test_a_head_of_another_target_is_told_of(heads, tmp_path, verified, capsys) -> None:
    where = TargetConfig(path=str(heads / "target"))
    made_for = identify_target(where, load_target_tokenizer(where), torch.float32)
    for weights, told in ((made_for.weights, False), ("0" * 64, True)):
        copy = shutil.copytree(heads / "eagle", tmp_path / str(weights))
        noted = {"target_identity": asdict(replace(made_for, weights=weights, dtype="bfloat16"))}
        (copy / PROVENANCE).write_text(json.dumps(noted))
        run(copy.parent, copy.name, "vllm", tmp_path / f"{weights}-out")
        said = capsys.readouterr().err
        assert (
            "for another target" in said and "differs: target.weights was 000000000000" in said
        ) == told


def test_a_head_of_another_checkouts_embedded_target_finds_it(tmp_path, verified) -> None:
    target = load_target(TargetConfig(path=TARGET_PATH), torch.device("cpu"))
    head = noisy_head(target, num_heads=2)
    head.config = replace(head.config, target="/elsewhere/data/embedded/target")
    head.save(tmp_path / "medusa")
    run(tmp_path, "medusa", "vllm", tmp_path / "out")
    assert verified == [tmp_path / "out"]


def test_a_head_is_written_verified_and_its_serve_command_printed(
    heads: Path, tmp_path: Path, verified: list[Path], capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    run(heads, "eagle", "vllm", out)
    assert verified == [out]
    speculation = {"method": "eagle3", "model": str(out), "num_speculative_tokens": 5}
    said = capsys.readouterr().out
    script, following = pasted(said)
    assert (script, following.endpoint) == ("eval/serve.py", "http://localhost:8000")
    assert following.head.path == str(heads / "eagle")
    assert following.target.path == str(heads / "target")
    assert following.data.path == PROMPTS_PLACEHOLDER
    assert said.splitlines()[:-3] == [
        "model.safetensors: 15 tensors",
        "parity: max |difference| 3e-06 of logits up to 12",
        UNMEASURED,
        "no speculation_profile.json is written: no acceptance.json of today's eval/acceptance.py "
        "lies beside this head",
        "Draft tokens: 5, the usual number, as nobody knows by depth what is accepted of this "
        "head.",
        f"wrote {out}; serve it with",
        "",
        f"vllm serve {heads / 'target'} --speculative-config '{json.dumps(speculation)}'",
    ]
    provenance = json.loads((out / "headsmith.json").read_text())
    assert (provenance["git"], provenance["config"]) == ("abc", {"seed": 3})
    assert provenance["export"]["target"] == str(heads / "target")


def test_the_verdict_of_the_head_stands_before_its_serve_command(
    heads: Path, tmp_path: Path, verified: list[Path], capsys: pytest.CaptureFixture
) -> None:
    shutil.copytree(heads / "eagle", tmp_path / "run/head")

    def measured(name: str, result: dict[str, Any], engine: str = "vllm") -> str:
        (tmp_path / f"run/{name}.json").write_text(json.dumps(result))
        run(tmp_path / "run", "head", engine, tmp_path / f"out-{engine}")
        return capsys.readouterr().out.splitlines()[2]

    assert measured("acceptance", {"tau": 1.1}) == UNMEASURED, "an old file"
    tree = {"tau": 1.2, "tau_ci95": [1.1, 1.3]}
    result = {"prompts": [{"dialogue": n} for n in range(8)], "static_tree": tree, **tree}
    said = measured("acceptance", result)
    assert said.startswith("The verdict of acceptance.json: This head is not worth ")
    assert measured("acceptance", result | {"head": str(heads / "eagle")}) == UNMEASURED
    slow, fast = (
        {"speedup": speed, "speedup_ci95": [speed, speed], "prompts": result["prompts"]}
        for speed in (0.56, 2.0)
    )
    # Of a second head.
    methods = {"eagle_chain": slow, "eagle_chain_2": fast, "eagle_tree_2": fast}
    said = measured("speedup", {"methods": methods})
    assert said.startswith(
        "The verdict of speedup.json: This head is not worth serving: eagle_chain decodes at 0.56 "
    )
    others = measured("speedup", {"methods": {"medusa_chain": slow}})
    assert others == UNMEASURED, "no figure of this head"


@pytest.fixture
def measured(heads: Path, tmp_path: Path) -> Path:
    """A run's folder with heads and what was measured of them."""
    for kind in ("eagle", "medusa"):
        shutil.copytree(heads / kind, tmp_path / "run" / kind)
    (tmp_path / "run/acceptance.json").write_text(json.dumps(result(*TEXTS, mode="replay")))
    return tmp_path / "run"


def test_what_was_measured_travels_with_every_export(
    measured: Path, tmp_path: Path, verified: list[Path], capsys: pytest.CaptureFixture
) -> None:
    """Of 10 passes 6, 3 and 1 accept the depths: the third draft token saves less than it costs."""
    tokens = {
        "vllm": '"num_speculative_tokens": 2}',
        "sglang": "--speculative-num-steps 2 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 3",
        "trtllm": "max_draft_len: 2",
        "llamacpp": "--spec-draft-n-max 2",
        "speculators": "vllm serve",
        "original": "",
    }
    for engine, words in tokens.items():
        out = tmp_path / engine
        for _ in range(2):  # the second time in place of the first
            run(measured, "eagle", engine, out)
        said, text = capsys.readouterr().out, (out / "README.md").read_text()
        assert words in said and words in text
        reason = "Draft tokens: 2. By depth, 0.60, 0.30, 0.10 of all passes accepted a draft token"
        assert reason in said and reason in text
        profile = json.loads((out / PROFILE).read_text())
        assert profile["marginal_accept_rates"] == [0.6, 0.3, 0.1]
        assert profile["draft_checkpoint"] == {"name": str(measured / "eagle")}
        assert PROFILE in json.loads((out / "headsmith.json").read_text())["export"]["files"]
    (proposal,) = config_of(tmp_path / "speculators")["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == 2
    # An export of an export has the same figures and draws the same conclusion.
    run(tmp_path, "vllm", "sglang", tmp_path / "again")
    assert tokens["sglang"] in capsys.readouterr().out
    assert (tmp_path / "again" / PROFILE).read_bytes() == (tmp_path / "vllm" / PROFILE).read_bytes()
    run(measured, "medusa", "vllm", tmp_path / "medusa")
    assert '"num_speculative_tokens": 2}' in (said := capsys.readouterr().out)
    assert "Draft tokens: 2, all of one pass of the head." in said


def test_a_quantised_output_head_is_offered_where_vllm_takes_one(heads, tmp_path, capsys) -> None:
    target = load_target(TargetConfig(path=str(heads / "target")), torch.device("cpu"))
    eagle_head(target, EagleForm.eagle1).save(tmp_path / "eagle1")
    for engine, told in (("vllm", True), ("sglang", False)):
        run(tmp_path, "eagle1", engine, tmp_path / engine)
        said = capsys.readouterr().out
        assert (QUANTISED_HINT in said) == told
        assert (QUANTISED_HINT in (tmp_path / engine / "README.md").read_text()) == told
    run(heads, "eagle", "vllm", tmp_path / "own")
    assert "draft_lm_head_quantization" not in capsys.readouterr().out, "its own output head"


SERVED = {"schedule": [[1, 8, 2], [9, 128, 0]], "draft_tokens": 2, "head": None}


def test_the_schedule_of_a_serving_machine_is_printed(
    measured: Path, tmp_path: Path, verified: list[Path], capsys: pytest.CaptureFixture
) -> None:
    serve = tmp_path / "serve"
    serve.mkdir()
    (serve / "serve.json").write_text(json.dumps(SERVED | {"head": str(measured / "eagle")}))
    for curve in (serve, serve / "serve.json"):
        run(measured, "eagle", "vllm", tmp_path / "out", curve=str(curve))
        config = (
            '"num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": '
            "[[1, 8, 2], [9, 128, 0]]}'"
        )
        said = capsys.readouterr().out
        assert config in said and config in (tmp_path / "out/README.md").read_text()
        assert f"The schedule is of the machine of {curve}." in said


@pytest.mark.parametrize(
    ("changes", "cell", "message"),
    [
        (None, "eagle vllm", "no such file; name a serve.json that eval/serve.py wrote, or its f"),
        ({"schedule": None}, "eagle vllm", r"holds no schedule; let eval/.* \(baseline=\)"),
        ({"schedule": [[2, 8, 2]]}, "eagle vllm", r"schedule has \[2, 8, 2\] after 0 requests in "
         "flight; must be 1, the last number of requests, and 0 to 2 draft tokens; measure again"),
        ({"schedule": [[1, 8, 3]]}, "eagle vllm", r"schedule has \[1, 8, 3\] after 0 requests"),
        ({"schedule": [[1, 8, 2], [9, 4, 0]]}, "eagle vllm", r"schedule has \[9, 4, 0\] after 8 "),
        ({"schedule": [[1, 8]]}, "eagle vllm", r"schedule has \[1, 8\] after 0 requests"),
        ({"head": "medusa"}, "eagle vllm", "measures another head, .*/medusa; name the curve of h"),
        ({"draft_tokens": 5}, "eagle vllm", "of a server that drafts 5 tokens, but this export draf"
         "ts 2; start the server with the line of an export without curve, and measure again"),
        ({}, "eagle sglang", "format=sglang has no place for a schedule; leave curve unset, or se"),
        ({}, "medusa vllm", "vLLM takes no schedule for Medusa heads; leave curve unset"),
    ],
)  # fmt: skip
def test_a_curve_of_something_else_is_refused(
    measured, tmp_path, monkeypatch, changes, cell, message
) -> None:
    monkeypatch.setattr(export, "load_target", lambda *_: pytest.fail("it was loaded"))
    curve, (head, engine) = tmp_path / "curve.json", cell.split()
    if changes is not None:
        told = SERVED | changes
        if told["head"] is not None:
            told["head"] = str(measured / told["head"])
        curve.write_text(json.dumps(told))
    with pytest.raises(InputError, match=f"^curve={curve}: {message}"):
        run(measured, head, engine, tmp_path / "out", curve=str(curve))
    assert not (tmp_path / "out").exists()


def test_a_target_with_which_the_engine_would_crash_is_said_in_place_of_its_line(
    tmp_path: Path, verified: list[Path], capsys: pytest.CaptureFixture
) -> None:
    path = str(save_target(tmp_path / "target", family="qwen2", num_hidden_layers=8))
    eagle(load_target(TargetConfig(path=path), torch.device("cpu"))).save(tmp_path / "eagle")
    out = tmp_path / "out"
    run(tmp_path, "eagle", "llamacpp", out)
    assert capsys.readouterr().out.splitlines()[2:] == [
        f"wrote {out}; do not serve it: llama.cpp b11434 serves no head of a target of type qwen2: "
        "`llama-server` starts, and ends with an assertion at the first request (GGML_ASSERT of "
        "t_layer_inp). docs/serving/llama_cpp.md of Headsmith lists the types that work."
    ]
    run(tmp_path, "eagle", "vllm", tmp_path / "vllm")
    assert "serve it with\n\nvllm serve" in capsys.readouterr().out


def test_the_versions_that_have_medusa_are_named_beside_the_line(
    heads: Path, tmp_path: Path, verified: list[Path], capsys: pytest.CaptureFixture
) -> None:
    for engine, name in (("vllm", "vLLM"), ("trtllm", "TensorRT-LLM"), ("original", "")):
        out = tmp_path / engine
        run(heads, "medusa", engine, out)
        version = {"vllm": "0.32", "trtllm": "1.1"}.get(engine)
        limit = f"{name} loads Medusa heads up to version {version}; newer versions have none."
        said, text = capsys.readouterr().out, (out / "README.md").read_text()
        assert (f"wrote {out}; serve it with ({limit})\n" in said) == bool(version)
        assert (f"## Serve\n\n{limit}\n\n```\n" in text) == bool(version)


def test_a_gguf_file_goes_out_and_comes_back(heads: Path, tmp_path: Path) -> None:
    words = build_vocab_metadata(300) | {"tokenizer.ggml.pre": Value.from_content("smollm")}
    write_gguf(tmp_path / "target.gguf", words, {})
    chosen: dict[str, Any] = {
        "dtype": ExportDtype.float16,
        "tokenizer_gguf": str(tmp_path / "target.gguf"),
        "target": TargetConfig(path=str(heads / "target")),
    }
    run(heads, "eagle", "llamacpp", tmp_path / "out", **chosen)
    file = tmp_path / "out" / "eagle3-target-F16.gguf"
    metadata = GgufFile(file, "file").metadata
    assert metadata["tokenizer.ggml.pre"] == Value.from_content("smollm")
    chosen["head"] = HeadRef(str(file))
    run(heads, "", "llamacpp", tmp_path / "again", **chosen)
    assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    del chosen["tokenizer_gguf"]
    run(heads, "", "vllm", tmp_path / "vllm", **chosen)
    run(heads, "eagle", "vllm", tmp_path / "straight", dtype=ExportDtype.float16)
    names = [tmp_path / name / "model.safetensors" for name in ("vllm", "straight")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_the_vocabulary_of_a_target_that_is_a_gguf_is_taken(tmp_path: Path) -> None:
    # As converters do, up to the rows of the embedding.
    padded = tokenizer().convert_ids_to_tokens(list(range(len(tokenizer()))))
    padded += [f"[PAD{index}]" for index in range(len(padded), 300)]
    tokens = {"tokenizer.ggml.tokens": padded, "tokenizer.ggml.token_type": [1] * 300}
    save_gguf(tmp_path / "Toy.gguf", metadata=tokens, num_hidden_layers=8)
    target = load_target(TargetConfig(path=str(tmp_path / "Toy.gguf")), torch.device("cpu"))
    eagle(target).save(tmp_path / "eagle")
    run(tmp_path, "eagle", "llamacpp", tmp_path / "out")
    words, theirs = (
        GgufFile(path, "file").metadata
        for path in (tmp_path / "out" / "eagle3-toy-F32.gguf", tmp_path / "Toy.gguf")
    )
    assert words["tokenizer.ggml.tokens"] == theirs["tokenizer.ggml.tokens"]
    assert words["tokenizer.ggml.eos_token_id"] == theirs["tokenizer.ggml.eos_token_id"]
    served = (tmp_path / "out" / "README.md").read_text()
    assert f"llama-server -m {tmp_path / 'Toy.gguf'} -md DIR/eagle3-toy-F32.gguf " in served


def test_an_export_can_be_exported_again(heads: Path, tmp_path: Path, verified) -> None:
    run(heads, "eagle", "original", tmp_path / "first")
    run(tmp_path, "first", "trtllm", tmp_path / "second")
    run(heads, "eagle", "trtllm", tmp_path / "straight")
    for name in ("model.safetensors", "config.json", "README.md"):
        again = (tmp_path / "second" / name).read_bytes()
        assert again == (tmp_path / "straight" / name).read_bytes(), name
    again, straight = (
        json.loads((tmp_path / name / "headsmith.json").read_text())
        for name in ("second", "straight")
    )
    assert again.pop("exported_from") == str(tmp_path / "first")
    assert straight.pop("exported_from") == str(heads / "eagle")
    assert again == straight


def test_another_target_and_dtype_are_written_down(heads: Path, tmp_path: Path, verified) -> None:
    moved = tmp_path / "moved"
    moved.symlink_to(heads / "target")
    dtype = ExportDtype.bfloat16
    target = TargetConfig(path=str(moved))
    run(heads, "medusa", "original", tmp_path / "out", target=target, dtype=dtype)
    config = config_of(tmp_path / "out")
    assert config["base_model_name_or_path"] == str(moved)
    assert config["dtype"] == "bfloat16"
    written = load_file(tmp_path / "out/medusa_lm_head.safetensors")
    trained = load_head(str(heads / "medusa")).collect_tensors()
    assert all(written[name].equal(each.bfloat16()) for name, each in trained.items())


def test_what_the_reader_refuses_stays_and_is_said(heads, tmp_path, monkeypatch) -> None:
    def verify(folder: Path) -> Any:
        raise InputError(f"{folder}: logits differ")

    monkeypatch.setattr(export, "check_parity", verify)
    out = tmp_path / "out"
    with pytest.raises(InputError, match=rf"{out}: logits differ\. {out} is kept, but do not"):
        run(heads, "medusa", "vllm", out)
    assert (out / "model.safetensors").is_file()


def test_only_an_earlier_export_of_the_same_head_and_format_is_replaced(
    heads: Path, tmp_path: Path, verified, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    run(heads, "eagle", "vllm", out)
    assert f"\nwrote {out}; serve it with\n" in capsys.readouterr().out
    run(heads, "eagle", "vllm", out, dtype=ExportDtype.bfloat16)
    assert f"\nwrote {out} in place of its earlier export; serve" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert load_file(out / "model.safetensors")["fc.weight"].dtype is torch.bfloat16
    found = rf"^out_dir={out}: holds the export of head.path={heads}/eagle for format=vllm, which "
    more = "stays; name another out_dir, or move the folder away$"
    for kind, engine in (("eagle", "sglang"), ("eagle", "llamacpp"), ("medusa", "vllm")):
        with pytest.raises(InputError, match=found + more):
            run(heads, kind, engine, out)
    (out / "parity" / "notes").touch()
    with pytest.raises(InputError, match=rf"{out}: holds files that .* there: parity/notes; name"):
        run(heads, "eagle", "vllm", out)
    (out / "parity" / "notes").unlink()
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_folder_of_other_files_is_not_written(heads: Path, tmp_path: Path, verified) -> None:
    mine, first = tmp_path / "mine", tmp_path / "first"
    mine.mkdir()
    (mine / "notes").touch()
    run(heads, "eagle", "llamacpp", first)
    (first / "headsmith.json").write_text("{}")  # as of an earlier version, or another program
    for folder in (mine, heads / "eagle", first):
        held = sorted(folder.rglob("*"))
        with pytest.raises(InputError, match=rf"out_dir={folder}: holds files that no export wro"):
            run(heads, "eagle", "llamacpp", folder)
        assert sorted(folder.rglob("*")) == held


@pytest.mark.parametrize(
    ("cell", "settings", "message"),
    [
        ("eagle vllm", {"tokenizer_gguf": "gone.gguf"},
         "^tokenizer_gguf=gone.gguf: format=vllm has no place for it; leave tokenizer_gguf unset"),
        ("eagle llamacpp", {"tokenizer_gguf": "gone.gguf"},
         "^tokenizer_gguf=gone.gguf: no such file; name a GGUF file$"),
        ("medusa sglang", {}, "format=sglang: SGLang loads no Medusa heads; allowed"),
        ("nameless vllm", {}, r"target\.path is unset, and head\.path=.*; set target"),
        ("eagle vllm", {"target": TargetConfig(path="./gone")},
         r"^target\.path=\./gone: no such folder, and not a Hub id"),
        ("eagle vllm", {"head": HeadRef()},
         r"head\.path is unset; type a folder with a trained head, or"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_refused_before_the_target_is_loaded(
    heads, tmp_path, monkeypatch, cell, settings, message
) -> None:
    head, engine = cell.split()
    monkeypatch.setattr(export, "load_target", lambda *_: pytest.fail("it was loaded"))
    if head == "nameless":
        shutil.copytree(heads / "eagle", heads / head)
        config = config_of(heads / head)
        del config["base_model_name_or_path"]
        (heads / head / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=message):
        run(heads, head, engine, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_the_command_passes_its_own_gate(heads: Path, tmp_path: Path) -> None:
    done = command(
        "scripts/export.py", f"head.path={heads / 'eagle'}", "format=sglang", "out_dir=out",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "parity: max |difference|" in done.stdout
    assert "python -m sglang.launch_server" in done.stdout
