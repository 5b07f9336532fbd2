"""A LoRA adapter that a target is given to be trained.

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


NUM_PROBED = 16
"""Token ids, spread over the vocabulary, that an adapted model is asked with."""


def with_adapter(model: Any, adapter: str) -> Any:
    """The peft model of a target and a saved adapter.

    Args:
        model: the transformers model, changed in place.
        adapter: folder or Hub id.

    Raises:
        InputError: an adapter that is not there, does not fit, or is not of the model's weights.
    """
    from peft import PeftModel

    folder = here("target.adapter", adapter)
    if folder is not None and not (folder / "adapter_model.safetensors").is_file():
        raise InputError(f"target.adapter={adapter}: no adapter_model.safetensors in that folder")
    try:
        _make_room(model, _stored(adapter), adapter)
        adapted = PeftModel.from_pretrained(model, adapter).eval()
        same = _is_of_weights(adapted)
        if same:
            _check_keys(adapted, adapter)
            expected = _logits(adapted, model)
            _fold_ends(adapted.get_base_model())
            same = _alike(expected, _logits(adapted.get_base_model(), model))
    except InputError:
        raise
    except (OSError, ImportError, *EVERY_WAY) as error:
        raise InputError(f"target.adapter={adapter}: cannot apply it: {error}") from error
    if not same:
        raise InputError(
            f"target.adapter={adapter}: {_kind(adapted)} changes more than the weights of a model, "
            "so that neither heads nor engines would see it; allowed: adapters of weights, such as "
            "LoRA"
        )
    return adapted


def merged(adapted: Any, adapter: str) -> Any:
    """The transformers model whose weights have an adapter's change in them.

    Args:
        adapted: of `with_adapter`.
        adapter: folder or Hub id.

    Raises:
        InputError: an adapter that cannot become weights.
    """
    expected = _logits(adapted, adapted.get_base_model())
    try:
        found = adapted.merge_and_unload(safe_merge=True)
    except EVERY_WAY as error:
        raise InputError(f"target.adapter={adapter}: cannot become weights: {error}") from error
    if not _alike(expected, _logits(found, found)):
        raise InputError(
            f"target.adapter={adapter}: merged, the model would say something else: "
            f"{_kind(adapted)} is no change of its weights"
        )
    return found


def _kind(adapted: Any) -> str:
    config = adapted.active_peft_config
    return "aLoRA" if _is_activated(config) else str(config.peft_type.value)


def _is_activated(config: Any) -> bool:
    """Whether an adapter waits for tokens that call it, which peft looks for outside the model."""
    return getattr(config, "alora_invocation_tokens", None) is not None


def _is_of_weights(adapted: Any) -> bool:
    config = adapted.active_peft_config
    return not config.is_prompt_learning and not _is_activated(config)


def _stored(adapter: str) -> dict[str, list[int]]:
    """The shape of each tensor of an adapter, by its name."""
    file = Path(str(cached_file(adapter, "adapter_model.safetensors")))
    return {name: each["shape"] for name, each in tensors(file).items()}


def _make_room(model: Any, stored: Mapping[str, list[int]], adapter: str) -> None:
    """Adds rows to both ends for tokens that an adapter was trained with and a model lacks.

    Raises:
        InputError: not all of them are in its file; they would be drawn anew at every start.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {each: f".{name}." for name, each in model.named_modules() if each in ends}
    shapes = {end: [s for key, s in stored.items() if names[end] in key] for end in ends}
    num_rows = max((max(s) for end in ends for s in shapes[end] if s), default=0)
    if num_rows <= ends[0].weight.shape[0]:
        return
    for end in ends:
        if [num_rows, end.weight.shape[1]] not in shapes[end]:
            raise InputError(
                f"target.adapter={adapter}: was trained with {num_rows} tokens, the target has "
                f"{ends[0].weight.shape[0]}, and its file lacks the rows of {names[end][1:-1]}; "
                "save it with save_embedding_layers=True, or both ends among modules_to_save"
            )
    model.resize_token_embeddings(num_rows, mean_resizing=False)


@torch.no_grad()
def _logits(model: Any, whole: Any) -> Tensor:
    weight = whole.get_input_embeddings().weight
    ids = torch.linspace(0, weight.shape[0] - 1, NUM_PROBED).long()[None].to(weight.device)
    return model(input_ids=ids, use_cache=False).logits.float()


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return float((one - other).abs().max()) <= 0.01 * float(one.abs().max())


def _fold_ends(model: Any) -> None:
    """Puts plain modules, with an adapter's change in their weights, in the place of both ends."""
    named = {id(each): name for name, each in model.named_modules()}
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = _weight(ends[0]) is _weight(ends[1])
    folded = False
    for end in ends:
        if not hasattr(end, "base_layer") and not hasattr(end, "original_module"):
            continue
        if tied:
            base = end.base_layer if hasattr(end, "base_layer") else end.original_module
            base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        parent, _, name = named[id(end)].rpartition(".")
        setattr(model.get_submodule(parent), name, _merged(end))
        folded = True
    if tied and folded:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def _merged(end: Any) -> nn.Module:
    if hasattr(end, "unload_and_optionally_merge_module"):
        return end.unload_and_optionally_merge_module(
            merge=True, safe_merge=True, adapter_names=None
        )
    end.merge(safe_merge=True)
    return end.get_base_layer()


def _weight(end: Any) -> Any:
    while not isinstance(end, nn.Embedding | nn.Linear):
        inner = getattr(end, "base_layer", getattr(end, "original_module", None))
        if inner is None:
            break
        end = inner
    return end.weight


def _check_keys(adapted: Any, adapter: str) -> None:
    """Refuses an adapter that lacks weights of the language model; says what has no place in it.

    Raises:
        InputError: what it lacks would be as it was drawn, which mostly changes nothing.
    """
    # peft's `from_pretrained` keeps what it finds here to itself, but for a warning.
    found = adapted.load_adapter(adapter, adapted.active_adapter)
    model = adapted.get_base_model()
    inside = {*decoder_of(model).modules(), model.get_output_embeddings()}
    names = {name for name, each in adapted.named_modules() if each in inside}
    weights = dict(adapted.named_parameters(remove_duplicate=False))
    # One that layers share lies in the file under one of its names.
    there = {id(each) for name, each in weights.items() if name not in found.missing_keys}
    lacking = sorted(
        key
        for key in found.missing_keys
        if key.rpartition(".")[0] in names and id(weights.get(key)) not in there
    )
    if lacking:
        raise InputError(
            f"target.adapter={adapter}: its file lacks weights for this model: {_some(lacking)}; "
            "name the model that it was trained on"
        )
    left = sorted(found.unexpected_keys)
    if left:
        print(  # noqa: T201
            f"target.adapter={adapter}: left out, as the language model has no place for them: "
            f"{_some(left)}",
            file=sys.stderr,
        )


def _some(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
