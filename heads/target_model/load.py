"""Loading a target: its config, tokenizer, weights and adapter."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, cached_file

from conf.command.compiler import missing
from conf.errors import InputError
from conf.settings.target import Dtype, Quantization, TargetConfig
from heads.processor import tell_if_slow
from heads.target_model.adapter import with_adapter
from heads.target_model.check import check_once
from heads.target_model.dequantise import folder_of
from heads.target_model.errors import naming_target
from heads.target_model.language import language_class
from heads.target_model.model import Target
from heads.target_model.weight_files import check_codes, check_used, complete, reads_codes


def load_target(config: TargetConfig, device: torch.device) -> Target:
    """Loads, freezes and checks a target; says so where its dtype is slow here.

    It goes to the device unless `config.device_map` says otherwise.

    Raises:
        InputError: nothing there, an adapter or quantisation that does not load, or an
            architecture that cannot be served, with the reason.
    """
    assert config.path is not None
    if config.engine:
        raise InputError(
            f"target.engine={config.engine}: this command runs the target in its own process; "
            "unset the setting (of train/*.py, eval/acceptance.py and scripts/capture.py)"
        )
    model_config, tokenizer = load_tokenizer(config)
    dtype = resolve_dtype(config.dtype, device)
    tell_if_slow("target.dtype", dtype, device)
    if config.attention is None:
        attentions = attentions_for(model_config)
    else:
        _check_attention(config.attention, device)
        attentions = [config.attention]
    for attention in attentions:
        model = load_model(config, model_config, dtype, device, attention)
        if config.adapter is not None:
            model = with_adapter(model, config.adapter).get_base_model()
        target = Target(model, tokenizer, config.path)
        target.prefill_chunk = config.prefill_chunk
        try:
            check_once(target, config)
        except InputError:
            if attention == attentions[-1]:
                raise
        else:
            return target
    raise AssertionError


def _check_attention(attention: str, device: torch.device) -> None:
    # FlexAttention's kernel for CPUs ends the process with a segmentation fault.
    allowed = ["sdpa", "eager"] + (["flex_attention"] if device.type != "cpu" else [])
    if attention not in allowed:
        raise InputError(
            f"target.attention={attention}: allowed on {device.type}: {', '.join(allowed)}"
        )
    if attention == "flex_attention" and (lacking := missing(device.type)):
        raise InputError(
            f"target.attention=flex_attention is compiled, which needs {lacking}; or set sdpa"
        )


def load_tokenizer(config: TargetConfig) -> tuple[Any, Any]:
    """The config and the tokenizer of a target, without its weights.

    Raises:
        InputError: nothing there, or nothing that writes text.
    """
    return load_config(config), tokenizer_of(config)


def load_config(config: TargetConfig) -> Any:
    """The config of a target's transformers model.

    Raises:
        InputError: nothing there, or nothing that writes text.
    """
    assert config.path is not None
    with naming_target(config):
        whole = AutoConfig.from_pretrained(folder_of(config), **hub_options(config))
        # Of a model that also speaks, what thinks; its class finds its weights among the others.
        model_config = getattr(whole, "thinker_config", whole)
        model_config.architectures = whole.architectures
        language_class(model_config)
    return model_config


def tokenizer_of(config: TargetConfig) -> Any:
    """The tokenizer of a target, with the chat template of its processor if it has none itself.

    An adapter's own come first: who trains one writes them beside it.

    Raises:
        InputError: nothing there.
    """
    assert config.path is not None
    if config.adapter is not None:
        return _adapter_tokenizer(config, config.adapter)
    with naming_target(config):
        tokenizer = AutoTokenizer.from_pretrained(folder_of(config), **hub_options(config))
        if tokenizer.chat_template is None:
            name = LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE
            file = _file_if_there(folder_of(config), name, config.revision)
            if file is not None:
                tokenizer.chat_template = json.loads(Path(file).read_text())["chat_template"]
    return tokenizer


def generation_config(config: TargetConfig) -> dict[str, Any] | None:
    """The content of `generation_config.json` beside a target; None without one.

    Raises:
        InputError: nothing there.
    """
    assert config.path is not None
    with naming_target(config):
        file = _file_if_there(folder_of(config), "generation_config.json", config.revision)
    if file is None:
        return None
    stored: dict[str, Any] = json.loads(Path(file).read_text())
    stored.pop("transformers_version", None)  # of whoever saved it last
    return stored


def _file_if_there(path: str, name: str, revision: str | None = None) -> str | None:
    return cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)


def _adapter_tokenizer(config: TargetConfig, adapter: str) -> Any:
    """The tokenizer of a target with an adapter; what does not lie beside that is the target's."""
    assert config.path is not None
    with naming_target(config, "adapter"):
        own = _file_if_there(adapter, "tokenizer_config.json")
        template = _file_if_there(adapter, "chat_template.jinja")
    base = replace(config, adapter=None)
    if own is None:
        tokenizer = tokenizer_of(base)
    else:
        with naming_target(config):
            model_config = AutoConfig.from_pretrained(folder_of(config), **hub_options(config))
        with naming_target(config, "adapter"):
            tokenizer = AutoTokenizer.from_pretrained(
                adapter, config=model_config, trust_remote_code=config.trust_remote_code
            )
    if own is None and template is not None:
        tokenizer.chat_template = Path(template).read_text()
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = tokenizer_of(base).chat_template
    return tokenizer


def resolve_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """The torch dtype; `auto` is bfloat16 on CUDA and float32 elsewhere."""
    if dtype is Dtype.auto:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, dtype.value)


def attentions_for(model_config: Any) -> list[str]:
    """Implementations that may take additive masks and compute what was trained, best first."""
    # SDPA leaves out attention soft-capping (Gemma 2) without a word.
    capped = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
    fits = getattr(language_class(model_config), "_supports_sdpa", True)
    return ["sdpa", "eager"] if fits and not capped else ["eager"]


def hub_options(config: TargetConfig) -> dict[str, Any]:
    """Options of every `from_pretrained` of a target."""
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


def load_model(
    config: TargetConfig,
    model_config: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    attention: str | None = None,
    towers: bool = False,
) -> Any:
    """The transformers model of a target, without its adapter.

    Args:
        config: of the target; `path` is set.
        model_config: of `load_tokenizer`.
        dtype: of its parameters; `auto` takes that of its files.
        device: where it goes, unless `device_map` says otherwise.
        attention: implementation of attention; unset leaves it to transformers.
        towers: whether the modules beside its language model are loaded, too.

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
    knows_codes = reads_codes(model_config)
    with naming_target(config):
        loaded: Any = language_class(model_config, towers).from_pretrained(
            folder_of(config),
            config=model_config,
            use_safetensors=True,
            output_loading_info=True,
            **options,
            **hub_options(config),
        )
    model, info = loaded
    unexpected = info["unexpected_keys"]
    if knows_codes:  # and which scales it does without
        unexpected = [key for key in unexpected if key.endswith((".weight", ".bias"))]
    else:
        # Old masks of 0 and 1 are among what the model itself ignores.
        ignored = "|".join(model._keys_to_ignore_on_load_unexpected or ()) or "(?!)"
        check_codes(
            config,
            folder_of(config),
            lambda name: name not in unexpected and not re.search(ignored, name),
        )
    check_used(config, model, unexpected)
    return complete(config, model, info)


def _quantization(quantization: Quantization, dtype: torch.dtype | str) -> Any:
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
