"""llama.cpp's server inside this process, on a CPU, in float32 throughout.

Runs in an environment of its own, with the settings {"target": GGUF file, "draft": null or
{"model": GGUF file of a head, "method": such as `draft-eagle3`, "num_tokens": per step}, "batch":
prompt tokens per pass, "metrics": whether it counts, "num_threads"}. Prints its URL and serves
until its input ends:

    python scripts/llamacpp/server.py '{"target": "target.gguf", ...}'
"""

import json
import sys
from typing import Any

import xllamacpp as llama

CONTEXT = 2048


def open_server(
    target: str,
    draft: dict[str, Any] | None,
    batch: int = CONTEXT,
    metrics: bool = True,
    num_threads: int = 1,
) -> Any:
    """Open the server, for one request at a time; its `listening_address` is the URL."""
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


if __name__ == "__main__":
    server = open_server(**json.loads(sys.argv[1]))
    print(server.listening_address, flush=True)
    sys.stdin.read()
