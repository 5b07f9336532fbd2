"""Embedding and output head of a target, which suffice for training on stored hidden states.

`Projection` is the output head as plain tensors, for fused losses.

Letters: D hidden, V vocabulary, N tokens, W ids that a head can draft.
"""

from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from conf.errors import InputError
from conf.settings.target import TargetConfig
from heads.folders import load_tensors, write_folder
from heads.target_model.architecture import count_layers, find_embedding_size, find_hidden_size
from heads.target_model.kernels import choose_kernels

# Scalings between last hidden states and logits, as configs name them.
MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
MULTIPLIED = "hyperclovax"
"""Model type that multiplies by `logits_scaling`; others divide by it."""
UNSCALED = ("mpt", "aya_vision", "cohere2_vision")
"""Model types whose `logit_scale` transformers does not apply."""
WEIGHTS = "ends.safetensors"
EMBEDDING, HEAD, BIAS = "embedding.weight", "output_head.weight", "output_head.bias"
ROWS_PER_CHUNK = 8192


class Projection(NamedTuple):
    """Logits = cap * tanh(s * (h W^T + b) / cap), each part if the target has it.

    Attributes:
        weight: [V, D].
        bias: [V], not trained.
        scale: factor s, the target's multiplier of logits or of last hidden states.
        cap: soft cap of the target.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute logits [N, V] of states [N, D] in the weight's dtype, in `out` if given."""
        logits = torch.matmul(hidden, self.weight.T, out=out)
        return self.scale_logits(logits if self.bias is None else logits.add_(self.bias))

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Scale and cap h W^T + b to logits."""
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def scale_gradient(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient of `logits` [N, V] into that of h W^T + b."""
        if self.cap is not None:
            grad = grad * (1 - (logits.to(grad.dtype) / self.cap).square())
        return grad if self.scale == 1.0 else grad * self.scale


class EmbeddingsAndOutputHead:
    """Frozen embedding and output head of a target, with its config and tokenizer.

    Args:
        model: transformers model, or an object with its `config` and `generation_config`.
        tokenizer: the target's tokenizer.
        name: Hub id or folder.
        embedding: embedding instead of the model's.
        output_head: output head instead of the model's.

    Attributes:
        config: config of the text part.
        embedding: V rows of D.
        output_head: D to V.
        generation_config: generation config, which names stop tokens.
        logits_processing: settings of the generation config that change logits, if followed.
        stop_strings: texts that end an answer.
        ignores_stops: whether stop tokens do not end an answer.
        prefill_chunk: prompt tokens per forward pass.
    """

    prefill_chunk = TargetConfig.prefill_chunk

    def __init__(
        self, model: Any, tokenizer: Any, name: str, embedding: Any = None, output_head: Any = None
    ) -> None:
        self._model_config, self.generation_config = model.config, model.generation_config
        self.config = model.config.get_text_config()
        self.embedding: Any = model.get_input_embeddings() if embedding is None else embedding
        head = model.get_output_embeddings() if output_head is None else output_head
        size = getattr(self.config, "unpadded_vocab_size", None)
        if size and size < len(head.weight):  # rows that pad a vocabulary, as Inkling's
            head = _make_linear(head.weight[:size], None)
        self.output_head: Any = head
        self.tokenizer, self.name = tokenizer, name
        self.logits_processing: dict[str, Any] = {}
        self.stop_strings: tuple[str, ...] = ()
        self.ignores_stops = False
        choose_kernels(self.device)

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any, name: str) -> "EmbeddingsAndOutputHead":
        """Share the parts of a transformers model that is being trained.

        Gradients do not reach the model.
        """
        head = model.get_output_embeddings()
        output_head = _make_linear(head.weight, getattr(head, "bias", None))
        weight = model.get_input_embeddings().weight.detach()
        return cls(model, tokenizer, name, nn.Embedding.from_pretrained(weight), output_head)

    @property
    def device(self) -> torch.device:
        """Return the device of inputs and results."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of hidden states."""
        return self.embedding.weight.dtype

    @property
    def architectures(self) -> list[str]:
        """Return the whole model's class in its `config.json`, by which engines find the model."""
        return self._model_config.architectures or []

    @property
    def hidden_size(self) -> int:
        """Return the width D of the embedding and of last hidden states."""
        return find_embedding_size(self.config)

    @property
    def feature_size(self) -> int:
        """Return the width of states between layers; differs from D if projected (OPT-350m)."""
        return find_hidden_size(self.config)

    @property
    def vocab_size(self) -> int:
        """Return the number V of rows of the output head."""
        return self.output_head.weight.shape[0]

    @property
    def num_embeddings(self) -> int:
        """Return the number of rows of the embedding, which may exceed V."""
        return self.embedding.weight.shape[0]

    @property
    def head_is_quantized(self) -> bool:
        """Tell whether the output head is no float matrix."""
        return not self.output_head.weight.is_floating_point()

    @property
    def has_plain_head(self) -> bool:
        """Tell whether the output head is one float matrix: not quantised, without a bias."""
        return not self.head_is_quantized and getattr(self.output_head, "bias", None) is None

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return count_layers(self.config)

    @property
    def max_positions(self) -> int | None:
        """Return the length of the longest text in tokens; None if the config does not name it."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def stop_ids(self) -> list[int]:
        """Return the token ids that end an answer, from generation config and tokenizer."""
        ids = self.generation_config.eos_token_id
        stops = set(ids if isinstance(ids, list) else [] if ids is None else [ids])
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            stops.add(self.tokenizer.eos_token_id)
        return sorted(stops)

    @property
    def special_ids(self) -> list[int]:
        """Return the special token ids of the tokenizer, and the stop tokens."""
        if self.tokenizer is None:
            return self.stop_ids
        added = self.tokenizer.added_tokens_decoder.items()
        marked = {index for index, token in added if token.special}
        return sorted({*marked, *self.tokenizer.all_special_ids, *self.stop_ids})

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute logits [..., V] of last hidden states [..., D] of any dtype.

        Gradients reach the hidden states if enabled.
        """
        weight = self.output_head.weight
        if weight.is_floating_point():
            hidden_states = hidden_states.to(weight.dtype)
        return self.projection.scale_logits(self.output_head(hidden_states).to(self.device))

    @property
    def projection(self) -> Projection:
        """Return the output head as plain tensors; not for a quantised one."""
        head = self.output_head
        return Projection(head.weight, getattr(head, "bias", None), *self._scaling)

    @cached_property
    def _scaling(self) -> tuple[float, float | None]:
        return _find_scaling(self._model_config)

    def save(self, folder: Path) -> None:
        """Write a folder for `from_folder`, atomically.

        Raises:
            InputError: the disk is full, or the output head cannot be stored.
        """
        head = self.output_head
        weights = self.embedding.weight, head.weight
        if not all(weight.is_floating_point() and not weight.is_meta for weight in weights):
            raise InputError(
                f"target.path={self.name}: its embedding or output head is quantised or offloaded, "
                "but training without the target needs their weights; name the model before "
                "quantisation (target.quantization keeps both), and a target.device_map that "
                "keeps them in memory"
            )
        tensors = {EMBEDDING: self.embedding.weight}
        if head.weight.data_ptr() != self.embedding.weight.data_ptr():
            tensors[HEAD] = head.weight
        if getattr(head, "bias", None) is not None:
            tensors[BIAS] = head.bias
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

        def fill(staging: Path) -> None:
            save_file(tensors, staging / WEIGHTS, metadata={"target": self.name})
            for part in (self._model_config, self.generation_config, self.tokenizer):
                part.save_pretrained(staging)

        write_folder(folder, fill)

    @classmethod
    def from_folder(cls, folder: Path, device: torch.device) -> "EmbeddingsAndOutputHead":
        """Load the embedding and output head that `save` wrote.

        Raises:
            InputError: a file is missing or damaged.
        """
        stored = load_tensors(folder / WEIGHTS)
        tensors = {name: tensor.to(device) for name, tensor in stored.items()}
        try:
            with safe_open(folder / WEIGHTS, "pt") as file:
                name = file.metadata()["target"]
            config = AutoConfig.from_pretrained(folder)
            generation = GenerationConfig.from_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                f"{folder}: cannot load the target's embedding and output head: {error}"
            ) from error
        embedding = nn.Embedding.from_pretrained(tensors[EMBEDDING])
        output_head = _make_linear(tensors.get(HEAD, embedding.weight), tensors.get(BIAS))
        parts = SimpleNamespace(config=config, generation_config=generation)
        return cls(parts, tokenizer, name, embedding, output_head)


def _find_scaling(model_config: Any) -> tuple[float, float | None]:
    """Find the scale and cap of a target's `Projection` in the config of the whole model."""
    config, scale = model_config.get_text_config(), 1.0
    if model_config.model_type not in UNSCALED:
        for name in MULTIPLIERS:
            scale *= getattr(config, name, None) or 1.0
    for name in DIVISORS:
        divisor = getattr(config, name, None) or 1.0
        scale = scale * divisor if config.model_type == MULTIPLIED else scale / divisor
    caps = [getattr(config, name, None) for name in CAPS]
    return scale, next((cap for cap in caps if cap), None)


def move_to_embedding_device(embedding: Any, output_head: Any) -> Any:
    """Move an output head to the embedding's device; return the head itself, or a frozen copy.

    A quantised, adapted or offloaded head stays in place, and
    `EmbeddingsAndOutputHead.compute_logits` copies between devices.
    """
    device, weight = embedding.weight.device, output_head.weight
    plain = isinstance(output_head, nn.Linear) and weight.is_floating_point()
    if weight.device == device or weight.is_meta or not plain:
        return output_head
    bias = output_head.bias
    return _make_linear(weight.to(device), None if bias is None else bias.to(device))


def _make_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Make a frozen projection with these weights."""
    head = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    head.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        head.bias = nn.Parameter(bias, requires_grad=False)
    return head


def select_embedding_rows(weight: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Select embedding rows [N, D] on the CPU, rounded as an engine with `dtype` has them."""
    return weight.detach()[token_ids.to(weight.device)].to("cpu", dtype)


def copy_output_rows(target: EmbeddingsAndOutputHead, dtype: torch.dtype) -> Tensor:
    """Copy the rows [V, D] of the target's output head to the CPU.

    The logits' scalings are left out: they change no greedy draft, and engines omit them in drafts.

    Raises:
        InputError: the output head is quantised or has a bias.
    """
    if not target.has_plain_head:
        raise InputError(
            f"target.path={target.name}: its output head is quantised or has a bias, but this head "
            "drafts with it; allowed: target.quantization=none and a plain output head"
        )
    return target.output_head.weight.detach().to("cpu", dtype)


def project_in_float32(outputs: Tensor, weight: Tensor) -> Tensor:
    """Multiply outputs [..., D] by a weight [W, D] of any dtype, in float32; [..., W]."""
    parts = [outputs @ rows.float().T for rows in weight.split(ROWS_PER_CHUNK)]
    return torch.cat(parts, dim=-1)
