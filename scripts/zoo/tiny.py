"""Tiny random targets of every architecture of transformers.

`tiny_target("qwen3_next", Path("outputs/zoo"))` gives a folder for `target.path`, made on first
use: random weights of a fixed seed, a tokenizer with a chat template, `made.json`.
"""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from scripts.embedded.corpus import train_tokenizer
from scripts.zoo.families import BY_HAND
from scripts.zoo.sizes import BOS, CONTEXT, EOS, FIRST_OTHER, NUM_TOKENS, PAD, TOKENS, tiny_sizes

MADE = "made.json"
WEIGHTS = ((1.5, 0.1), (1.5, 0.03), (2.5, 0.03), (4.0, 0.1), (1.0, 0.1), (0.7, 0.1))
"""Of a matrix, its output's deviation over its input's, and the deviation of embeddings: the first
that gives fit texts. Large tied embeddings make a token call for itself."""
DISTINCT, REACH = 8, 0.05
"""What makes texts fit: see `judged`."""
AS_THEY_ARE = {"A_log", "dt_proj", "time_decay", "time_first"}
"""Rates of decay, whose size is their meaning."""
TIMM = {"gemma3n_vision", "timm_wrapper"}
PROMPT = torch.arange(20, 44).unsqueeze(0)
TEXT = ("def read(path):\n    return open(path).read()\n", "class Reader:\n    lines = 0\n")


def model_types() -> list[str]:
    """Every model type of transformers whose model answers text with text."""
    return sorted(
        {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    )


def tiny_target(model_type: str, root: Path) -> Path:
    """The folder of a tiny random target, made if it is not there.

    Args:
        model_type: one of `model_types`.
        root: holds a folder for each.
    """
    folder = root / model_type
    if not (folder / MADE).is_file():
        staging = folder.with_name(f"{model_type}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        _make(model_type, staging)
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    return folder


def _make(model_type: str, folder: Path) -> None:
    name = class_name(model_type)
    config = tiny_config(model_type)
    with without_timm() as left_out:
        model, weights = random_model(getattr(transformers, name), config)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    text = config.get_text_config(decoder=True)
    made = {
        "class": name,
        "layers": _layers(text),
        "by_hand": {each: BY_HAND[each] for each in _types(config) if each in BY_HAND},
        "left_out": left_out,
        **weights,
        "num_parameters": sum(each.numel() for each in model.parameters()),
    }
    (folder / MADE).write_text(json.dumps(made, indent=1, default=str) + "\n")


def class_name(model_type: str) -> str:
    """The class that its checkpoints are saved with: the wrapper's where there is one."""
    wrapper = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    return wrapper or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


def tiny_config(model_type: str) -> Any:
    """The default config of a model type, shrunk."""
    return CONFIG_MAPPING[model_type](**_settings(_default(model_type)))


def _default(model_type: str) -> Any:
    # Some defaults contradict themselves; what is said by hand mends them.
    kind = CONFIG_MAPPING[model_type]
    try:
        return kind()
    except ValueError:
        return kind(**BY_HAND[model_type])


def _settings(config: Any) -> dict[str, Any]:
    parts = {
        name: {"model_type": part.model_type, **_settings(part)}
        for name, part in vars(config).items()
        if isinstance(part, PreTrainedConfig)
    }
    found = tiny_sizes(config) | parts
    for name, value in BY_HAND.get(config.model_type, {}).items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = found[name] | value if both else value
    return found


def _types(config: Any) -> list[str]:
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    return [config.model_type, *(name for part in parts for name in _types(part))]


def _layers(text: Any) -> str:
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    count = getattr(text, "num_hidden_layers", None)
    if not kinds:
        return str(count)
    runs: list[list[Any]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1][1] += 1
        else:
            runs.append([kind, 1])
    return ", ".join(f"{number} {kind}" for kind, number in runs)


@contextmanager
def without_timm() -> Iterator[list[str]]:
    """Inside, towers that only timm could make are a module of next to nothing.

    Yields:
        what is left out, filled meanwhile.
    """
    left_out: list[str] = []
    usual = AutoModel.from_config

    def from_config(config: Any, **options: Any) -> Any:
        if config.model_type not in TIMM:
            return usual(config, **options)
        left_out[:] = [f"{config.model_type}, which needs timm"]
        return nn.Linear(1, 1)

    with patch.object(AutoModel, "from_config", from_config):
        yield left_out


def random_model(kind: Any, config: Any) -> tuple[Any, dict[str, Any]]:
    """A model whose greedy text varies and depends on what was said before, and its weights.

    Args:
        kind: class of transformers.
        config: of a tiny model.

    Raises:
        RuntimeError: its logits are not finite.
    """
    best: tuple[float, Any, dict[str, Any]] = (-1.0, None, {})
    for gain, embedding in WEIGHTS:
        torch.manual_seed(0)
        model = kind._from_config(config, dtype=torch.float32).eval()
        spread(model, gain, embedding)
        found = {"gain": gain, "embedding": embedding, **judged(model)}
        fit = min(found["num_distinct_tokens"] / DISTINCT, 1) * min(found["reach"] / REACH, 1)
        if fit > best[0]:
            best = fit, model, found
        if fit == 1:
            break
    return best[1:]


@torch.no_grad()
def spread(model: Any, gain: float, embedding: float) -> None:
    """Matrices that hand on what they read, and noise where weights start as constants.

    However a family initialises, a matrix of n inputs gets a deviation of gain / sqrt(n). A
    bias that starts as zero, or a norm as one, would hide that somebody leaves it out.
    """
    generator = torch.Generator().manual_seed(1)
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if last == "dt_bias":
            # As initialised, a state is forgotten in two tokens; trained ones last for many.
            parameter.sub_(4)
        elif parameter.numel() == 1 or bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        elif parameter.dim() > 1 and last not in AS_THEY_ARE:
            shape = parameter.shape
            inputs = math.prod(shape[1:]) if "conv" in name else min(shape[-2:])
            deviation = embedding if id(parameter) in embeddings else gain / math.sqrt(inputs)
            parameter.mul_(deviation / parameter.std())
    _silence(model, placeholders(model.config))
    _raise_logits(model)


def _silence(model: Any, ids: list[int]) -> None:
    """Tokens that stand for pictures and sounds are never said: a whole model reads them anew."""
    head = model.get_output_embeddings()
    if head is not None:
        head.weight[ids] = 0


def placeholders(config: Any) -> list[int]:
    """Ids of the tokens of a config and its parts that stand for pictures and the like."""
    found = set()
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            found |= set(placeholders(value))
        elif name.endswith(TOKENS) and isinstance(value, int) and value >= FIRST_OTHER:
            found.add(value)
    return sorted(found)


def _raise_logits(model: Any) -> None:
    """Gives the final norm a gain, so that the logits of any family have a deviation of 2."""
    deviation, norm = _deviation(model)
    if norm is not None and 0 < deviation < 2:
        # Beside the 1 that norms start with, in the weight or in code.
        norm.weight.add_(2 / deviation - 1)


def _deviation(model: Any) -> tuple[float, Any]:
    """Of logits, and the norm that runs last before them."""
    ran: list[nn.Module] = []
    hooks = [
        module.register_forward_hook(lambda module, *_: ran.append(module))
        for module in model.modules()
        if getattr(module, "weight", None) is not None and module.weight.dim() == 1
    ]
    logits = model(input_ids=PROMPT).logits[0, -1].float()
    for hook in hooks:
        hook.remove()
    return logits.std().item(), ran[-1] if ran else None


@torch.no_grad()
def judged(model: Any) -> dict[str, Any]:
    """Whether texts of a model are fit to be compared.

    Returns:
        logits_std: below 1, ties of float32 decide.
        num_distinct_tokens: of 32 that follow a prompt greedily.
        reach: how far another token 6 places before moves the logits, in their deviations.

    Raises:
        RuntimeError: its logits are not finite.
    """
    other = PROMPT.clone()
    other[0, -7] += 1
    logits, moved = (model(input_ids=ids).logits[0, -1].float() for ids in (PROMPT, other))
    deviation = logits.std().item()
    if not math.isfinite(deviation):
        raise RuntimeError(f"its logits are not finite: their deviation is {deviation}")
    text = model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=32, do_sample=False,
        pad_token_id=PAD, eos_token_id=None,
    )  # fmt: skip
    return {
        "logits_std": round(deviation, 3),
        "num_distinct_tokens": len(set(text[0, PROMPT.shape[1] :].tolist())),
        "reach": round((logits - moved).std().item() / max(deviation, 1e-6), 3),
    }


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    return train_tokenizer(list(TEXT), NUM_TOKENS, CONTEXT)
