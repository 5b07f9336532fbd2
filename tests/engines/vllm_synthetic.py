"""What vLLM's own kernel accepts under synthetic acceptance, which its CPU build has no kernel for.

Run by the Python of vLLM's own environment, on a job {"depth", "passes", "settings": list of
`synthetic_acceptance_*` of a `speculative_config`}:

    python vllm_synthetic.py job.json result.json

Writes the passes that accepted each depth, for each setting. Every draft is wrong.
"""

import json
import sys
from pathlib import Path

import vllm_interpreted  # noqa: F401

# isort: split
import torch
from vllm.config import SpeculativeConfig
from vllm.v1.sample import rejection_sampler as sampler
from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates


def accepted(depth: int, passes: int, settings: dict) -> list[int]:
    """[depth] passes that accepted so many draft tokens at least."""
    rates = SpeculativeConfig._resolve_synthetic_acceptance_rates(
        depth,
        settings.get("synthetic_acceptance_rates"),
        settings.get("synthetic_acceptance_length"),
    )
    conditional = torch.tensor(unconditional_to_conditional_rates(rates))
    output = torch.full((passes, depth + 1), -1, dtype=torch.int32)
    ends = torch.arange(1, passes + 1, dtype=torch.int32) * depth
    drafts = torch.full((passes * depth,), 7, dtype=torch.int32)
    target = torch.full((passes * depth,), 8, dtype=torch.int64)
    uniform = sampler.generate_uniform_probs(len(drafts), [depth] * passes, {}, drafts.device)
    sampler.rejection_greedy_sample_kernel[(passes,)](
        output, ends, drafts, target, target[:passes], None, depth, uniform, conditional,
        SYNTHETIC_MODE=True,
    )  # fmt: skip
    return (output[:, :depth] == 7).sum(0).tolist()


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(0)
    found = [accepted(job["depth"], job["passes"], each) for each in job["settings"]]
    Path(sys.argv[2]).write_text(json.dumps(found))
