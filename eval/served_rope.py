"""Rotary position embeddings as engines read them from `config.json`.

Sources: vLLM 0.32 `model_executor/layers/rotary_embedding`, transformers 5
`modeling_rope_utils.py`. Letters: N rows, Q heads, d head size.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conf.schema import InputError
from eval.served_config import Settings

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Turns the first `2 * len(frequencies)` components of a head, halves against halves.

    Attributes:
        frequencies: float32, radians per position.
        scale: of the turned components.
    """

    frequencies: Tensor
    scale: float

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """[N, Q, d] states at positions [N]."""
        # In float32, as engines do: in float64 angles at far positions are others.
        angles = position_ids.float()[:, None, None] * self.frequencies
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        half = len(self.frequencies)
        first, second, rest = states.split([half, half, states.shape[-1] - 2 * half], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def read_rope(config: Settings, head_dim: int, legacy: bool) -> Rope:
    """The RoPE that an engine makes of a config.

    Args:
        config: with `rope_theta` and `rope_scaling`, or `rope_parameters`, or both.
        head_dim: d.
        legacy: whether the engine reads the first spelling alone.

    Raises:
        InputError: absent, of a kind that draft heads have not, or the spellings disagree.
    """
    settings = _settings(config, legacy)
    kind = settings["rope_type"]
    if kind not in KINDS:
        raise config.wrong("rope_parameters", f"a rope_type of {list(KINDS)}, not {kind!r}")
    width = int(head_dim * settings.get("partial_rotary_factor", 1.0))
    powers = float(settings["rope_theta"]) ** (torch.arange(0, width, 2).float() / width)
    try:
        if kind == "llama3":
            return Rope(_llama3(1.0 / powers, settings), 1.0)
        if kind == "yarn":
            return _yarn(powers, settings)
        return Rope(1.0 / powers / (settings["factor"] if kind == "linear" else 1.0), 1.0)
    except KeyError as error:
        raise config.wrong("rope_parameters", f"the key {error} for rope_type {kind}") from error


def _settings(config: Settings, legacy: bool) -> dict[str, Any]:
    """One dict of both spellings; the newer one's names."""
    new = dict(config.part("rope_parameters")._values)
    old = dict(config.part("rope_scaling")._values)
    if legacy or not new:
        config.need("rope_theta", float, "turns with a theta of 10000")
    for spelling in (new, old):
        if spelling:
            spelling.setdefault("rope_type", spelling.pop("type", "default"))
    if config.has("rope_theta"):
        old = {"rope_type": "default", **old}
        old.setdefault("rope_theta", config.get("rope_theta"))
    if config.get("partial_rotary_factor") is not None:
        for spelling in (new, old):
            spelling.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    if new and "rope_theta" not in new:
        new["rope_theta"] = config.need("rope_theta", float, "turns with a theta of 10000")
    if new and old and new != old:
        raise InputError(
            f"{config.file}: the two spellings of RoPE disagree: rope_parameters says {new}, "
            f"rope_theta and rope_scaling say {old}; {config.engine} and older loaders would "
            "turn by different angles"
        )
    return old or new


def _llama3(plain: Tensor, settings: dict[str, Any]) -> Tensor:
    """Frequencies of long waves are divided by `factor`, those of short ones stay."""
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    turns = settings["original_max_position_embeddings"] / (2 * math.pi / plain)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / settings["factor"] + smooth * plain


def _yarn(powers: Tensor, settings: dict[str, Any]) -> Rope:
    """Interpolates dimensions of few turns, leaves those of many, and scales the result."""
    factor, original = settings["factor"], settings["original_max_position_embeddings"]
    width, theta = 2 * len(powers), settings["rope_theta"]

    def dimension(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(settings.get("beta_fast") or 32)
    high = dimension(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (torch.arange(len(powers)).float() - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    frequencies = (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept
    return Rope(frequencies, _yarn_scale(factor, settings))


def _yarn_scale(factor: float, settings: dict[str, Any]) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    one, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    return scale(one) / scale(all_dim) if one and all_dim else scale(1.0)
