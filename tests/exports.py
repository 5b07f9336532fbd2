"""Small heads and their exports."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from toys import noisy_head, random_target

from conf.settings.eagle import EagleConfig, EagleForm, OutputHead
from conf.settings.export import ExportFormat
from heads import medusa
from heads.draft_head import DraftHead
from heads.eagle import layouts as eagle_layouts
from heads.eagle.eagle import EagleHead
from heads.export.writer import compute_reference_tensors, export_head
from heads.target_model.model import Target
from heads.vocab import DraftVocab

KINDS = ("medusa", "eagle1", "eagle3", "eagle3.1")
LAYOUTS = {("medusa", engine) for engine in medusa.ENGINES} | {
    (form.value, engine) for engine, forms in eagle_layouts.LAYOUTS.items() for form in forms
}
CELLS = [
    (engine.value, kind)
    for engine in ExportFormat
    for kind in KINDS
    if (kind.split(".")[0], engine) in LAYOUTS
    and (engine.value, kind) not in (("original", "eagle3.1"), ("llamacpp", "eagle3.1"))
]
EAGLE31 = {"fc_norm": True, "norm_output": True}


def toy_target(family: str = "llama", **changes: Any) -> Target:
    """Eight layers, so that the default features are those that the authors' code reads."""
    made = random_target(family, num_hidden_layers=8, **changes)
    made.name = "me/toy"
    # As a saved model has it.
    made.config.architectures = [type(made.model).__name__]
    return made


def eagle(target: Target, form: EagleForm = EagleForm.eagle3, num_ids: int = 24, **more) -> Any:
    """An untrained head with noise in its norms, which start as ones."""
    settings = EagleConfig(form=form, output_head=OutputHead.copy, **more)
    counts = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(0))
    vocab = DraftVocab.from_counts(counts, num_ids if form is EagleForm.eagle3 else None, [0, 1, 2])
    head = EagleHead.from_settings(target, settings, vocab, seed=0)
    torch.manual_seed(0)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return head.eval()


def make(target: Target, kind: str) -> DraftHead:
    if kind == "medusa":
        return noisy_head(target, num_heads=2)
    if kind == "eagle1":
        return eagle(target, EagleForm.eagle1)
    return eagle(target, **(EAGLE31 if kind == "eagle3.1" else {}))


def exported(head: DraftHead, target: Target, engine: str, folder: Path) -> Path:
    values = compute_reference_tensors(head, target, num_rows=3, depth=2)
    export_head(head, ExportFormat(engine), values, folder, {"git": "abc"})
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def stored(folder: Path, weights: str = "model.safetensors") -> dict[str, str]:
    return {
        name: f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
        for name, each in load_file(folder / weights).items()
    }
