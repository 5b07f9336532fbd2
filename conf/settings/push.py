"""Settings of `scripts/push.py`."""

from dataclasses import dataclass, field
from enum import Enum

from conf.settings.head import HeadRef


class Layout(Enum):
    """Where a head's exports go on the Hub."""

    one = "one"
    """In subfolders of the head's repository, named after their formats."""
    each = "each"
    """In repositories of their own, `{repo_id}-{format}`."""


@dataclass
class PushRun:
    """`scripts/push.py`."""

    head: HeadRef = field(default_factory=HeadRef)
    repo_id: str = "???"
    """`user/name` on the Hub."""
    exports: list[str] = field(default_factory=list)
    """Folders that `scripts/export.py` wrote of this head, pushed with it."""
    layout: Layout = Layout.one
    private: bool = True
    """Make the repository private, if it is made."""
    publish_private_target: bool = False
    """Push a head with `private=false` although its target is a private repository."""
    dry_run: bool = False
    """Write what would be uploaded to `out_dir` and stop."""
    license: str | None = None
    """SPDX id for the model card."""
    measured: str | None = None
    """Folder with `acceptance.json` / `speedup.json` to quote; unset looks beside the head."""
    out_dir: str = "outputs/push"
    """Folder for what would be uploaded."""
