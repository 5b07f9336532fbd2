"""A trained head with the shapes that it drafts."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from conf.schema import HeadRef, InputError
from conf.schema_measure import MeasureRun
from heads.drafting import Drafter
from heads.eagle.drafter import DynamicShape, EagleChain, EagleTree
from heads.eagle.head import EagleHead
from heads.kinds import Head, load_head
from heads.medusa.drafter import MedusaDrafter
from heads.sampling import Sampling
from heads.storage import locate
from heads.target.model import Target
from heads.tree import Tree, default_tree

EAGLE_DEPTH = 5
EAGLE_LONGEST = 8
SHAPE_FILE = "draft_tree.json"
"""What `eval/tree_search.py` found best for a head, beside its weights."""


@dataclass(frozen=True)
class BenchHead:
    """A head, attached to its target.

    Attributes:
        path: folder or Hub id that it came from.
        head: the head.
        tree: Medusa's static tree, or the shape of EAGLE's dynamic ones.
        chain: one candidate per depth.
    """

    path: str
    head: Head
    tree: Tree | DynamicShape
    chain: Tree

    @property
    def family(self) -> str:
        """What the head's methods are named after."""
        return "eagle" if isinstance(self.head, EagleHead) else "medusa"

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
        return EAGLE_LONGEST if isinstance(self.head, EagleHead) else self.head.num_heads

    def drafter(self, kind: str, sampling: Sampling, seeds: list[int]) -> Drafter:
        """A fresh drafter, `chain` or `tree`, for texts with these seeds."""
        if isinstance(self.head, EagleHead):
            if isinstance(self.tree, DynamicShape) and kind == "tree":
                return EagleTree(self.head, self.tree)
            return EagleChain(self.head, self.chain.depth, sampling, drafter_seeds(seeds))
        assert isinstance(self.tree, Tree)
        return MedusaDrafter(self.head, self.tree if kind == "tree" else self.chain)

    def described(self) -> list[int] | dict[str, int]:
        """The tree, for a results file: parents of a static one, limits of a dynamic one."""
        return list(self.tree.parents) if isinstance(self.tree, Tree) else asdict(self.tree)


def drafter_seeds(seeds: list[int]) -> list[int]:
    """Seeds of a drafter's own draws, which must not follow what the target draws."""
    return [seed + (1 << 32) for seed in seeds]


def open_head(run: MeasureRun, ref: HeadRef) -> BenchHead:
    """Loads a head and settles its shapes; `attach` comes when there is a target.

    Raises:
        InputError: nothing there, or shapes that the head cannot draft.
    """
    assert ref.path is not None
    head = load_head(ref.path, ref.revision, ref.layers)
    stored = stored_shape(ref)
    if isinstance(head, EagleHead):
        if run.tree is not None:
            raise InputError("tree: an EAGLE head drafts dynamic trees; set dynamic_tree.*")
        chain = Tree.chain(run.depth or EAGLE_DEPTH)
        return BenchHead(ref.path, head, _dynamic_shape(run, stored), chain)
    depth = run.depth or head.num_heads
    if depth > head.num_heads:
        raise InputError(f"depth={depth}: this head drafts at most {head.num_heads} tokens")
    paths = run.tree or stored.get("tree")
    tree = usual_tree(head.num_heads) if paths is None else Tree.from_paths(paths)
    if not 0 < tree.depth <= head.num_heads:
        raise InputError(f"tree: depth {tree.depth}, this head has depths 1..{head.num_heads}")
    return BenchHead(ref.path, head, tree, Tree.chain(depth))


def attach(bench_head: BenchHead, target: Target) -> None:
    """Puts a head on its target, in the target's dtype."""
    bench_head.head.attach(target, target.dtype).eval()


def stored_shape(ref: HeadRef) -> dict[str, Any]:
    """The contents of SHAPE_FILE if it was written on such a machine, or nothing.

    Raises:
        InputError: it is not JSON.
    """
    assert ref.path is not None
    path = locate(ref.path, ref.revision) / SHAPE_FILE
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); delete it") from None
    return stored if stored.get("device") == device_name() else {}


def device_name() -> str:
    """What figures are measured on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def usual_tree(depth: int, gpu: bool | None = None) -> Tree:
    """A static tree for drafts nobody has measured; nodes cost time on CPU, hardly any on CUDA.

    Args:
        depth: of the deepest node.
        gpu: what it is for; this machine unless told.
    """
    return default_tree(depth, 32 if _is_gpu(gpu) else 8)


def usual_shape(gpu: bool | None = None) -> DynamicShape:
    """EAGLE-2's settings on CUDA, and some that a CPU can afford; `gpu` as in `usual_tree`."""
    return DynamicShape(8, 10, 59) if _is_gpu(gpu) else DynamicShape(5, 4, 8)


def _is_gpu(gpu: bool | None) -> bool:
    return torch.cuda.is_available() if gpu is None else gpu


def _dynamic_shape(run: MeasureRun, stored: dict[str, Any]) -> DynamicShape:
    usual = asdict(usual_shape()) | stored.get("dynamic_tree", {})
    chosen = {name: getattr(run.dynamic_tree, name) for name in usual}
    return DynamicShape(**{name: chosen[name] or usual[name] for name in usual})
