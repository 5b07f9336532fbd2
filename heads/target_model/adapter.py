"""Adapters of a target: a LoRA that is trained, and a saved peft adapter that is loaded.

Losses, stores and exports take the weights of the embedding and of the output head as they are, so
what a saved adapter changes of these is folded in. Layers keep theirs beside the weights.

Source: LoRA, arXiv 2106.09685.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import cached_file

from conf.errors import InputError
from conf.files import here
from conf.settings.medusa import AdapterConfig
from heads.folders import PROVENANCE
from heads.storage import write_folder
from heads.target_model.decoder import EVERY_WAY, decoder_of
from heads.target_model.model import Target
from heads.target_model.weight_files import tensors

WEIGHTS = "adapter_model.safetensors"
NUM_PROBED = 16
"""Token ids, spread over the vocabulary, that an adapted model is asked with."""


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
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer

        super().__init__()
        if target.device.type == "cpu" and getattr(target.model, "is_loaded_in_4bit", False):
            raise InputError(
                f"target.path={target.name} in 4 bits: bitsandbytes gives no gradient through it "
                "on a CPU; allowed there: target.quantization=none or int8"
            )
        frozen = (target.embedding, target.output_head)
        named = target.model.named_modules()
        names = {name.rsplit(".")[-1] for name, module in named if module in frozen}
        wrong = sorted(names & set(config.modules or []))
        if wrong:
            raise InputError(
                f"adapter.modules={config.modules}: {wrong} is the target's embedding or output "
                "head, whose weights losses use as they are; allowed: linear layers of the decoder"
            )
        lora = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=config.modules or "all-linear",
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
            torch.manual_seed(seed)
            try:
                model = get_peft_model(target.model, lora)
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
        """A context in which the target runs without the adapter."""
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


def with_adapter(model: Any, adapter: str) -> Any:
    """The peft model of a target and a saved adapter; changes the transformers model in place.

    Raises:
        InputError: an adapter that is not there, does not fit, or is not of the model's weights.
    """
    from peft import PeftModel

    folder = here("target.adapter", adapter)
    if folder is not None and not (folder / WEIGHTS).is_file():
        raise InputError(f"target.adapter={adapter}: no {WEIGHTS} in that folder")
    try:
        stored = tensors(Path(str(cached_file(adapter, WEIGHTS))))
        shapes = {name: tensor["shape"] for name, tensor in stored.items()}
        _add_token_rows(model, shapes, adapter)
        adapted = PeftModel.from_pretrained(model, adapter).eval()
        config = adapted.active_peft_config
        same = not config.is_prompt_learning and not _is_activated(config)
        if same:
            _check_keys(adapted, adapter)
            expected = _probe(adapted, model)
            _fold_embedding_and_head(adapted.get_base_model())
            same = _alike(expected, _probe(adapted.get_base_model(), model))
    except InputError:
        raise
    except (OSError, ImportError, *EVERY_WAY) as error:
        raise InputError(f"target.adapter={adapter}: cannot apply it: {error}") from error
    if not same:
        raise InputError(
            f"target.adapter={adapter}: {_method(adapted)} changes more than the weights of a "
            "model, so that neither heads nor engines would see it; allowed: adapters of weights, "
            "such as LoRA"
        )
    return adapted


def merged(adapted: Any, adapter: str) -> Any:
    """The transformers model of `with_adapter` with the adapter's change in its weights.

    Raises:
        InputError: an adapter that cannot become weights.
    """
    expected = _probe(adapted, adapted.get_base_model())
    try:
        model = adapted.merge_and_unload(safe_merge=True)
    except EVERY_WAY as error:
        raise InputError(f"target.adapter={adapter}: cannot become weights: {error}") from error
    if not _alike(expected, _probe(model, model)):
        raise InputError(
            f"target.adapter={adapter}: merged, the model would say something else: "
            f"{_method(adapted)} is no change of its weights"
        )
    return model


def _method(adapted: Any) -> str:
    config = adapted.active_peft_config
    return "aLoRA" if _is_activated(config) else str(config.peft_type.value)


def _is_activated(config: Any) -> bool:
    """True where an adapter waits for tokens that call it, which peft seeks outside the model."""
    return getattr(config, "alora_invocation_tokens", None) is not None


def _add_token_rows(model: Any, shapes: Mapping[str, list[int]], adapter: str) -> None:
    """Adds rows to embedding and output head for tokens that an adapter has and a model lacks.

    Raises:
        InputError: not all rows are in its file; they would be drawn anew at every start.
    """
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {module: f".{name}." for name, module in model.named_modules() if module in both}
    stored = {end: [s for key, s in shapes.items() if names[end] in key] for end in both}
    num_rows = max((max(shape) for end in both for shape in stored[end] if shape), default=0)
    if num_rows <= both[0].weight.shape[0]:
        return
    for end in both:
        if [num_rows, end.weight.shape[1]] not in stored[end]:
            raise InputError(
                f"target.adapter={adapter}: was trained with {num_rows} tokens, the target has "
                f"{both[0].weight.shape[0]}, and its file lacks the rows of {names[end][1:-1]}; "
                "save it with save_embedding_layers=True, or embedding and output head among "
                "modules_to_save"
            )
    model.resize_token_embeddings(num_rows, mean_resizing=False)


@torch.no_grad()
def _probe(model: Any, whole: Any) -> Tensor:
    """Logits of a model after some token ids of the whole vocabulary."""
    weight = whole.get_input_embeddings().weight
    ids = torch.linspace(0, weight.shape[0] - 1, NUM_PROBED).long()[None].to(weight.device)
    return model(input_ids=ids, use_cache=False).logits.float()


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return float((one - other).abs().max()) <= 0.01 * float(one.abs().max())


def _fold_embedding_and_head(model: Any) -> None:
    """Puts plain modules, with an adapter's change in their weights, in place of both modules."""
    names = {id(module): name for name, module in model.named_modules()}
    both = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = _weight(both[0]) is _weight(both[1])
    folded = False
    for module in both:
        if not hasattr(module, "base_layer") and not hasattr(module, "original_module"):
            continue
        if tied:
            base = module.base_layer if hasattr(module, "base_layer") else module.original_module
            base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        if hasattr(module, "unload_and_optionally_merge_module"):
            plain = module.unload_and_optionally_merge_module(
                merge=True, safe_merge=True, adapter_names=None
            )
        else:
            module.merge(safe_merge=True)
            plain = module.get_base_layer()
        parent, _, name = names[id(module)].rpartition(".")
        setattr(model.get_submodule(parent), name, plain)
        folded = True
    if tied and folded:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def _weight(module: Any) -> Any:
    while not isinstance(module, nn.Embedding | nn.Linear):
        inner = getattr(module, "base_layer", getattr(module, "original_module", None))
        if inner is None:
            break
        module = inner
    return module.weight


def _check_keys(adapted: Any, adapter: str) -> None:
    """Refuses an adapter that lacks weights of the language model; prints what has no place in it.

    Raises:
        InputError: what it lacks would be as it was drawn, which mostly changes nothing.
    """
    # peft's `from_pretrained` keeps what it finds here to itself, but for a warning.
    loaded = adapted.load_adapter(adapter, adapted.active_adapter)
    model = adapted.get_base_model()
    inside = {*decoder_of(model).modules(), model.get_output_embeddings()}
    names = {name for name, module in adapted.named_modules() if module in inside}
    weights = dict(adapted.named_parameters(remove_duplicate=False))
    # One that layers share lies in the file under one of its names.
    there = {id(weight) for name, weight in weights.items() if name not in loaded.missing_keys}
    lacking = sorted(
        key
        for key in loaded.missing_keys
        if key.rpartition(".")[0] in names and id(weights.get(key)) not in there
    )
    if lacking:
        raise InputError(
            f"target.adapter={adapter}: its file lacks weights for this model: {_some(lacking)}; "
            "name the model that it was trained on"
        )
    left = sorted(loaded.unexpected_keys)
    if left:
        print(  # noqa: T201
            f"target.adapter={adapter}: left out, as the language model has no place for them: "
            f"{_some(left)}",
            file=sys.stderr,
        )


def _some(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
