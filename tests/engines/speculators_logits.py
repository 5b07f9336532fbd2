"""Draft logits of speculators for an EAGLE-3 head, float32 on a CPU.

Run by the Python of its own environment, on a file with `ids` [T + 1] and `features` [T + 1, 3H]:

    python speculators_logits.py head target inputs.safetensors logits.safetensors

A head in another layout than its own goes through `speculators convert` first. Writes `step0` to
`step2`, [T, W] each: the training-time test, in which step j of row t reads token t + 1 + j and
the output of step j - 1. The last j rows of step j read no token.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, shift_batch

NUM_STEPS = 3


def converted(head: Path, target: str, folder: Path) -> Path:
    """`head` in speculators' layout, written to `folder` unless it has that already."""
    stated = json.loads((head / "config.json").read_text())
    if "speculators_model_type" in stated:
        return head
    # It does not read these in config.json.
    names = ("eagle_aux_hidden_state_layer_ids", "norm_before_residual")
    settings = stated | stated.get("eagle_config", {})
    chosen = {name: settings[name] for name in names if name in settings}
    command = [str(Path(sys.executable).with_name("speculators")), "convert", str(head)]
    command += ["--algorithm", "eagle3", "--verifier", target, "--output-path", str(folder)]
    command += ["--algorithm-kwargs", json.dumps(chosen), "--validate-device", "cpu"]
    subprocess.run(command, check=True)
    return folder


def opened(folder: Path) -> Eagle3DraftModel:
    """The head as a model of speculators."""
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
    model = opened(converted(Path(head), target, Path(outputs).with_suffix("")))
    steps = logits(model, **load_file(inputs))
    save_file({f"step{j}": step.contiguous() for j, step in enumerate(steps)}, outputs)


if __name__ == "__main__":
    main()
