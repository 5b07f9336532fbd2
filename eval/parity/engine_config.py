"""Keys of `config.json` and rotary position embeddings (RoPE) as serving engines read them.

A value that an engine would guess is an error.

Sources of RoPE: vLLM 0.32 `model_executor/layers/rotary_embedding`, transformers 5
`modeling_rope_utils.py`. Letters: N rows, Q heads, d head size.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from conf.errors import InputError

KINDS = ("default", "linear", "llama3", "yarn")


class EngineConfig:
    """JSON object of `config.json`.

    Args:
        values: the JSON object.
        file: file name, for messages.
        engine: name of the serving engine, for messages.
        prefix: prefix of the keys, for messages.
    """

    def __init__(self, values: dict[str, Any], file: Path, engine: str, prefix: str = "") -> None:
        self.values, self.file, self.engine, self.prefix = values, file, engine, prefix

    def require_key(self, key: str, kind: type, otherwise: str) -> Any:
        """Return the value of a required key.

        Args:
            key: name of the key.
            kind: type of the value; float allows int.
            otherwise: action of the serving engine without the key, for messages.

        Raises:
            InputError: the key is missing, null or of another type.
        """
        if self.values.get(key) is None:
            raise self.make_missing_error(key, kind, otherwise)
        self.check_type(key, kind)
        return self.values[key]

    def check_type(self, key: str, kind: type) -> None:
        """Check the type of the value of an existing key; float allows int.

        Raises:
            InputError: the value is of another type.
        """
        found = type(self.values[key])
        if found is not kind and not (kind is float and found is int):
            raise self.make_error(key, f"a value of type {kind.__name__}")

    def get_section(self, key: str) -> "EngineConfig":
        """Return the object under a key, or an empty one if the key is missing or null.

        Raises:
            InputError: the value is not an object.
        """
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.make_error(key, "an object")
        return EngineConfig(value, self.file, self.engine, f"{self.prefix}{key}.")

    def check_allowed(self, key: str, *allowed: object) -> None:
        """Check the value of a key that may be missing.

        Raises:
            InputError: the value is not one of `allowed`.
        """
        if key in self.values and self.values[key] not in allowed:
            raise self.make_error(key, " or ".join(map(repr, allowed)))

    def check_equal(self, key: str, expected: object, why: str, otherwise: str) -> None:
        """Check that a key has one certain value.

        Args:
            key: name of the key.
            expected: the required value.
            why: where the required value comes from, for messages.
            otherwise: action of the serving engine without the key, for messages.

        Raises:
            InputError: the key is missing, or has another value.
        """
        if self.require_key(key, type(expected), otherwise) != expected:
            raise self.make_error(key, f"{expected!r}, {why}")

    def format_key(self, key: str) -> str:
        """Format a key with its prefix."""
        return f"{self.prefix}{key}"

    def make_missing_error(self, key: str, kind: type, otherwise: str) -> InputError:
        """Make an error about a key that is missing or null."""
        found = "null" if key in self.values else "absent"
        return InputError(
            f"{self.file}: {self.format_key(key)} is {found}: without it {self.engine} "
            f"{otherwise}; must be a value of type {kind.__name__}"
        )

    def make_error(self, key: str, allowed: str) -> InputError:
        """Make an error about the value of a key."""
        found = repr(self.values[key]) if key in self.values else "absent"
        return InputError(
            f"{self.file}: {self.format_key(key)} is {found}: {self.engine} needs {allowed}"
        )


def require_same_value(key: str, kind: type, otherwise: str, *places: EngineConfig) -> Any:
    """Return the value of a key that several places may hold, but must hold equally.

    Raises:
        InputError: the key is missing, of another type, or has two values.
    """
    holders = [place for place in places if key in place.values] or [places[0]]
    first = holders[0].require_key(key, kind, otherwise)
    for place in holders[1:]:
        if place.require_key(key, kind, otherwise) != first:
            raise place.make_error(key, f"{first!r}, as at the other place in the file")
    return first


RopeKeys = Literal["both", "old", "two_keys"]
"""Spelling of RoPE that a serving engine reads.

- both: `rope_parameters`, or `rope_theta` and `rope_scaling`; loaders on transformers 5.
- old: `rope_theta` and `rope_scaling`.
- two_keys: `rope_theta`, or a `rope_scaling` of `type` and `factor` with a theta of 10000.
"""


@dataclass(frozen=True)
class Rope:
    """Rotates the first `2 * len(frequencies)` components of a head, half against half.

    Attributes:
        frequencies: float32, radians per position.
        scale: factor of the rotated components.
    """

    frequencies: Tensor
    scale: float

    def rotate_states(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Rotate states [N, Q, d] at positions [N]."""
        # In float32, as in engines: float64 gives other angles at far positions.
        angles = position_ids.float()[:, None, None] * self.frequencies
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        half = len(self.frequencies)
        first, second, rest = states.split([half, half, states.shape[-1] - 2 * half], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def parse_rope(config: EngineConfig, head_dim: int, keys: RopeKeys) -> Rope:
    """Build RoPE as a serving engine builds it from a config.

    Args:
        config: config with `rope_theta` and `rope_scaling`, or `rope_parameters`, or both.
        head_dim: size d of a head.
        keys: spelling that the serving engine reads.

    Raises:
        InputError: RoPE is missing, of a type that the engine lacks, or spelled in two ways that
            disagree.
    """
    settings = _merge_spellings(config, keys)
    kind, theta = settings["rope_type"], float(settings["rope_theta"])
    if keys == "two_keys" and kind != "default" and (kind != "linear" or theta != 10000):
        raise config.make_error("rope_scaling", "none, or a linear one with a rope_theta of 10000")
    if kind not in KINDS:
        raise config.make_error("rope_scaling", f"a rope_type of {list(KINDS)}")
    width = int(head_dim * settings.get("partial_rotary_factor", 1.0))
    powers = theta ** (torch.arange(0, width, 2).float() / width)
    try:
        if kind == "llama3":
            return Rope(_scale_llama3(1.0 / powers, settings), 1.0)
        if kind == "yarn":
            return _build_yarn_rope(powers, settings)
        return Rope(1.0 / powers / (settings["factor"] if kind == "linear" else 1.0), 1.0)
    except KeyError as error:
        raise config.make_error("rope_scaling", f"the key {error} for {kind}") from error


def _merge_spellings(config: EngineConfig, keys: RopeKeys) -> dict[str, Any]:
    """Merge both spellings into settings in the form of `rope_parameters`."""
    new = config.get_section("rope_parameters")
    if keys != "both" or "rope_theta" not in new.values:
        config.require_key("rope_theta", float, "turns with a theta of 10000")
    theta, part = config.values.get("rope_theta"), config.values.get("partial_rotary_factor")
    outer = {"rope_theta": theta, "partial_rotary_factor": part}
    old = _normalise_spelling(config.get_section("rope_scaling"), outer)
    if keys == "old":
        for key in ("attention_factor", "truncate", "partial_rotary_factor"):
            config.get_section("rope_scaling").check_allowed(key, None, outer.get(key))
    spelled = [_normalise_spelling(new, outer)] if new.values else []
    if "rope_theta" in config.values or config.values.get("rope_scaling"):
        spelled.append(old)
    if spelled[0] != spelled[-1]:
        raise InputError(
            f"{config.file}: the two spellings of RoPE disagree: rope_parameters says "
            f"{spelled[0]}, but rope_theta and rope_scaling say {old}, so old and new loaders "
            "would differ; export again"
        )
    return spelled[-1]


def _normalise_spelling(spelling: EngineConfig, outer: dict[str, Any]) -> dict[str, Any]:
    """Complete one spelling by the outer values, with one key for the type."""
    settings = {key: value for key, value in spelling.values.items() if key != "type"}
    settings.setdefault("rope_type", spelling.values.get("type") or "default")
    spelling.check_allowed("type", None, settings["rope_type"])
    for key, value in outer.items():
        if value is not None:
            settings.setdefault(key, value)
    return settings


def _scale_llama3(plain: Tensor, settings: dict[str, Any]) -> Tensor:
    """Divide the frequencies of long waves by `factor`; short waves keep their frequencies."""
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    turns = settings["original_max_position_embeddings"] / (2 * math.pi / plain)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / settings["factor"] + smooth * plain


def _build_yarn_rope(powers: Tensor, settings: dict[str, Any]) -> Rope:
    """Interpolate dimensions of few turns, keep those of many, and scale the result."""
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
    extrapolated = 1 - ramp.clamp(0, 1)
    frequencies = (1.0 / (factor * powers)) * (1 - extrapolated) + (1.0 / powers) * extrapolated
    if settings.get("attention_factor") is not None:
        return Rope(frequencies, float(settings["attention_factor"]))

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    return Rope(frequencies, scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0))
