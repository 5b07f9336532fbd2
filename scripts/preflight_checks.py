"""Refuse settings of scripts before heavy imports."""

from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from conf.errors import InputError
from conf.files import HUB_ID, find_local_path, load_json, split_gguf_path
from conf.settings.drafting import HeadRef
from conf.settings.export import (
    ExportFormat,
    ExportRun,
    MergeAdapterRun,
    MtpAction,
    MtpFilesRun,
    PushRun,
)
from conf.settings.scripts import PruneRun, RelayRun
from conf.settings.target import Quantization
from eval.preflight_checks import check_inputs
from heads.folders import PROVENANCE, check_head_files, check_target_files

SOURCE = "exported_from"
"""Key of an export's `headsmith.json`: the head's absolute path or Hub id."""


def is_occupied(out_dir: str) -> bool:
    """Tell whether a path is a file, or a folder that is not empty."""
    path = Path(out_dir)
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def check_export(config: ExportRun) -> None:
    """Refuse to overwrite anything but the same export, and a missing head or vocabulary.

    Raises:
        InputError: names the setting and its allowed values.
    """
    if config.head.path is None:
        raise InputError("head.path is unset; type a folder with a trained head, or a Hub id")
    check_export_folder(Path(config.out_dir), config.format.value, name_head(config.head))
    words = config.tokenizer_gguf
    if words is not None and config.format is not ExportFormat.llamacpp:
        raise InputError(
            f"tokenizer_gguf={words}: format={config.format.value} has no place for it; leave "
            "tokenizer_gguf unset, or set format=llamacpp"
        )
    if words is not None and not Path(words).expanduser().is_file():
        raise InputError(f"tokenizer_gguf={words}: no such file; name a GGUF file")
    check_inputs(config)


def name_head(head: HeadRef) -> str:
    """Name a head for the record of its exports: its absolute path, or its Hub id."""
    local = find_local_path("head.path", str(head.path))
    return str(head.path) if local is None else str(local.absolute())


def check_export_folder(folder: Path, engine: str, head: str) -> None:
    """Refuse a folder that holds anything but an earlier export of the same head and format.

    Args:
        folder: folder to write.
        engine: format to write.
        head: `name_head` of the head.

    Raises:
        InputError: names what is found.
    """
    if not folder.is_dir():
        return
    there = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    if not there:
        return
    remedy = "name another out_dir, or move the folder away"
    made = load_json(folder / PROVENANCE) or {}
    record = made.get("export") or {}
    known = record.get("files", [])
    unknown = [name for p in there if (name := p.relative_to(folder).as_posix()) not in known]
    if unknown:
        raise InputError(
            f"out_dir={folder}: holds files that no export wrote there: {', '.join(unknown[:3])}"
            f"{', ...' if len(unknown) > 3 else ''}; {remedy}"
        )
    found = {"format": record.get("format"), "head": made.get(SOURCE)}
    if found != {"format": engine, "head": head}:
        raise InputError(
            f"out_dir={folder}: holds the export of head.path={found['head']} for "
            f"format={found['format']}, which stays; {remedy}"
        )


def check_mtp(config: MtpFilesRun) -> None:
    """Refuse to overwrite anything, and missing folders.

    Raises:
        InputError: names the setting and its allowed values.
    """
    stitches = config.action is MtpAction.stitch
    if config.target.path is None:
        raise InputError("target.path is unset; type the folder of a model")
    if stitches is (config.head.path is None):
        raise InputError(
            f"action={config.action.value}, head.path={config.head.path}: only stitch takes a "
            "head.path, and needs one; for check and extract leave it unset"
        )
    if stitches and not Path(config.target.path).is_dir():
        raise InputError(
            f"target.path={config.target.path}: stitch needs a folder; run hf download "
            f"{config.target.path} --local-dir DIR"
        )
    if config.action is not MtpAction.check and is_occupied(config.out_dir):
        raise InputError(f"out_dir={config.out_dir}: is not empty; choose another folder")
    check_target_files(config.target)
    check_head_files(config.head, None)


def check_prune(config: PruneRun) -> None:
    """Refuse a run without a head or sizes, missing data, and an earlier result.

    Raises:
        InputError: names the setting and its allowed values.
    """
    if config.head.path is None:
        raise InputError("head.path is unset; type a folder with a trained head, or a Hub id")
    if not config.sizes and not config.ranks:
        raise InputError(
            "sizes=[]: names nothing to do; type how many ids pruned heads draft, e.g. "
            "sizes=[8192,16384], or set ranks"
        )
    if is_occupied(config.out_dir):
        raise InputError(f"out_dir={config.out_dir}: is not an empty folder; choose another folder")
    check_inputs(config)


def check_merge(config: MergeAdapterRun) -> None:
    """Refuse a target without an adapter, a quantised target, and an `out_dir` with files.

    Raises:
        InputError: names the setting and its allowed values.
    """
    for name in ("path", "adapter"):
        if getattr(config.target, name) is None:
            raise InputError(f"target.{name} is unset; name a folder or Hub id to merge")
    if config.target.quantization is not Quantization.none:
        raise InputError(
            f"target.quantization={config.target.quantization.value}: merged weights are not "
            "quantised; leave target.quantization unset"
        )
    if is_occupied(config.out_dir):
        raise InputError(f"out_dir={config.out_dir}: is not empty; name another folder")
    check_inputs(config)


def check_relay(config: RelayRun) -> None:
    """Refuse to answer other machines without a token.

    Raises:
        InputError: the variable is unset, or its value cannot be sent.
    """
    from data.servers.http_client import RELAY_TOKEN_VARIABLE, find_relay_token

    if find_relay_token() is None and not is_loopback(config.host):
        raise InputError(
            f"host={config.host}: other machines can reach it, so a token is needed; run export "
            f"{RELAY_TOKEN_VARIABLE}=$(openssl rand -hex 32) here, and set the same value where "
            "trainers run"
        )


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address or name."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def check_push(config: PushRun) -> None:
    """Refuse an invalid Hub name, a head that is no folder, and an `out_dir` that is not empty.

    Raises:
        InputError: names the setting and its allowed values.
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
    base = config.base_model
    if base is not None:
        repo_id = (split_gguf_path(base) or (base, ""))[0]
        if repo_id.count("/") != 1 or not HUB_ID.fullmatch(repo_id):
            raise InputError(
                f"base_model={base}: must be the target's Hub id, owner/name; a local folder means "
                "nothing to others"
            )
    if config.dry_run and is_occupied(config.out_dir):
        raise InputError(
            f"out_dir={config.out_dir}: is not an empty folder; choose another folder or empty it"
        )
    if config.measured is not None and not Path(config.measured).is_dir():
        raise InputError(
            f"measured={config.measured}: no such folder; name a folder with acceptance.json or "
            "speedup.json"
        )
    for folder in config.comparisons:
        if not (Path(folder) / "comparison.md").is_file():
            raise InputError(
                f"comparisons={folder}: has no comparison.md; name a folder that "
                "scripts/compare.py wrote"
            )
    if config.head.path is None:
        raise InputError("head.path is unset; name the folder of a trained head")
    if config.head.layers is not None:
        raise InputError(
            f"head.layers={config.head.layers}: a head is published unchanged; leave head.layers "
            "unset, and correct eagle_aux_hidden_state_layer_ids in the head's config.json"
        )
    if not Path(config.head.path).expanduser().is_dir():
        raise InputError(
            f"head.path={config.head.path}: no such folder; name a trained head (training writes "
            "out_dir/head)"
        )
    check_head_files(config.head, None)
