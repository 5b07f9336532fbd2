"""A push of a head: its card, what stays at home, and the Hub's answers."""

import json
import os
import re
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants

from conf.errors import InputError
from conf.settings.drafting import HeadRef
from conf.settings.export import ExportFormat, PushRun
from eval.measure.speculation_profile import compare_with_published
from heads.export.writer import format_readme
from heads.kinds import load_head
from heads.medusa import MedusaHead, MedusaHeadConfig
from scripts import push
from scripts.publish.hub import fetch_terms
from scripts.publish.staging import Renaming, scrub_private_data
from tests.conf.command.test_following import pasted
from tests.eval.measure import test_results as made
from tests.hub_server import TOKEN, HubServer, Repo

ROWS = [{"dialogue": n} for n in range(11)]
ACCEPTANCE, SPEEDUP, PROVENANCE = json.loads(
    (Path(__file__).parent / "run.json").read_text()
).values()
"""What a run left: its measurements, and the record of its training."""
ACCEPTANCE["prompts"] = ROWS
for figures in SPEEDUP["methods"].values():
    figures["prompts"] = ROWS


def make_head(folder: Path, target: str = "Qwen/Qwen3-8B") -> MedusaHead:
    torch.manual_seed(0)
    head = MedusaHead(
        MedusaHeadConfig(hidden_size=32, vocab_size=64, num_heads=2, num_layers=1, target=target)
    )
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    head.save(folder)
    (folder / "headsmith.json").write_text(json.dumps(PROVENANCE))
    return head


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A training run's folder with a head, measurements, and things that must stay at home."""
    run = tmp_path / "run"
    make_head(run / "head")
    (run / "acceptance.json").write_text(json.dumps(ACCEPTANCE))
    (run / "speedup.json").write_text(json.dumps(SPEEDUP))
    (run / "acceptance.png").write_bytes(b"\x89PNG not a real picture")
    (run / "head" / "optimizer.safetensors").write_bytes(b"state")
    (run / "head" / "optimizer.bin").write_bytes(b"state")
    (run / "head" / "wandb").mkdir()
    return run


def dry(run_dir: Path, tmp_path: Path, **changes: object) -> Path:
    settings = {"repo_id": "me/qwen-medusa", "dry_run": True, "out_dir": str(tmp_path / "staged")}
    head = HeadRef(path=str(run_dir / "head"))
    push.main(PushRun(head=head, **{**settings, **changes}))  # type: ignore[arg-type]
    return tmp_path / "staged"


def hub_env(hub: HubServer, home: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING_FACE"))}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return env | {"NO_PROXY": "127.0.0.1", "HF_TOKEN": TOKEN}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A loopback Hub that the client in this process uses, with a token."""
    monkeypatch.setattr(constants, "ENDPOINT", "set below")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with HubServer() as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        yield server


def upload(run_dir: Path, **changes: object) -> None:
    head = HeadRef(path=str(run_dir / "head"))
    push.main(PushRun(head=head, **{"repo_id": "me/qwen-medusa", **changes}))  # type: ignore[arg-type]


def test_push_then_load_from_the_hub_gives_the_same_head(hub, run_dir, tmp_path, capsys) -> None:
    upload(run_dir)
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"{hub.url}/me/qwen-medusa"
    repo = hub.repos["me/qwen-medusa"]
    assert repo.private
    assert len(repo.commits) == 2, "one commit after the initial one"
    load_head("me/qwen-medusa").save(tmp_path / "loaded")
    ours = load_head(str(run_dir / "head")).state_dict()
    theirs = load_head(str(tmp_path / "loaded")).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert TOKEN not in said.out + said.err


def test_a_dry_run_ends_with_the_push(run_dir, tmp_path, capsys) -> None:
    staged = dry(run_dir, tmp_path, private=False)
    said = capsys.readouterr().out
    assert "links after upload: https://huggingface.co/me/qwen-medusa\n" in said
    again = PushRun(HeadRef(str(run_dir / "head")), "me/qwen-medusa", private=False)
    assert pasted(said) == ("scripts/push.py", again)
    names = [
        "README.md", "acceptance.png", "config.json", "headsmith.json",
        "medusa_lm_head.safetensors", "speculation_profile.json",
    ]  # fmt: skip
    sizes = {path.name: path.stat().st_size for path in staged.iterdir()}
    assert sorted(sizes) == names
    listed = "".join(f"  {name} ({sizes[name]:,} bytes)\n" for name in names)
    assert f"me/qwen-medusa\n{listed}dry run: nothing" in said


@pytest.mark.parametrize(
    ("path", "name", "shown"),
    [
        (None, "headsmith-default", "headsmith-default"),
        ("/home/ann/mt_bench.jsonl", "mt_bench", "mt_bench"),
        ("HuggingFaceH4/mt_bench", "HuggingFaceH4/mt_bench", "mt_bench"),
    ],
)
def test_card_says_what_was_measured_and_how_to_use_it(
    run_dir: Path, tmp_path: Path, path: str | None, name: str, shown: str
) -> None:
    measured = ACCEPTANCE | ({"data": {"path": path}} if path else {})
    (run_dir / "acceptance.json").write_text(json.dumps(measured))
    card = (dry(run_dir, tmp_path, license="Apache-2.0") / "README.md").read_text()
    _, metadata, body = card.split("---\n", 2)
    taus = [
        {"type": "tau", "value": tau, "name": f"tau, {way} (mean tokens per target pass)"}
        for way, tau in (("chain", 1.8125), ("static tree", 2.25))
    ]
    results = {
        "task": {"type": "text-generation"},
        "dataset": {"name": shown, "type": name},
        "metrics": taus,
    }
    assert yaml.safe_load(metadata) == {
        "base_model": "Qwen/Qwen3-8B",
        "base_model_relation": "adapter",
        "library_name": "headsmith",
        "license": "apache-2.0",
        "tags": ["speculative-decoding", "medusa", "draft-head"],
        "model-index": [{"name": "qwen-medusa", "results": [results]}],
    }
    for text in (
        "[Qwen/Qwen3-8B](https://huggingface.co/Qwen/Qwen3-8B)",
        "**1.812**",
        "| category | prompts | tau | 95% interval | tau, tree |",
        "| writing | 2 | 1.750 | few | 2.125 |",
        "| math\\|code | 8 | 1.875 | 1.75-2.00 | 2.375 |",
        "| one | 1 | 1.250 | - | 2.000 |",
        "| all | 11 | 1.812 | 1.60-2.00 | 2.250 |",
        "| 2 | 0.350 | 0.210 |",
        "| method | tau | tokens/s | speed-up | 95% interval | efficiency |",
        "| medusa_chain | 1.800 | 11.2 | 0.56 | 0.49-0.64 | 0.31 |",
        "8 of 8 texts equal",
        "![acceptance](acceptance.png)",
        f"Data: `chats.jsonl`, 12,000 rows, form messages, sha256 `{'f00d' * 16}`. 345 rows of "
        "`kept.jsonl` were held out. 1,200 samples were longer than `data.max_length`; their ends "
        "were not learnt.",
        "| data.max_length | 128 |",
        "| train.max_steps | 77 |",
        "| head.num_heads | 2 |",
        "| head.labels | hard |",
        "| seed | 3 |",
        "python eval/acceptance.py head.path=me/qwen-medusa target.path=Qwen/Qwen3-8B",
        "Serve with vLLM up to version 0.32:\n\n```\n"
        "vllm serve Qwen/Qwen3-8B --speculative-config '"
        '{"method": "medusa", "model": "me/qwen-medusa", "num_speculative_tokens": 2}\'',
    ):
        assert text in body


def test_push_and_card_begin_with_the_verdict_of_the_figures(run_dir, tmp_path, capsys) -> None:
    said = "The verdict of speedup.json: This head is not worth serving: medusa_chain decodes at "
    card = (dry(run_dir, tmp_path) / "README.md").read_text()
    assert said in card[: card.index("## Use")]
    told = capsys.readouterr().out
    assert told.index(said) < told.index("\nme/qwen-medusa\n")


def test_card_and_export_say_how_chats_were_rendered(run_dir: Path, tmp_path: Path) -> None:
    data = {"chat_template_kwargs": {"enable_thinking": False}}
    config = {**PROVENANCE["config"], "data": data}
    (run_dir / "head/headsmith.json").write_text(json.dumps(PROVENANCE | {"config": config}))
    card = (dry(run_dir, tmp_path) / "README.md").read_text()
    said = "vLLM with `--default-chat-template-kwargs '{\"enable_thinking\": false}'`."
    assert said in card
    head = load_head(str(run_dir / "head"))
    assert said in format_readme(head, ExportFormat.vllm, [], PROVENANCE | {"config": config})
    assert "chat_template_kwargs" not in format_readme(head, ExportFormat.vllm, [], PROVENANCE)


def test_card_says_what_was_trained_on_and_digests_stay_at_home(run_dir, tmp_path) -> None:
    head = str(run_dir / "head")
    own = {"chat_template_kwargs": {}, "target_dtype": "float32", "sha256": "ab"}
    trained = own | {"head": head, "num_trained": 3, "num_dialogues": 4, "target_dtype": "bfloat16"}
    other = trained | {"head": "another", "num_trained": 1}
    data = own | {"trained_on": [trained, other]}
    for name, result in (("acceptance", ACCEPTANCE), ("speedup", SPEEDUP)):
        measured = result | {"head": head, "data": data}
        (run_dir / f"{name}.json").write_text(json.dumps(measured))
    (run_dir / "head/trained_prompts.json").write_text("{}")
    staged = dry(run_dir, tmp_path)
    card = (staged / "README.md").read_text()
    assert card.count("This head: was trained on the first prompts of 3 of 4 dialogues, so") == 2
    assert (
        card.count("trained with the target in bfloat16, but is measured with the target in") == 2
    )
    assert "1 of 4 dialogues" not in card
    assert not (staged / "trained_prompts.json").exists()


def test_card_of_a_head_that_belongs_to_an_adapter(run_dir: Path, tmp_path: Path) -> None:
    belongs = {"adapter": {"path": "/home/ann/run/adapter", "sha256": "f00d" * 16}}
    (run_dir / "head/headsmith.json").write_text(json.dumps(PROVENANCE | belongs))
    staged = dry(run_dir, tmp_path)
    assert "Medusa-2 ([arXiv 2401.10774]" in (staged / "README.md").read_text()
    assert "works with the target so adapted, or" in (staged / "README.md").read_text()
    published = json.loads((staged / "headsmith.json").read_text())
    assert published["adapter"] == {"path": "adapter", "sha256": "f00d" * 16}


def test_local_paths_and_quoted_rows_stay_at_home(run_dir: Path, tmp_path: Path) -> None:
    make_head(run_dir / "head", target="/home/ann/models/tiny-chat")
    with pytest.raises(
        InputError,
        match=r"^base_model is unset, but this head's target is /home/ann/models/tiny-chat, which "
        r"others cannot find; type base_model=owner/name, the target's id on the Hub$",
    ):
        dry(run_dir, tmp_path)
    staged = dry(run_dir, tmp_path, base_model="me/tiny-chat")
    for path in staged.iterdir():
        assert b"ann" not in path.read_bytes(), path.name
        assert b"diary" not in path.read_bytes(), path.name
    published = json.loads((staged / "headsmith.json").read_text())
    assert published["argv"] == ["medusa.py", "data.path=chats.jsonl"]
    assert published["config"]["train"]["resume"] == "last"
    config = json.loads((staged / "config.json").read_text())
    assert config["base_model_name_or_path"] == "me/tiny-chat"
    card = (staged / "README.md").read_text()
    assert "\nbase_model: me/tiny-chat\n" in card
    assert "decoding of [me/tiny-chat](https://huggingface.co/me/tiny-chat): " in card
    assert "\nvllm serve me/tiny-chat --spec" in card
    assert " target.path=me/tiny-chat " in card


def test_the_target_of_a_gguf_head_is_a_file_on_the_hub(run_dir, tmp_path, capsys) -> None:
    make_head(run_dir / "head", target="models/chat.Q4_1.gguf")
    with pytest.raises(InputError, match=r"owner/name/chat\.Q4_1\.gguf, the target's file"):
        dry(run_dir, tmp_path)
    dry(run_dir, tmp_path, base_model="me/tiny-chat")
    warned = "names no GGUF file, but the head was trained for chat.Q4_1.gguf"
    assert warned in capsys.readouterr().out


@pytest.mark.parametrize("base", ["tiny-chat", "models/8B/chat", "/home/ann/tiny-chat", "~/a"])
def test_a_base_model_is_an_id_on_the_hub(run_dir: Path, tmp_path: Path, base: str) -> None:
    with pytest.raises(InputError, match=rf"^base_model={base}: must be the target's Hub id, own"):
        dry(run_dir, tmp_path, base_model=base)


COMMANDS = """python llama.cpp/convert_hf_to_gguf.py /x/qm --outtype auto --outfile qm.gguf
llama-server -m qm.gguf -md DIR/eagle3-qm-F32.gguf
vllm serve /x/qm --speculative-config '{"model": "/x/qm/head"}'
"""
RENAMED = """hf download me/chat --local-dir qm
python llama.cpp/convert_hf_to_gguf.py qm --outtype auto --outfile qm.gguf
llama-server -m qm.gguf -md DIR/eagle3-qm-F32.gguf
vllm serve me/chat --speculative-config '{"model": "/x/qm/head"}'
"""


def test_commands_and_files_name_the_target_as_others_know_it() -> None:
    assert Renaming("/x/qm", "me/chat").rename_in_text(COMMANDS) == RENAMED
    assert Renaming("/x/qm", None).rename_in_text(COMMANDS) == COMMANDS
    # A folder may have the name of a type of models.
    files = {"model_type": "llama", "target": "llama", "of": [{"name_or_path": "llama"}]}
    named = {"model_type": "llama", "target": "me/chat", "of": [{"name_or_path": "me/chat"}]}
    assert Renaming("llama", "me/chat").rename_values(files) == named
    assert Renaming("llama", "me/chat").rename_in_text("llama-server, llama.cpp: llama") == (
        "llama-server, llama.cpp: me/chat"
    )
    file = Renaming("/x/Q4.gguf", "me/chat-GGUF/Q4.gguf")
    assert file.rename_in_text("-m /x/Q4.gguf -md") == "-hf me/chat-GGUF -hff Q4.gguf -md"
    assert Renaming("/x/Q4.gguf", "me/chat").rename_in_text("-m /x/Q4.gguf") == "-m /x/Q4.gguf"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ann/a b/c.jsonl", "c.jsonl"),
        ("data.path=/home/ann/c.jsonl", "data.path=c.jsonl"),
        ("/x/y.jsonl:3: field 'a'", "y.jsonl:3: field 'a'"),
        ("paths=[/x/y.jsonl,/x/z.jsonl]", "paths=[y.jsonl,z.jsonl]"),
        ("see file:///home/ann/c.jsonl", "see c.jsonl"),
        ("~/c.jsonl", "c.jsonl"),
        (r"C:\Users\ann\c.jsonl", "c.jsonl"),
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("tokens / second", "tokens / second"),
        ("outputs/run", "outputs/run"),
        ("target.engine=[http://10.0.0.5:8000/v1]", "target.engine=[http://HOST/v1]"),
        ("https://gpu-3.lab:443/v1: fine", "https://HOST/v1: fine"),
        ("https://huggingface.co/me/it", "https://huggingface.co/me/it"),
    ],
)
def test_scrubbed(text: str, expected: str) -> None:
    assert scrub_private_data({"a": [text]}) == {"a": [expected]}


def test_embedded_target_and_nothing_measured(run_dir: Path, tmp_path: Path) -> None:
    for name in ("acceptance.json", "speedup.json", "acceptance.png"):
        (run_dir / name).unlink()
    embedded = {**PROVENANCE, "config": {"target": {"path": "/elsewhere/data/embedded/target"}}}
    (run_dir / "head" / "headsmith.json").write_text(json.dumps(embedded))
    card = (dry(run_dir, tmp_path) / "README.md").read_text()
    assert "Nothing was measured" in card
    assert "embedded default target" in card
    assert "head.path=me/qwen-medusa data.path" in card


def test_a_measurement_is_held_against_the_published_card(run_dir, tmp_path) -> None:
    staged = dry(run_dir, tmp_path)
    texts = [made.text(number, [0, 1, 2, 2]) for number in range(8)]
    here = made.result(*texts) | {"draft_tokens": 2}
    assert (compare_with_published(here, staged, 0) or {})["source"] == "speculation_profile.json"
    (staged / "speculation_profile.json").unlink()
    found = compare_with_published(here, staged, 0)
    assert found is not None
    assert (found["source"], found["count"]) == ("its model card", "passes")
    assert (found["published"], found["num_prompts"]) == (1.812, 11)
    assert (found["measured"], found["equal"]) == (2.25, False)
    assert (compare_with_published(here | {"draft_tokens": 3}, staged, 0) or {})["equal"] is None


def test_card_shows_comparisons(run_dir: Path, tmp_path: Path) -> None:
    tables = []
    for name in ("heldout", "general"):
        tables.append(tmp_path / name)
        tables[-1].mkdir()
        (tables[-1] / "comparison.md").write_text(f"8 prompts of {name}:\n\n| before | after |\n")
    card = (dry(run_dir, tmp_path, comparisons=[*map(str, tables)]) / "README.md").read_text()
    measured = card[card.index("## Measured") : card.index("## Training")]
    assert "Nothing was measured" not in measured
    assert measured.index("8 prompts of heldout:") < measured.index("8 prompts of general:")


def test_measured_names_the_folder(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "measured"
    other.mkdir()
    (other / "acceptance.json").write_text(json.dumps({**ACCEPTANCE, "tau": 1.5}))
    card = (dry(run_dir, tmp_path, measured=str(other)) / "README.md").read_text()
    assert "**1.500**" in card
    assert "medusa_chain" not in card


def test_bad_inputs_are_named(run_dir: Path, tmp_path: Path) -> None:
    def refused(match: str, **changes: object) -> None:
        with pytest.raises(InputError, match=match):
            dry(run_dir, tmp_path, **changes)

    refused("repo_id=name: must be user/name", repo_id="name")
    refused("must be user/name", repo_id="a/b/c")
    refused("must be user/name", repo_id="me/bad name")
    refused("measured=nowhere: no such folder", measured="nowhere")
    refused("comparisons=nowhere: has no comparison.md", comparisons=["nowhere"])
    refused("not an empty folder", out_dir=str(run_dir))
    with pytest.raises(InputError, match=r"head\.path is unset"):
        push.main(PushRun(repo_id="me/x", dry_run=True, out_dir=str(tmp_path / "o")))
    with pytest.raises(InputError, match=r"path=nowhere: no such folder; name a trained head"):
        push.main(PushRun(head=HeadRef(path="nowhere"), repo_id="me/x"))
    (run_dir / "acceptance.json").write_text(json.dumps({"tau": 1}))
    refused(r"acceptance.json: lacks tau_ci95, alpha, per_position, .*, prompts, mode, static_tree")
    (run_dir / "acceptance.json").write_text(json.dumps({**ACCEPTANCE, "alpha": [0.1] * 3}))
    refused("measures drafts of 3 tokens, but this head drafts at most 2")
    (run_dir / "acceptance.json").write_text(json.dumps(ACCEPTANCE))
    written = json.loads((run_dir / "speedup.json").read_text())
    del written["methods"]["vanilla"]["speedup_ci95"]
    (run_dir / "speedup.json").write_text(json.dumps(written))
    refused(r"speedup.json: lacks methods.\*.speedup_ci95; measure again with eval/speedup.py")
    make_head(tmp_path / "other")
    (run_dir / "acceptance.json").write_text(
        json.dumps({**ACCEPTANCE, "head": str(tmp_path / "other")})
    )
    refused("measures another head")
    weights = run_dir / "head" / "medusa_lm_head.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    refused("corrupt or truncated")
    assert not (tmp_path / "staged").exists()


def test_hub_refusals_are_explained(hub, run_dir, monkeypatch) -> None:
    with pytest.raises(InputError, match=r"may not write there \(HTTP 403\)"):
        upload(run_dir, repo_id="others/head")
    upload(run_dir, private=False)
    assert not hub.repos["me/qwen-medusa"].private
    with pytest.raises(InputError, match="exists and is public; set private=false"):
        upload(run_dir)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(InputError, match=r"not logged in to .*hf auth login"):
        upload(run_dir, private=False)
    with pytest.raises(InputError, match=r"not logged in to .*hf auth login"):
        upload(run_dir, repo_id="me/new")


def test_an_unreachable_hub_is_named(hub, run_dir, monkeypatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    # The number of the error is the system's.
    told = str(fetch_terms("me/x"))
    assert re.fullmatch(r"cannot reach http://127\.0\.0\.1:9: .*Connection refused", told)
    with pytest.raises(InputError, match=r"cannot reach http://127\.0\.0\.1:9"):
        upload(run_dir)


# --- Requests of a push to the Hub, and uploads that break off.


WEIGHTS = "medusa_lm_head.safetensors"
REPO = "me/qwen-medusa"


def test_nothing_that_arrived_is_sent_again(hub: HubServer, run_dir: Path) -> None:
    weights, picture = (run_dir / "head" / WEIGHTS).read_bytes(), b"\x89PNG not a real picture"

    def received() -> list[int]:
        return [hub.received[sha256(each).hexdigest()] for each in (weights, picture)]

    hub.refuse_after = 10_000
    expected = r"Error while uploading 'medusa_lm_head.safetensors'.*Run the same command again"
    with pytest.raises(InputError, match=expected) as refused:
        upload(run_dir)
    assert "signature" not in str(refused.value)
    assert len(hub.repos[REPO].commits) == 1, "nothing is visible"
    assert received() == [10_000, len(picture)]
    for _ in range(2):
        upload(run_dir)
        assert received() == [10_000 + len(weights), len(picture)]
        assert len(hub.repos[REPO].commits) == 2, "one commit after the initial one"


def test_files_of_an_earlier_head_go_with_the_same_commit(hub: HubServer, run_dir: Path) -> None:
    upload(run_dir)
    repo = hub.repos[REPO]
    old = {
        "model.safetensors": b"old", "speedup.png": b"old", "notes.txt": b"kept",
        "sglang/headsmith.json": b"{}", "sglang/config.json": b"{}",
        "sglang/parity/parity.safetensors": b"old", "docs/config.json": b"kept",
    }  # fmt: skip
    repo.commit({**(repo.files("main") or {}), **old})
    upload(run_dir)
    assert set(repo.files("main") or {}) == {
        ".gitattributes", "README.md", "acceptance.png", "config.json", "docs/config.json",
        "headsmith.json", WEIGHTS, "notes.txt", "speculation_profile.json",
    }  # fmt: skip
    assert len(repo.commits) == 4


def add_target(hub: HubServer, **facts: object) -> None:
    hub.repos["Qwen/Qwen3-8B"] = Repo(private=False, **facts)  # type: ignore[arg-type]
    hub.repos["Qwen/Qwen3-8B"].commit({})


def card_of(hub: HubServer) -> str:
    return (hub.repos[REPO].files("main") or {})["README.md"].decode()


def test_a_head_of_a_private_target_stays_private_unless_told(hub, run_dir) -> None:
    add_target(hub)
    hub.repos["Qwen/Qwen3-8B"].private = True
    with pytest.raises(InputError, match=r"private=false: Qwen/Qwen3-8B is a private .*leave priv"):
        upload(run_dir, private=False)
    assert REPO not in hub.repos
    upload(run_dir)
    assert hub.repos[REPO].private
    upload(run_dir, repo_id="me/public", private=False, publish_private_target=True)
    assert not hub.repos["me/public"].private


def test_a_private_adapter_counts_too(hub: HubServer, run_dir: Path) -> None:
    hub.repos["me/lora"] = Repo(private=True)
    hub.repos["me/lora"].commit({})
    path = run_dir / "head" / "headsmith.json"
    provenance = json.loads(path.read_text())
    provenance["config"]["target"]["adapter"] = "me/lora"
    path.write_text(json.dumps(provenance))
    with pytest.raises(InputError, match="private=false: me/lora is a private repository"):
        upload(run_dir, private=False)


def test_the_card_tells_a_gated_targets_terms(hub: HubServer, run_dir: Path) -> None:
    add_target(hub, gated="manual")
    upload(run_dir, private=False)
    assert (
        "[Qwen/Qwen3-8B](https://huggingface.co/Qwen/Qwen3-8B) is gated: users agree to its "
        "terms before they download it, and the terms apply to this head to the extent that it was "
        "made from it. It holds output "
        "layers that started as copies of its own."
    ) in card_of(hub)


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ({"license": "apache-2.0"}, "Qwen/Qwen3-8B has apache-2.0; set license="),
        ({"license": "other", "license_name": "qwen-research"}, "has qwen-research; set"),
        ({}, "the card will name no licence"),
    ],
)
def test_a_licence_is_suggested_and_never_taken(hub, run_dir, capsys, card, said) -> None:
    add_target(hub, card=card)
    upload(run_dir)
    assert said in capsys.readouterr().out
    assert "license:" not in card_of(hub)


def test_an_unknown_target_is_said_to_be_unknown(hub, run_dir, capsys) -> None:
    upload(run_dir, private=False)
    assert (
        f"Qwen/Qwen3-8B: {hub.url} does not show it to you; it is private to others, or deleted. "
        "Its licence and terms are unknown here; check them before you push"
    ) in capsys.readouterr().out
    assert "gated" not in card_of(hub)
