"""Medusa heads per serving engine.

Read from the loaders: vLLM 0.32 `models/medusa.py`; TensorRT-LLM up to 1.1
`models/medusa/weight.py`; TGI 3.3 `layers/{medusa,speculative}.py`; FasterDecoding/Medusa
`model/medusa_model.py`.
"""

import json
from dataclasses import dataclass

from torch import Tensor

from conf.settings.export import ExportFormat
from heads.export.engines import format_dtype, format_vllm_command
from heads.head import HeadFiles
from heads.medusa.network import MEDUSA_WEIGHTS, VLLM_WEIGHTS, MedusaNetwork


@dataclass(frozen=True)
class MedusaLayout:
    """Layout in which a loader reads Medusa heads.

    Attributes:
        weights: name of the weights file.
        own_names: vLLM's names (`blocks.{k}.layers.{j}`) instead of the authors' (`{k}.{j}`).
        architecture: value of `architectures`; None omits the key.
        max_layers: largest number of residual blocks per head.
    """

    weights: str = MEDUSA_WEIGHTS
    own_names: bool = False
    architecture: str | None = None
    max_layers: int | None = None


LAYOUTS = {
    # vLLM's own names, as older versions do not know the authors'.
    ExportFormat.vllm: MedusaLayout(VLLM_WEIGHTS, own_names=True, architecture="MedusaModel"),
    ExportFormat.trtllm: MedusaLayout(),
    # With `architectures` other than an MLP speculator, TGI loads no heads at all.
    ExportFormat.tgi: MedusaLayout(),
    # The authors' loader makes all blocks of a head one module.
    ExportFormat.original: MedusaLayout(max_layers=1),
}
AUTHORS_HINT = (
    "The authors' loader always builds 5 heads; heads missing in the file draft at random."
)
CONVERT = (
    "import torch; from safetensors.torch import load_file; "
    "torch.save(load_file('{folder}/medusa_lm_head.safetensors'), '{folder}/medusa_lm_head.pt')"
)


def find_export_problem(head: MedusaNetwork, engine: ExportFormat) -> str | None:
    """Reason why an engine cannot serve heads, as the end of a sentence; None if it can."""
    layout = LAYOUTS.get(engine)
    if layout is None:
        return "loads no Medusa heads"
    if not head.vocab.is_full:
        # vLLM 0.32 knows `token_map`, but makes each head as large as the target's vocabulary and
        # then refuses fewer rows.
        return "loads no Medusa heads with a reduced draft vocabulary; export the unpruned head"
    blocks = head.config.num_layers
    if layout.max_layers is not None and blocks > layout.max_layers:
        return f"merges the {blocks} residual blocks of a head into one (head.num_layers)"
    return None


def build_engine_files(head: MedusaNetwork, engine: ExportFormat) -> HeadFiles:
    """Files with the keys of the authors, of TGI and of vLLM's `MedusaConfig`."""
    layout, dtype, own = LAYOUTS[engine], format_dtype(head), head.build_files()
    settings = own.config | {"dtype": dtype, "torch_dtype": dtype}
    del settings["architectures"]
    if layout.architecture is not None:
        settings["architectures"] = [layout.architecture]
    tensors = _rename_tensors(own.tensors) if layout.own_names else own.tensors
    return HeadFiles(settings, layout.weights, tensors)


def _rename_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {}
    for name, tensor in tensors.items():
        k, layer, *rest = name.split(".")
        block = f"blocks.{k}.layers.{layer}.{rest[-1]}"
        named[block if rest[0] == "linear" else f"lm_heads.{k}.weight"] = tensor
    return named


def serve_command(head: MedusaNetwork, engine: ExportFormat, folder: str) -> str:
    """Command that starts an engine with heads, as lines for a shell; one token per head."""
    num_heads, target = head.num_heads, head.target_name
    if engine is ExportFormat.vllm:
        return format_vllm_command("medusa", num_heads, target, folder)
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
    # The authors' loader only opens pickles.
    convert = CONVERT.format(folder=folder)
    return f'python -c "{convert}"\npython -m medusa.inference.cli --model {folder}'
