"""A head is pushed with its exports, each looked at once more."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from conf.errors import InputError
from conf.settings.drafting import HeadRef
from conf.settings.eagle import EagleConfig, EagleForm, OutputHead
from conf.settings.export import ExportFormat, HubLayout, PushRun
from eval.parity.parity_check import check_parity
from heads.eagle.eagle import EagleHead
from heads.export.writer import compute_reference_tensors, export_head
from heads.folders import PROFILE
from heads.kinds import load_head
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts import push
from tests.hub_server import HubServer, Repo
from tests.scripts.publish.test_push import ACCEPTANCE, hub
from tests.toys import random_target

__all__ = ["hub"]  # a fixture
REPO = "me/toy-eagle3"
PROVENANCE = {
    "config": {"target": {"path": "/home/ann/toy"}, "head": {"output_head": "copy"}, "seed": 0},
    "data": {"path": "/home/ann/chats.jsonl", "num_records": 9, "bad": ["ann's diary"]},
    "about_head": ["draft vocabulary: 48 of 96 ids cover 91.20% of the learnt tokens"],
}
FILES = {"README.md", "config.json", "headsmith.json", "model.safetensors"}
PARITY = "parity/parity.safetensors"


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(num_hidden_layers=6)


def make_head(target: Target, seed: int = 0) -> EagleHead:
    settings = EagleConfig(form=EagleForm.eagle3, output_head=OutputHead.copy)
    vocab = DraftVocab(torch.arange(0, target.vocab_size, 2), target.vocab_size)
    return EagleHead.from_settings(target, settings, vocab, seed).eval()


def export(head: EagleHead, engine: ExportFormat, folder: Path) -> None:
    values = compute_reference_tensors(head, head.target, num_rows=4, depth=2)
    export_head(head, engine, values, folder, PROVENANCE)


@pytest.fixture
def run_dir(target: Target, tmp_path: Path) -> Path:
    """A trained head, what was measured, and two exports."""
    run = tmp_path / "run"
    head = make_head(target)
    head.save(run / "head", dict(PROVENANCE))
    (run / "acceptance.json").write_text(json.dumps(ACCEPTANCE))
    for engine in (ExportFormat.vllm, ExportFormat.sglang):
        export(head, engine, run / engine.value)
        (run / engine.value / "notes.txt").write_text("ann's notes")
    return run


def pushed(run: Path, **changes: Any) -> None:
    settings: dict[str, Any] = {
        "repo_id": REPO,
        "base_model": "me/llama",
        "exports": [str(run / "vllm"), str(run / "sglang")],
        **changes,
    }
    push.main(PushRun(**{"head": HeadRef(path=str(run / "head")), **settings}))


def test_exports_lie_in_folders_beside_the_head(hub: HubServer, run_dir: Path) -> None:
    pushed(run_dir)
    files = hub.repos[REPO].files("main") or {}
    assert len(hub.repos[REPO].commits) == 2, "one commit after the initial one"
    expected = {f"{name}/{file}" for name in ("vllm", "sglang") for file in {*FILES, PARITY}}
    assert set(files) == {".gitattributes", *FILES, PROFILE, *expected}
    card = files["README.md"].decode()
    assert yaml.safe_load(card.split("---\n", 2)[1])["tags"] == [
        "speculative-decoding", "eagle3", "draft-head", "sglang", "vllm",
    ]  # fmt: skip
    for text in (
        "Engines only look for weights in a repository's root, so download its folder first.",
        "| format | where | loaders read | parity |",
        "| vllm | `me/toy-eagle3/vllm` | vLLM 0.33.0 and 0.32.0 | max \\|difference\\| ",
        "hf download me/toy-eagle3 --include 'vllm/*' --local-dir toy-eagle3\n"
        "vllm serve me/llama --speculative-config '"
        '{"method": "eagle3", "model": "toy-eagle3/vllm", "num_speculative_tokens": ',
        "--speculative-draft-model-path toy-eagle3/sglang ",
        "Parity: an independent reader, which only knows the engine's documented names, ",
        "Headsmith's `python scripts/verify_export.py FOLDER` checks it again on the serving ",
        "draft vocabulary: 48 of 96 ids cover 91.20% of the learnt tokens",
        "**1.812**",
    ):
        assert text in card
    for name, content in files.items():
        assert b"ann" not in content or name.endswith(".safetensors"), name


def test_the_profile_travels_with_head_and_exports(hub: HubServer, run_dir: Path) -> None:
    profile = {"schema_version": "1.0", "target_model": {"name": "/home/ann/toy"}}
    for folder in (run_dir / "head", run_dir / "vllm"):
        (folder / PROFILE).write_text(json.dumps(profile))
    (run_dir / "acceptance.json").unlink()
    record = json.loads((run_dir / "vllm/headsmith.json").read_text())
    record["export"]["target"] = "/home/ann/toy"
    (run_dir / "vllm/headsmith.json").write_text(json.dumps(record))
    pushed(run_dir)
    files = hub.repos[REPO].files("main") or {}
    assert json.loads(files[f"vllm/{PROFILE}"])["target_model"] == {"name": "me/llama"}
    assert json.loads(files[PROFILE])["target_model"] == {"name": "toy"}
    assert f"sglang/{PROFILE}" not in files
    (run_dir / "acceptance.json").write_text(json.dumps(ACCEPTANCE))
    pushed(run_dir)
    profile = json.loads((hub.repos[REPO].files("main") or {})[PROFILE])
    assert profile["draft_checkpoint"] == {"name": REPO}
    assert profile["marginal_accept_rates"] == [0.6, 0.21]


def test_what_is_pulled_computes_the_head(hub: HubServer, run_dir: Path, tmp_path: Path) -> None:
    pushed(run_dir)
    found, expected = load_head(REPO).state_dict(), load_head(str(run_dir / "head")).state_dict()
    assert all(found[name].equal(each) for name, each in expected.items())
    assert not [*(tmp_path / "hub-cache").rglob("parity")], "a head comes without its exports"
    for name, content in (hub.repos[REPO].files("main") or {}).items():
        path = tmp_path / "pulled" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for engine in ("vllm", "sglang"):
        verdict = check_parity(tmp_path / "pulled" / engine)
        assert verdict.max_difference <= 1e-4 * verdict.scale


def test_each_export_in_a_repository_of_its_own(hub: HubServer, run_dir: Path) -> None:
    pushed(run_dir, layout=HubLayout.each)
    assert set(hub.repos) == {REPO, f"{REPO}-vllm", f"{REPO}-sglang"}
    assert all(repo.private and len(repo.commits) == 2 for repo in hub.repos.values())
    assert set(hub.repos[REPO].files("main") or {}) == {".gitattributes", *FILES, PROFILE}
    files = hub.repos[f"{REPO}-vllm"].files("main") or {}
    assert set(files) == {".gitattributes", *FILES, PARITY}
    card = files["README.md"].decode()
    for text in (
        "# toy-eagle3-vllm",
        "This repository holds the head in the format vllm; the head itself, for Headsmith, is in "
        "[me/toy-eagle3](https://huggingface.co/me/toy-eagle3).",
        '{"method": "eagle3", "model": "me/toy-eagle3-vllm", "num_speculative_tokens": ',
        "python eval/acceptance.py head.path=me/toy-eagle3 ",
        "**1.812**",
    ):
        assert text in card
    assert "hf download" not in card
    assert "repository's root" not in card
    assert "sglang" not in card
    assert "me/toy-eagle3-sglang" in (hub.repos[REPO].files("main") or {})["README.md"].decode()


@pytest.mark.parametrize("layout", HubLayout)
def test_llamacpp_fetches_its_file_from_the_root_of_a_repository(
    target: Target, hub: HubServer, run_dir: Path, tmp_path: Path, layout: HubLayout
) -> None:
    export(make_head(target).half(), ExportFormat.llamacpp, run_dir / "gguf")
    pushed(run_dir, exports=[str(run_dir / "gguf")], layout=layout)
    apart = layout is HubLayout.each
    repo = f"{REPO}-llamacpp" if apart else REPO
    files = hub.repos[repo].files("main") or {}
    place = "" if apart else "llamacpp/"
    name = "eagle3-llama-F16.gguf"
    held = {f"{place}{file}" for file in (name, PARITY, "headsmith.json", "README.md")}
    assert {file for file in files if file.startswith(place)} - {".gitattributes"} == held
    card = files["README.md"].decode()
    serve = "--spec-type draft-eagle3 --spec-draft-n-max 5 --metrics"
    assert "llama.cpp b11549 and b11434" in card
    if apart:
        assert f"llama-server -m llama.gguf -hfd {repo} {serve}" in card
    else:
        assert "hf download me/toy-eagle3 --include 'llamacpp/*' --local-dir toy-eagle3\n" in card
        assert f"llama-server -m llama.gguf -md toy-eagle3/llamacpp/{name} {serve}" in card
    (tmp_path / name).write_bytes(files[f"{place}{name}"])
    fetched, half = load_head(str(tmp_path / name)), make_head(target).half().float()
    assert fetched.norm.weight.equal(half.norm.weight)


def test_the_card_has_no_line_with_which_the_engine_would_crash(hub, tmp_path) -> None:
    head = make_head(random_target("qwen2", num_hidden_layers=6))
    head.save(tmp_path / "head", dict(PROVENANCE))
    exports = [tmp_path / engine for engine in ("vllm", "llamacpp")]
    for folder in exports:
        export(head, ExportFormat(folder.name), folder)
    pushed(tmp_path, exports=list(map(str, exports)))
    card = (hub.repos[REPO].files("main") or {})["README.md"].decode()
    assert "\n\nllamacpp: llama.cpp b11434 serves no head of a target of type qwen2: " in card
    assert "vllm serve" in card and "llama-server -m" not in card


def test_a_head_that_is_a_gguf_file_is_pushed_as_it_is(target, hub, run_dir) -> None:
    export(make_head(target), ExportFormat.llamacpp, run_dir / "gguf")
    pushed(run_dir, head=HeadRef(path=str(run_dir / "gguf")), exports=[])
    assert set(hub.repos[REPO].files("main") or {}) == {
        ".gitattributes", "README.md", "headsmith.json", "eagle3-llama-F32.gguf", PROFILE,
    }  # fmt: skip
    assert load_head(REPO).vocab.ids.tolist() == list(range(0, 96, 2))
    file = f"{REPO}/eagle3-llama-F32.gguf"
    assert load_head(file).vocab.ids.tolist() == list(range(0, 96, 2))


def test_a_dry_run_writes_a_folder_for_each_repository(run_dir: Path, tmp_path: Path) -> None:
    pushed(run_dir, layout=HubLayout.each, dry_run=True, out_dir=str(tmp_path / "out"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "toy-eagle3", "toy-eagle3-vllm", "toy-eagle3-sglang",
    }  # fmt: skip
    assert (tmp_path / "out" / "toy-eagle3-vllm" / PARITY).is_file()


def test_an_export_that_no_longer_computes_the_head_stays_at_home(hub, run_dir) -> None:
    config = run_dir / "vllm" / "config.json"
    changed = json.loads(config.read_text()) | {"rms_norm_eps": 0.1}
    config.write_text(json.dumps(changed))
    with pytest.raises(InputError, match=r"exports=.*vllm: .*logits of the served head differ"):
        pushed(run_dir)
    assert not hub.repos


def test_an_export_of_another_head_is_refused(target, hub, run_dir) -> None:
    export(make_head(target, seed=1), ExportFormat.sglang, run_dir / "sglang")
    with pytest.raises(InputError, match=r"sglang: its [\w.]+ differs from that of head\.path"):
        pushed(run_dir)
    assert not hub.repos


def test_exports_in_bfloat16_are_of_the_same_head(target, run_dir, tmp_path) -> None:
    export(make_head(target).to(torch.bfloat16), ExportFormat.vllm, run_dir / "vllm")
    pushed(run_dir, dry_run=True, out_dir=str(tmp_path / "out"))
    weights = load_file(tmp_path / "out" / "vllm" / "model.safetensors")
    assert weights["fc.weight"].dtype is torch.bfloat16


def test_folders_that_are_no_exports_are_named(run_dir: Path) -> None:
    def refused(match: str, *folders: Path) -> None:
        with pytest.raises(InputError, match=match):
            pushed(run_dir, exports=[str(folder) for folder in folders])

    refused("exports=.*nowhere: no such folder", run_dir / "nowhere")
    refused("headsmith.json says None is not a valid ExportFormat", run_dir / "head")
    refused("are both for vllm; name one per format", run_dir / "vllm", run_dir / "vllm")
    (run_dir / "vllm" / "headsmith.json").write_text("{")
    refused("headsmith.json: not JSON", run_dir / "vllm")


def test_copies_of_a_gated_targets_weights_are_told(hub: HubServer, tmp_path: Path) -> None:
    """The authors' EAGLE-1 needs the embedding, and its golden features the output head."""
    target = random_target()
    target.name = "me/gated"
    hub.repos["me/gated"] = Repo(private=False, gated="auto")
    hub.repos["me/gated"].commit({})
    head = EagleHead.from_settings(
        target, EagleConfig(form=EagleForm.eagle1), DraftVocab.make_full(target.vocab_size), 0
    )
    head.save(tmp_path / "head")
    export(head.eval(), ExportFormat.original, tmp_path / "original")
    pushed(tmp_path, base_model=None, exports=[str(tmp_path / "original")])
    assert (
        "[me/gated](https://huggingface.co/me/gated) is gated: users agree to its terms "
        "before they download it, and the terms apply to this head to the extent that it was made "
        "from it. It holds its token "
        "embedding, some rows of its token embedding, rows of its output head."
    ) in (hub.repos[REPO].files("main") or {})["README.md"].decode()
