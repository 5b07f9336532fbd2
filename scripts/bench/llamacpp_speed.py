"""Measure greedy texts of llama.cpp and its speed, without a draft head and with one.

Runs in an environment of its own, with the settings {"target": GGUF file, "head": folder with one,
"method": such as `draft-eagle3`, "depths": draft tokens per step, 0 first for none, "prompts": file
of rows with `turns`, "num_tokens": most tokens of an answer, "num_repeats", "num_threads"}:

    python scripts/bench/llamacpp_speed.py '{"target": "target.gguf", ...}' result.json

The result is {"questions", "rows": [{"depth", "num_tokens", "num_steps", "seconds"}], "answers":
texts of each depth, "partings": places where texts differ from those of depth 0}.

Without a file for the result the script serves, on a CPU and in float32 throughout: it prints its
URL and ends with its input. Its settings are then {"target", "draft": null or {"model": GGUF file
of a head, "method", "num_tokens": draft tokens per step}, "batch": prompt tokens per pass,
"metrics": whether the server counts, "num_threads"}.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import xllamacpp as llama

CONTEXT = 2048
LOOPBACK = build_opener(ProxyHandler({}))


def open_server(
    target: str,
    draft: dict[str, Any] | None,
    batch: int = CONTEXT,
    metrics: bool = True,
    num_threads: int = 1,
) -> Any:
    """Open llama.cpp's server, for one request at a time; `listening_address` is its URL."""
    settings = llama.CommonParams()
    settings.model.path = target
    settings.port = 0  # any free port
    settings.n_ctx, settings.n_parallel, settings.n_batch = CONTEXT, 1, batch
    settings.n_ubatch = min(settings.n_ubatch, batch)
    settings.endpoint_metrics, settings.verbosity = metrics, 1
    # Fitting to the device's memory would open the head without its target.
    settings.fit_params, settings.warmup = False, False
    drafting = settings.speculative.draft
    if draft is not None:
        drafting.mparams.path, drafting.n_max = draft["model"], draft["num_tokens"]
        drafting.p_min = 0.0
        kind = f"COMMON_SPECULATIVE_TYPE_{draft['method'].replace('-', '_').upper()}"
        settings.speculative.types = [getattr(llama.common_speculative_type, kind)]
    # Flash attention casts keys and values to float16, whatever the type of the cache.
    settings.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for part in (settings, drafting):
        part.cpuparams.n_threads = part.cpuparams_batch.n_threads = num_threads
        part.cache_type_k = part.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    return llama.Server(settings)


def request_json(url: str, path: str, **body: Any) -> Any:
    """Send a request to a server, and return its JSON answer."""
    request = Request(
        f"{url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return json.load(LOOPBACK.open(request))


def request_answer(url: str, prompt: list[int], num_tokens: int, **settings: Any) -> Any:
    """Request a greedy answer, with its token ids and times."""
    return request_json(
        url, "completion", prompt=prompt, n_predict=num_tokens, temperature=0, return_tokens=True,
        cache_prompt=False, **settings,
    )  # fmt: skip


def request_prompt_ids(url: str, questions: list[str]) -> list[list[int]]:
    """Request the token ids of questions in the target's own chat template."""
    prompts = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        text = request_json(url, "apply-template", messages=messages)["prompt"]
        settings = {"add_special": True, "parse_special": True}
        prompts.append(request_json(url, "tokenize", content=text, **settings)["tokens"])
    return prompts


def summarise_passes(depth: int, passes: list[list[Any]]) -> dict[str, Any]:
    """Sum tokens, steps and seconds over the prompts; each answer counts by its median time.

    The first token of an answer comes with its prompt; neither of them is timed.
    """
    times = [[each["timings"] for each in answers] for answers in zip(*passes, strict=True)]
    num_tokens = sum(first["predicted_n"] - 1 for first, *_ in times)
    accepted = sum(first.get("draft_n_accepted", 0) for first, *_ in times)
    medians = [statistics.median(each["predicted_ms"] for each in answer) for answer in times]
    return {
        "depth": depth,
        "num_tokens": num_tokens,
        "num_steps": num_tokens - accepted,
        "seconds": sum(medians) / 1e3,
    }


def find_first_difference(
    url: str, prompt: list[int], usual: list[int], other: list[int]
) -> dict[str, Any]:
    """Find the place where a text leaves the usual one, and the target's two best scores there."""
    pairs = zip(usual, other, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(usual), len(other)))
    answer = request_answer(url, prompt + usual[:place], 1, n_probs=2)
    first, second = answer["completion_probabilities"][0]["top_logprobs"]
    return {
        "token": place + 1,
        "top_two": [first["token"], second["token"]],
        "margin": first["logprob"] - second["logprob"],
    }


def measure_speed(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure llama.cpp at each depth of drafts, and build the contents of the result file.

    All servers are open at the same time and take turns, so that other load affects all equally.
    """
    depths, num_tokens = settings["depths"], settings["num_tokens"]
    (head,) = Path(settings["head"]).glob("*.gguf")
    draft = {"model": str(head), "method": settings["method"]}
    servers = [
        open_server(
            settings["target"],
            draft | {"num_tokens": depth} if depth else None,
            num_threads=settings["num_threads"],
        )
        for depth in depths
    ]
    urls = [server.listening_address for server in servers]
    lines = Path(settings["prompts"]).read_text().splitlines()
    questions = [json.loads(line)["turns"][0] for line in lines]
    prompts = request_prompt_ids(urls[0], questions)
    passes: list[list[list[Any]]] = [[] for _ in urls]
    for url in urls:  # to warm up
        request_answer(url, prompts[0], num_tokens)
    for number in range(1, settings["num_repeats"] + 1):
        rows = [[request_answer(url, prompt, num_tokens) for url in urls] for prompt in prompts]
        for one_pass, answers in zip(passes, zip(*rows, strict=True), strict=True):
            one_pass.append(list(answers))
        print(f"pass {number} of {settings['num_repeats']} is done", flush=True)
    usual, *drafted = [one_pass[0] for one_pass in passes]
    partings = [
        {"question": question, "depth": depth}
        | find_first_difference(urls[0], prompt, plain["tokens"], answered["tokens"])
        for depth, answers in zip(depths[1:], drafted, strict=True)
        for question, prompt, plain, answered in zip(
            questions, prompts, usual, answers, strict=True
        )
        if plain["tokens"] != answered["tokens"]
    ]
    return {
        "questions": questions,
        "rows": [summarise_passes(*each) for each in zip(depths, passes, strict=True)],
        "answers": [[each["content"] for each in one_pass[0]] for one_pass in passes],
        "partings": partings,
    }


def main(settings: dict[str, Any], result: Path | None = None) -> None:
    """Measure and write the result; without a file for it, serve until the input ends."""
    if result is None:
        server = open_server(**settings)
        print(server.listening_address, flush=True)
        sys.stdin.read()
        return
    # Written completely or not at all; this environment lacks the packages of conf.files.
    partial = result.with_name(f"{result.name}.tmp")
    partial.write_text(json.dumps(measure_speed(settings), indent=1))
    partial.replace(result)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *map(Path, sys.argv[2:]))
