"""Loading of a target: config, tokenizer, weights and adapter."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, cached_file

from conf.command.environment import find_missing_toolchain
from conf.errors import InputError
from conf.settings.target import Dtype, Quantization, TargetConfig
from heads.devices import warn_if_slow
from heads.target_model.adapter import apply_adapter
from heads.target_model.check import check_support_once
from heads.target_model.dequantise import load_config_file, resolve_target_folder
from heads.target_model.language_model import find_language_class
from heads.target_model.model import Target
from heads.target_model.weight_files import (
    can_read_quantization,
    check_complete,
    check_quantized_codes,
    check_unused_weights,
    refuse_untied_weights,
    report_target_errors,
)


def load_target(config: TargetConfig, device: torch.device) -> Target:
    """Load, freeze and check a target; warn if its dtype is slow here.

    The target goes to the device unless `config.device_map` is set.

    Raises:
        InputError: nothing is there, an adapter or quantisation does not load, or the architecture
            is not supported, with the reason.
    """
    assert config.path is not None
    if config.engine:
        raise InputError(
            f"target.engine={config.engine}: this command runs the target in its own process; "
            "leave target.engine unset (it is for train/*.py, eval/acceptance.py and "
            "scripts/capture.py)"
        )
    model_config, tokenizer = load_config_and_tokenizer(config)
    dtype = resolve_dtype(config.dtype, device)
    warn_if_slow("target.dtype", dtype, device)
    if config.attention is None:
        attentions = choose_attentions(model_config)
    else:
        _check_attention(config.attention, device)
        attentions = [config.attention]
    for attention in attentions:
        model = load_model(config, model_config, dtype, device, attention)
        if config.adapter is not None:
            model = apply_adapter(model, config.adapter).get_base_model()
        target = Target(model, tokenizer, config.path)
        target.prefill_chunk = config.prefill_chunk
        try:
            check_support_once(target, config)
        except InputError:
            if attention == attentions[-1]:
                raise
        else:
            return target
    raise AssertionError


def _check_attention(attention: str, device: torch.device) -> None:
    # FlexAttention's CPU kernel ends the process with a segmentation fault.
    allowed = ["sdpa", "eager"] + (["flex_attention"] if device.type != "cpu" else [])
    if attention not in allowed:
        raise InputError(
            f"target.attention={attention}: allowed on {device.type}: {', '.join(allowed)}"
        )
    if attention == "flex_attention" and (lacking := find_missing_toolchain(device.type)):
        raise InputError(
            f"target.attention=flex_attention: must be compiled, which needs {lacking}; or set "
            "target.attention=sdpa"
        )


def load_config_and_tokenizer(config: TargetConfig) -> tuple[Any, Any]:
    """Load the config and the tokenizer of a target, without weights.

    Raises:
        InputError: nothing is there, or no model that generates text.
    """
    return load_config(config), load_target_tokenizer(config)


def load_config(config: TargetConfig) -> Any:
    """Load the config of a target's transformers model.

    Raises:
        InputError: nothing is there, or no model that generates text.
    """
    assert config.path is not None
    with report_target_errors(config):
        whole = AutoConfig.from_pretrained(
            resolve_target_folder(config), **make_hub_options(config)
        )
        # A model that speaks (Qwen-Omni) has a config for its thinking part. Load that part: its
        # class finds its weights among those of the whole model.
        model_config = getattr(whole, "thinker_config", whole)
        model_config.architectures = whole.architectures
        find_language_class(model_config)
    return model_config


def load_target_tokenizer(config: TargetConfig) -> Any:
    """Load a target's tokenizer, with its processor's chat template if it has none.

    An adapter's own tokenizer and template take precedence.

    Raises:
        InputError: nothing is there.
    """
    assert config.path is not None
    if config.adapter is not None:
        return _load_adapter_tokenizer(config, config.adapter)
    with report_target_errors(config):
        tokenizer = AutoTokenizer.from_pretrained(
            resolve_target_folder(config), **make_hub_options(config)
        )
        if tokenizer.chat_template is None:
            name = LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE
            file = find_file(resolve_target_folder(config), name, config.revision)
            if file is not None:
                tokenizer.chat_template = json.loads(Path(file).read_text())["chat_template"]
    return tokenizer


def load_generation_config(config: TargetConfig) -> dict[str, Any] | None:
    """Load `generation_config.json` beside a target; None without one.

    Raises:
        InputError: nothing is there.
    """
    assert config.path is not None
    with report_target_errors(config):
        file = find_file(resolve_target_folder(config), "generation_config.json", config.revision)
    return None if file is None else load_config_file(Path(file))


def find_file(path: str, name: str, revision: str | None = None) -> str | None:
    """Find a file of a folder or Hub repository, downloaded if needed; None without one."""
    return cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)


def _load_adapter_tokenizer(config: TargetConfig, adapter: str) -> Any:
    """Load the tokenizer of a target with an adapter; parts that it lacks are the target's."""
    assert config.path is not None
    with report_target_errors(config, "adapter"):
        tokenizer_file = find_file(adapter, "tokenizer_config.json")
        template_file = find_file(adapter, "chat_template.jinja")
    base = replace(config, adapter=None)
    if tokenizer_file is None:
        tokenizer = load_target_tokenizer(base)
    else:
        with report_target_errors(config):
            model_config = AutoConfig.from_pretrained(
                resolve_target_folder(config), **make_hub_options(config)
            )
        with report_target_errors(config, "adapter"):
            tokenizer = AutoTokenizer.from_pretrained(
                adapter, config=model_config, trust_remote_code=config.trust_remote_code
            )
    if tokenizer_file is None and template_file is not None:
        tokenizer.chat_template = Path(template_file).read_text()
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = load_target_tokenizer(base).chat_template
    return tokenizer


def resolve_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """Resolve the torch dtype; `auto` is bfloat16 on CUDA and float32 elsewhere."""
    if dtype is Dtype.auto:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, dtype.value)


def choose_attentions(model_config: Any) -> list[str]:
    """Choose attention implementations that accept additive masks and train alike, best first."""
    # SDPA silently skips attention soft-capping (Gemma 2).
    capped = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
    fits = getattr(find_language_class(model_config), "_supports_sdpa", True)
    return ["sdpa", "eager"] if fits and not capped else ["eager"]


def make_hub_options(config: TargetConfig) -> dict[str, Any]:
    """Make the options of every `from_pretrained` of a target."""
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


def load_model(
    config: TargetConfig,
    model_config: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    attention: str | None = None,
    towers: bool = False,
) -> Any:
    """Load the transformers model of a target, without its adapter.

    Args:
        config: target settings with a `path`.
        model_config: config from `load_config_and_tokenizer`.
        dtype: dtype of the parameters; `auto` takes that of the files.
        device: device of the model, unless `device_map` is set.
        attention: attention implementation; unset leaves it to transformers.
        towers: whether to load modules beside the language model.

    Raises:
        InputError: nothing is there, or the model does not load.
    """
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    quantized = config.quantization is not Quantization.none
    if quantized:
        options["quantization_config"] = _make_quantization_config(config.quantization, dtype)
    if config.device_map is not None:
        options["device_map"] = config.device_map
    elif quantized or device.type != "cpu":
        # Straight from the files, without a copy per process on the host.
        options["device_map"] = {"": device}
    assert config.path is not None
    knows_codes = can_read_quantization(model_config)
    with report_target_errors(config):
        loaded: Any = find_language_class(model_config, towers).from_pretrained(
            resolve_target_folder(config),
            config=model_config,
            use_safetensors=True,
            output_loading_info=True,
            **options,
            **make_hub_options(config),
        )
    model, info = loaded
    unexpected = info["unexpected_keys"]
    if knows_codes:  # transformers also knows unused scales
        unexpected = [key for key in unexpected if key.endswith((".weight", ".bias"))]
    else:
        # The model itself ignores, among others, old masks of 0 and 1.
        ignored = "|".join(model._keys_to_ignore_on_load_unexpected or ()) or "(?!)"
        check_quantized_codes(
            config,
            resolve_target_folder(config),
            lambda name: name not in unexpected and not re.search(ignored, name),
        )
    check_unused_weights(config, model, unexpected)
    refuse_untied_weights(config, model)
    return check_complete(config, model, info)


def _make_quantization_config(quantization: Quantization, dtype: torch.dtype | str) -> Any:
    from transformers import BitsAndBytesConfig

    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"target.quantization={quantization.value} needs bitsandbytes: "
            "pip install -e '.[quantize]'"
        ) from error
    if quantization is Quantization.int8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
