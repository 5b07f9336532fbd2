"""A saved peft adapter on a target, whose two ends are left plain matrices.

Losses, stores and exports take the weights of the embedding and of the output head as they are, so
what an adapter changes of them is folded in. Layers keep theirs beside the weights.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import cached_file

from conf.places import here
from conf.schema import InputError
from heads.target.decoder import EVERY_WAY
from heads.target.weight_files import tensors

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
        stored = _stored(adapter)
        _make_room(model, stored)
        adapted = PeftModel.from_pretrained(model, adapter).eval()
        _check_keys(adapted, stored, adapter)
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
    return str(adapted.active_peft_config.peft_type.value)


def _stored(adapter: str) -> dict[str, list[int]]:
    """The shape of each tensor of an adapter, by its name."""
    file = Path(str(cached_file(adapter, "adapter_model.safetensors")))
    return {name: each["shape"] for name, each in tensors(file).items()}


def _make_room(model: Any, stored: Mapping[str, list[int]]) -> None:
    """Adds rows to both ends for tokens that an adapter was trained with and a model lacks."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [f".{name}." for name, each in model.named_modules() if each in ends]
    shapes = [s for name, s in stored.items() if any(end in name for end in names)]
    num_rows = max((max(shape) for shape in shapes if shape), default=0)
    if num_rows > ends[0].weight.shape[0]:
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


def _check_keys(adapted: Any, stored: Iterable[str], adapter: str) -> None:
    """Refuses an adapter of which nothing has a place in the model; says what has none.

    Raises:
        InputError: it changes nothing.
    """
    from peft import get_peft_model_state_dict

    placed = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    left = sorted(name for name in stored if name not in placed and "lora" in name)
    if not left:
        return
    model = adapted.get_base_model()
    with adapted.disable_adapter():
        without = _logits(adapted, model)
    if torch.equal(without, _logits(adapted, model)):
        raise InputError(
            f"target.adapter={adapter}: changes nothing: {left[0]} and {len(left) - 1} more have "
            "no place in this model; name the model that it was trained on"
        )
    print(  # noqa: T201
        f"target.adapter={adapter}: left out, as the language model has no place for them: "
        f"{left[0]} and {len(left) - 1} more",
        file=sys.stderr,
    )
