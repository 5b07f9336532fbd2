"""Settings of scripts that are refused before anything heavy is imported."""

from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from conf.errors import InputError
from conf.settings.export import (
    ExportFormat,
    ExportRun,
    MergeAdapterRun,
    MtpAction,
    MtpFilesRun,
    PushRun,
)
from conf.settings.scripts import ContestRun, PruneRun, RelayRun
from conf.settings.target import Quantization
from data.rows.files import check_data
from data.servers.token import TOKEN, token
from eval.refusals import check_inputs
from heads.folders import PROVENANCE, check_head, check_target
from scripts.publish.staging import read_json


def taken(out_dir: str) -> bool:
    """True of a file, and of a folder that holds something."""
    path = Path(out_dir)
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def check_contest(config: ContestRun) -> None:
    """Refuses two budgets or none, and what is not there.

    Raises:
        InputError: which setting, and what it may be.
    """
    if (config.tokens is None) == (config.minutes is None):
        raise InputError(
            f"tokens={config.tokens}, minutes={config.minutes}: set one of them, as the budget"
        )
    check_data(config.prompts, "prompts")
    check_inputs(config)


def check_export(config: ExportRun) -> None:
    """Refuses to write over what is no export, and a head or a vocabulary that is not there.

    Raises:
        InputError: which setting, and what it may be.
    """
    made = read_json(Path(config.out_dir) / PROVENANCE) or {}
    if taken(config.out_dir) and "export" not in made:
        raise InputError(
            f"out_dir={config.out_dir}: holds something that is no export; choose another or "
            "empty it"
        )
    if config.head.path is None:
        raise InputError("head.path is unset: a folder with a trained head, or a Hub id")
    words = config.tokenizer_gguf
    if words is not None and config.format is not ExportFormat.llamacpp:
        raise InputError(
            f"tokenizer_gguf={words}: format={config.format.value} has no place for it; leave it "
            "unset, or format=llamacpp"
        )
    if words is not None and not Path(words).expanduser().is_file():
        raise InputError(f"tokenizer_gguf={words}: no such file")
    check_inputs(config)


def check_mtp(config: MtpFilesRun) -> None:
    """Refuses to write over anything, and folders that are not there.

    Raises:
        InputError: which setting, and what it may be.
    """
    stitches = config.action is MtpAction.stitch
    if config.target.path is None:
        raise InputError("target.path is unset: the folder of a model")
    if stitches is (config.head.path is None):
        raise InputError(
            f"action={config.action.value}, head.path={config.head.path}: stitch takes the layer "
            "to write, check and extract take none"
        )
    if stitches and not Path(config.target.path).is_dir():
        raise InputError(
            f"target.path={config.target.path}: stitch takes a folder: "
            f"hf download {config.target.path} --local-dir DIR"
        )
    if config.action is not MtpAction.check and taken(config.out_dir):
        raise InputError(f"out_dir={config.out_dir}: is not empty; choose another")
    check_target(config.target)
    check_head(config.head, None)


def check_prune(config: PruneRun) -> None:
    """Refuses a run without a head or sizes, data that are not there, and an earlier result.

    Raises:
        InputError: which setting, and what it may be.
    """
    if config.head.path is None:
        raise InputError("head.path is unset: a folder with a trained head, or a Hub id")
    if not config.sizes and not config.ranks:
        raise InputError(
            "sizes=[]: name how many ids pruned heads draft, e.g. sizes=[8192,16384], or ranks"
        )
    if taken(config.out_dir):
        raise InputError(f"out_dir={config.out_dir} is not an empty folder: choose another")
    check_inputs(config)


def check_merge(config: MergeAdapterRun) -> None:
    """Refuses what cannot be merged.

    Raises:
        InputError: which setting, and what it may be.
    """
    for name in ("path", "adapter"):
        if getattr(config.target, name) is None:
            raise InputError(f"target.{name} is unset: name what is merged, a folder or Hub id")
    if config.target.quantization is not Quantization.none:
        raise InputError(
            f"target.quantization={config.target.quantization.value}: merged weights are written "
            "whole; leave it unset"
        )
    if taken(config.out_dir):
        raise InputError(f"out_dir={config.out_dir} is there and not empty: name another folder")
    check_inputs(config)


def check_relay(config: RelayRun) -> None:
    """Refuses to answer other machines without a token.

    Raises:
        InputError: which variable, or that its value cannot be sent.
    """
    if token() is None and not is_loopback(config.host):
        raise InputError(
            f"host={config.host}: other machines reach it; export {TOKEN}=$(openssl rand -hex 32) "
            "here, and the same where trainers run"
        )


def is_loopback(host: str) -> bool:
    """True of an address, or name, that only this machine reaches."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def check_push(config: PushRun) -> None:
    """Refuses a name that the Hub would not take, a head that is no folder, and a full `out_dir`.

    Raises:
        InputError: which setting, and what it may be.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    form = f"repo_id={config.repo_id}: must be user/name"
    if config.repo_id.count("/") != 1:
        raise InputError(form)
    try:
        validate_repo_id(config.repo_id)
    except HFValidationError as error:
        raise InputError(f"{form}: {error}") from error
    if config.dry_run and taken(config.out_dir):
        raise InputError(
            f"out_dir={config.out_dir}: is not an empty folder; choose another or empty it"
        )
    if config.measured is not None and not Path(config.measured).is_dir():
        raise InputError(f"measured={config.measured}: no such folder")
    for folder in config.comparisons:
        if not (Path(folder) / "comparison.md").is_file():
            raise InputError(
                f"comparisons={folder}: has no comparison.md; name a folder that "
                "scripts/compare.py wrote"
            )
    if config.head.path is None:
        raise InputError("head.path is not set: name the folder of a trained head")
    if config.head.layers is not None:
        raise InputError(
            f"head.layers={config.head.layers}: a head is published as it is; correct "
            "eagle_aux_hidden_state_layer_ids in its config.json"
        )
    if not Path(config.head.path).expanduser().is_dir():
        raise InputError(
            f"head.path={config.head.path}: no such folder (training writes out_dir/head)"
        )
    check_head(config.head, None)
