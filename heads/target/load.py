"""Loading a target."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from conf.schema import Dtype, InputError, Quantization, TargetConfig
from heads.target.check import check_served
from heads.target.model import Target

def load_target(config: TargetConfig, device: torch.device) -> Target:
    """Loads, freezes and checks a target.

    Args:
        config: where it is and how to load it; `path` is set.
        device: where it goes, unless `device_map` says otherwise.

    Raises:
        InputError: nothing there, an adapter or quantisation that does not load, or an
            architecture that cannot be served, with the reason.
    """
    assert config.path is not None
    model_config, tokenizer = load_tokenizer(config)
    dtype = resolve_dtype(config.dtype, device)
    attentions = [config.attention] if config.attention else attentions_for(model_config)
    for attention in attentions:
        model = load_model(config, model_config, dtype, device, attention)
        if config.adapter is not None:
            model = with_adapter(model, config.adapter).get_base_model()
        target = Target(model, tokenizer, config.path)
        try:
            check_served(target)
        except InputError:
            if attention == attentions[-1]:
                raise
        else:
            return target
    raise AssertionError


def load_tokenizer(config: TargetConfig) -> tuple[Any, Any]:
    """The config and the tokenizer of a target, without its weights.

    Args:
        config: where it is; `path` is set.

    Raises:
        InputError: nothing there.
    """
    assert config.path is not None
    with naming_target(config):
        return (
            AutoConfig.from_pretrained(config.path, **hub_options(config)),
            AutoTokenizer.from_pretrained(config.path, **hub_options(config)),
        )


def resolve_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """The torch dtype; `auto` is bfloat16 on CUDA and float32 elsewhere."""
    if dtype is Dtype.auto:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, dtype.value)


def attentions_for(model_config: Any) -> list[str]:
    """Implementations that may take additive masks and compute what was trained, best first."""
    # SDPA leaves out attention soft-capping (Gemma 2) without a word.
    capped = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
    known = AutoModelForCausalLM._model_mapping
    fits = type(model_config) not in known or known[type(model_config)]._supports_sdpa
    return ["sdpa", "eager"] if fits and not capped else ["eager"]


@contextmanager
def naming_target(config: TargetConfig) -> Iterator[None]:
    """Says of what transformers raises which setting it is about.

    Raises:
        InputError: with `target.path`, in place of an error of files or of their content.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(f"target.path={config.path}: cannot load it: {error}") from error


def hub_options(config: TargetConfig) -> dict[str, Any]:
    """What every `from_pretrained` of a target is told."""
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


def load_model(
    config: TargetConfig,
    model_config: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    attention: str | None = None,
) -> Any:
    """The transformers model of a target, without its adapter.

    Args:
        config: where it is and how to load it; `path` is set.
        model_config: of `load_tokenizer`.
        dtype: of its parameters; `auto` takes that of its files.
        device: where it goes, unless `device_map` says otherwise.
        attention: how its layers attend; unset leaves it to transformers.

    Raises:
        InputError: nothing there, or it does not load.
    """
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    quantized = config.quantization is not Quantization.none
    if quantized:
        options["quantization_config"] = _quantization(config.quantization, dtype)
    if config.device_map is not None:
        options["device_map"] = config.device_map
    elif quantized or device.type != "cpu":
        # Straight from the files: no process holds a copy of its own on the host.
        options["device_map"] = {"": device}
    assert config.path is not None
    with naming_target(config):
        model: Any = AutoModelForCausalLM.from_pretrained(
            config.path, config=model_config, use_safetensors=True, **options, **hub_options(config)
        )
    return model


def _quantization(kind: Quantization, dtype: torch.dtype | str) -> Any:
    from transformers import BitsAndBytesConfig

    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"target.quantization={kind.value} needs bitsandbytes: pip install -e '.[quantize]'"
        ) from error
    if kind is Quantization.int8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def with_adapter(model: Any, adapter: str) -> Any:
    """The peft model of a target and a saved adapter.

    Args:
        model: the transformers model, changed in place.
        adapter: folder or Hub id.

    Raises:
        InputError: an adapter that is not there or does not fit.
    """
    from peft import PeftModel

    if Path(adapter).is_dir() and not (Path(adapter) / "adapter_model.safetensors").is_file():
        raise InputError(f"target.adapter={adapter}: no adapter_model.safetensors in that folder")
    try:
        return PeftModel.from_pretrained(model, adapter)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"target.adapter={adapter}: cannot apply it: {error}") from error
