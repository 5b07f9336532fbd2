"""The Hub: its terms of a repository, and the upload of folders."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, errors
from huggingface_hub.utils import filter_repo_objects

from conf.command.run_record import to_json
from conf.errors import InputError
from heads.folders import PROVENANCE

# Files of an earlier head in a head's repository; exports are recognised by their own
# `headsmith.json`.
OF_A_HEAD = ["*.safetensors", "*.gguf", "*.safetensors.index.json", "*.png", "draft_*.json"]
# Storage has signed links; whoever has one may write there for a while.
SIGNED = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]+")
RESUME = (
    "nothing of it is visible yet. Run the same command again; uploaded files are not sent twice"
)


@dataclass(frozen=True)
class Terms:
    """Hold the terms of a repository, as the Hub tells them.

    Attributes:
        name: id of the repository.
        private: whether only some users may see the repository.
        gated: whether users must agree to terms before they download.
        license: SPDX id, or the name of another licence; None if none is named.
    """

    name: str
    private: bool
    gated: bool
    license: str | None


def fetch_terms(name: str) -> Terms | str:
    """Ask the Hub for the terms of a repository, as the user whose token is set.

    Args:
        name: Hub id.

    Returns:
        The terms, or why they are unknown.
    """
    api = HfApi()
    try:
        info = api.model_info(name, expand=["private", "gated", "cardData"])
    except errors.RepositoryNotFoundError:
        return f"{api.endpoint} does not show it to you; it is private to others, or deleted"
    except errors.HfHubHTTPError as error:
        return f"{api.endpoint} answered HTTP {error.response.status_code}"
    except errors.OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set, so the Hub was not asked"
    except errors.HTTPError as error:
        return f"cannot reach {api.endpoint}: {format_hub_error(error)}"
    card: dict[str, Any] = info.card_data.to_dict() if info.card_data else {}
    license_id = card.get("license")
    if license_id == "other":
        license_id = card.get("license_name") or "other"
    return Terms(name, bool(info.private), bool(info.gated), license_id)


def format_link(repo_id: str) -> str:
    """Format the address of a repository's page."""
    return f"{HfApi().endpoint}/{repo_id}"


def upload_repositories(folders: dict[str, Path], private: bool) -> list[str]:
    """Upload each folder to its repository, in one commit each.

    `HfApi.upload_folder` and `upload_large_folder` commit in batches if Xet is installed, and users
    who download in between get half a head. After an interruption the Hub keeps what was uploaded,
    and the client asks before it sends a file (with Xet, a chunk) again.

    Args:
        folders: folders by Hub id, `user/name`.
        private: visibility of new repositories; True refuses an existing public one.

    Returns:
        URLs of the repositories.

    Raises:
        InputError: no right to write there, the Hub is unreachable, or the upload stopped.
    """
    api = HfApi()
    urls = []
    for repo_id in folders:  # before the first upload, as a missing right to one must stop all
        with _translate_hub_errors(repo_id, api.endpoint):
            urls.append(str(api.create_repo(repo_id, private=private, exist_ok=True)))
            if private and not api.repo_info(repo_id).private:
                raise InputError(
                    f"repo_id={repo_id}: exists and is public; set private=false to publish there"
                )
    for repo_id, folder in folders.items():
        files = {path.relative_to(folder).as_posix(): path for path in list_files(folder)}
        with _translate_hub_errors(repo_id, api.endpoint):
            stale = _find_stale_files(api.list_repo_files(repo_id), files)
            api.create_commit(
                repo_id,
                [
                    *(CommitOperationDelete(name) for name in stale),
                    *(CommitOperationAdd(name, path) for name, path in files.items()),
                ],
                commit_message="Upload draft head",
            )
    return urls


def _find_stale_files(there: list[str], files: dict[str, Path]) -> list[str]:
    """Find the files of an earlier head, which must not mix with this head's."""
    exports = {name.parent for name in map(PurePosixPath, there) if name.name == PROVENANCE}
    exports.discard(PurePosixPath())
    stale = set(filter_repo_objects(there, allow_patterns=OF_A_HEAD))
    stale |= {name for name in there if exports & set(PurePosixPath(name).parents)}
    return sorted(stale - files.keys())


def list_files(folder: Path) -> list[Path]:
    """List every file in a folder and its subfolders, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def format_hub_error(error: BaseException) -> str:
    """Format an error and its cause on one line, without keys."""
    cause = f" {error.__cause__}" if error.__cause__ else ""
    return " ".join(str(to_json(SIGNED.sub(r"\1", f"{error}{cause}"))).split())


@contextmanager
def _translate_hub_errors(repo_id: str, endpoint: str) -> Iterator[None]:
    """Turn the client's errors into messages for the user."""
    try:
        yield
    except InputError:
        raise
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        problem = f"{endpoint} answered HTTP {status}: {format_hub_error(error)}; {RESUME}"
        if status == 401:
            problem = f"not logged in to {endpoint}: run `hf auth login` or set HF_TOKEN"
        elif status == 403:
            problem = (
                f"this token may not write there (HTTP 403): {format_hub_error(error)}; set "
                "HF_TOKEN to one that may"
            )
        raise InputError(f"repo_id={repo_id}: {problem}") from error
    except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
        raise InputError(f"cannot reach {endpoint}: {format_hub_error(error)}; {RESUME}") from error
    except ValueError as error:
        raise InputError(f"repo_id={repo_id}: {format_hub_error(error)}") from error
    except (RuntimeError, OSError) as error:  # the client's errors about a file's transfer
        raise InputError(f"repo_id={repo_id}: {format_hub_error(error)}; {RESUME}") from error
