"""A trained head with the shapes that it drafts."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from conf.errors import InputError
from conf.files import here, write_whole
from conf.settings.drafting import HeadRef
from conf.settings.measure import MeasureRun
from heads.decoding.chains import Calibration
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import Sampling
from heads.decoding.tree import DynamicShape, Shape, Tree
from heads.head import DraftHead, check_depth
from heads.kinds import load_head, name_of
from heads.storage import locate

SHAPE_FILE = "draft_tree.json"
"""Beside the weights of a head: the best tree, by `eval/tree_search.py`."""
CONFIDENCE_FILE = "draft_confidence.json"
"""The same for its calibration, by `eval/calibrate.py`."""


@dataclass(frozen=True)
class BenchHead:
    """A head, attached to its target.

    Attributes:
        path: folder or Hub id that it came from.
        head: the head.
        tree: a static tree, or the shape of dynamic ones.
        chain: one candidate per depth.
        searched_on: checksum of the data on which the tree was searched for; None if it was not.
        calibration: to cut the chain by; None if nobody has calibrated it that deep here.
        calibrated_on: checksum of the data of the calibration.
    """

    path: str
    head: DraftHead
    tree: Shape
    chain: Tree
    searched_on: str | None = None
    calibration: Calibration | None = None
    calibrated_on: str | None = None

    @property
    def family(self) -> str:
        """The name of the head's kind, in the names of its methods."""
        return name_of(self.head)

    @property
    def tree_name(self) -> str:
        """The key of the tree's figures."""
        return "static_tree" if isinstance(self.tree, Tree) else "dynamic_tree"

    @property
    def depth(self) -> int:
        """Draft tokens of the longest path, over both shapes."""
        return max(self.tree.depth, self.chain.depth)

    @property
    def longest(self) -> int:
        """Draft tokens of the longest chain worth a look."""
        return self.head.longest

    def drafter(self, shape: str, sampling: Sampling, seeds: list[int]) -> Drafter:
        """A fresh drafter, `chain`, `cut` or `tree`, for texts with these seeds."""
        if shape == "cut":
            assert self.calibration is not None
            return self.head.drafter(self.chain, sampling, seeds, self.calibration)
        chosen = self.tree if shape == "tree" else self.chain
        return self.head.drafter(chosen, sampling, seeds)

    def described(self) -> list[int] | dict[str, int]:
        """The tree, for a results file: parents of a static one, limits of a dynamic one."""
        return list(self.tree.parents) if isinstance(self.tree, Tree) else asdict(self.tree)


def open_head(run: MeasureRun, ref: HeadRef) -> BenchHead:
    """Loads a head and settles its shapes; `attach` comes when there is a target.

    Raises:
        InputError: nothing there, or shapes that the head cannot draft.
    """
    assert ref.path is not None
    head = load_head(ref.path, ref.revision, ref.layers)
    stored = _stored(ref, SHAPE_FILE)
    check_depth(run.depth, head.most_tokens)
    check_depth(run.dynamic_tree.depth, head.most_tokens, "dynamic_tree.depth")
    usual = head.usual_shape()
    if isinstance(usual, DynamicShape):
        if run.tree is not None:
            raise InputError(f"tree: {head.phrase} drafts dynamic trees; set dynamic_tree.*")
        limits = asdict(usual) | stored.get("dynamic_tree", {})
        chosen = {name: getattr(run.dynamic_tree, name) or limits[name] for name in limits}
        shape: Shape = DynamicShape(**chosen)
    else:
        paths, most = run.tree or stored.get("tree"), head.most_tokens
        shape = usual if paths is None else Tree.from_paths(paths)
        if not 0 < shape.depth <= (most or shape.depth):
            raise InputError(f"tree: depth {shape.depth}, this head has depths 1..{most}")
    chain = Tree.chain(run.depth or head.usual_depth)
    calibration = _calibration(ref, chain.depth)
    searched_on = None if run.tree else stored.get("data")
    return BenchHead(ref.path, head, shape, chain, searched_on, *calibration)


def _stored(ref: HeadRef, name: str) -> dict[str, Any]:
    """The contents of a file beside a head if it was written on such a machine, or nothing.

    Raises:
        InputError: it is not JSON.
    """
    assert ref.path is not None
    path = locate(ref.path, ref.revision) / name
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); delete it") from None
    return stored if stored.get("device") == device_name() else {}


def _calibration(ref: HeadRef, depth: int) -> tuple[Calibration | None, str | None]:
    """The stored calibration, if it is of chains as deep at least, and its data's checksum.

    Raises:
        InputError: it is not what `eval/calibrate.py` writes.
    """
    stored = _stored(ref, CONFIDENCE_FILE)
    if not stored:
        return None, None
    try:
        calibration = Calibration.of(stored)
    except ValueError as error:
        raise InputError(
            f"head.path={ref.path}: {CONFIDENCE_FILE}: {error}; delete it, or run "
            "eval/calibrate.py again"
        ) from None
    if len(calibration.temperatures) < depth:
        return None, None
    return calibration, stored.get("data")


def write_beside(head: BenchHead, name: str, content: dict[str, Any], out_dir: Path) -> Path:
    """Writes JSON beside a head, or into `out_dir` for one that lies on the Hub.

    Raises:
        InputError: it cannot be written.
    """
    path = (here("head.path", head.path) or out_dir) / name
    try:
        write_whole(path, json.dumps(content) + "\n")
    except OSError as error:
        raise InputError(f"head.path={head.path}: cannot write {path}: {error}") from error
    return path


def device_name() -> str:
    """The device that figures are measured on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
