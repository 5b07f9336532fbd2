"""Adapters of a target: a trained LoRA, and a loaded peft adapter.

Losses, stores and exports use the weights of embedding and output head directly, so a loaded
adapter's changes to these are merged. Layers keep their adapter separately.

Source: LoRA, arXiv 2106.09685.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers.utils import cached_file

from conf.errors import InputError
from conf.files import find_local_path
from conf.settings.medusa import AdapterConfig
from heads.folders import PROVENANCE, write_folder
from heads.target_model.architecture import count_layers, find_hidden_size
from heads.target_model.decoder import MODEL_ERRORS, find_decoder
from heads.target_model.model import Target
from heads.target_model.weight_files import load_tensor_table

WEIGHTS = "adapter_model.safetensors"
LORA_FACTOR = re.compile(r"\.lora_\w+(\.\w+)*$")
NUM_PROBED = 16
"""Token ids, spread over the vocabulary, on which adapted models are compared."""


class Adapter(nn.Module):
    """LoRA of a target: factors [rank, in] and [out, rank] per linear layer.

    Effects: replaces the target's linear layers by peft's, which add the factors' product; at first
        zero.
    """

    def __init__(self, target: Target, config: AdapterConfig, seed: int) -> None:
        """Add an adapter to a target.

        Args:
            target: target to change; its own parameters stay frozen.
            config: size and place of the adapter.
            seed: seed of the first factors; the second ones are zero.

        Raises:
            InputError: `config.modules` names modules that cannot be adapted, or the target cannot
                carry gradients.
        """
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer

        super().__init__()
        if target.device.type == "cpu" and getattr(target.model, "is_loaded_in_4bit", False):
            raise InputError(
                f"target.path={target.name}: its weights have 4 bits, through which bitsandbytes "
                "gives no gradient on a CPU; set target.quantization=none or int8"
            )
        frozen = (target.embedding, target.output_head)
        named = target.model.named_modules()
        names = {name.rsplit(".")[-1] for name, module in named if module in frozen}
        wrong = sorted(names & set(config.modules or []))
        if wrong:
            raise InputError(
                f"adapter.modules={config.modules}: {wrong} is the target's embedding or output "
                "head, whose weights losses use directly; allowed: linear layers of the decoder"
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
        # A parameter's name must not have dots.
        self.factors = nn.ParameterDict({n.replace(".", "/"): p for n, p in factors.items()})
        layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
        self.dropouts = nn.ModuleList(layer.lora_dropout for layer in layers)
        # Not the model, whose parameters would all belong to this module.
        self._disabled, self._write = model.disable_adapter, model.save_pretrained
        if config.recompute_layers:
            target.recompute_layers()
        self.train()

    def pause_adapter(self) -> AbstractContextManager[None]:
        """Run the target without the adapter inside this context."""
        return self._disabled()

    def save(self, folder: Path, provenance: dict[str, object]) -> None:
        """Write a peft adapter with `headsmith.json`, atomically.

        Raises:
            InputError: the disk is full or not writable. An older adapter there stays untouched.
        """

        def fill(staging: Path) -> None:
            # Otherwise peft asks the Hub whether the vocabulary has grown.
            self._write(str(staging), save_embedding_layers=False)
            (staging / "README.md").unlink()  # an empty form
            (staging / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")

        write_folder(folder, fill)


def apply_adapter(model: Any, adapter: str) -> Any:
    """Make the peft model of a target and a saved adapter; changes the model in place.

    Prints a line if the adapter names another base model.

    Raises:
        InputError: the adapter is missing, does not fit, or changes more than weights.
    """
    from peft import PeftModel

    folder = find_local_path("target.adapter", adapter)
    if folder is not None and not (folder / WEIGHTS).is_file():
        raise InputError(f"target.adapter={adapter}: no {WEIGHTS} in that folder")
    try:
        stored = load_tensor_table(Path(str(cached_file(adapter, WEIGHTS))))
        shapes = {name: tensor["shape"] for name, tensor in stored.items()}
        _add_token_rows(model, shapes, adapter)
        adapted = PeftModel.from_pretrained(model, adapter).eval()
        config = adapted.active_peft_config
        _warn_of_other_base(config.base_model_name_or_path, model.name_or_path, adapter)
        changes_weights_only = not config.is_prompt_learning and not _is_activated(config)
        if changes_weights_only:
            _check_keys(adapted, adapter)
            base = adapted.get_base_model()
            with _widen_to_float32(base) as rounding:
                expected = _compute_probe_logits(adapted, base)
                _fold_embedding_and_head(base)
                folded = _compute_probe_logits(base, base)
            changes_weights_only = _is_close(expected, folded, rounding)
    except InputError:
        raise
    except (OSError, ImportError, *MODEL_ERRORS) as error:
        raise InputError(f"target.adapter={adapter}: cannot apply it: {error}") from error
    if not changes_weights_only:
        raise InputError(
            f"target.adapter={adapter}: {_format_method(adapted)} changes more than a model's "
            "weights, so heads and engines would miss it; allowed: adapters of weights, such as "
            "LoRA"
        )
    return adapted


def _warn_of_other_base(base: str | None, target: str, adapter: str) -> None:
    """Print a line if an adapter's base model and the target are different folders or names."""
    # A folder of another machine, and a Hub id, are known by their last part.
    is_here = bool(base) and Path(str(base)).is_dir()
    names = [Path(each).resolve() if is_here else Path(each).name for each in (base or "", target)]
    if base and names[0] != names[1]:
        print(  # noqa: T201
            f"target.adapter={adapter}: its adapter_config.json names the base model {base}, but "
            f"the target is {target}. If these are different models, set target.path={base}",
            file=sys.stderr,
        )


def merge_into_weights(adapted: Any, adapter: str) -> Any:
    """Merge the adapter of `apply_adapter` into the weights of its transformers model.

    Raises:
        InputError: the adapter cannot become weights.
    """
    base = adapted.get_base_model()
    with _widen_to_float32(base) as rounding:
        expected = _compute_probe_logits(adapted, base)
        try:
            model = adapted.merge_and_unload(safe_merge=True)
        except MODEL_ERRORS as error:
            raise InputError(
                f"target.adapter={adapter}: cannot be merged into weights: {error}; name a LoRA "
                "adapter"
            ) from error
        merged = _compute_probe_logits(model, model)
    if not _is_close(expected, merged, rounding):
        raise InputError(
            f"target.adapter={adapter}: the merged model would give other logits, as "
            f"{_format_method(adapted)} is no change of its weights; name a LoRA adapter"
        )
    return model


def _format_method(adapted: Any) -> str:
    config = adapted.active_peft_config
    return "aLoRA" if _is_activated(config) else str(config.peft_type.value)


def _is_activated(config: Any) -> bool:
    """Tell whether tokens activate the adapter, which peft handles outside of the model."""
    return getattr(config, "alora_invocation_tokens", None) is not None


def _add_token_rows(model: Any, shapes: Mapping[str, list[int]], adapter: str) -> None:
    """Add rows to embedding and output head for an adapter's additional tokens.

    Raises:
        InputError: rows are missing in its file; they would be random at every start.
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
                f"target.adapter={adapter}: trained with {num_rows} tokens, but the target has "
                f"{both[0].weight.shape[0]}, and its file lacks the rows of {names[end][1:-1]}; "
                "save it with save_embedding_layers=True, or with embedding and output head among "
                "modules_to_save"
            )
    model.resize_token_embeddings(num_rows, mean_resizing=False)


@torch.no_grad()
def _compute_probe_logits(model: Any, whole: Any) -> Tensor:
    """Compute the logits of a model after token ids from the whole vocabulary."""
    weight = whole.get_input_embeddings().weight
    ids = torch.linspace(0, weight.shape[0] - 1, NUM_PROBED).long()[None].to(weight.device)
    return model(input_ids=ids, use_cache=False).logits.float()


@contextmanager
def _widen_to_float32(model: Any) -> Iterator[float]:
    """Keep 16-bit weights of a transformers model in float32 inside this context.

    Adapters merged meanwhile are rounded once, at the end. Quantised models, and models without
    room for the copies, stay as they are.

    Yields:
        The rounding error of logits, as a share of their norm.
    """
    before = _find_floats(model)
    narrow = [tensor for tensor in before if tensor.element_size() == 2]
    own_dtype, config = model.dtype, model.config.get_text_config()
    is_wide = not getattr(model, "is_quantized", False) and _has_room(narrow)
    dtypes = {id(tensor): tensor.dtype for tensor in before}
    # A layer rounds about 16 results, one after another. Errors of either sign add up as their
    # square root does, so L layers multiply the error of one result by 4 sqrt(L). This error is eps
    # of the dtype, 2**-7 in bfloat16. In float32 a sum over H terms rounds H times, so the error
    # is sqrt(H) eps.
    one = torch.finfo(torch.bfloat16).eps
    if is_wide:
        one = find_hidden_size(config) ** 0.5 * torch.finfo(torch.float32).eps
        for tensor in narrow:
            tensor.data = tensor.data.float()
    try:
        yield 4 * count_layers(config) ** 0.5 * one
    finally:
        for tensor in _find_floats(model) if is_wide and narrow else ():
            tensor.data = tensor.data.to(dtypes.get(id(tensor), own_dtype))


def _find_floats(model: Any) -> list[Tensor]:
    both = (*model.parameters(), *model.buffers())
    return [tensor for tensor in both if tensor.is_floating_point()]


def _has_room(narrow: list[Tensor]) -> bool:
    """Tell whether 16-bit tensors have room to become float32, each on its device."""
    growth = Counter[torch.device]()
    for tensor in narrow:
        growth[tensor.device] += tensor.nbytes
    free = {
        device: torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else psutil.virtual_memory().available
        for device in growth
    }
    return all(device.type != "meta" and growth[device] < free[device] for device in growth)


def _is_close(one: Tensor, other: Tensor, rounding: float) -> bool:
    """Tell whether logits [1, P, V] after most of P tokens differ by no more than rounding.

    A router may send single tokens elsewhere for a tiny difference.
    """
    if one.shape != other.shape:
        return False
    differences, norms = (one - other).norm(dim=-1), one.norm(dim=-1)
    return float((differences <= rounding * norms).float().mean()) > 0.5


def _fold_embedding_and_head(model: Any) -> None:
    """Replace embedding and output head by plain modules with the adapter merged in."""
    names = {id(module): name for name, module in model.named_modules()}
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = _find_weight(modules[0]) is _find_weight(modules[1])
    folded = False
    for module in modules:
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


def _find_weight(module: Any) -> Any:
    while not isinstance(module, nn.Embedding | nn.Linear):
        inner = getattr(module, "base_layer", getattr(module, "original_module", None))
        if inner is None:
            break
        module = inner
    return module.weight


def _check_keys(adapted: Any, adapter: str) -> None:
    """Refuse an adapter whose file and config differ; print weights without a place.

    Raises:
        InputError: weights of the language model are missing, which would keep their initial
            values and change nothing, or are there and would not be used.
    """
    # peft's `from_pretrained` only warns about missing keys.
    loaded = adapted.load_adapter(adapter, adapted.active_adapter)
    model = adapted.get_base_model()
    inside = {*find_decoder(model).modules(), model.get_output_embeddings()}
    names = {name for name, module in adapted.named_modules() if module in inside}
    weights = dict(adapted.named_parameters(remove_duplicate=False))
    # A weight shared by layers lies in the file under one of its names.
    loaded_ids = {id(weight) for name, weight in weights.items() if name not in loaded.missing_keys}
    lacking = sorted(
        key
        for key in loaded.missing_keys
        if key.rpartition(".")[0] in names and id(weights.get(key)) not in loaded_ids
    )
    if lacking:
        raise InputError(
            f"target.adapter={adapter}: its file lacks weights for this model: "
            f"{_format_names(lacking)}; name the model it was trained on"
        )
    skipped = sorted(loaded.unexpected_keys)
    unchanged = [key for key in skipped if LORA_FACTOR.sub("", key) in names]
    if unchanged:
        raise InputError(
            f"target.adapter={adapter}: its file holds {_format_names(unchanged)}, but its "
            "adapter_config.json leaves these layers as they are, and engines apply what the file "
            "holds; correct layers_to_transform or target_modules there"
        )
    if skipped:
        print(  # noqa: T201
            f"target.adapter={adapter}: skipped weights without a place in the language model: "
            f"{_format_names(skipped)}",
            file=sys.stderr,
        )


def _format_names(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
