"""Prompts in two halves: one for tuning, one for checking the result in real decoding."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conf.command.jsonl_store import JsonlStore
from conf.errors import InputError
from conf.settings.measure import CalibrateRun, SpeedupRun, TreeSearchRun
from eval.compare.methods import Method
from eval.compare.speedup_stats import summarise_speedup
from eval.compare.timing import measure_methods
from eval.decode.engine import Generation, NoDraft, decode_batch
from eval.measure.measurement import Measurement, join_processes, open_measurement
from eval.preflight_checks import VANILLA
from heads.decoding.drafting import Drafter
from heads.decoding.tree import Tree

DrafterFactory = Callable[[list[int]], Drafter]
"""Function that makes a drafter for texts with these seeds."""


def open_split_measurement(
    config: CalibrateRun | TreeSearchRun, result: str, doing: str
) -> tuple[Measurement, list[int], list[int]]:
    """Open a measurement in one process, and divide its prompts.

    Dialogues are divided, not prompts, as a second turn includes the first.

    Args:
        config: settings of the command.
        result: name of the file to write.
        doing: name of the tuning, for messages.

    Returns:
        The measurement, and the indices of the prompts of each half.

    Raises:
        InputError: several processes, or too few prompts.
    """
    num_processes = join_processes().num_processes
    if num_processes > 1:
        raise InputError(
            f"{num_processes} processes: times are measured by one process; start a single one"
        )
    measurement = open_measurement(config, result)
    tuned, checked = (
        [n for n, prompt in enumerate(measurement.prompts) if prompt.dialogue % 2 == odd]
        for odd in (0, 1)
    )
    if not checked:
        raise InputError(
            f"data.num_prompts=1: {doing} and checking need one prompt each; set "
            "data.num_prompts=2 or more"
        )
    return measurement, tuned, checked


def decode_with_drafters(
    measurement: Measurement,
    config: CalibrateRun | TreeSearchRun,
    drafters: Mapping[str, tuple[DrafterFactory, Tree | None]],
    journal: JsonlStore | None = None,
) -> dict[str, Any]:
    """Decode with each drafter, interleaved with decoding without drafts.

    Args:
        measurement: measurement with the prompts.
        config: settings of the command.
        drafters: drafters by name, each with its static tree if any.
        journal: finished runs, which are not repeated.

    Returns:
        The content of `speedup.json`.
    """

    def method(make: DrafterFactory, tree: Tree | None) -> Method:
        def run(
            ids: Sequence[list[int]], seeds: Sequence[int], _batch_size: int
        ) -> list[Generation]:
            drafter, length = make(list(seeds)), config.max_new_tokens
            return decode_batch(
                measurement.target, drafter, ids, length, measurement.sampling, seeds
            )

        return Method(run, tree)

    methods = {VANILLA: method(lambda _: NoDraft(), None)}
    methods |= {name: method(*drafter) for name, drafter in drafters.items()}
    settings = SpeedupRun(seed=config.seed, num_repeats=config.num_repeats, num_texts=0)
    runs = measure_methods(measurement, settings, methods, journal=journal)
    return summarise_speedup(measurement, settings, methods, runs)
