import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import noisy_head, save_target

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.drafting import HeadRef
from conf.settings.scripts import ServeCheckRun
from conf.settings.target import Dtype, TargetConfig
from data.servers import endpoint as endpoint_module
from eval.decode.engine import NoDraft, decode
from eval.measure.replay import accepted_lengths, ranked_drafts
from heads.decoding.tree import Tree
from heads.target_model.load import load_target
from scripts import serve_check
from tests.servers import LLAMACPP_METRICS, DraftServer

DEPTH, NUM_TOKENS = 3, 24


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A saved head and target, three prompts, and what an engine makes of them, by replay."""
    folder = tmp_path_factory.mktemp("serve_check")
    path = str(save_target(folder / "target"))
    target = load_target(TargetConfig(path=path, dtype=Dtype.float32), torch.device("cpu"))
    head = noisy_head(target)
    head.save(folder / "head")
    prompts = folder / "prompts.jsonl"
    rows = [{"turns": [f"hello {word}, how are you?"]} for word in ("there", "you", "today")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chain = Tree.chain(DEPTH)

    @cache
    def replayed(prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], list[int]]:
        text = decode(target, NoDraft(), list(prompt), num_tokens + DEPTH).token_ids
        assert len(text) == num_tokens + DEPTH
        output = target.read_text([*prompt, *text[:-1]], head.taps)
        accepted = accepted_lengths(
            chain, ranked_drafts(head, chain, output, list(prompt), text), text
        )
        lengths, root = [], 0
        while root < num_tokens - 1:
            lengths.append(accepted[root])
            root += accepted[root] + 1
        return text[:num_tokens], lengths

    def answers(prompt: list[int], num_tokens: int) -> tuple[list[int], list[int]]:
        text, lengths = replayed(tuple(prompt), num_tokens)
        return text.copy(), lengths.copy()

    return {"target": path, "head": str(folder / "head"), "data": str(prompts), "answers": answers}


def checked(setting: dict[str, Any], server: DraftServer, out_dir: Path, **more: Any) -> dict:
    config = ServeCheckRun(
        endpoint=server.root,
        target=TargetConfig(path=setting["target"], dtype=Dtype.float32),
        data=DataConfig(path=setting["data"]),
        head=HeadRef(path=setting["head"]),
        out_dir=str(out_dir),
        **{"max_new_tokens": NUM_TOKENS, **more},
    )
    serve_check.main(config)
    return json.loads((out_dir / "serve_check.json").read_text())


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
def test_a_server_that_drafts_what_we_do_agrees(setting, tmp_path: Path, kind: str, capsys) -> None:
    with DraftServer(kind, DEPTH, setting["answers"]) as server:
        result = checked(setting, server, tmp_path)
    assert (result["engine"], result["served_model"], result["depth"]) == (kind, "toy", DEPTH)
    assert (result["num_texts"], result["divergences"], result["problems"]) == (3, [], [])
    assert result["ours"] == result["theirs"]
    assert len(result["ours"]["accepted"]) == DEPTH
    assert result["ours"]["drafts"] > result["ours"]["accepted"][0] > 0
    # One after the other, each as it is rendered for the target.
    sizes = {"vllm": [6] * 3, "sglang": [2] * 3, "llamacpp": [7, 6, 6, 6]}[kind]
    assert [len(body) for body in server.bodies] == sizes
    assert all(body["ignore_eos"] for body in server.bodies if len(body) == 7)
    assert server.most_at_once == 1
    shown = capsys.readouterr().out
    assert f"3 of 3 texts equal, {kind} and ours" in shown


def wrong(change: Callable[[list[int], list[int]], object], answers):
    """Answers in which one text or its counts are changed."""
    seen: list[int] = []

    def changed(prompt: list[int], num_tokens: int) -> tuple[list[int], list[int]]:
        text, lengths = answers(prompt, num_tokens)
        # A first request may only be there to learn the depth.
        seen.extend([len(text)] if num_tokens == NUM_TOKENS else [])
        if len(seen) == 2:
            change(text, lengths)
        return text, lengths

    return changed


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_one_draft_more_is_told_and_exits_with_1(setting, tmp_path: Path, kind, capsys) -> None:
    answers = wrong(lambda _, lengths: lengths.append(1), setting["answers"])
    with DraftServer(kind, DEPTH, answers) as server, pytest.raises(SystemExit, match="1"):
        checked(setting, server, tmp_path)
    result = json.loads((tmp_path / "serve_check.json").read_text())
    ours = result["ours"]
    assert result["divergences"] == []
    drafts, accepted = ours["drafts"], ours["accepted"][0]
    assert result["problems"] == [
        f"drafts: {drafts} by us, {drafts + 1} by the engine",
        f"draft tokens: {3 * drafts} by us, {3 * drafts + 3} by the engine",
        f"accepted at depth 1: {accepted} by us, {accepted + 1} by the engine",
    ]
    assert f"differs: drafts: {drafts} by us" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
def test_another_text_is_told_with_its_place(setting, tmp_path: Path, kind: str) -> None:
    answers = wrong(lambda text, _: text.__delitem__(slice(20, None)), setting["answers"])
    with DraftServer(kind, DEPTH, answers) as server, pytest.raises(SystemExit):
        checked(setting, server, tmp_path)
    result = json.loads((tmp_path / "serve_check.json").read_text())
    (divergence,) = result["divergences"]
    assert (divergence["prompt"], divergence["token"]) == (1, 20)
    assert divergence["engine"] is None
    assert result["problems"] == [
        f"1 of 3 texts, first prompt 1 at token 20: {divergence['ours']} by us, None by the engine"
    ]


def test_a_tolerance_lets_shares_differ(setting, tmp_path: Path) -> None:
    def change(text: list[int], lengths: list[int]) -> None:
        text[-1] += 1
        lengths.append(0)

    with DraftServer("vllm", DEPTH, wrong(change, setting["answers"])) as server:
        result = checked(setting, server, tmp_path, tolerance=0.34)
    assert len(result["divergences"]) == 1
    assert result["theirs"]["drafts"] == result["ours"]["drafts"] + 1
    assert result["problems"] == []


@pytest.mark.parametrize(
    ("kind", "depth", "changes", "message"),
    [
        ("vllm", 0, {}, r"endpoint=http://.*: it drafts nothing: start it with a draft head"),
        ("sglang", 0, {}, r"it drafts nothing: start it with a draft head"),
        ("sglang", 2, {"speculative_eagle_topk": 4}, r"speculative_eagle_topk=4: only chains"),
    ],
)
def test_a_server_without_chains_is_refused(
    setting, tmp_path: Path, kind, depth, changes, message
) -> None:
    with DraftServer(kind, depth, setting["answers"]) as server:
        server.server_info = changes
        with pytest.raises(InputError, match=message):
            checked(setting, server, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert server.bodies == []


@pytest.mark.parametrize(
    ("depth", "page", "message"),
    [
        (0, LLAMACPP_METRICS.format(drafts=0, proposed=0, total=0), r"it drafts nothing: start it"),
        (DEPTH, None, r"counts nothing: start it with --metrics \(.*HTTP 404"),
    ],
)
def test_llamacpp_without_a_head_or_counters_is_refused(
    setting, tmp_path: Path, depth: int, page: str | None, message: str
) -> None:
    with DraftServer("llamacpp", depth, setting["answers"]) as server:
        models = server.page
        server.page = lambda path: page if path == "/metrics" else models(path)  # type: ignore[method-assign]
        with pytest.raises(InputError, match=message):
            checked(setting, server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_llamacpp_names_no_window_while_it_loads(setting, tmp_path: Path) -> None:
    with DraftServer("llamacpp", DEPTH, setting["answers"]) as server:
        server.models = (server.models[0] | {"meta": None},)
        assert checked(setting, server, tmp_path)["problems"] == []


def test_another_engine_is_refused(setting, tmp_path: Path) -> None:
    with DraftServer("vllm", DEPTH, setting["answers"]) as server:
        server.models = ({"id": "toy", "owned_by": "tabby"},)
        with pytest.raises(InputError, match=r"must be one of vllm, sglang, llamacpp; .*tabby"):
            checked(setting, server, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 2}, r"depth=2: http.* drafts 3 tokens; leave depth unset"),
        ({"max_new_tokens": 250}, r"max_new_tokens=250 are 275, above"),
    ],
)
def test_what_cannot_be_compared_is_refused(setting, tmp_path: Path, settings, message) -> None:
    with DraftServer("vllm", DEPTH, setting["answers"]) as server:
        server.models = ({"id": "toy", "owned_by": "vllm", "max_model_len": 64},)
        with pytest.raises(InputError, match=message):
            checked(setting, server, tmp_path, **settings)
    assert server.bodies == []


def test_answers_without_token_ids_are_refused(setting, tmp_path: Path) -> None:
    with DraftServer("vllm", DEPTH, setting["answers"]) as server:
        server.answer = lambda _: {"choices": [{"text": "hello"}]}  # type: ignore[method-assign]
        with pytest.raises(InputError, match=r"no choices\[0\]\.token_ids: vLLM is too old"):
            checked(setting, server, tmp_path)


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match=r"tolerance=1\.0: must be from 0 to below 1"):
        ServeCheckRun(tolerance=1.0)
