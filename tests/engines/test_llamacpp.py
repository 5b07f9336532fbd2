"""llama.cpp on a CPU: greedy texts, drafts, draft tokens and accepted tokens, to the unit."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import pytest
import torch
from commands import ROOT
from environments import (
    LLAMACPP,
    accepted_by_depth,
    answered,
    counts_of_llamacpp,
    needs,
    opened,
    serve_checked,
)
from exports import ROPES
from feature_heads import fresh, objective_of, settings_of
from ggufs import save_target_gguf
from toys import save_target, texts, trained

from conf.errors import InputError
from conf.settings.export import ExportFormat
from data.servers.serving_engines import DraftCounts
from eval.decode.engine import decode_batch
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import Tree
from heads.draft_head import DraftHead
from heads.export.gguf import target_hint
from heads.export.writer import compute_reference_tensors, export_head
from heads.target_model.model import Target
from tests.engines.test_vllm import reduced

SERVER = str(ROOT / "scripts/bench/llamacpp_speed.py")
DEPTHS, NUM_TOKENS = (4, 7), 60
# Which the target often writes.
STOP = 140
METHODS = {"eagle3": "draft-eagle3", "dspark": "draft-dspark"}
CONFIDENT = {"confidence_head_with_markov": False}
REDUCED = {"own_output_head": True, "draft_vocab_size": 150}

pytestmark = [pytest.mark.engine, needs(LLAMACPP)]


def made(folder: Path, **changes: Any) -> Target:
    """A target of six layers whose texts end at `STOP`; `target.gguf` lies beside it."""
    target = opened(save_target(folder, num_hidden_layers=6, **changes))
    target.model.generation_config.eos_token_id = STOP
    save_target_gguf(target, folder / "target.gguf", STOP)
    return target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return made(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def eagle3(target: Target) -> DraftHead:
    return feature_head(target, "eagle3")


def learnt(target: Target, num_tokens: int) -> list[list[int]]:
    """The beginnings of six texts that heads have learnt, and of two that they have not."""
    return [text[:num_tokens] for text in texts(target, 8, 30)]


def exported(head: DraftHead, target: Target, folder: Path) -> Path:
    """The GGUF file of an export."""
    values = compute_reference_tensors(head, target, num_rows=5)
    export_head(head, ExportFormat.llamacpp, values, folder / "export", {})
    (file,) = (folder / "export").glob("*.gguf")
    return file


def server(target: Target, head: DraftHead, file: Path, depth: int) -> dict[str, Any]:
    """Settings of `scripts/bench/llamacpp_speed.py`."""
    method = METHODS.get(head.variant, "draft-dflash")
    draft = {"model": str(file), "method": method, "num_tokens": depth}
    return {"target": f"{target.name}/target.gguf", "draft": draft}


def ours(
    target: Target, head: DraftHead, prompts: list[list[int]], depth: int, stop_ids: list[int]
) -> list[dict[str, Any]]:
    """Counts of our decoder, by llama.cpp's rules."""
    drafter = head.make_drafter(Tree.make_chain(depth), GREEDY, [0] * len(prompts))
    counts = []
    for found in decode_batch(target, drafter, prompts, NUM_TOKENS):
        lengths = [len(path) for path in found.paths]
        counts.append(
            DraftCounts.from_passes_within_text(
                found.token_ids, lengths, depth, NUM_TOKENS, stop_ids
            )
        )
    return [asdict(each) for each in counts]


def compare(target: Target, head: DraftHead, folder: Path) -> None:
    """An export in llama.cpp, and the head itself in our decoder, as chains of 4 and of 7."""
    file = exported(head, target, folder)
    prompts = learnt(target, 4)
    servers = [server(target, head, file, depth) for depth in DEPTHS]
    theirs = counts_of_llamacpp(folder, prompts, NUM_TOKENS, servers)
    for depth, found in zip(DEPTHS, theirs, strict=True):
        assert found == ours(target, head, prompts, depth, [STOP])
        accepted = accepted_by_depth(found)
        assert min(accepted) > 10


def feature_head(
    target: Target,
    kind: str,
    documents: list[list[int]] | None = None,
    changes: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A head that has learnt texts, with changes of its architecture that no setting makes."""
    config = settings_of(kind, **settings)
    usual = fresh(target, config)
    head = type(usual)(replace(usual.config, **changes or {}), usual.vocab)
    start = (config.output_head,) if kind == "eagle3" else ()
    head.initialise(target, *start, seed=0)
    if head.embed_tokens is not None:
        rows = head.embed_tokens.weight.data
        rows.add_(0.5 * rows.std() * torch.randn(rows.shape, generator=torch.manual_seed(0)))
    objective = objective_of(head, target, config)
    learnt_texts = texts(target, 6, 40) if documents is None else documents
    return trained(objective, learnt_texts, 60 if kind == "eagle3" else 40)


def test_llamacpp_drafts_with_few_ids_what_we_do(target, eagle3, tmp_path) -> None:
    compare(target, reduced(eagle3, target, 64).attach(target), tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings", "changes"),
    [
        pytest.param("eagle3", {}, {}, id="EAGLE-3"),
        pytest.param("eagle3", {"norm_before_residual": True}, {}, id="residual after the norm"),
        pytest.param("eagle3", {"layers": [5, 0, 3]}, {}, id="other layers"),
        pytest.param("eagle3", {}, {"norm_before_fc": True}, id="one norm over all features"),
        pytest.param("eagle3", {}, {"own_embedding": True}, id="EAGLE-3, own embedding"),
        pytest.param("eagle3", {}, {"own_output_head": False}, id="the target's output head"),
        pytest.param("dflash", {}, {}, id="DFlash"),
        pytest.param("dflash", {"causal": True}, {}, id="causal"),
        pytest.param("dflash", {"causal": True, "window": 24}, {}, id="causal in a window"),
        pytest.param("dflash", {"window": 24}, {"full_layers": (1,)}, id="one layer in a window"),
        pytest.param("dflash", REDUCED, {}, id="150 ids"),
        pytest.param("dflash", {}, {"own_embedding": True}, id="own embedding"),
        pytest.param("dflash2", {}, {"selector_top_k": 7}, id="DFlash-2"),
        pytest.param("dspark", {}, {}, id="DSpark"),
        pytest.param("dspark", {}, {"sample_from_anchor": False}, id="DSpark that fills in"),
        pytest.param("dspark", {"confidence_weight": 0.0}, {}, id="DSpark without confidence"),
        pytest.param("dspark", CONFIDENT, {}, id="DSpark, confidence without the token before"),
        pytest.param("dspark", REDUCED, {}, id="DSpark, 150 ids"),
    ],
)
def test_llamacpp_drafts_what_we_do(target, tmp_path, kind, settings, changes) -> None:
    block = {} if kind == "eagle3" else {"block_size": 8}
    compare(target, feature_head(target, kind, None, changes, **block, **settings), tmp_path)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_llamacpp_turns_positions_as_we_do(tmp_path: Path, kind: str, rope: str) -> None:
    target = made(tmp_path / "target", rope_parameters=ROPES[rope])
    settings = {"block_size": 8} if kind == "dflash" else {}
    compare(target, feature_head(target, kind, **settings), tmp_path)


def test_llamacpp_counts_drafts_that_stop_tokens_end_as_we_do(
    target: Target, eagle3: DraftHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that stand inside of drafts of 2, at their end, and behind them."""
    file, prompts = exported(eagle3, target, tmp_path), learnt(target, 4)
    targets = {stop: tmp_path / f"{stop}.gguf" for stop in (59, 212, 236, 277)}
    for stop, ending in targets.items():
        save_target_gguf(target, ending, stop)
    usual, unlike = server(target, eagle3, file, 2), 0
    servers = [usual | {"target": str(ending)} for ending in targets.values()]
    theirs = counts_of_llamacpp(tmp_path, prompts, NUM_TOKENS, servers)
    for stop, found in zip(targets, theirs, strict=True):
        monkeypatch.setattr(target.model.generation_config, "eos_token_id", stop)
        assert found == ours(target, eagle3, prompts, 2, [stop])
        unlike += found != ours(target, eagle3, prompts, 2, [])
    assert unlike


@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        ("eagle3", 2048),
        ("dflash", 8),
        pytest.param(
            "eagle3",
            8,
            marks=pytest.mark.xfail(
                strict=True,
                reason="llama.cpp b11549 reads, at the border of two batches of a prompt, the "
                "feature of the second's last token",
            ),
        ),
    ],
)
def test_llamacpp_reads_prompts_in_batches(target, eagle3, tmp_path, kind, batch) -> None:
    """Prompts of 33 tokens; passes once llama.cpp keeps a batch's features until they are read."""
    head = deepcopy(eagle3) if kind == "eagle3" else feature_head(target, kind)
    attention = head.layer if kind == "eagle3" else head.layers[-1]
    # By itself the text before the last token hardly matters to a head that has learnt so little.
    attention.self_attn.o_proj.weight.data.mul_(4)
    file, prompts = exported(head, target, tmp_path), learnt(target, 33)
    servers = [server(target, head, file, 4) | {"batch": batch}]
    (theirs,) = counts_of_llamacpp(tmp_path, prompts, NUM_TOKENS, servers)
    assert theirs == ours(target, head, prompts, 4, [STOP])


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_llamacpp_serves_heads_of_the_types_that_the_table_says(tmp_path, family) -> None:
    """A server with a head of a type that gives no inputs of layers ends at its first request."""
    target = made(tmp_path / "target", family=family)
    head = feature_head(target, "eagle3")
    servers = [server(target, head, exported(head, target, tmp_path), 4)]
    prompts = learnt(target, 4)
    if target_hint(family) == "":
        (found,) = counts_of_llamacpp(tmp_path, prompts, NUM_TOKENS, servers)
        assert found == ours(target, head, prompts, 4, [STOP])
        return
    with serving(servers[0] | {"draft": None}) as url:
        alone = {"prompt": prompts[0], "n_predict": 8, "temperature": 0, "return_tokens": True}
        asked = Request(f"{url}/completion", json.dumps(alone).encode())
        text = json.load(build_opener(ProxyHandler({})).open(asked))["tokens"]
    assert text == texts(target, 8, 8)[0][4:]
    with pytest.raises(AssertionError, match=r"GGML_ASSERT\(t_layer_inp\[il\] != nullptr"):
        counts_of_llamacpp(tmp_path, prompts, NUM_TOKENS, servers)


@contextmanager
def serving(settings: dict[str, Any]) -> Iterator[str]:
    """The URL of llama.cpp's server."""
    command = [os.environ[LLAMACPP], SERVER, json.dumps(settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        yield run.stdout.readline().strip()


def test_llamacpp_served_with_a_head_passes_the_check(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eagle3 = feature_head(target, "eagle3", answered(target, 48))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    ending = tmp_path / "target.gguf"
    save_target_gguf(target, ending, 2)
    eagle3.save(tmp_path / "saved")
    file = exported(eagle3, target, tmp_path)
    settings = server(target, eagle3, file, 3) | {"target": str(ending)}

    with serving(settings) as url:
        result = serve_checked(url, "llamacpp", target.name, tmp_path / "saved", tmp_path / "a")
    measured = result["concurrency"]["1"]["methods"]["with drafts"]
    assert measured["per_draft"] == result["served"]["acceptance_length"]["drafts"]["pooled"]
    seen = [key for key, check in measured["checks"].items() if check["passed"] is None]
    assert seen == ["same_texts", "same_lengths"]  # these need a server without drafts
    assert measured["window"]["num_generated"] == measured["num_tokens"]
    assert measured["window"]["num_cached"] == [0, 0, 0]
    assert (measured["window"]["num_cut"], measured["window"]["most_running"]) == ([0, 0, 0], 1)
    with (
        serving(settings | {"metrics": False}) as url,
        pytest.raises(InputError, match="start it with --metrics"),
    ):
        serve_checked(url, "llamacpp", target.name, tmp_path / "saved", tmp_path / "b")
