"""The words of a command that refuses its input, in one pattern.

setting=value: what is wrong; what is allowed; what to type
"""

import re
from collections.abc import Sequence
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf

from conf.command import help as words
from conf.errors import InputError

MERGED = re.compile(r"Error merging override (.+)")
SEVERAL = re.compile(r"Ambiguous value for argument '(.+?)=(.+)'")


def convert_hydra_error(
    error: HydraException, schema: type[Any], recipes: Sequence[str]
) -> InputError:
    """Word Hydra's refusal of a command line in our own pattern.

    Args:
        error: of Hydra.
        schema: the dataclass of the command's settings.
        recipes: that `head=` may name.
    """
    if isinstance(error, MissingConfigException):
        group, _, name = str(error.missing_cfg_file).partition("/")
        return InputError(
            f"{group}={name}: no such recipe; allowed: {', '.join(recipes)} (conf/{group})"
        )
    known = {s.name: s.allowed for s in words.list_settings(schema, OmegaConf.structured(schema))}
    said = str(error).strip().splitlines()
    if several := SEVERAL.match(said[0]):
        key, value = several.groups()
        takes_list = known.get(key, "").startswith(("list", "anything"))
        as_list = f"type '{key}=[{value}]' for a list, or " if takes_list else ""
        return InputError(
            f"{key}={value}: several values; allowed: one; {as_list}add --multirun to run the "
            "command for each"
        )
    merged = MERGED.match(said[0])
    given = error.override if isinstance(error, OverrideParseException) else merged and merged[1]
    if not given:
        return InputError("; ".join(filter(None, map(str.strip, said))))
    key, equals, value = given.partition("=")
    if not equals:
        return InputError(f"{given}: not a setting; type KEY=VALUE, --help lists all of them")
    if isinstance(error, OverrideParseException):
        return InputError(
            f"{given}: the value cannot be read; allowed: words and numbers, [a,b] for a list; "
            f"put a text with other signs in two kinds of quotes: '{key}=\"...\"'"
        )
    name = key.lstrip("+~")
    allowed = known.get(name, "see --help")
    return InputError(f"{name}={value}: not allowed here; allowed: {allowed}; try --help {name}")
