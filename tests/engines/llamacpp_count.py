"""Greedy texts of llama.cpp on a CPU, and its counts of drafts and accepted draft tokens.

Run by the Python of its own environment, on a job {"servers": list of settings of
`scripts/bench/llamacpp_speed.py`, "num_tokens", "prompts": token ids}:

    python llamacpp_count.py job.json result.json

Writes {"text", "drafts", "proposed": draft tokens, "accepted": of each depth} per prompt, for each
server.
"""

import json
import re
import sys
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.llamacpp_speed import open_server

COUNTER = re.compile(
    r'^llamacpp:spec_decode_num_(\w+)_total(?:\{position="(\d+)"\})? (\d+)', re.MULTILINE
)
LOOPBACK = build_opener(ProxyHandler({}))


def counts(url: str, depth: int) -> list[int]:
    """Drafts, their tokens, and accepted tokens of each depth, since the start."""
    page = LOOPBACK.open(f"{url}/metrics").read().decode()
    found = {(name, place): int(count) for name, place, count in COUNTER.findall(page)}
    # A position is not there before the first draft.
    positions = [found.get(("accepted_tokens_per_pos", str(place)), 0) for place in range(depth)]
    return [found["drafts", ""], found["draft_tokens", ""], *positions]


def counted(url: str, job: dict, depth: int) -> list[dict]:
    """Counts that each prompt adds, one after the other."""
    how = {"temperature": 0, "n_predict": job["num_tokens"], "return_tokens": True}
    results = []
    for prompt in job["prompts"]:
        before = counts(url, depth)
        body = json.dumps({"prompt": prompt, "cache_prompt": False, **how}).encode()
        request = Request(f"{url}/completion", body, {"Content-Type": "application/json"})
        text = json.load(LOOPBACK.open(request))["tokens"]
        new = [now - old for now, old in zip(counts(url, depth), before, strict=True)]
        found = {"drafts": new[0], "proposed": new[1], "accepted": new[2:]}
        results.append({"text": text} | found)
    return results


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for settings in job["servers"]:
        server = open_server(**settings)
        depth = settings["draft"]["num_tokens"]
        results.append(counted(server.listening_address, job, depth))
        del server
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
