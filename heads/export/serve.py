"""How an export is served: the command, and the README that carries it.

Sources of the commands: vLLM 0.32 `config/speculative.py`; SGLang `server_args.py`; TensorRT-LLM
1.3 `llm_args.py`, and `examples/medusa/README.md` up to 1.1; TGI 3.3 launcher; SafeAILab/EAGLE
and FasterDecoding/Medusa.
"""

import json

from conf.schema_export import ExportFormat
from heads.eagle.head import EagleHead
from heads.export.config import NUM_DRAFT_TOKENS, dtype_of, target_name
from heads.export.layouts import ENGINES, KINDS
from heads.kinds import Head, kind_of
from heads.medusa.head import MedusaHead

LOADERS = {
    ExportFormat.vllm: "vLLM 0.32",
    ExportFormat.sglang: "SGLang of 2026 (EAGLE-3.1 needs one that knows `fc_norm`)",
    ExportFormat.trtllm: "TensorRT-LLM 1.3 (Medusa: TensorRT engines, up to 1.1)",
    ExportFormat.tgi: "TGI 3.3",
    ExportFormat.speculators: "speculators 0.9 and vLLM 0.32",
    ExportFormat.original: "SafeAILab/EAGLE and FasterDecoding/Medusa of 2025",
}
CONVERT = (
    "import torch; from safetensors.torch import load_file; "
    "torch.save(load_file('{folder}/medusa_lm_head.safetensors'), '{folder}/medusa_lm_head.pt')"
)


def serve_command(head: Head, engine: ExportFormat, folder: str) -> str:
    """What starts the engine with the head, as lines for a shell (authors' EAGLE: for Python).

    Args:
        head: the trained head.
        engine: the format.
        folder: of the export.
    """
    target = target_name(head)
    if isinstance(head, MedusaHead):
        return _medusa(head.num_heads, engine, target, folder)
    return _eagle(head, engine, target, folder)


def _medusa(num_heads: int, engine: ExportFormat, target: str, folder: str) -> str:
    if engine is ExportFormat.vllm:
        return _vllm("medusa", num_heads, target, folder)
    if engine is ExportFormat.tgi:
        return f"text-generation-launcher --model-id {folder} --speculate {num_heads}"
    if engine is ExportFormat.trtllm:
        return (
            f"python examples/medusa/convert_checkpoint.py --model_dir {target} "
            f"--medusa_model_dir {folder} --num_medusa_heads {num_heads} "
            "--dtype bfloat16 --output_dir checkpoint\n"
            "trtllm-build --checkpoint_dir checkpoint --output_dir engine --gemm_plugin bfloat16 "
            "--speculative_decoding_mode medusa\n"
            f"python examples/run.py --engine_dir engine --tokenizer_dir {target} "
            f"--medusa_choices '{json.dumps([[0] * k for k in range(1, num_heads + 1)])}' "
            "--temperature 1.0 --max_output_len 128 --input_text 'Hello'"
        )
    # Their loader opens pickles alone.
    convert = CONVERT.format(folder=folder)
    return f'python -c "{convert}"\npython -m medusa.inference.cli --model {folder}'


def _eagle(head: EagleHead, engine: ExportFormat, target: str, folder: str) -> str:
    eagle3 = kind_of(head) == "eagle3"
    tokens = NUM_DRAFT_TOKENS
    if engine is ExportFormat.vllm:
        return _vllm("eagle3" if eagle3 else "eagle", tokens, target, folder)
    if engine is ExportFormat.speculators:
        return f"vllm serve {folder}"
    if engine is ExportFormat.sglang:
        return (
            f"python -m sglang.launch_server --model-path {target} "
            f"--speculative-algorithm {'EAGLE3' if eagle3 else 'EAGLE'} "
            f"--speculative-draft-model-path {folder} --speculative-num-steps {tokens} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens + 1}"
        )
    if engine is ExportFormat.trtllm:
        layers = [index - 1 for index in head.config.layers]
        return (
            "cat > speculative.yaml <<END\nspeculative_config:\n  decoding_type: Eagle3\n"
            f"  max_draft_len: {tokens}\n  speculative_model: {folder}\n"
            f"  eagle3_layers_to_capture: {layers}\nEND\n"
            f"trtllm-serve {target} --config speculative.yaml"
        )
    return (
        "import torch\nfrom eagle.model.ea_model import EaModel\n"
        f'model = EaModel.from_pretrained(base_model_path="{target}", ea_model_path="{folder}", '
        f"use_eagle3={eagle3}, torch_dtype=torch.{dtype_of(head)})"
    )


def _vllm(method: str, num_tokens: int, target: str, folder: str) -> str:
    speculation = {"method": method, "model": folder, "num_speculative_tokens": num_tokens}
    return f"vllm serve {target} --speculative-config '{json.dumps(speculation)}'"


def readme(head: Head, engine: ExportFormat) -> str:
    """The README of an export; `DIR` stands for its folder."""
    layers = "" if isinstance(head, MedusaHead) else _layers(head)
    return (
        f"# {KINDS[kind_of(head)]} for {target_name(head)}\n\n"
        f"For speculative decoding with {ENGINES[engine]}, {dtype_of(head)} weights{layers}. "
        f"Written by Headsmith after the loaders of {LOADERS[engine]}.\n\n"
        "## Serve\n\n"
        f"```\n{serve_command(head, engine, 'DIR')}\n```\n\n{_hint(head, engine)}"
        "## Verify\n\n"
        "`parity/parity.safetensors` holds features of the target and the logits of the trained "
        "head on them. On any machine with Headsmith\n\n"
        "```\npython scripts/verify_export.py DIR\n```\n\n"
        "computes the head anew from these files alone, as the engine reads them, and compares.\n"
    )


def _layers(head: EagleHead) -> str:
    if not head.config.layers:
        return ""
    return f", reads `output_hidden_states` {list(head.config.layers)} of the target"


def _hint(head: Head, engine: ExportFormat) -> str:
    """What else a user of this engine should know."""
    medusa = isinstance(head, MedusaHead)
    if engine is ExportFormat.original and medusa:
        return (
            "The authors' loader builds 5 heads, whatever the file holds; those that it lacks "
            "draft at random.\n\n"
        )
    if engine is ExportFormat.original and kind_of(head) == "eagle1":
        return (
            "The authors' loader looks up the target's embedding in its "
            "`model.safetensors.index.json`, which a target in one file lacks.\n\n"
        )
    if engine is ExportFormat.trtllm and not medusa and dtype_of(head) == "float32":
        return (
            "TensorRT-LLM runs the head in the dtype of `config.json`, and its attention knows "
            "no float32: export with dtype=bfloat16.\n\n"
        )
    return ""
