"""Measures one head under several conditions, each a few settings changed."""

import re
import shlex
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.command.help_pages import check_setting_exists
from conf.errors import InputError
from conf.settings.measure import AcceptanceRun

CONDITIONS_FILE = "conditions.json"

CHANGEABLE = (
    *("data", "num_turns", "max_new_tokens", "seed"),
    *("mode", "temperature", "top_p", "top_k", "min_p"),
)
"""Settings and groups of settings that a condition may change."""


def build_condition_runs(config: AcceptanceRun) -> dict[str, AcceptanceRun]:
    """Make the settings of each condition.

    Args:
        config: the settings, with `conditions`.

    Returns:
        Copies of the settings by condition, each with its own folder below `out_dir`.

    Raises:
        InputError: a condition is not a list of settings, changes target or head, or stands twice.
    """
    runs: dict[str, AcceptanceRun] = {}
    for condition in config.conditions:
        name = " ".join(condition.split())
        if name in runs:
            raise InputError(f"conditions: {name!r} stands twice; remove one")
        runs[name] = _apply_condition(config, name)
    return runs


def _apply_condition(config: AcceptanceRun, name: str) -> AcceptanceRun:
    words = shlex.split(name)
    for word in words:
        key, found, _ = word.partition("=")
        if not found:
            raise InputError(
                f"conditions: {name!r}: {word!r} sets nothing; a condition is settings such as "
                "'mode=decode temperature=1'"
            )
        check_setting_exists(AcceptanceRun, key)
        if key.partition(".")[0] not in CHANGEABLE:
            raise InputError(
                f"conditions: {name!r}: {key} is not a condition; allowed: "
                f"{', '.join(CHANGEABLE)}; measure another target or head by a command of its own"
            )
    folder = re.sub(r"[^\w.=,-]+", "_", name) or "as_given"
    try:
        settings = OmegaConf.structured(config)
        settings.merge_with_dotlist(words)
        settings.out_dir, settings.conditions = str(Path(config.out_dir) / folder), []
        changed = OmegaConf.to_object(settings)
    except OmegaConfBaseException as error:
        raise InputError(f"conditions: {name!r}: {str(error).splitlines()[0]}") from error
    except InputError as error:
        raise InputError(f"conditions: {name!r}: {error}") from None
    assert isinstance(changed, AcceptanceRun)
    return changed
