"""The frozen target: loading, hidden-state taps, masks and the output head.

Letters: B batch, Q query tokens, S key tokens (cache + query), T tokens, D hidden, V vocab.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from conf.schema import Dtype, InputError, Quantization, TargetConfig

SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Reads:
    """What a draft head reads of the target.

    Layer indices follow `output_hidden_states`: 0 is the embedding, i the output of decoder
    layer i - 1, before the final norm. Exporters translate to each engine's convention.
    """

    layers: tuple[int, ...] = ()
    """Besides the last layer's output after the final norm, which is always there."""


@dataclass
class TargetOutput:
    """Hidden states of one pass."""

    hidden_states: Tensor
    """[B, Q, D], last layer, after the final norm."""
    layers: dict[int, Tensor] = field(default_factory=dict)
    """[B, Q, D] per index of `Reads.layers`."""


class Target:
    """A frozen causal language model with explicit masks and positions.

    Attributes:
        model: the transformers model, in eval mode, without gradients.
        tokenizer: its tokenizer.
        name: Hub id or folder it came from.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        self.output_head = model.get_output_embeddings()
        self._windows = _windows(self.config, name)

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.decoder.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states."""
        return self.decoder.get_input_embeddings().weight.dtype

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """V, the rows of the output head."""
        return self.output_head.weight.shape[0]

    @property
    def has_plain_head(self) -> bool:
        """Whether the output head is one matrix of floats: not quantised, without a bias."""
        head = self.output_head
        return head.weight.is_floating_point() and getattr(head, "bias", None) is None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.config.num_hidden_layers

    @property
    def stop_ids(self) -> list[int]:
        """Token ids that end a response, from the generation config and the tokenizer."""
        ids = self.model.generation_config.eos_token_id
        stops = set(ids if isinstance(ids, list) else [] if ids is None else [ids])
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            stops.add(self.tokenizer.eos_token_id)
        return sorted(stops)

    @property
    def special_ids(self) -> list[int]:
        """Token ids with a meaning of their own: the tokenizer's special ones and the stops."""
        if self.tokenizer is None:
            return self.stop_ids
        added = self.tokenizer.added_tokens_decoder.items()
        marked = {index for index, token in added if token.special}
        return sorted({*marked, *self.tokenizer.all_special_ids, *self.stop_ids})

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        allowed: Tensor,
        key_positions: Tensor,
        cache: DynamicCache | None = None,
        reads: Reads | None = None,
    ) -> TargetOutput:
        """Runs the decoder with an explicit attention mask.

        Args:
            input_ids: [B, Q] int64.
            position_ids: [B, Q] int64.
            allowed: [B, Q, S] bool, True where a query may look; sliding windows are applied
                on top, by position.
            key_positions: [B, S] int64, positions of the cached and the new tokens.
            cache: `DynamicCache()` made without a config, so that no layer drops keys.
            reads: the layers to tap; the last hidden states are always there.
        """
        layers: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for index in (reads or Reads()).layers:
                hooks.enter_context(self._tap(index, layers))
            output = self.decoder(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=self._masks(allowed, position_ids, key_positions),
                past_key_values=cache,
                use_cache=cache is not None,
            )
        return TargetOutput(output.last_hidden_state, layers)

    def read(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        reads: Reads | None = None,
    ) -> TargetOutput:
        """States [B, T, D] of packed sequences; no document sees another.

        Args:
            input_ids: [B, T] int64.
            position_ids: [B, T] int64, restarting in each document.
            document_ids: [B, T] int64, -1 on padding.
            reads: the layers to tap; the last hidden states are always there.
        """
        same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
        causal = torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril()
        allowed = same & causal
        return self.forward(input_ids, position_ids, allowed, position_ids, reads=reads)

    def read_text(self, token_ids: list[int], reads: Reads | None = None) -> TargetOutput:
        """States [1, S, D] of one text of S tokens."""
        ids = torch.tensor([token_ids], device=self.device)
        positions = torch.arange(ids.shape[1], device=self.device).unsqueeze(0)
        return self.read(ids, positions, torch.zeros_like(ids), reads)

    def logits(self, hidden_states: Tensor, rows: Tensor | None = None) -> Tensor:
        """[..., V] the frozen output head on [..., D] final hidden states.

        Gradients reach the hidden states, where the caller wants any.

        Args:
            hidden_states: in the target's dtype.
            rows: [W, D], some rows of a plain projection to use instead: gives [..., W].
        """
        logits = self.output_head(hidden_states) if rows is None else hidden_states @ rows.T
        scale = getattr(self.config, "logit_scale", None)
        divisor = getattr(self.config, "logits_scaling", None)
        cap = getattr(self.config, "final_logit_softcapping", None)
        logits = logits if scale is None else logits * scale
        logits = logits if divisor is None else logits / divisor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _masks(
        self, allowed: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> Tensor | dict[str, Tensor]:
        distance = query_positions.unsqueeze(2) - key_positions.unsqueeze(1)
        masks = {
            kind: self._additive(allowed if window is None else allowed & (distance < window))
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, allowed: Tensor) -> Tensor:
        # Boolean masks are silently wrong in eager attention; additive ones are right everywhere.
        floor = torch.finfo(self.dtype).min
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, floor).unsqueeze(1)

    def _tap(self, index: int, into: dict[int, Tensor]) -> Any:
        if not 0 <= index <= self.num_layers:
            raise InputError(f"hidden state {index}: {self.name} has 0..{self.num_layers}")

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            into[index] = output[0] if isinstance(output, tuple) else output

        if index == 0:
            return self.decoder.get_input_embeddings().register_forward_hook(keep)
        return self.decoder.layers[index - 1].register_forward_hook(keep)


def _windows(config: Any, name: str) -> dict[str, int | None]:
    """Attention window in tokens per layer type; None looks at everything."""
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds - SERVED_LAYER_TYPES:
        raise InputError(
            f"target.path={name}: {config.model_type} has {sorted(kinds - SERVED_LAYER_TYPES)} "
            "layers, whose state cannot be rolled back to an accepted token; "
            f"allowed: {sorted(SERVED_LAYER_TYPES)}"
        )
    window = getattr(config, "sliding_window", None)
    if not kinds:
        return {"full_attention": window}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


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
    dtype = resolve_dtype(config.dtype, device)
    common = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        model_config = AutoConfig.from_pretrained(config.path, **common)
        tokenizer = AutoTokenizer.from_pretrained(config.path, **common)
        model = _load_model(config, model_config, dtype, device, common)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(f"target.path={config.path}: cannot load it: {error}") from error
    if config.adapter is not None:
        model = _with_adapter(model, config.adapter)
    target = Target(model, tokenizer, config.path)
    check_served(target)
    return target


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


def _load_model(
    config: TargetConfig,
    model_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    common: dict[str, Any],
) -> Any:
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": attention_for(model_config),
    }
    if config.quantization is not Quantization.none:
        options["quantization_config"] = _quantization(config.quantization, dtype)
        options["device_map"] = config.device_map or {"": device}
    elif config.device_map is not None:
        options["device_map"] = config.device_map
    assert config.path is not None
    model: Any = AutoModelForCausalLM.from_pretrained(
        config.path, config=model_config, use_safetensors=True, **options, **common
    )
    return model if "device_map" in options else model.to(device)


def _quantization(kind: Quantization, dtype: torch.dtype) -> Any:
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


def _with_adapter(model: Any, adapter: str) -> Any:
    from peft import PeftModel

    if Path(adapter).is_dir() and not (Path(adapter) / "adapter_model.safetensors").is_file():
        raise InputError(f"target.adapter={adapter}: no adapter_model.safetensors in that folder")
    try:
        return PeftModel.from_pretrained(model, adapter).get_base_model()
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
    reason = _probe(target)
    if reason is not None:
        raise InputError(
            f"target.path={target.name}: {target.config.model_type} "
            f"({type(target.model).__name__}) cannot be served: {reason}"
        )


@torch.no_grad()
def _probe(target: Target) -> str | None:
    ids = torch.tensor([[5, 9, 7, 11]], device=target.device) % target.vocab_size
    try:
        expected = target.model(input_ids=ids, use_cache=False).logits[0, -1].float()
        hidden = _probe_tree(target, ids)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    found = target.logits(hidden).float()
    # int8 rounds activations by the batch that they come in.
    exact = target.dtype == torch.float32 and not getattr(target.model, "is_quantized", False)
    tolerance = 1e-3 if exact else 0.3
    difference = ((found - expected).abs().max() / expected.std().clamp_min(1e-6)).item()
    if not difference < tolerance:
        return (
            "a pass with explicit masks, positions and cache differs from its own pass by "
            f"{difference:.2g} standard deviations of the logits (allowed {tolerance})"
        )
    return None


def _probe_tree(target: Target, ids: Tensor) -> Tensor:
    """[D] state of the last of 4 tokens; a wrong sibling of it stands in between."""
    cache = DynamicCache()
    positions = torch.arange(4, device=ids.device).unsqueeze(0)
    causal = torch.ones(1, 2, 2, dtype=torch.bool, device=ids.device).tril()
    target.forward(ids[:, :2], positions[:, :2], causal, positions[:, :2], cache)
    tree = torch.stack([ids[0, 2], ids[0, 0], ids[0, 3]]).unsqueeze(0)
    tree_positions = positions[:, [2, 3, 3]]
    allowed = torch.tensor(
        [[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]], dtype=torch.bool, device=ids.device
    )
    keys = torch.cat([positions[:, :2], tree_positions], dim=1)
    output = target.forward(tree, tree_positions, allowed, keys, cache)
    if cache.get_seq_length() != 5:
        raise RuntimeError("its cache does not keep one entry per token")
    return output.hidden_states[0, -1]


def keep_cache(cache: Any, index: Tensor | Sequence[int]) -> None:
    """Compacts a cache to the given token slots, in their order.

    Args:
        cache: keys and values [B, heads, S, head_dim] per layer.
        index: [n] int64 slots to keep.

    Effects:
        `cache` holds n tokens.
    """
    for layer in cache.layers:
        slots = torch.as_tensor(index, device=layer.keys.device)
        layer.keys = layer.keys.index_select(-2, slots)
        layer.values = layer.values.index_select(-2, slots)
