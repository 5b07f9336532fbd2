"""A target's passes over drafts as compiled regions: its layers, masks and cache together.

Outside stay the output head, whose product alone has nothing to fuse, and what a drafter does.

Letters: B texts, n new tokens, the last of P pending ones.
"""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heads.decoding.buffers import move
from heads.decoding.cache import TreeCache
from heads.target_model.attention import under_way_traced, without_masks
from heads.target_model.extension import Extension

if TYPE_CHECKING:
    from heads.target_model.model import Taps, Target, TargetOutput

MOST_GRAPHS = 64  # of one target


class CompiledPasses:
    """What `Target.compile` makes.

    Args:
        target: the target.
        capacity: slots of its caches on a GPU, where all of them are read, so that shapes stay
            the same. On a CPU caches grow, as code for any shape is no slower there, and fewer
            slots are.
        backend: of torch.compile.
    """

    def __init__(self, target: "Target", capacity: int, backend: str) -> None:
        self.target, self.device = target, target.device
        self.capacity = capacity if self.device.type == "cuda" else None
        # What they keep is made anew where it is traced, which is right.
        warnings.filterwarnings("ignore", "Dynamo detected a call to a .functools.lru_cache")
        # Every set of layers that heads read is a graph; on a GPU every shape is one.
        limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
        torch._dynamo.config.recompile_limit = limit
        self._run: Any = torch.compile(self._pass, dynamic=self.capacity is None, backend=backend)
        self._move: Any = torch.compile(move, dynamic=True, backend=backend)

    def new_cache(self, num_texts: int, num_layers: int) -> TreeCache:
        """See `Target.new_cache`."""
        return TreeCache(num_texts, self.device, num_layers, self.capacity, mover=self._move)

    def extend(
        self, cache: TreeCache, input_ids: Tensor, draft: tuple[Tensor, Tensor], taps: "Taps"
    ) -> "TargetOutput":
        """`Target.extend` by draft tokens: `draft` is their mask and their depths."""
        for index in taps.layers:
            # Before a pass is traced, which no later hook becomes part of.
            self.target.keep_state(index)
        width = cache.slots.width(draft[0].shape[2])
        cache.reserve(width)
        with without_masks(None if self.target.needs_masks else self.target.decoder.config):
            output: TargetOutput = self._run(cache, input_ids, draft, taps, self.capacity or width)
        return output

    def _pass(
        self,
        cache: TreeCache,
        input_ids: Tensor,
        draft: tuple[Tensor, Tensor],
        taps: "Taps",
        width: int,
    ) -> "TargetOutput":
        """What is compiled; arguments that are no tensors are constants of a graph."""
        num_new, target = input_ids.shape[1], self.target
        cache.begin_traced(num_new, draft[0].shape[2], width)
        found = Extension(
            target.decoder.config, cache, num_new, draft, target.attention_pattern.chunks
        )
        with under_way_traced(found):
            return target.behind(found, input_ids, taps)
