"""A trained head with its draft shapes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from conf.errors import InputError
from conf.files import find_local_path, load_json
from conf.settings.drafting import HeadRef
from conf.settings.measure import MeasureRun
from eval.measure.results import write_files
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import Sampling
from heads.decoding.tree import DraftShape, DynamicShape, Tree
from heads.draft_head import DraftHead, check_depth
from heads.folders import locate_head
from heads.kinds import load_head

SHAPE_FILE = "draft_tree.json"
"""File beside the weights of a head: the best tree, from `eval/tree_search.py`."""


@dataclass(frozen=True)
class MeasuredHead:
    """A head that is attached to its target.

    Attributes:
        path: folder or Hub id of the head.
        draft_head: the head itself.
        tree: static tree, or shape of dynamic trees.
        chain: chain of one candidate per depth.
        tree_data_sha256: checksum of the data of the tree search; None without a search.
    """

    path: str
    draft_head: DraftHead
    tree: DraftShape
    chain: Tree
    tree_data_sha256: str | None = None

    def make_drafter(self, shape: str, sampling: Sampling, seeds: list[int]) -> Drafter:
        """Make a new drafter, `chain` or `tree`, for texts with these seeds."""
        chosen = self.tree if shape == "tree" else self.chain
        return self.draft_head.make_drafter(chosen, sampling, seeds)

    def describe_tree(self) -> list[int] | dict[str, int]:
        """Describe the tree for a results file: parents of a static tree, or limits."""
        return list(self.tree.parents) if isinstance(self.tree, Tree) else asdict(self.tree)


def load_measured_head(run: MeasureRun, ref: HeadRef) -> MeasuredHead:
    """Load a head and choose its shapes; `attach` follows once there is a target.

    Raises:
        InputError: there is no head, the head cannot draft the shapes that are asked, or the file
            of its shape is not JSON.
    """
    assert ref.path is not None
    head = load_head(ref.path, ref.revision, ref.layers)
    stored = load_json(locate_head(ref.path, ref.revision) / SHAPE_FILE) or {}
    if stored.get("device") != get_device_name():
        stored = {}
    check_depth(run.depth, head.max_draft_tokens)
    check_depth(run.dynamic_tree.depth, head.max_draft_tokens, "dynamic_tree.depth")
    usual = head.make_default_shape()
    if isinstance(usual, DynamicShape):
        if run.tree is not None:
            raise InputError(
                f"tree: {head.name_with_article} drafts dynamic trees; leave tree unset, and set "
                "dynamic_tree.*"
            )
        limits = asdict(usual) | stored.get("dynamic_tree", {})
        chosen = {name: getattr(run.dynamic_tree, name) or limits[name] for name in limits}
        shape: DraftShape = DynamicShape(**chosen)
    else:
        paths, most = run.tree or stored.get("tree"), head.max_draft_tokens
        shape = usual if paths is None else Tree.from_paths(paths)
        if not 0 < shape.depth <= (most or shape.depth):
            raise InputError(
                f"tree: has depth {shape.depth}, but this head allows depths 1..{most}; lower it"
            )
    chain = Tree.make_chain(run.depth or head.default_depth)
    searched_on = None if run.tree else stored.get("data")
    return MeasuredHead(ref.path, head, shape, chain, searched_on)


def store_shape(head: MeasuredHead, content: dict[str, Any], out_dir: Path) -> Path:
    """Write SHAPE_FILE beside a head, or into `out_dir` if the head is on the Hub.

    Raises:
        InputError: the file cannot be written.
    """
    path = (find_local_path("head.path", head.path) or out_dir) / SHAPE_FILE
    return write_files({path: json.dumps(content) + "\n"}, f"head.path={head.path}")[0]


def get_device_name() -> str:
    """Return the name of the device that figures are measured on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
