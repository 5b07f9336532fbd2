"""An EAGLE-3 head of nvidia-modelopt: its own export, and its own draft logits, on a CPU.

Run by the Python of its own environment, on a job {"target": folder, "text": token ids,
"architecture": the head's `eagle_architecture_config`, "ids": target ids that it drafts or null}:

    python modelopt_export.py job.json head logits.safetensors

Writes the head as `EagleExporter` does, and `text` [T, W], the logits along the text, `steps`
[S, W], those of S drafts after its end, `tokens` [S + 1] int64: the target's next token and the
drafts. All weights are random but `input_layernorm`, which modelopt 0.47 applies a second time, to
the feature, where no engine does: at its initial value, ones, that changes nothing.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import modelopt.torch.speculative as mtsp
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

NUM_STEPS = 4


def converted(job: dict) -> torch.nn.Module:
    """The target with a random head."""
    model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32)
    ids, architecture = job["ids"], job["architecture"]
    if ids is not None:
        architecture["draft_vocab_size"] = len(ids)
    settings = {
        "eagle_architecture_config": architecture,
        "eagle_use_torch_compile": False,
        # Or a head that was trained without YaRN would be exported with it.
        "eagle_export_rope_scaling": {},
    }
    mtsp.convert(model, [("eagle", settings)])
    module = model.eagle_module
    if ids is not None:
        module.d2t.copy_(torch.tensor(ids) - torch.arange(len(ids)))
    torch.manual_seed(1)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.2)
        elif "input_layernorm" not in name:
            parameter.data.uniform_(0.5, 1.5)
    return model.eval()


def drafted(model: torch.nn.Module, text: list[int]) -> dict[str, torch.Tensor]:
    """Logits along a text and of the drafts after it."""
    found: list[torch.Tensor] = []
    head = getattr(model.eagle_module, "lm_head", None) or model.lm_head
    base, drafts = None, None

    def keep(_module: object, _inputs: object, output: torch.Tensor) -> None:
        found.append(output[0])

    with head.register_forward_hook(keep):
        base, drafts = model.pseudo_speculative_generate(torch.tensor([text]), steps=NUM_STEPS)
    # The target's own pass has gone through the head that they share.
    steps = found[-NUM_STEPS:]
    return {
        "text": steps[0].clone(),
        "steps": torch.stack([step[-1] for step in steps]),
        "tokens": torch.cat([base[0], drafts[0]]),
    }


def main() -> None:
    job, head, logits = sys.argv[1:]
    settings = json.loads(Path(job).read_text())
    model = converted(settings)
    model.get_exporter().export(head)
    save_file(drafted(model, settings["text"]), logits)


if __name__ == "__main__":
    main()
