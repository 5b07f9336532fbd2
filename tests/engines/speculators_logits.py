"""Draft logits of speculators for an EAGLE-3 head in the original layout, float32 on a CPU.

Run by the Python of its own environment, on a file with `ids` [T + 1] and `features` [T + 1, 3H]:

    python speculators_logits.py head target inputs.safetensors logits.safetensors

Writes `step0` to `step2`, [T, W] each: the training-time test, in which step j of row t reads
token t + 1 + j and the output of step j - 1. The last j rows of step j read no token.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, shift_batch

NUM_STEPS = 3
# The converter takes these from its caller, not from config.json.
SETTINGS = (
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual",
    "fc_norm",
    "norm_output",
)


def converted(head: str, target: str, folder: Path) -> Eagle3DraftModel:
    """The head as a model of speculators, by its own converter, written to `folder`."""
    stated = json.loads((Path(head) / "config.json").read_text())
    settings = {name: stated[name] for name in SETTINGS if name in stated}
    Eagle3Converter().convert(head, folder, target, validate=False, **settings)
    weights = folder / "model.safetensors"
    original = load_file(Path(head) / "model.safetensors")
    # Version 0.9.0 says `fc_norm: true` and leaves the norms out.
    norms = {name: tensor for name, tensor in original.items() if name.startswith("fc_norm.")}
    save_file(load_file(weights) | norms, weights, metadata={"format": "pt"})
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config, dtype=torch.float32)
    # It takes the target's embedding only where a NaN is found in memory that nothing has filled.
    model._load_verifier_weights(overwrite_embed_tokens=True)
    return model.eval()


@torch.no_grad()
def logits(model: Eagle3DraftModel, ids: torch.Tensor, features: torch.Tensor) -> list:
    """[T, W] per step."""
    length = len(ids)
    batch = shift_batch(
        {
            "input_ids": ids,
            "hidden_states": features,
            "verifier_last_hidden_states": torch.zeros(length, features.shape[1] // 3),
            "loss_mask": torch.ones(length),
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
    )
    found = []
    # The model returns drafted ids only.
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: found.append(output[0]))
    model(
        hidden_states=batch["hidden_states"][None],
        input_ids=batch["input_ids"][None],
        position_ids=batch["position_ids"][None],
        document_ids=torch.zeros(1, length - 1, dtype=torch.int64),
        ttt_steps=NUM_STEPS,
    )
    return found


def main() -> None:
    head, target, inputs, outputs = sys.argv[1:]
    model = converted(head, target, Path(outputs).with_suffix(""))
    steps = logits(model, **load_file(inputs))
    save_file({f"step{j}": step.contiguous() for j, step in enumerate(steps)}, outputs)


if __name__ == "__main__":
    main()
