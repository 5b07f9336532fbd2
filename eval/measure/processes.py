"""The processes of a launch, which measure or store one share each."""

import os
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env

from conf.command.environment import check_launch

Item = TypeVar("Item")


def join_processes() -> PartialState:
    """Join the processes of this launch; without a launch there is one.

    Raises:
        InputError: they do not see each other.
    """
    cpu = not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    # A process that is done waits for the others, whose prompts may be much longer.
    state = PartialState(cpu=cpu, timeout=timedelta(days=30))
    check_launch(os.environ, state.num_processes)
    return state


def gather_items(items: list[Item]) -> list[Item]:
    """Collect the items of all processes, in process order, on every process."""
    return gather_object(items) if PartialState().num_processes > 1 else items
