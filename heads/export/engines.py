"""Engines that heads are exported for: names and start commands.

Sources of the commands: vLLM 0.32 `config/speculative.py`; SGLang `server_args.py`; TensorRT-LLM
1.3 `llm_args.py`, and `examples/medusa/README.md` up to 1.1; TGI 3.3 launcher; SafeAILab/EAGLE
and FasterDecoding/Medusa.
"""

import json
from typing import Any

from torch import nn

from conf.settings.export import ExportFormat

ENGINE_NAMES = {
    ExportFormat.vllm: "vLLM",
    ExportFormat.sglang: "SGLang",
    ExportFormat.trtllm: "TensorRT-LLM",
    ExportFormat.tgi: "TGI",
    ExportFormat.speculators: "speculators",
    ExportFormat.original: "the authors' code",
    ExportFormat.llamacpp: "llama.cpp",
}
LOADER_VERSIONS = {
    ExportFormat.vllm: "vLLM 0.32",
    ExportFormat.sglang: "SGLang of 2026 (for EAGLE-3.1, a version with `fc_norm`)",
    ExportFormat.trtllm: "TensorRT-LLM 1.3 (Medusa: TensorRT engines, up to 1.1)",
    ExportFormat.tgi: "TGI 3.3",
    ExportFormat.speculators: "speculators 0.9 and vLLM 0.32",
    ExportFormat.original: "SafeAILab/EAGLE and FasterDecoding/Medusa of 2025",
    ExportFormat.llamacpp: "llama.cpp b11434",
}
"""Engine versions whose loaders were read."""


SERVED_HEADS = {
    ExportFormat.llamacpp: (
        "it serves heads of train/eagle.py with head=eagle3, and of train/dflash.py, dflash2.py "
        "and dspark.py"
    )
}
"""Heads that an engine serves, if few, for the message to owners of others."""


def format_vllm_command(
    method: str, num_tokens: int, target: str, folder: str, **more: bool
) -> str:
    """Command that starts vLLM with a head in a folder; `more` are further speculation settings."""
    speculation = {"method": method, "model": folder, "num_speculative_tokens": num_tokens, **more}
    return f"vllm serve {target} --speculative-config '{json.dumps(speculation)}'"


def format_template_note(provenance: dict[str, Any]) -> str:
    """Advice to serve with the template settings of a head's training; empty without such settings.

    Args:
        provenance: content of `headsmith.json`.
    """
    data = (provenance.get("config") or {}).get("data") or {}
    kwargs = data.get("chat_template_kwargs")
    if not kwargs:
        return ""
    written = json.dumps(kwargs)
    return (
        f"It was trained on chats rendered with `chat_template_kwargs` `{written}`. Serve with the "
        f"same: in each request, or vLLM with `--default-chat-template-kwargs '{written}'`."
    )


def format_dtype(head: nn.Module) -> str:
    """`float32`, `float16` or `bfloat16`."""
    return str(next(head.parameters()).dtype).removeprefix("torch.")
