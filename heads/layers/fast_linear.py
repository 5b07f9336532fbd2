"""Linear layers that are faster for few rows: low-rank output heads, and packed weights on a CPU.

Logits are most of a draft's cost. In a low-rank output head, all logits come from the state's part
along the `rank` directions with the largest weight in the output head; the logits of the likeliest
ids are then computed exactly. Drafts are verified as usual, so texts stay the target's own.

A verify pass multiplies a few rows by every matrix of the target. Torch reorders each matrix for
every product, which takes longer than the product: float32 products of 5 rows take 2 to 3 times as
long as of one row. oneDNN with packed weights reads each number once and takes as long for 5 rows
as for one, or 1.3 times as long with AVX2 alone.

Letters: D numbers of a row, N of its product, V rows of the output head, r rank, C candidates.
"""

import os
from itertools import count
from typing import TypeGuard
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn import functional

from conf.errors import InputError
from heads.devices import this_processor
from heads.draft_head import DraftHead
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead

NUM_CANDIDATES = 32
"""Number of ids with exact logits. For a chat model of 8M parameters at a quarter of the
directions, 8 ids lost 2% of the drafts' length and 32 ids nothing."""
NUM_ROWS = 16
"""Rows of the products that weights are packed for; packings for 5 to 512 rows are equally fast."""
FEWEST_ROWS = 4
"""Least rows of a product with a large matrix, where `Processor.pads_few_rows`."""
SMALL = 1 << 19
"""Numbers of a small matrix, for which torch's float32 product of one row is as fast."""
FEWEST_NUMBERS = 1 << 18
"""Least numbers of a packed matrix: a packed product costs 20 to 40 us more than torch's, which
smaller matrices do not win back."""
LARGEST_SHARE = 0.25
"""Share of the machine's memory for packed models, whose weights take memory twice."""
_packed: dict[int, tuple[int, Tensor]] = {}
"""Address of the packed weights and the weights, by the key of a layer."""
_keys = count()


class LowRankOutputHead(nn.Module):
    """Logits of an output head W [V, D]: (W P)(P^T h), and W h for the likeliest C ids.

    P [D, r] holds the eigenvectors of W^T W with the largest eigenvalues, so W P P^T is the nearest
    matrix of rank r (Eckart and Young).

    Args:
        weight: W [V, D] of any float dtype, which the logits get too.
        rank: r, at most D.
        bias: [V] bias of all logits, or None.

    Source: SVD-softmax, Shim et al., NeurIPS 2017, which ranks by the same preview.
    """

    def __init__(self, weight: Tensor, rank: int, bias: Tensor | None = None) -> None:
        super().__init__()
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.num_candidates = min(NUM_CANDIDATES, len(weight))
        gram = torch.zeros(weight.shape[1], weight.shape[1], device=weight.device)
        for rows in weight.detach().split(1 << 14):  # in parts, as a large W is too much in float32
            gram.addmm_(rows.float().T, rows.float())
        directions = torch.linalg.eigh(gram).eigenvectors[:, -rank:].to(weight)
        self.directions = nn.Parameter(directions.T.contiguous(), requires_grad=False)
        self.reduced = nn.Parameter(weight.detach() @ directions, requires_grad=False)

    @property
    def read_bytes(self) -> int:
        """Return the bytes of weights that one row of logits reads."""
        exact = self.num_candidates * self.weight[0].nbytes
        return self.directions.nbytes + self.reduced.nbytes + exact

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] of states [..., D]."""
        coordinates = functional.linear(hidden, self.directions)
        rough = functional.linear(coordinates, self.reduced, self.bias)
        ids = rough.topk(self.num_candidates, dim=-1).indices
        exact = (self.weight[ids] @ hidden.unsqueeze(-1)).squeeze(-1)
        if self.bias is not None:
            exact += self.bias[ids]
        return rough.scatter(-1, ids, exact)


def make_low_rank_target(target: EmbeddingsAndOutputHead, rank: int) -> EmbeddingsAndOutputHead:
    """Join a target's embedding with a low-rank output head, for drafting.

    Raises:
        InputError: the rank is too large, or the output head is quantised.
    """
    check_rank("output_rank", rank, target)
    if target.head_is_quantized:
        raise InputError(
            f"output_rank={rank}: the output head of target.path={target.name} is quantised; leave "
            "output_rank unset"
        )
    whole = target.output_head
    head = LowRankOutputHead(whole.weight, rank, getattr(whole, "bias", None))
    return EmbeddingsAndOutputHead(target, target.tokenizer, target.name, target.embedding, head)


def reduce_rank(
    head: DraftHead, target: EmbeddingsAndOutputHead, rank: int
) -> list[LowRankOutputHead]:
    """Make a head draft with output heads of low rank, its own or the target's.

    Returns:
        The low-rank output heads.

    Raises:
        InputError: the rank is too large, or the output head is quantised.
    """
    check_rank("output_rank", rank, target)
    own_ids = {id(weight) for weight in head.find_output_heads()}
    if not own_ids:
        low_rank_target = make_low_rank_target(target, rank)
        head.attach(low_rank_target)
        return [low_rank_target.output_head]
    output_heads = []
    for parent in [*head.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, nn.Linear) and id(child.weight) in own_ids:
                output_heads.append(LowRankOutputHead(child.weight, rank))
                setattr(parent, name, output_heads[-1])
    return output_heads


def check_rank(key: str, rank: int, target: EmbeddingsAndOutputHead) -> None:
    """Refuse ranks that are not below the width of a target's hidden states.

    Raises:
        InputError: naming the hidden size.
    """
    if rank >= target.hidden_size:
        raise InputError(
            f"{key}={rank}: must be below {target.hidden_size}, the hidden size of {target.name}"
        )


def pack_weights(*modules: nn.Module) -> None:
    """Let the linear layers of modules multiply packed weights, where this is faster.

    This is on x86 CPUs in float32, and in bfloat16 with native instructions. The weights stay for
    other readers and gradients; their numbers must not change afterwards. Models above
    `LARGEST_SHARE` stay unchanged.
    """
    layers = {layer for module in modules for layer in module.modules() if _can_be_packed(layer)}
    if sum(layer.weight.nbytes for layer in layers) > LARGEST_SHARE * _get_memory_bytes():
        return
    for layer in layers:
        weight, key = layer.weight, next(_keys)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), NUM_ROWS)
        _packed[key] = weight.data_ptr(), packed
        finalize(weight, _packed.pop, key)
        layer.__class__ = PackedLinear
        assert isinstance(layer, PackedLinear)
        # For one row, torch's own product is then at least as fast.
        small = weight.numel() <= SMALL
        leaves_one = small or not this_processor().packs_for_one_row(torch.get_num_threads())
        layer.key, layer.leaves_one = key, leaves_one and weight.dtype == torch.float32


def _can_be_packed(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Tell whether a layer is a plain CPU linear layer of a size and dtype that packs."""
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu":
        return False
    if layer.weight.numel() < FEWEST_NUMBERS:
        return False
    return this_processor().multiplies_packed(layer.weight.dtype)


def _get_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class PackedLinear(nn.Linear):
    """Linear layer whose weights exist twice, once packed for oneDNN.

    Attributes:
        key: key of the packed weights.
        leaves_one: whether torch, not oneDNN, computes products of one row.
    """

    key: int
    leaves_one: bool

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Multiply rows [..., D] to [..., N]; torch does so if gradients or a cast are needed."""
        weight = self.weight
        trained = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        cast = input.dtype != weight.dtype or torch.is_autocast_enabled("cpu")
        if trained or cast or (self.leaves_one and input.numel() == self.in_features):
            return functional.linear(input, weight, self.bias)
        if torch.compiler.is_compiling():
            return torch.ops.headsmith.packed_linear.default(input, weight, self.bias, self.key)
        return _multiply_packed(input, weight, self.bias, self.key)


# An operator, so that compiled regions call it unchanged.
_library = torch.library.Library("headsmith", "DEF")
_library.define("packed_linear(Tensor rows, Tensor weight, Tensor? bias, int key) -> Tensor")


def _multiply_packed(rows: Tensor, weight: Tensor, bias: Tensor | None, key: int) -> Tensor:
    address, packed = _packed.get(key, (None, weight))
    if address != weight.data_ptr():  # the layer was copied or cast
        return functional.linear(rows, weight, bias)
    multiply, width = torch.ops.mkldnn._linear_pointwise.default, rows.shape[-1]
    num_rows = rows.numel() // width
    few = num_rows < FEWEST_ROWS and weight.numel() > SMALL
    if not (few and this_processor().pads_few_rows):
        return multiply(rows, packed, bias, "none", [], "")
    padded = functional.pad(rows.reshape(-1, width), (0, 0, 0, FEWEST_ROWS - num_rows))
    output = multiply(padded, packed, bias, "none", [], "")
    return output[:num_rows].view(*rows.shape[:-1], len(weight))


_library.impl("packed_linear", _multiply_packed, "CPU")
_library.impl(
    "packed_linear",
    lambda rows, weight, *_: rows.new_empty((*rows.shape[:-1], len(weight))),
    "Meta",
)
