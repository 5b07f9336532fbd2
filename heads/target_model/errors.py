"""Errors of a target's files and of their content, under the name of the setting."""

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from conf.errors import InputError
from conf.settings.target import TargetConfig
from heads.target_model.decoder import EVERY_WAY

LONGEST_REASON = 300


@contextmanager
def naming_target(config: TargetConfig, setting: str = "path") -> Iterator[None]:
    """Inside, errors of files or of their content are an `InputError` with the setting's name."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ImportError, SafetensorError, StrictDataclassError, *EVERY_WAY) as error:
        # Some say all that transformers knows.
        said = shorten(str(error), LONGEST_REASON, placeholder=" ...")
        raise InputError(
            f"target.{setting}={getattr(config, setting)}: cannot load it: {said}"
        ) from error
