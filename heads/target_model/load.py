"""Loading of a target: config, tokenizer, weights and adapter; or the parts outside its layers.

Where a serving engine runs the layers, only the weight files of a Hub repository that hold the
other parts are downloaded. Format of the index of files:
https://huggingface.co/docs/transformers/big_models.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, cached_file, logging

from conf.command.environment import find_missing_toolchain
from conf.errors import InputError
from conf.files import split_gguf_path
from conf.settings.target import Dtype, Quantization, TargetConfig
from heads.devices import keep_freed_memory, warn_if_slow
from heads.target_model.adapter import apply_adapter
from heads.target_model.check import check_support_once
from heads.target_model.decoder import (
    find_decoder,
    find_decoder_layers,
    find_language_class,
    record_hidden_state,
)
from heads.target_model.dequantise import load_config_file, resolve_target_folder
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target
from heads.target_model.weight_files import (
    can_read_quantization,
    check_complete,
    check_quantized_codes,
    check_unused_weights,
    refuse_untied_weights,
    report_target_errors,
)

INDEX = "model.safetensors.index.json"
BESIDE = ("config.json", "generation_config.json")
FINAL_NORMS = (
    *("norm", "final_layer_norm", "final_layernorm", "final_norm", "ln_f", "norm_f", "ln_out"),
    *("layer_norm", "layernorm", "out_norm"),
    "embedding_norm",  # LFM's, named after its position
)
MOST_PARAMETERS = 3e9
"""Most parameters of first layers and embedding to load for a comparison."""
ALONE = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of first layers that cannot run alone: Gemma 4's share the caches of later ones."""
BEHIND_LAYERS = ("hc_head", "altup_unembed_projections", "final_input", "project_out")
"""Modules that join several streams into one state, or narrow it: hyper-connections, AltUp,
residuals that look back, OPT-350m."""


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
    model_config, tokenizer = load_config(config), load_target_tokenizer(config)
    dtype = resolve_dtype(config.dtype, device)
    warn_if_slow("target.dtype", dtype, device)
    if device.type == "cpu":
        keep_freed_memory()
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


def load_config(config: TargetConfig) -> Any:
    """Load the config of a target's transformers model.

    Raises:
        InputError: nothing is there, or no model that generates text.
    """
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
    with report_target_errors(config):
        file = find_file(resolve_target_folder(config), "generation_config.json", config.revision)
    return None if file is None else load_config_file(Path(file))


def find_file(path: str, name: str, revision: str | None = None) -> str | None:
    """Find a file of a folder or Hub repository, downloaded if needed; None without one."""
    return cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)


def _load_adapter_tokenizer(config: TargetConfig, adapter: str) -> Any:
    """Load the tokenizer of a target with an adapter; parts that it lacks are the target's."""
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
        model_config: config from `load_config`.
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
            "pip install 'headsmith[quantize]'"
        ) from error
    if quantization is Quantization.int8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


class RemoteTarget(EmbeddingsAndOutputHead):
    """Embedding, final norm and output head of a target, for hidden states of a serving engine.

    Attributes:
        final_norm: norm that turns the last layer's output into last hidden states.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        super().__init__(model, tokenizer, name)
        self.final_norm = find_final_norm(model)

    @classmethod
    def from_config(cls, config: TargetConfig, device: torch.device) -> "RemoteTarget":
        """Load the parts of a target to a device. See `load_remote`."""
        model = load_remote(config, device)
        return cls(model, load_target_tokenizer(config), str(config.path))


def load_remote(config: TargetConfig, device: torch.device, num_layers: int = 0) -> Any:
    """Load only the embedding, final norm and output head of a frozen target.

    Args:
        config: target settings.
        device: device of the parts.
        num_layers: number of first layers to load too.

    Returns:
        The transformers model with these layers and the config of the whole model.

    Raises:
        InputError: nothing is there, a part is missing, or a setting would have no effect.
    """
    quantized = config.quantization is not Quantization.none
    settings = {
        "adapter": config.adapter,
        "device_map": config.device_map,
        "quantization": config.quantization.value if quantized else None,
    }
    for name, value in settings.items():
        if value is not None:
            raise InputError(
                f"target.{name}={value}: concerns layers, which the engine runs; leave it unset "
                "and give it to the engine (an adapter that the engine serves is "
                "target.adapter_name)"
            )
    whole, bare = load_config(config), load_config(config)
    _truncate_layers(bare, num_layers)
    with (
        report_target_errors(config),
        _silence_warnings(),
        open_partial_files(config, _make_tensor_filter(bare, num_layers)) as place,
    ):
        loaded: Any = find_language_class(bare).from_pretrained(
            place,
            config=bare,
            dtype=resolve_dtype(config.dtype, device),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # shared parts of layers, which do not run here
            **make_hub_options(config),
        )
        model, info = loaded
        parameters = {_shorten_name(name) for name, _ in model.named_parameters()}
        check_quantized_codes(config, place, lambda name: _shorten_name(name) in parameters)
    modules = dict(model.named_modules())
    unexpected = [key for key in info["unexpected_keys"] if key.rpartition(".")[0] in modules]
    check_unused_weights(config, model, unexpected)
    check_complete(config, model, info)
    _check_shapes(config, model, info["mismatched_keys"])
    model.config = whole
    return model.to(device).eval().requires_grad_(False)


def _make_tensor_filter(bare: Any, num_layers: int) -> Callable[[str], bool]:
    """Make a function that tells by its name whether a model with these layers has a tensor."""

    @cache
    def list_names() -> set[str]:
        return {_shorten_name(name) for name in _make_skeleton(bare).state_dict()}

    def is_read(name: str) -> bool:
        number = next((int(part) for part in name.split(".") if part.isdecimal()), None)
        return number < num_layers if number is not None else _shorten_name(name) in list_names()

    return is_read


def _make_skeleton(bare: Any) -> nn.Module:
    """Make a model without weights."""
    with torch.device("meta"):
        return find_language_class(bare)(bare)


def _truncate_layers(config: Any, num_layers: int) -> None:
    """Remove all but the first layers from a config, with the quantisation of their weights.

    Raises:
        InputError: the other parts do not load without them.
    """
    text = config.get_text_config()
    if getattr(text, "altup_num_inputs", None):
        raise _make_parts_error(text.model_type, ["altup_unembed_projections"])
    text.num_hidden_layers = num_layers
    kinds = text.attribute_map.get("layer_types", "layer_types")
    if vars(text).get(kinds) is not None:  # otherwise it follows from the number
        setattr(text, kinds, getattr(text, kinds)[:num_layers])
    if getattr(text, "hidden_size_per_layer_input", None) and not num_layers:
        text.hidden_size_per_layer_input = 0  # Gemma 4's second embedding per layer
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def _check_shapes(config: TargetConfig, model: Any, mismatched: Iterable[tuple[Any, ...]]) -> None:
    """Refuse parts of another size in the files, which transformers would initialise randomly."""
    decoder = find_decoder(model)
    norms = [getattr(decoder, name, None) for name in FINAL_NORMS]
    read = [model.get_input_embeddings(), model.get_output_embeddings(), *norms]
    for key, stored, expected in sorted(mismatched):
        if model.get_submodule(key.rpartition(".")[0]) in read:
            raise InputError(
                f"target.path={config.path}: {key} has shape {list(stored)} in its files, but "
                f"{list(expected)} by its config.json; name a model whose files and config belong "
                "together"
            )


def _shorten_name(name: str) -> str:
    """Shorten a name to module and parameter: outer modules differ between classes."""
    return ".".join(name.split(".")[-2:])


def find_final_norm(model: Any) -> nn.Module:
    """Find the norm after the last layer of a transformers model.

    Raises:
        InputError: no known name, or more than a norm.
    """
    decoder = find_decoder(model)
    joining = [name for name in BEHIND_LAYERS if getattr(decoder, name, None) is not None]
    if joining:
        raise _make_parts_error(type(model).__name__, joining)
    for name in FINAL_NORMS:
        if getattr(decoder, name, None) is not None:
            return getattr(decoder, name)
    raise InputError(
        f"target.path: {type(model).__name__} has no final norm, looked for {FINAL_NORMS}; leave "
        "target.engine unset"
    )


def _make_parts_error(who: str, parts: list[str]) -> InputError:
    return InputError(
        f"target.path: {who} makes last hidden states with {parts} too; leave target.engine unset "
        "to run the target itself"
    )


def load_early_layers(config: TargetConfig, index: int) -> Callable[[list[int]], Tensor] | None:
    """Load a target's first layers, to compare their hidden state with an engine's.

    Args:
        config: target settings.
        index: index of `output_hidden_states`, from 1.

    Returns:
        Function from token ids to the state [S, D] on the CPU; None if the checkpoint is quantised,
        has an adapter, or its layers are too large or need later ones.
    """
    whole = load_config(config)
    text = whole.get_text_config()
    quantised = (
        hasattr(whole, "quantization_config") or split_gguf_path(str(config.path)) is not None
    )
    by_depth = hasattr(text, "scale_depth")  # the number of layers changes each layer (MiniCPM)
    if quantised or by_depth or config.adapter_name or config.trust_remote_code:
        return None
    states: dict[int, Tensor] = {}

    @torch.no_grad()
    def compute_state(token_ids: list[int]) -> Tensor:
        decoder(input_ids=torch.tensor([token_ids]), use_cache=False)
        return states.pop(index)[0]

    try:
        bare = load_config(config)
        _truncate_layers(bare, index)
        if sum(each.numel() for each in _make_skeleton(bare).parameters()) > MOST_PARAMETERS:
            return None
        decoder = find_decoder(load_remote(config, torch.device("cpu"), index))
        layers = find_decoder_layers(decoder, index, str(config.path))
        record_hidden_state(layers, index, getattr(text, "altup_active_idx", None), states)
        compute_state([0])
    except ALONE:
        return None
    return compute_state


@contextmanager
def open_partial_files(config: TargetConfig, is_wanted: Callable[[str], bool]) -> Iterator[str]:
    """Yield the folder or Hub id from which to load some tensors of a target.

    Downloads no other weight files of a Hub repository; the largest take a terabyte.

    Args:
        config: target settings.
        is_wanted: function that tells whether a tensor is needed, by its name.
    """
    place = resolve_target_folder(config)
    weight_map: dict[str, str] = {}
    if not Path(place).is_dir() and not config.trust_remote_code:
        index = find_file(place, INDEX, config.revision)
        if index is not None:  # else all weights are in one file
            weight_map = json.loads(Path(index).read_text())["weight_map"]
    files = sorted({file for name, file in weight_map.items() if is_wanted(name)})
    if len(files) == len({*weight_map.values()}):
        yield place
        return
    with TemporaryDirectory(prefix="headsmith-") as temporary:
        folder = Path(temporary)
        for name in (*BESIDE, *files):
            cached = cached_file(
                place, name, revision=config.revision,
                _raise_exceptions_for_missing_entries=name in files,
            )  # fmt: skip
            if cached is not None:
                (folder / name).symlink_to(Path(str(cached)).absolute())
        partial_map = {name: file for name, file in weight_map.items() if file in files}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": partial_map}))
        yield temporary


@contextmanager
def _silence_warnings() -> Iterator[None]:
    """Keep transformers from listing each unused weight."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
