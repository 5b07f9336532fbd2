"""Weight files of a Hub repository that hold some tensors, without the other files.

Format of the index: https://huggingface.co/docs/transformers/big_models.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers.utils import cached_file

from conf.settings.target import TargetConfig
from heads.target_model.dequantise import resolve_target_folder

INDEX = "model.safetensors.index.json"
BESIDE = ("config.json", "generation_config.json")


@contextmanager
def open_partial_files(config: TargetConfig, wanted: Callable[[str], bool]) -> Iterator[str]:
    """Yield the folder or Hub id from which to load some tensors of a target.

    Downloads no other weight files of a Hub repository; the largest take a terabyte.

    Args:
        config: target settings.
        wanted: function that tells whether a tensor is needed, by its name.
    """
    place = resolve_target_folder(config)
    weight_map = (
        {} if Path(place).is_dir() or config.trust_remote_code else _load_weight_map(config, place)
    )
    files = sorted({file for name, file in weight_map.items() if wanted(name)})
    if len(files) == len({*weight_map.values()}):
        yield place
        return
    with TemporaryDirectory(prefix="headsmith-") as temporary:
        folder = Path(temporary)
        for name in (*BESIDE, *files):
            found = cached_file(
                place, name, revision=config.revision,
                _raise_exceptions_for_missing_entries=name in files,
            )  # fmt: skip
            if found is not None:
                (folder / name).symlink_to(Path(str(found)).absolute())
        kept = {name: file for name, file in weight_map.items() if file in files}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": kept}))
        yield temporary


def _load_weight_map(config: TargetConfig, place: str) -> dict[str, str]:
    """Files of a Hub repository by the names of their tensors; empty for a single file."""
    found = cached_file(
        place, INDEX, revision=config.revision, _raise_exceptions_for_missing_entries=False
    )
    return {} if found is None else json.loads(Path(str(found)).read_text())["weight_map"]
