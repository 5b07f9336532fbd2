"""What vLLM's own checks say of speculative configs, without starting an engine.

Run by the Python of vLLM's own environment, on a job {"target": folder, "speculative": list of
vLLM's `speculative_config`, "most": requests in flight at most}:

    python vllm_config.py job.json result.json

Writes for each config its "method", "num_speculative_tokens", "parallel_drafting" as vLLM reads
them and "lookup", the draft tokens of 1 to `most` requests in flight (null without a schedule), or
"refused", the message.
"""

import json
import sys
from pathlib import Path

from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

READ = ("method", "num_speculative_tokens", "parallel_drafting")


def checked(target: ModelConfig, settings: dict, most: int) -> dict:
    """What becomes of a config."""
    engine = {"target_model_config": target, "target_parallel_config": ParallelConfig()}
    try:
        config = SpeculativeConfig(**settings, **engine)
        schedule, lookup = config.num_speculative_tokens_per_batch_size, None
        if schedule is not None:
            lookup = build_dynamic_sd_schedule_lookup(
                schedule, most, config.num_speculative_tokens
            )[1:]
    except ValueError as error:
        return {"refused": str(error)}
    return {key: getattr(config, key) for key in READ} | {"lookup": lookup}


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    target = ModelConfig(model=job["target"], dtype="float32")
    found = [checked(target, settings, job["most"]) for settings in job["speculative"]]
    Path(sys.argv[2]).write_text(json.dumps(found))
