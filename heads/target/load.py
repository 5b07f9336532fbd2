"""Loading a target, and the check that it can be served."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from conf.schema import Dtype, InputError, Quantization, TargetConfig
from heads.documents import Documents
from heads.target.model import Target

# In which a model fails that is not as ours are.
EVERY_WAY = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


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
    model = load_model(config, model_config, dtype, device)
    if config.adapter is not None:
        model = with_adapter(model, config.adapter).get_base_model()
    target = Target(model, tokenizer, config.path)
    check_served(target)
    return target


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


def attention_for(model_config: Any) -> str:
    """The attention implementation that takes additive masks and computes what was trained."""
    # SDPA leaves out attention soft-capping (Gemma 2) without a word.
    capped = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if capped else "sdpa"


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
    config: TargetConfig, model_config: Any, dtype: torch.dtype | str, device: torch.device
) -> Any:
    """The transformers model of a target, without its adapter.

    Args:
        config: where it is and how to load it; `path` is set.
        model_config: of `load_tokenizer`.
        dtype: of its parameters; `auto` takes that of its files.
        device: where it goes, unless `device_map` says otherwise.

    Raises:
        InputError: nothing there, or it does not load.
    """
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": attention_for(model_config),
    }
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


def check_served(target: Target) -> None:
    """Refuses a target whose tree pass or output head differs from its own forward pass.

    A three-token text is run by the model itself, and by us as a cached prefix plus a tree
    with a distracting sibling; states and logits must agree. This catches architectures that
    ignore explicit masks or positions, and output heads with scalings we do not know.

    Raises:
        InputError: with what differed.
    """
    if target.device.type == "meta":
        raise InputError(
            f"target.path={target.name}: its embedding is offloaded, and all that a target gives "
            "lies beside it; target.device_map has to keep it on a device"
        )
    reason = _probe(target)
    if reason is not None:
        raise InputError(
            f"target.path={target.name}: {target.config.model_type} "
            f"({type(target.model).__name__}) cannot be served: {reason}"
        )
    target.needs_masks = _probe_documents(target)


@torch.no_grad()
def _probe(target: Target) -> str | None:
    ids = torch.tensor([[5, 9, 7, 11]], device=target.device) % target.vocab_size
    try:
        expected = target.model(input_ids=ids, use_cache=False).logits[0, -1].float()
        hidden = _probe_tree(target, ids)
    except EVERY_WAY as error:
        return f"{type(error).__name__}: {error}"
    difference = _difference(target, hidden, expected)
    if difference:
        return f"a pass with explicit masks, positions and cache {difference}"
    return None


def _difference(target: Target, hidden: Tensor, expected: Tensor) -> str:
    """How the logits after hidden states differ from the model's own; empty if they do not."""
    found = target.logits(hidden).float()
    # int8 rounds activations by the batch that they come in.
    exact = target.dtype == torch.float32 and not getattr(target.model, "is_quantized", False)
    tolerance = 1e-3 if exact else 0.3
    difference = ((found - expected).abs().max() / expected.std().clamp_min(1e-6)).item()
    if difference < tolerance:
        return ""
    return (
        f"differs from its own pass by {difference:.2g} standard deviations of the logits "
        f"(allowed {tolerance})"
    )


@torch.no_grad()
def _probe_documents(target: Target) -> str:
    """Why a target cannot read documents without masks; empty if it can.

    Two documents, packed in both orders, must give what the model gives on each alone, and each
    layer must have asked for the window that it has.
    """
    device = target.device
    ids = torch.tensor([[5, 9, 7, 11, 6, 8, 4]], device=device) % target.vocab_size
    first, second = ids[:, :4], ids[:, 4:]
    packed = torch.cat([torch.cat([first, second], 1), torch.cat([second, first], 1)])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3]], device=device)
    documents = Documents.of(torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]]))
    alone = [target.model(input_ids=text, use_cache=False).logits[0] for text in (first, second)]
    try:
        output = target.read(packed, positions, documents.on(device))
    except EVERY_WAY as error:
        return f"{type(error).__name__}: {error}"
    if [window for window, _ in target.attended] != target.windows:
        return f"{type(target.model).__name__} attends in a way of its own"
    expected = torch.cat([*alone, *reversed(alone)]).float()
    difference = _difference(target, output.hidden_states.flatten(0, 1), expected)
    return difference and f"a read by documents {difference}"


def _probe_tree(target: Target, ids: Tensor) -> Tensor:
    """[D] state of the last of 4 tokens; a wrong sibling of it stands in between."""
    cache, device = target.new_cache(1), ids.device
    causal = torch.ones(1, 2, 2, dtype=torch.bool, device=device).tril()
    target.extend(cache, ids[:, :2], causal, torch.arange(2, device=device).unsqueeze(0))
    cache.commit([[0, 1]])
    tree = torch.stack([ids[0, 2], ids[0, 0], ids[0, 3]]).unsqueeze(0)
    mask = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool, device=device)
    output = target.extend(cache, tree, mask, torch.tensor([[0, 1, 1]], device=device))
    if not cache.complete:
        raise RuntimeError("a layer keeps its state outside the cache")
    return output.hidden_states[0, -1]
