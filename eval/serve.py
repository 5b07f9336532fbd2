r"""A served head measured where it is served: drafts, speed and waits of a running server.

    python eval/serve.py endpoint=http://localhost:8000 baseline=http://localhost:8001 \
        head.path=outputs/eagle/head target.path=Qwen/Qwen3-8B data.path=prompts.jsonl

Works with vLLM, SGLang and llama.cpp. First every prompt goes to the server greedily and alone, and
the head is replayed along the server's text: the counts must be equal, and the target must choose
the same tokens. The command names the cause of a difference and exits with 1. Then all prompts are
timed with each number of requests in flight, and on `baseline`, the server without drafts. The
result says which of these windows are valid, and from which load on the head should be off.
"""

import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.measure import ServeRun
from eval.preflight_checks import check_measurement

RESULT = "serve.json"
CHECK = partial(check_measurement, result=RESULT)
COMMAND = Command(__doc__, ServeRun, "serve", check=CHECK)
if __name__ == "__main__":
    COMMAND.parse_command_line()

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from rich.console import Console
from tqdm import tqdm

from conf.command.jsonl_store import JsonlStore
from conf.command.run_record import collect_changed_settings, is_embedded_path
from conf.errors import InputError
from data.servers.http_client import Endpoint
from data.servers.serving_engines import ServingEngine
from eval.measure.acceptance_stats import format_interval, print_acceptance_lengths
from eval.measure.measurement import (
    Measurement,
    open_jsonl_store,
    open_measurement,
    print_notes,
    write_result,
)
from eval.measure.results import format_conditions
from eval.measure.verdict import judge_serving, print_verdict
from eval.report.plots import plot_load_curve
from eval.serving.load_curve import build_schedule, measure_curve, print_curve
from eval.serving.server_check import (
    CheckedText,
    compare_chat_template,
    diagnose_differences,
    replay_server_text,
    summarise_checks,
    summarise_counts,
)
from eval.serving.server_load import WITH, WITHOUT


def main(config: ServeRun) -> None:
    """Ask the servers, replay the head, print, and write `serve.json` and its picture."""
    CHECK(config)
    with ExitStack() as stack:
        server = stack.enter_context(make_serving_engine(config, config.endpoint, "endpoint"))
        servers = {WITH: server}
        config.depth = config.depth or server.depth
        if config.depth != server.depth:
            raise InputError(
                f"depth={config.depth}: {config.endpoint} drafts {server.depth} tokens; leave "
                "depth unset, or start the server with as many speculative tokens"
            )
        if config.baseline is not None:
            servers[WITHOUT] = stack.enter_context(
                make_serving_engine(config, config.baseline, "baseline", drafts=False)
            )

        def write_answers(
            prompts: Sequence[list[int]], max_new_tokens: int
        ) -> Iterator[tuple[int, list[int]]]:
            """Let the server itself answer the earlier turns of a dialogue."""
            for number, prompt in enumerate(prompts):
                yield number, server.request_answer(prompt, max_new_tokens).text

        measurement = stack.enter_context(
            open_measurement(config, RESULT, may_use_engines=True, writer=write_answers)
        )
        check_context_window(config, measurement, server)
        identities = {
            name: {"engine": each.name, "version": each.version, "model": each.model}
            for name, each in servers.items()
        }
        journal = stack.enter_context(
            open_jsonl_store(config, RESULT, measurement, servers=identities)
        )
        result = {
            "servers": identities,
            "draft_tokens": server.depth,
            "tolerance": config.tolerance,
            **measure_server_acceptance(measurement, config, server, journal),
            "num_repeats": config.num_repeats,
            "concurrency": measure_curve(servers, measurement.prompts, config, journal),
        }
    dialogues = len({prompt.dialogue for prompt in measurement.prompts})
    result |= build_schedule(result["concurrency"], server.depth, dialogues)
    console = Console()
    print_serve_result(result, console)
    path, written = write_result(config, RESULT, result, measurement)
    files = [path]
    if result["concurrency"]:
        files.append(path.with_suffix(".png"))
        plot_load_curve(written, files[-1])
    console.print(format_conditions(written), highlight=False, markup=False)
    console.print("wrote " + ", ".join(map(str, files)))
    if result["problems"]:
        print_notes(f"differs: {'; '.join(result['problems'])}")
        sys.exit(1)
    if (verdict := judge_serving(result, dialogues)) is not None:
        head = collect_changed_settings(config, "head")
        publish = {**head, "repo_id": "me/head", "dry_run": True} if head else None
        target = measurement.embeddings_and_output_head.name
        if publish and Path(target).exists() and not is_embedded_path(target):
            publish["base_model"] = "owner/name"
        print_verdict("serve", verdict, config, publish)


def make_serving_engine(
    config: ServeRun, url: str, setting: str, drafts: bool = True
) -> ServingEngine:
    """Return a connection to a server, not yet opened."""
    key = os.environ.get(config.api_key_env)
    endpoint = Endpoint(url, config.model, api_key=key, timeout_s=3600.0, setting=setting)
    return ServingEngine(endpoint, max(config.concurrency, default=1), drafts)


def check_context_window(config: ServeRun, measurement: Measurement, server: ServingEngine) -> None:
    """Refuse texts near the end of the server's window, where it drafts less.

    Raises:
        InputError: a text may reach the end of the window; the message names the lengths.
    """
    longest = max(len(prompt.token_ids) for prompt in measurement.prompts)
    needed = longest + config.max_new_tokens + 2 * server.depth + 1
    if server.max_model_len is not None and needed > server.max_model_len:
        raise InputError(
            f"max_new_tokens={config.max_new_tokens}: with the longest prompt of {longest} tokens "
            f"and drafts of {server.depth} that is {needed}, and {config.endpoint} takes "
            f"{server.max_model_len}; lower it, or start the server with --max-model-len {needed} "
            f"(llama.cpp: -c {needed})"
        )


def measure_server_acceptance(
    measurement: Measurement, config: ServeRun, server: ServingEngine, journal: JsonlStore
) -> dict[str, Any]:
    """Compare texts and counts of the server with the target and the replayed head.

    Compares nothing above temperature 0, as drawn texts cannot be replayed, or without a head.
    """
    if not measurement.heads or config.temperature:
        return {"served": None, "replayed": None, "texts": None, "problems": [], "prompts": []}
    template, num_rendered = compare_chat_template(server, measurement.prompts)
    texts = list(iter_checked_texts(measurement, config, server, journal))
    problems = diagnose_differences(server, measurement, texts, config)

    def counted(side: str) -> dict[str, object]:
        counts = [getattr(text, side) for text in texts]
        return summarise_counts(measurement.prompts, counts, server, config.seed)

    rows = zip(measurement.prompts, texts, strict=True)
    return {
        "served": counted("served"),
        "replayed": counted("replayed"),
        "texts": {
            **summarise_checks(texts),
            "num_rendered_alike": num_rendered - bool(template),
        },
        "problems": [*([template] if template else []), *problems],
        "prompts": [
            {
                **{key: getattr(prompt, key) for key in ("dialogue", "turn", "category")},
                "prompt_tokens": len(prompt.token_ids),
                **{side: asdict(getattr(text, side)) for side in ("served", "replayed")},
            }
            for prompt, text in rows
        ],
    }


def iter_checked_texts(
    measurement: Measurement, config: ServeRun, server: ServingEngine, journal: JsonlStore
) -> Iterator[CheckedText]:
    """Ask the server for all texts, then check each."""
    limit, depth = config.max_new_tokens, server.depth
    for number, prompt in enumerate(tqdm(measurement.prompts, desc=server.name, unit="prompt")):
        if number not in journal.done_ids:
            answer = server.request_answer(prompt.token_ids, limit)
            # Engines also count draft tokens that the last pass accepts beyond the text.
            token_ids = [*prompt.token_ids, *answer.text]
            beyond = server.request_answer(token_ids, depth + 1, ignore_eos=True).text
            journal.append([{"id": number, "served": asdict(answer), "beyond": beyond}])
    rows = journal.load_rows()[: len(measurement.prompts)]
    for row in tqdm(rows, desc="replay along the server's text", unit="prompt"):
        yield replay_server_text(measurement, row, limit, server.within)


def print_serve_result(result: dict[str, Any], console: Console) -> None:
    """Print acceptance by the server and by replay, then speed and waits."""
    served, replayed, texts = result["served"], result["replayed"], result["texts"]
    engine = result["servers"][WITH]["engine"]
    if texts is not None:
        print_acceptance_lengths(served["acceptance_length"], console, engine)
        console.print(
            f"1 + accepted / drafts: 95% interval {format_interval(served['per_draft_ci95'], 3)}, "
            f"{texts['num_texts']} prompts"
        )
        pooled = {count: means["pooled"] for count, means in replayed["acceptance_length"].items()}
        console.print(
            "replayed along the same texts, pooled: "
            + ", ".join(f"{count} {value or 0:.3f}" for count, value in pooled.items())
        )
        console.print(
            f"{texts['num_equal_counts']} of {texts['num_texts']} texts have the counts of the "
            f"replay; of {texts['num_tokens']} tokens the target would have chosen "
            f"{texts['num_other_tokens']} otherwise, {texts['num_near_ties']} more are near-ties"
        )
    if result["concurrency"]:
        print_curve(result, console)


if __name__ == "__main__":
    COMMAND.run(main)
