"""What of a training's settings is refused before anything heavy is imported."""

from pathlib import Path

from conf.settings.training import TrainRun
from eval.refusals import check_inputs
from train.parallel.launch import check_out_dir


def check_training(config: TrainRun) -> None:
    """Refuses a folder that is taken, and a target, data or a head that are not there.

    Raises:
        InputError: see each.
    """
    check_out_dir(Path(config.out_dir), config.train.resume)
    check_inputs(config)
