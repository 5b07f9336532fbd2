"""Private functions of PyTorch that are called are there, in the oldest version and this."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from oldest_torch import FUNCTIONS, OPERATORS, check_call

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("conf", "data", "heads", "train", "eval", "scripts")
SOURCES = [path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py")]


def called(pattern: str) -> set[str]:
    return {name for source in SOURCES for name in re.findall(pattern, source)}


def test_every_operator_that_is_called_is_listed() -> None:
    listed = {each.overloadpacket.__name__ for each in OPERATORS}
    assert called(r"ops\.aten\.(\w+)") <= listed
    assert called(r"torch\.(_[a-z]\w+)\(") <= listed
    assert called(r"torch\._C\.(_\w+)") <= {*FUNCTIONS}


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_this_version_takes_whatever_the_oldest_takes(operator: Any) -> None:
    assert operator._schema.is_backward_compatible_with(OPERATORS[operator])


def test_an_argument_that_is_newer_is_refused() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    check_call(flash, (1, 2, 3), {"scale": 1.0})
    with pytest.raises(AssertionError, match=r"2\.11 knows no \{'newer'\}"):
        check_call(flash, (1, 2, 3), {"newer": 1.0})
    with pytest.raises(AssertionError, match=r"2\.11 takes \['query', 'key', 'value', 'dropout_p'"):
        check_call(flash, (1, 2, 3, 4, 5, 6), {})
