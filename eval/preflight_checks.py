"""Checks of settings before heavy imports and work."""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.command.environment import check_device_map
from conf.command.help_pages import check_setting_exists
from conf.errors import InputError
from conf.files import (
    LOCK_NAME,
    check_out_dir,
    find_local_path,
    find_lock_owner,
    load_json,
    make_lock_error,
    split_gguf_path,
)
from conf.settings.data import RowsConfig
from conf.settings.drafting import HeadRef
from conf.settings.measure import AcceptanceRun, MeasureRun, SpeedupRun
from conf.settings.target import TargetConfig
from conf.settings.training import TrainRun
from data.embedded import is_embedded
from data.rows.data_files import check_data_paths
from heads.folders import PROVENANCE, check_head_files, check_target_files

VANILLA = "vanilla"
BASELINES = (VANILLA, "generate")
"""Methods without drafting. Both always run, and speed-ups are over the faster one."""
METHODS = {
    VANILLA: "the engine without drafts",
    "generate": "transformers' generate",
    "generate_lookup": "generate with prompt_lookup_num_tokens; batch_size=1, no recurrent target",
    "generate_assisted": "generate with assistant_model=draft.path; as generate_lookup",
    "draft_chain": "draft.path",
    "draft_tree": "draft.path with the target's tokenizer",
    "prompt_lookup": "nothing",
    "ngram": "nothing",
    "suffix": "nothing",
    "recycling": "nothing",
    "lookahead": "nothing",
    "early_exit": "a target whose layers all have keys of their own",
    "skip_layers": "as early_exit; prompts beyond data.num_prompts for its search, or "
    "self_draft.skip",
}
"""Methods without a head, with a description or their needs."""
OF_HEADS = ("chain", "tree", "suffix", "typical")
"""Ways of a head to draft, after the kind of head, as in `medusa_tree`."""
CONDITIONS_FILE = "conditions.json"
CHANGEABLE = (
    *("data", "num_turns", "max_new_tokens", "seed"),
    *("mode", "temperature", "top_p", "top_k", "min_p"),
)
"""Settings and groups of settings that a condition may change."""


def check_inputs(run: Any) -> None:
    """Refuse a target, data or heads that do not exist or do not belong together.

    Raises:
        InputError: naming the setting.
    """
    data, target = getattr(run, "data", None), getattr(run, "target", None)
    if data is not None:
        check_data_paths(data)
    if target is not None and getattr(data, "features", None) is None:
        check_device_map(target.device_map, os.environ)
        check_target_files(target)
    if (head := getattr(run, "head", None)) is not None:
        check_head_files(head, target)
    if isinstance(run, SpeedupRun):
        for path in run.heads:
            check_head_files(HeadRef(path), target, "heads")
        check_head_files(run.draft, None, "draft.path")
    if data is not None and target is not None:
        check_own_data(target, data)
    check_out_dir(run.out_dir)


def check_own_data(target: TargetConfig, data: RowsConfig, section: str = "data") -> None:
    """Refuse the data of the embedded default for another target, unless their path is typed.

    Args:
        target: target of the command.
        data: data settings.
        section: section of these settings in the command.

    Raises:
        InputError: the message names both settings.
    """
    unset = data.path is None and data.features is None
    if unset and target.path is not None and not is_embedded(target.path):
        raise InputError(
            f"{section}.path is unset: target.path={target.path} is a target of your own, and the "
            f"embedded data are about other things; type {section}.path=FILE, texts of your users"
        )


def check_measurement(run: MeasureRun, result: str) -> None:
    """Refuse a measurement without a head, or over an earlier one.

    Args:
        run: settings of the command.
        result: name of the file to write.

    Raises:
        InputError: before anything is made.
    """
    if run.head.path is None and run.needs_head:
        raise InputError(
            "head.path is unset: this command needs a head; type a folder with a trained head, or "
            "a Hub id"
        )
    if (Path(run.out_dir) / result).exists():
        raise InputError(f"out_dir={run.out_dir}: already holds {result}; choose another folder")
    adopt_head_target(run)
    check_inputs(run)


def adopt_head_target(run: MeasureRun) -> str | None:
    """Take the target that a head's record names, if `target.path` is unset.

    Effects: sets `target.path`, and the revision and the adapter of the record.

    Returns:
        A line that says so; None if nothing was taken. The embedded target is nobody's record.
    """
    if run.target.path is not None or run.head.path is None or split_gguf_path(run.head.path):
        return None
    folder = find_local_path("head.path", run.head.path)
    record = load_json(folder / PROVENANCE) if folder is not None else None
    identity = (record or {}).get("target_identity") or {}
    name = identity.get("name")
    if name is None or is_embedded(name):
        return None
    run.target.path = name
    run.target.revision = run.target.revision or identity.get("revision")
    if identity.get("adapter_weights") is not None:  # otherwise a server's name of an adapter
        run.target.adapter = run.target.adapter or identity.get("adapter")
    return f"target.path={name}: from {PROVENANCE} of {run.head.path}, as target.path is unset"


def check_training(config: TrainRun) -> None:
    """Refuse a used `out_dir`, missing inputs, and a stream without a number of steps.

    Raises:
        InputError: naming the setting, or the process that trains there.
    """
    lock = Path(config.out_dir) / LOCK_NAME
    owner = find_lock_owner(lock)
    if owner is not None and owner.is_alive():
        raise make_lock_error(lock, owner)
    check_run_folder(Path(config.out_dir), config.train.resume)
    check_inputs(config)
    path = config.data.path
    is_stream = config.data.streaming and path and not find_local_path("data.path", path)
    if is_stream and config.train.max_steps is None:
        raise InputError(
            "data.streaming=true: a stream tells its length only where it ends, so "
            "train.num_epochs gives no number of steps; type train.max_steps=N, optimizer "
            f"steps of {config.train.batch_size} packed sequences (train.batch_size)"
        )


def check_run_folder(out_dir: Path, resume: str | None) -> None:
    """Refuse to write over another run.

    Raises:
        InputError: `out_dir` is a file, or is not empty and nothing is resumed.
    """
    if out_dir.exists() and not out_dir.is_dir():
        raise InputError(f"out_dir={out_dir}: is a file; name a folder")
    taken = out_dir.is_dir() and any(path.name != LOCK_NAME for path in out_dir.iterdir())
    inside = resume == "auto" or (
        resume is not None and Path(resume).resolve().is_relative_to(out_dir.resolve())
    )
    if taken and not inside:
        raise InputError(
            f"out_dir={out_dir}: is not empty; name another folder, or continue its run with "
            "train.resume=auto"
        )
    if resume not in (None, "auto") and not Path(str(resume)).is_dir():
        raise InputError(
            f"train.resume={resume}: no such folder; type auto or the folder of a checkpoint"
        )


def check_methods(names: Sequence[str], before_imports: bool = False) -> None:
    """Refuse unknown names of methods.

    Args:
        names: names of the settings.
        before_imports: whether to refuse only names that are no method of any head, before heavy
            imports.

    Raises:
        InputError: naming the methods.
    """
    known, ends, of_heads = ["all", *METHODS], tuple(f"_{way}" for way in OF_HEADS), ""
    if before_imports:
        of_heads = f", and for a head its kind with {', '.join(OF_HEADS)}, e.g. medusa_tree"
    else:
        known, ends = ["all", *list_methods()], ()
    stems = {name: strip_head_number(name) for name in names}
    unknown = [n for n, stem in stems.items() if stem not in known and not stem.endswith(ends)]
    if unknown:
        raise InputError(
            f"methods={sorted(unknown)}: unknown; allowed: {', '.join(known)}{of_heads}"
        )


def list_methods() -> dict[str, str]:
    """List every method by name, with a description or its needs.

    With several heads of a kind, later ones are called `eagle_tree_2` and so on, in the order of
    `head.path` and `heads`.
    """
    from heads.kinds import HEADS  # imports torch, for which a refused name does not wait

    of_heads: dict[str, str] = {}
    for name, kind in HEADS.items():
        of_heads |= {f"{name}_{way}": kind.name_with_article for way in ("chain", "tree", "suffix")}
        if kind.has_static_tree:
            of_heads[f"{name}_typical"] = f"{kind.name_with_article}; temperature above 0; lossy"
    return METHODS | of_heads


def strip_head_number(name: str) -> str:
    """Strip the number from the name of a further head's method."""
    stem, _, number = name.rpartition("_")
    return stem if number.isdigit() else name


def build_condition_runs(config: AcceptanceRun) -> dict[str, AcceptanceRun]:
    """Build the settings of each condition.

    Args:
        config: the settings, with `conditions`.

    Returns:
        Copies of the settings by condition, each with its own folder below `out_dir`.

    Raises:
        InputError: a condition is not a list of settings, changes target or head, or stands twice.
    """
    runs: dict[str, AcceptanceRun] = {}
    for condition in config.conditions:
        name = " ".join(condition.split())
        if name in runs:
            raise InputError(f"conditions: {name!r} stands twice; remove one")
        words = shlex.split(name)
        for word in words:
            key, separator, _ = word.partition("=")
            if not separator:
                raise InputError(
                    f"conditions: {name!r}: {word!r} sets nothing; a condition is settings such as "
                    "'mode=decode temperature=1'"
                )
            check_setting_exists(AcceptanceRun, key)
            if key.partition(".")[0] not in CHANGEABLE:
                raise InputError(
                    f"conditions: {name!r}: {key} is not a condition; allowed: "
                    f"{', '.join(CHANGEABLE)}; measure another target or head by a command of "
                    "its own"
                )
        folder = re.sub(r"[^\w.=,-]+", "_", name) or "as_given"
        try:
            settings = OmegaConf.structured(config)
            settings.merge_with_dotlist(words)
            settings.out_dir, settings.conditions = str(Path(config.out_dir) / folder), []
            changed = OmegaConf.to_object(settings)
        except OmegaConfBaseException as error:
            raise InputError(f"conditions: {name!r}: {str(error).splitlines()[0]}") from error
        except InputError as error:
            raise InputError(f"conditions: {name!r}: {error}") from None
        assert isinstance(changed, AcceptanceRun)
        runs[name] = changed
    return runs
