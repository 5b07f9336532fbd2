"""Greedy texts of vLLM on a CPU, and its counts of drafts and accepted draft tokens.

Run by the Python of vLLM's own environment, on a job {"target": folder, "speculative": list of
vLLM's `speculative_config`, "num_tokens", "prompts": token ids}:

    python vllm_count.py job.json result.json

Writes {"text", "drafts", "proposed": draft tokens, "accepted": of each depth} per prompt, for each
setting. A text must end well before the target's `max_position_embeddings`, near which vLLM stops
drafting.
"""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported

import vllm_dflash  # noqa: F401  mends it
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def opened(job: dict, speculative: dict) -> LLM:
    """The engine, one request at a time."""
    return LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=1,
        # The counters are statistics.
        disable_log_stats=False,
        speculative_config=speculative,
    )


def counts(llm: LLM) -> list[int]:
    """Drafts, their tokens, and accepted tokens of each depth, since the start."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    proposed = [found[f"vllm:spec_decode_num_{name}"].value for name in ("drafts", "draft_tokens")]
    return proposed + found["vllm:spec_decode_num_accepted_tokens_per_pos"].values


def counted(llm: LLM, job: dict) -> list[dict]:
    """Counts that each prompt adds, one after the other."""
    greedy = SamplingParams(temperature=0, max_tokens=job["num_tokens"], ignore_eos=True)
    results = []
    for prompt in job["prompts"]:
        before = counts(llm)
        output = llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)[0].outputs[0]
        new = [now - old for now, old in zip(counts(llm), before, strict=True)]
        found = {"drafts": new[0], "proposed": new[1], "accepted": new[2:]}
        results.append({"text": list(output.token_ids)} | found)
    return results


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for speculative in job["speculative"]:
        llm = opened(job, speculative)
        results.append(counted(llm, job))
        del llm
        cleanup_dist_env_and_memory()
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
