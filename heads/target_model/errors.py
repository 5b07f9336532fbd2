"""Errors of a target's files, reported under the setting's name."""

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from conf.errors import InputError
from conf.settings.target import TargetConfig
from heads.target_model.decoder import MODEL_ERRORS

LONGEST_REASON = 300


@contextmanager
def report_target_errors(config: TargetConfig, setting: str = "path") -> Iterator[None]:
    """Context that turns errors of files or their content into an `InputError` with the setting."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ImportError, SafetensorError, StrictDataclassError, *MODEL_ERRORS) as error:
        # Some messages list everything that transformers knows.
        said = shorten(str(error), LONGEST_REASON, placeholder=" ...")
        raise InputError(
            f"target.{setting}={getattr(config, setting)}: cannot load it: {said}"
        ) from error
