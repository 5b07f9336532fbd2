"""A LoRA adapter that a target is given to be trained.

Source: LoRA, arXiv 2106.09685.
"""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from conf.errors import InputError
from conf.settings.medusa import AdapterConfig
from heads.folders import PROVENANCE
from heads.storage import write_folder
from heads.target_model.model import Target

WEIGHTS = "adapter_model.safetensors"


class Adapter(nn.Module):
    """The LoRA of a target: two factors, [rank, in] and [out, rank], per linear layer.

    Effects: the target's linear layers become peft's, which add what the factors give; at first
    that is zero.
    """

    def __init__(self, target: Target, config: AdapterConfig, seed: int) -> None:
        """Puts an adapter on a target.

        Args:
            target: gets it; its own parameters stay frozen.
            config: its size and place.
            seed: of the first factors; the second ones are zero.

        Raises:
            InputError: `config.modules` names what cannot be adapted, or the target cannot carry
                gradients back.
        """
        from peft import get_peft_model
        from peft.tuners.lora import LoraLayer

        super().__init__()
        if target.device.type == "cpu" and getattr(target.model, "is_loaded_in_4bit", False):
            raise InputError(
                f"target.path={target.name} in 4 bits: bitsandbytes gives no gradient through it "
                "on a CPU; allowed there: target.quantization=none or int8"
            )
        with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
            torch.manual_seed(seed)
            try:
                model = get_peft_model(target.model, _lora(target, config))
            except ValueError as error:
                raise InputError(f"adapter.modules={config.modules}: {error}") from error
        factors = {n: p for n, p in model.named_parameters() if p.requires_grad}
        # A parameter's name has no dots.
        self.factors = nn.ParameterDict({n.replace(".", "/"): p for n, p in factors.items()})
        layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
        self.dropouts = nn.ModuleList(layer.lora_dropout for layer in layers)
        # Not the model, all of whose parameters would be this module's.
        self._disabled, self._write = model.disable_adapter, model.save_pretrained
        if config.recompute_layers:
            target.recompute_layers()
        self.train()

    def off(self) -> AbstractContextManager[None]:
        """Inside, the target is what it was."""
        return self._disabled()

    def save(self, folder: Path, provenance: dict[str, object]) -> None:
        """Writes a peft adapter with `headsmith.json`, whole or not at all.

        Raises:
            InputError: the disk is full or not writable; an older adapter there is untouched.
        """

        def fill(staging: Path) -> None:
            # Left to itself peft asks the Hub whether the vocabulary has grown.
            self._write(str(staging), save_embedding_layers=False)
            (staging / "README.md").unlink()  # an empty form
            (staging / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")

        write_folder(folder, fill)


def _lora(target: Target, config: AdapterConfig) -> Any:
    """The adapter's config for peft.

    Raises:
        InputError: the output head is among its modules.
    """
    from peft import LoraConfig

    ends = (target.embedding, target.output_head)
    names = {name.rsplit(".")[-1] for name, each in target.model.named_modules() if each in ends}
    wrong = sorted(names & set(config.modules or []))
    if wrong:
        raise InputError(
            f"adapter.modules={config.modules}: {wrong} is one of the ends of the target, whose "
            "weights losses use as they are; allowed: linear layers of the decoder"
        )
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.modules or "all-linear",
        task_type="CAUSAL_LM",
    )
