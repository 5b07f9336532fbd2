"""Publishes a head on the Hub, with a card that says what was measured.

python scripts/push.py head.path=outputs/medusa/head repo_id=me/my-model-medusa dry_run=true
"""

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id

from conf.entry import run
from conf.schema import InputError, PushRun
from heads.load import load_head
from heads.medusa import MedusaHead
from scripts.model_card import CardFacts, head_facts, is_hub_id, model_card

PROVENANCE_NAME = "headsmith.json"
FIGURES = ("acceptance.png", "speedup.png")
# Nothing else of a folder is a head's own; optimizer states, logs and data stay at home.
OWN_FILES = ("config.json", PROVENANCE_NAME)
OWN_SUFFIXES = (".safetensors", ".safetensors.index.json")
NOT_WEIGHTS = ("optimizer", "scheduler", "random_states", "sampler")

LOCAL_PATH = re.compile(
    r"""(?:(?:file:/*|(?<![\w./:-])~?)/|(?<!\w)[A-Za-z]:[/\\])   # where an absolute path starts
        (?:[^\s,;:'"\[\](){}=/\\]+[/\\]+)*                      # its folders
        ([^\s,;:'"\[\](){}=/\\]+)                               # its last name
    """,
    re.VERBOSE,
)


def main(config: PushRun) -> None:
    """Stages, then writes to `out_dir` (dry run) or uploads in one commit."""
    _check(config)
    folder = _head_folder(config)
    with tempfile.TemporaryDirectory(prefix="headsmith-push-") as name:
        staged = Path(name) / "head"
        _stage(config, folder, staged)
        _show(staged)
        if config.dry_run:
            _write_out(staged, Path(config.out_dir))
            print(f"dry run: nothing uploaded; what would be is in {config.out_dir}")
        else:
            print(_upload(config, staged))


def scrubbed(value: Any) -> Any:
    """Leaves only the last name of every absolute local path in a JSON value."""
    if isinstance(value, dict):
        return {_scrubbed_text(str(key)): scrubbed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [scrubbed(item) for item in value]
    return _scrubbed_text(value) if isinstance(value, str) else value


def _scrubbed_text(text: str) -> str:
    # A text that is one path, or key=path, may hold spaces; inside prose a path ends at them.
    key, equals, path = text.rpartition("=")
    if not re.search(r"[\s=]", key) and "\n" not in path:
        if path.startswith(("/", "~")):
            return f"{key}{equals}{PurePosixPath(path).name}"
        if PureWindowsPath(path).drive:
            return f"{key}{equals}{PureWindowsPath(path).name}"
    return LOCAL_PATH.sub(r"\1", text)


def _check(config: PushRun) -> None:
    form = f"repo_id={config.repo_id}: must be user/name"
    if config.repo_id.count("/") != 1:
        raise InputError(form)
    try:
        validate_repo_id(config.repo_id)
    except HFValidationError as error:
        raise InputError(f"{form}: {error}") from error
    out_dir = Path(config.out_dir)
    if config.dry_run and out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise InputError(f"out_dir={out_dir}: is not an empty folder; choose another or empty it")
    if config.measured is not None and not Path(config.measured).is_dir():
        raise InputError(f"measured={config.measured}: no such folder")


def _head_folder(config: PushRun) -> Path:
    if config.head.path is None:
        raise InputError("head.path is not set: name the folder of a trained head")
    if config.head.layers is not None:
        raise InputError(
            f"head.layers={config.head.layers}: a head is published as it is; correct "
            "eagle_aux_hidden_state_layer_ids in its config.json"
        )
    folder = Path(config.head.path).expanduser()
    if not folder.is_dir():
        raise InputError(
            f"head.path={config.head.path}: no such folder (training writes out_dir/head)"
        )
    return folder


def _stage(config: PushRun, folder: Path, staged: Path) -> None:
    """Effects: fills `staged` with the head's own files, its figures and the card."""
    staged.mkdir()
    head = load_head(str(folder))
    provenance = _json(folder / PROVENANCE_NAME) or {}
    # Malformed rows are quoted there: somebody's data, of no use to the head's users.
    (provenance.get("data") or {}).pop("bad", None)
    contents = {"config.json": scrubbed(_json(folder / "config.json"))}
    if provenance:
        contents[PROVENANCE_NAME] = scrubbed(provenance)
    else:
        print(f"{folder}: no {PROVENANCE_NAME}, so the card cannot say how it was trained")
    left_out = []
    for path in sorted(folder.iterdir()):
        if not _is_own(path):
            left_out.append(path.name)
        elif path.name in contents:
            text = json.dumps(contents[path.name], indent=2) + "\n"
            (staged / path.name).write_text(text, encoding="utf-8")
        else:
            shutil.copyfile(path, staged / path.name)
    if left_out:
        print(f"not the head's own, left out: {', '.join(left_out)}")
    places = [Path(config.measured)] if config.measured else [folder, folder.resolve().parent]
    figures = [_find(places, name) for name in FIGURES]
    for figure in filter(None, figures):
        shutil.copyfile(figure, staged / figure.name)
    num_heads = head.num_heads if isinstance(head, MedusaHead) else None
    acceptance = scrubbed(_measurement(places, "acceptance", folder, num_heads))
    published = contents.get(PROVENANCE_NAME, {})
    facts = CardFacts(
        repo_id=config.repo_id,
        head=head_facts(head, published, acceptance),
        target=_target_name(provenance, head.config.target),
        provenance=published,
        license=config.license.lower() if config.license else None,
        acceptance=acceptance,
        speedup=scrubbed(_measurement(places, "speedup", folder, num_heads)),
        figures=[figure.name for figure in figures if figure],
    )
    (staged / "README.md").write_text(str(model_card(facts)), encoding="utf-8")


def _is_own(path: Path) -> bool:
    if not path.is_file() or path.name.startswith((".", *NOT_WEIGHTS)):
        return False
    return path.name in OWN_FILES or path.name.endswith(OWN_SUFFIXES)


def _target_name(provenance: dict[str, Any], target: str) -> str | None:
    """Returns the target as others can name it, or None for the embedded default."""
    settings = provenance.get("config", {}).get("target")
    if isinstance(settings, dict) and settings.get("path") is None:
        return None
    return target if is_hub_id(target) else Path(target).name


def _measurement(
    places: list[Path], name: str, folder: Path, num_heads: int | None
) -> dict[str, Any] | None:
    """Reads `acceptance.json` or `speedup.json`.

    Args:
        places: folders, the first that has the file counts.
        name: without its suffix.
        folder: of the head.
        num_heads: depths of a Medusa head; None for an EAGLE head, which drafts to any depth.

    Raises:
        InputError: it lacks what the card quotes, or measured another head.
    """
    path = _find(places, f"{name}.json")
    if path is None:
        looked = ", ".join(str(place) for place in places)
        print(f"no {name}.json in {looked}: the card will not quote it (eval/{name}.py writes it)")
        return None
    found = _json(path) or {}
    wanted = {
        "acceptance": ("tau", "alpha", "per_position", "by_category", "num_prompts", "mode"),
        "speedup": ("methods", "baseline", "lossless"),
    }[name]
    missing = [key for key in wanted if key not in found]
    if missing:
        raise InputError(f"{path}: no {', '.join(missing)}; measure again with eval/{name}.py")
    other = found.get("head")
    if isinstance(other, str) and Path(other).is_dir() and not Path(other).samefile(folder):
        raise InputError(f"{path}: measures another head, {other}; set measured=")
    if num_heads is not None and len(found.get("alpha", [])) > num_heads:
        raise InputError(
            f"{path}: measures {len(found['alpha'])} heads, and this one has {num_heads}"
        )
    return found


def _find(places: list[Path], name: str) -> Path | None:
    return next((place / name for place in places if (place / name).is_file()), None)


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a {type(content).__name__}, not an object")
    return content


def _show(staged: Path) -> None:
    for path in sorted(staged.iterdir()):
        print(f"  {path.name} ({path.stat().st_size:,} bytes)")


def _write_out(staged: Path, out_dir: Path) -> None:
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for path in sorted(staged.iterdir()):
            shutil.copyfile(path, out_dir / path.name)
    except OSError as error:
        raise InputError(f"out_dir={out_dir}: {error}") from error


def _upload(config: PushRun, staged: Path) -> str:
    """Returns the URL of the repository."""
    api = HfApi()
    try:
        url = api.create_repo(config.repo_id, private=config.private, exist_ok=True)
        if config.private and not api.repo_info(config.repo_id).private:
            raise InputError(
                f"repo_id={config.repo_id}: exists and is public; set private=false to publish "
                "there"
            )
        api.upload_folder(
            repo_id=config.repo_id,
            folder_path=staged,
            commit_message="Upload draft head",
            # Files of an earlier head must not mix with this one's; same names are kept.
            delete_patterns=["*.safetensors", "*.safetensors.index.json", "*.png"],
        )
    except HfHubHTTPError as error:
        raise InputError(_explained(error, config.repo_id, api.endpoint)) from error
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise InputError(f"cannot reach {api.endpoint}: {error}") from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"repo_id={config.repo_id}: {error}") from error
    return str(url)


def _explained(error: HfHubHTTPError, repo_id: str, endpoint: str) -> str:
    status = error.response.status_code
    if status == 401:
        return (
            f"repo_id={repo_id}: not logged in to {endpoint}: run `hf auth login` or set HF_TOKEN"
        )
    if status == 403:
        return f"repo_id={repo_id}: this token may not write there (HTTP 403): {error}"
    return f"repo_id={repo_id}: {endpoint} answered HTTP {status}: {error}"


if __name__ == "__main__":
    run(main, PushRun, "push")
