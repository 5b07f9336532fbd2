import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import noisy_head, save_target, tokenizer

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.drafting import HeadRef
from conf.settings.measure import ServeRun
from conf.settings.target import Dtype, TargetConfig
from data.servers import http_client as endpoint_module
from eval import serve
from eval.decode.engine import NoDraft, decode
from eval.measure.replay import compute_accepted_lengths, rank_candidates
from eval.measure.verdict import Outcome, Verdict
from eval.serving import server_check as check
from heads.decoding.tree import Tree
from heads.target_model.load import load_target
from tests.chats import write_rows
from tests.conf.command.test_following import pasted
from tests.servers import LLAMACPP_METRICS, Answers, DraftServer

DEPTH, NUM_TOKENS = 3, 24
KINDS = ["vllm", "sglang", "llamacpp"]
WORDS = ("there", "you", "today")


pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A saved head and target, three prompts, and what an engine makes of them, by decoding."""
    folder = tmp_path_factory.mktemp("serve")
    path = str(save_target(folder / "target"))
    target = load_target(TargetConfig(path=path, dtype=Dtype.float32), torch.device("cpu"))
    head = noisy_head(target)
    head.save(folder / "head")
    rows = [{"turns": [f"hello {word}, how are you?", "and now?"]} for word in WORDS]
    prompts = write_rows(folder / "prompts.jsonl", rows)
    chain = Tree.make_chain(DEPTH)

    @cache
    def replayed(prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], list[int]]:
        text = decode(target, NoDraft(), list(prompt), num_tokens + DEPTH).token_ids
        assert len(text) == num_tokens + DEPTH
        output = target.encode_text([*prompt, *text[:-1]], head.taps)
        accepted = compute_accepted_lengths(
            chain, rank_candidates(head, chain, output, list(prompt), text), text
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


def rendered(messages: list[dict]) -> list[int]:
    return tokenizer().apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


@contextmanager
def serving(kind: str, answers: Answers, depth: int = DEPTH) -> Iterator[DraftServer]:
    with DraftServer(kind, depth, answers) as server:
        server.rendered = rendered
        yield server


def without_drafts(answers: Answers) -> Answers:
    return lambda prompt, num_tokens: (answers(prompt, num_tokens)[0], [])


def measured(setting: dict[str, Any], server: DraftServer, out_dir: Path, **more: Any) -> dict:
    usual = {
        "endpoint": server.root,
        "target": TargetConfig(path=setting["target"], dtype=Dtype.float32),
        "data": DataConfig(path=setting["data"]),
        "head": HeadRef(path=setting["head"]),
        "out_dir": str(out_dir),
        "max_new_tokens": NUM_TOKENS,
        "concurrency": [],
    }
    serve.main(ServeRun(**usual | more))
    return json.loads((out_dir / "serve.json").read_text())


def problems(setting: dict[str, Any], server: DraftServer, out_dir: Path, **more: Any) -> list[str]:
    """Of a measurement that exits with 1."""
    with pytest.raises(SystemExit, match="1"):
        measured(setting, server, out_dir, **more)
    return json.loads((out_dir / "serve.json").read_text())["problems"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_drafts_what_the_head_does_agrees(
    setting, tmp_path: Path, kind: str, capsys
) -> None:
    with serving(kind, setting["answers"]) as server:
        result = measured(setting, server, tmp_path)
    assert result["servers"] == {"with drafts": {"engine": kind, "version": None, "model": "toy"}}
    assert (result["draft_tokens"], result["problems"], result["concurrency"]) == (DEPTH, [], {})
    assert result["texts"] == {
        "num_texts": 3, "num_tokens": 3 * NUM_TOKENS, "num_other_tokens": 0, "num_near_ties": 0,
        "first_other_tokens": [], "num_equal_counts": 3, "first_difference": None,
        "num_rendered_alike": 3,
    }  # fmt: skip
    assert result["served"] == result["replayed"]
    assert result["served"]["num_drafts"] > result["served"]["accepted"][0] > 0
    rows = [row["served"] for row in result["prompts"]]
    drafts, accepted = sum(row["drafts"] for row in rows), sum(sum(row["accepted"]) for row in rows)
    lengths = result["served"]["acceptance_length"]
    assert lengths["drafts"]["pooled"] == (drafts + accepted) / drafts
    low, high = result["served"]["per_draft_ci95"]
    assert 1 <= low <= lengths["drafts"]["pooled"] <= high
    if kind == "llamacpp":  # passes without drafts are not counted
        assert lengths.keys() == {"drafts"}
    else:
        assert lengths["passes"]["pooled"] == 3 * (NUM_TOKENS - 1) / drafts
        assert lengths["first_token"]["pooled"] == 3 * NUM_TOKENS / drafts
    assert server.most_at_once == 1
    assert "3 of 3 texts have the counts of the replay" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("no_picture")
def test_later_turns_follow_the_servers_own_answers_which_no_later_request_remembers(
    setting, tmp_path: Path
) -> None:
    one = DataConfig(path=setting["data"], num_prompts=1)
    timed = {"concurrency": [1], "num_repeats": 2, "num_turns": 2}
    with serving("vllm", setting["answers"]) as server:
        result = measured(setting, server, tmp_path, data=one, **timed)
    assert [row["turn"] for row in result["prompts"]] == [1, 2]
    asked = [tuple(b["prompt"]) for b in server.bodies if b.get("max_tokens") == NUM_TOKENS]
    first, second = sorted({*asked}, key=len)
    answer = setting["answers"](list(first), NUM_TOKENS)[0]
    said = tokenizer().decode(answer, clean_up_tokenization_spaces=False)
    question = f"hello {WORDS[0]}, how are you?"
    messages = [("user", question), ("assistant", said), ("user", "and now?")]
    assert list(second) == rendered([{"role": r, "content": text} for r, text in messages])
    salts = [body["cache_salt"] for body in server.bodies if "cache_salt" in body]
    # A warm-up over one prompt, then two passes that ask a dialogue of two turns twice.
    assert len(salts) == len({*salts}) == 1 + 2 * 4


def wrong(change: Callable[[list[int], list[int]], object], answers: Answers) -> Answers:
    """Answers in which the second text or its counts are changed, whenever it is asked for."""
    seen: list[list[int]] = []

    def changed(prompt: list[int], num_tokens: int) -> tuple[list[int], list[int]]:
        text, lengths = answers(prompt, num_tokens)
        # Shorter ones are there to learn the depth, or go on behind a text.
        if num_tokens == NUM_TOKENS:
            seen.extend([prompt] if prompt not in seen else [])
            if seen[1:2] == [prompt]:
                change(text, lengths)
        return text, lengths

    return changed


def test_other_drafts_are_named(setting, tmp_path: Path, capsys) -> None:
    answers = wrong(lambda _, lengths: lengths.append(1), setting["answers"])
    with serving("sglang", answers) as server:
        found, drafts, accepted, proposed = problems(setting, server, tmp_path)
    assert found.startswith("drafts: the texts are the target's, the drafts are not those of")
    assert found.endswith("first at prompt 1")
    served = json.loads((tmp_path / "serve.json").read_text())["served"]
    num_drafts, num_accepted = served["num_drafts"], served["accepted"][0]
    assert drafts == f"drafts: {num_drafts - 1} by replay, {num_drafts} by the server"
    assert accepted.startswith(f"draft tokens: {3 * num_drafts - 3} by replay")
    assert proposed == (
        f"accepted at depth 1: {num_accepted - 1} by replay, {num_accepted} by the server"
    )
    assert "differs: drafts: the texts are" in capsys.readouterr().err


def other(text: list[int], _lengths: list[int]) -> None:
    """Another token at place 20, which stands nowhere else."""
    text[20] = 299 if text[20] != 299 else 298


def test_another_target_is_named_with_its_first_token(setting, tmp_path: Path) -> None:
    with serving("llamacpp", wrong(other, setting["answers"])) as server:
        adapters = ({"id": "tuned", "parent": "toy"},)
        server.models = (*server.models, *adapters)
        [found] = problems(setting, server, tmp_path)
    ours = json.loads((tmp_path / "serve.json").read_text())["texts"]["first_other_tokens"][0]
    assert (ours["prompt"], ours["token"], ours["engine"] in {298, 299}) == (1, 20, True)
    assert f"first prompt 1 at token 20: {ours['ours']} here, {ours['engine']} by the" in found
    assert found.startswith("target: ")
    assert found.endswith(
        "toy is another model than target.path, or an adapter or a quantisation of it; it lists "
        "the adapters tuned"
    )


def test_a_server_that_draws_its_tokens_is_named(setting, tmp_path: Path) -> None:
    drawn = iter(range(100, 200))
    draw = wrong(lambda text, _: text.__setitem__(20, next(drawn)), setting["answers"])
    with serving("vllm", draw) as server:
        [found] = problems(setting, server, tmp_path)
    assert found.startswith("sampling: ")
    assert found.endswith("asked again, the server answers otherwise: it draws its tokens")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("vllm", "token 2 is 9 by the server, {ours} here"),
        ("sglang", "has {more} tokens by the server, {size} here"),
    ],
)
def test_another_chat_template_is_named(setting, tmp_path: Path, kind: str, words: str) -> None:
    with serving(kind, setting["answers"]) as server:
        server.rendered = lambda messages: [*rendered(messages)[:2], 9, *rendered(messages)[2:]]
        [found] = problems(setting, server, tmp_path)
    ids = rendered([{"role": "user", "content": f"hello {WORDS[0]}, how are you?"}])
    said = words.format(ours=ids[2], size=len(ids), more=len(ids) + 1)
    assert found.startswith("chat template: the server renders conversations in another way: ")
    assert "prompts.jsonl:1, turn 1" in found
    assert found.endswith(said)


def test_a_server_that_renders_nothing_and_names_no_window_is_compared_all_the_same(
    setting, tmp_path: Path
) -> None:
    with serving("llamacpp", setting["answers"]) as server:
        server.rendered = lambda _: []
        server.models = (server.models[0] | {"meta": None},)  # while it loads
        result = measured(setting, server, tmp_path)
    assert (result["problems"], result["texts"]["num_rendered_alike"]) == ([], 0)


def test_a_tolerance_lets_shares_differ_and_near_ties_are_no_other_tokens(
    setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(text: list[int], lengths: list[int]) -> None:
        other(text, lengths)
        lengths.append(0)

    with serving("vllm", wrong(change, setting["answers"])) as server:
        result = measured(setting, server, tmp_path / "a", tolerance=0.34)
        monkeypatch.setitem(check.NEAR_TIES, torch.float32, 1e9)
        tied = measured(setting, server, tmp_path / "b", tolerance=0.34)
    assert result["texts"]["num_other_tokens"] >= 1
    assert result["problems"] == []
    assert (tied["texts"]["num_other_tokens"], tied["texts"]["num_near_ties"] >= 1) == (0, True)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_in_flight_are_timed_beside_a_server_without_drafts(
    setting, tmp_path: Path, kind: str, request
) -> None:
    if kind != "vllm":
        request.getfixturevalue("no_picture")
    plain = without_drafts(setting["answers"])
    with serving(kind, setting["answers"]) as server, serving(kind, plain, 0) as base:
        server.delay_s = base.delay_s = 0.02
        result = measured(
            setting, server, tmp_path, baseline=base.root, concurrency=[4, 1, 4], num_repeats=2
        )
    assert 1 <= max(server.most_at_once, base.most_at_once) <= 4
    # llama.cpp's server ends connections that stay open.
    assert ("keep-alive" in server.connections) == (kind != "llamacpp")
    assert list(result["concurrency"]) == ["1", "4"]
    # Texts of three prompts, at least four for each request in flight.
    for num_copies, measured_ in zip((2, 6), result["concurrency"].values(), strict=True):
        assert measured_["baseline"] == "without"
        ours, theirs = measured_["methods"]["with drafts"], measured_["methods"]["without"]
        assert ours["num_tokens"] == theirs["num_tokens"] == [num_copies * 3 * NUM_TOKENS] * 2
        assert ours["num_drafts"] == [num_copies * result["served"]["num_drafts"]] * 2
        assert ours["per_draft"] == result["served"]["acceptance_length"]["drafts"]["pooled"]
        assert (theirs["per_draft"], theirs["speedup"], theirs["speedup_ci95"]) == (None, 1.0, None)
        low, high = ours["speedup_ci95"]
        assert 0 < low <= ours["speedup"] <= high
        for waits in ("first_token_ms", "between_tokens_ms", "request_ms"):
            assert 0 < ours[waits]["p50"] <= ours[waits]["p99"]
        for name in ("whole_texts", "drafting", "same_texts", "same_lengths"):
            assert ours["checks"][name]["passed"], name
        assert ours["window"]["num_other_texts"] == [0, 0]
        assert ours["checks"]["no_prefix_cache"]["passed"] is (None if kind == "vllm" else True)
    assert result["schedule_basis"] == "No schedule: 3 dialogues are too few, 8 are needed."
    if kind == "sglang":
        keys = [body["extra_key"] for body in server.bodies if body.get("stream")]
        assert len(keys) == len({*keys})
    assert (tmp_path / "serve.png").exists() == (kind == "vllm")


def test_the_next_push_asks_for_the_hub_id_of_a_target_in_a_folder(
    setting, tmp_path: Path, monkeypatch, capsys
) -> None:
    worth = Verdict(Outcome.worth, "It pays.")
    monkeypatch.setattr(serve, "judge_serving", lambda result, num_dialogues: worth)
    with serving("vllm", setting["answers"]) as server:
        measured(setting, server, tmp_path)
    script, push = pasted(capsys.readouterr().out)
    assert (script, push.head.path) == ("scripts/push.py", setting["head"])
    assert (push.base_model, push.dry_run) == ("owner/name", True)


@pytest.mark.usefixtures("no_picture")
def test_drawn_texts_are_timed_and_not_compared(setting, tmp_path: Path) -> None:
    with serving("vllm", setting["answers"]) as server:
        server.temperature = 0.7
        result = measured(
            setting, server, tmp_path, temperature=0.7, top_p=0.9, top_k=40, concurrency=[1],
            num_repeats=1, num_warmups=0,
        )  # fmt: skip
    assert (result["served"], result["replayed"], result["problems"]) == (None, None, [])
    for body in server.bodies:
        assert (body["top_p"], body["top_k"], "min_p" in body) == (0.9, 40, False)
    assert len({body["seed"] for body in server.bodies}) == 3
    assert result["concurrency"]["1"]["methods"]["with drafts"]["num_drafts"][0] > 0


@pytest.mark.usefixtures("no_picture")
def test_without_a_head_nothing_is_compared(setting, tmp_path: Path) -> None:
    with serving("vllm", setting["answers"]) as server:
        result = measured(setting, server, tmp_path, head=HeadRef(), concurrency=[1], num_repeats=1)
    assert (result["texts"], result["prompts"]) == (None, [])
    assert result["concurrency"]["1"]["methods"]["with drafts"]["num_tokens"] == [6 * NUM_TOKENS]


@pytest.mark.usefixtures("no_picture")
def test_a_second_start_goes_on_where_a_server_failed(setting, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"concurrency": [1], "num_repeats": 2, "num_warmups": 0}
    with serving("vllm", setting["answers"]) as server:
        # Three renderings, three texts with what follows each, six of a first pass, one more.
        server.fault_for = lambda body: (500, {}) if len(server.bodies) > 15 else None
        with pytest.raises(InputError, match="HTTP 500"):
            measured(setting, server, tmp_path, **settings)
        assert not (tmp_path / "serve.json").exists()
        server.fault_for, before = lambda _: None, len(server.bodies)
        result = measured(setting, server, tmp_path, **settings)
    # Three renderings and the pass that failed.
    assert len(server.bodies) - before == 3 + 6
    assert result["concurrency"]["1"]["methods"]["with drafts"]["num_tokens"] == [144, 144]
    assert result["texts"]["num_equal_counts"] == 3


NO_METRICS = {"metrics": None}
NOTHING_DRAFTED = {"metrics": LLAMACPP_METRICS.format(drafts=0, proposed=0, total=0, running=0)}
SMALL_WINDOW = {"models": ({"id": "toy", "owned_by": "vllm", "max_model_len": 64},)}
TIMED = {"head": HeadRef(), "concurrency": [1]}


@pytest.mark.parametrize(
    ("drafting", "server_has", "settings", "message"),
    [
        (("vllm", 0), {}, {}, r"endpoint=http://.*: drafts nothing: start it with a draft head"),
        (("sglang", 0), {}, {}, r"drafts nothing: start it with a draft head"),
        (("sglang", 2), {"server_info": {"speculative_eagle_topk": 4}}, {}, r"topk=4: only chains"),
        (("llamacpp", 0), NOTHING_DRAFTED, {}, r"drafts nothing: start it"),
        (("llamacpp", 3), NO_METRICS, {}, r"counts nothing: start it with --metrics \(.*HTTP 404"),
        (("vllm", 3), {"models": ({"id": "toy", "owned_by": "tabby"},)}, {},
         r"must be one of vllm, sglang, llamacpp; .*"),
        (("vllm", 3), {"models": ({"id": "toy", "owned_by": "vllm"},)}, {"model": "tuned"},
         r"model=tuned: not served; allowed: toy"),
        (("vllm", 3), {"models": ()}, {}, r"must be one of vllm"),
        (("vllm", 3), SMALL_WINDOW, {"depth": 2}, r"http.* drafts 3 tokens; leave depth unset"),
        (("vllm", 3), SMALL_WINDOW, {"max_new_tokens": 250}, r"max_new_tokens=250 are 275, above"),
        (("vllm", 3), {"answer": lambda _: {"choices": [{"text": "hello"}]}}, {},
         r"no choices\[0\]\.token_ids: vLLM is too old"),
        (("vllm", 3), {"answer": lambda _: [{"error": {"message": "out of memory"}}]}, TIMED,
         r"broke a text off: .*out of memory"),
        (("vllm", 3), {"answer": lambda _: [{"choices": []}]}, TIMED,
         r"streams no token at v1/completions: \{'choices': \[\]\}"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(
    setting, tmp_path: Path, drafting, server_has, settings, message
) -> None:
    kind, depth = drafting
    with serving(kind, setting["answers"], depth) as server:
        page = server.page
        for name, value in server_has.items():
            setattr(server, name, value)
        if "metrics" in server_has:
            server.page = lambda path: server_has["metrics"] if path == "/metrics" else page(path)  # type: ignore[method-assign]
        with pytest.raises(InputError, match=message):
            measured(setting, server, tmp_path / "out", **settings)
    if "answer" not in server_has:
        assert not (tmp_path / "out").exists()
        assert kind == "llamacpp" or server.bodies == []


def test_a_baseline_that_drafts_and_an_address_without_a_server_are_refused(
    setting, tmp_path: Path
) -> None:
    with serving("vllm", setting["answers"]) as server:
        words = r"baseline=http://.*: drafts 3 tokens; the baseline is the same server without"
        with pytest.raises(InputError, match=words):
            measured(setting, server, tmp_path, baseline=server.root)
    words = r"endpoint=.*ConnectError.*; start a server there with the line that scripts/export.py"
    with pytest.raises(InputError, match=words):
        measured(setting, server, tmp_path)
