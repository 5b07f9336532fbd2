"""Lists of modules that a quantisation skips, which must name those of an MTP layer.

Formats: `quantization_config` of `config.json` as compressed-tensors (`ignore`), FP8, GPTQ and AWQ
(`modules_to_not_convert`, `ignored_layers`), ModelOpt (`ignore`, `exclude_modules`) and
bitsandbytes write it.
"""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

LISTS = (
    "modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules",
    "llm_int8_skip_modules",
)  # fmt: skip
USUAL = {"bitsandbytes": "llm_int8_skip_modules", "compressed-tensors": "ignore"}
"""The skip list of a method if its config has none; for other methods, the first of `LISTS`."""


def find_unlisted_modules(
    quantisation: dict[str, Any], modules: Iterable[str]
) -> dict[str, list[str]]:
    """Modules that each skip list of a quantisation lacks, by the list's key.

    Args:
        quantisation: `quantization_config`; empty for a model that is not quantised.
        modules: names of matrices, as in the model's files.
    """
    if not quantisation:
        return {}
    lists = {key: quantisation[key] for key in LISTS if isinstance(quantisation.get(key), list)}
    usual = USUAL.get(str(quantisation.get("quant_method")), LISTS[0])
    missing = {
        key: [name for name in modules if not any(_is_match(each, name) for each in listed)]
        for key, listed in (lists or {usual: []}).items()
    }
    return {key: names for key, names in missing.items() if names}


def add_unquantized_modules(quantisation: dict[str, Any], modules: Iterable[str]) -> None:
    """Add modules to the skip lists of a quantisation, in place."""
    for key, missing in find_unlisted_modules(quantisation, modules).items():
        # Without a list, readers skip the output head.
        quantisation[key] = [*(quantisation.get(key) or ["lm_head"]), *missing]


def _is_match(entry: str, module: str) -> bool:
    """Tell whether an entry is a module, a parent of it, or a pattern of either."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    parts = module.split(".")
    holders = (".".join(parts[: n + 1]) for n in range(len(parts)))
    return any(fnmatchcase(holder, entry) for holder in holders)
