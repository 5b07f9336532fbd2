"""Taps an exported EAGLE head as its engine would, and computes its logits.

Letters as in `eval/parity/chain.py`; R compared ids, L layers of the target.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from conf.errors import InputError
from eval.parity.chain import LAYER, Chain
from eval.parity.engines import ENGINES, Engine, Place
from eval.parity.files import Export, Golden
from eval.parity.shape import read_shape

FORMATS = {
    kind: tuple(name for name, form in ENGINES if form == kind) for kind in ("eagle1", "eagle3")
}
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"


class ServedEagle:
    """An exported EAGLE head.

    Args:
        export: the engine's files.
        golden: sizes of the target.
        engine: how they are read.

    Raises:
        InputError: the engine would refuse the files, guess, or serve another head.
    """

    def __init__(self, export: Export, golden: Golden, engine: Engine) -> None:
        self._export, self._golden, self._engine = export, golden, engine
        tensors = self._canonical(export.tensors)
        own_head, number = OUTPUT in tensors, self._num_layers(tensors)
        self._shape = read_shape(export, golden, engine, own_head, number)
        self._check(tensors)
        self._targets = self._drafted(tensors)
        # The embedding stays as it is: a few of its rows are needed, and it is large.
        self._embedding = tensors.pop(EMBEDDING, None)
        self._weights = {n: t.float() for n, t in tensors.items() if t.is_floating_point()}

    @property
    def lines(self) -> list[str]:
        """What was found, a line for each kind of check."""
        shape = self._shape
        on = ", ".join(sorted(shape.flags)) or "none"
        owner = "its own" if shape.own_head else "the target's"
        read = f"hidden states {list(shape.layers)}" if shape.eagle3 else "the last hidden state"
        return [
            f"config.json: {self._engine.title} reads {read}, norm flags on: {on}",
            f"{self._export.weights.name}: {len(self._export.tensors)} tensors of "
            f"{self._export.dtype}, none missing, none to spare",
            f"vocabulary: drafts {shape.draft_vocab_size} of {shape.vocab_size} ids with "
            f"{owner} output head",
        ]

    def logits(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """[S, R] logits of the golden ids, and [S] their logsumexp over all, at each depth."""
        golden, shape = self._golden, self._shape
        ids = golden.need("ids", (None,))
        position_ids = golden.need("position_ids", (None,))
        reached, all_positions = int(position_ids.max()), golden.max_position_embeddings
        if reached < all_positions // 2:
            raise InputError(
                f"{golden.file}: position_ids end at {reached} of {all_positions}: a wrong RoPE "
                "would not show; export again"
            )
        embeds = self._embeds(golden.need("token_ids", (None,)))
        features = self._features(len(position_ids))
        for states in self._states(features, embeds, position_ids):
            if not shape.own_head:
                rows = golden.need("output_head", (len(ids), shape.hidden_size))
                yield shape.logit_scale * states @ rows.T, None
                continue
            drafted = shape.logit_scale * functional.linear(states, self._weights[OUTPUT])
            every = torch.full((len(states), shape.vocab_size), -torch.inf)
            every[:, self._targets] = drafted
            yield every[:, ids], drafted.logsumexp(dim=-1)

    def _num_layers(self, tensors: dict[str, Tensor]) -> int:
        """Of the head whose tensors these are."""
        del tensors
        return 1

    def _states(self, features: Tensor, embeds: Tensor, position_ids: Tensor) -> Iterator[Tensor]:
        """See `Chain.states`."""
        return Chain(self._shape, self._weights).states(features, embeds, position_ids)

    def _features(self, num_rows: int) -> Tensor:
        shape = (num_rows, self._shape.target_hidden_size)
        layers = self._shape.layers or (self._golden.num_layers,)
        return torch.cat([self._golden.need(f"hidden_states.{i}", shape) for i in layers], dim=-1)

    def _embeds(self, token_ids: Tensor) -> Tensor:
        """[S + D, H] of the embedding that the engine uses."""
        shape = self._shape
        wanted = (len(token_ids), shape.hidden_size)
        if self._embedding is None:
            return self._golden.need("token_embeddings", wanted)
        own = self._embedding[token_ids].float()
        dropped = self._engine.embedding is Place.no
        if not dropped or shape.hidden_size != shape.target_hidden_size:
            return own
        if not torch.equal(own, self._golden.need("token_embeddings", wanted)):
            raise self._wrong(EMBEDDING, "is not the target's", "the target's: it takes that")
        return own

    def _canonical(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """With the layer's names as `LAYER` has them."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            prefix = next((p for p in self._engine.prefixes if name.startswith(p)), "")
            new = LAYER + name.removeprefix(prefix) if prefix else name
            if new in found:
                raise self._wrong(name, "is there under two names", "one of them")
            # A prefix that the engine does not know must not pass for one that it knows.
            foreign = not prefix and name.startswith(LAYER)
            found[f"? {name}" if foreign else new] = tensor
        return found

    def _check(self, tensors: dict[str, Tensor]) -> None:
        """Names, shapes and integer types."""
        must, may = self._expected()
        missing = sorted(set(must) - set(tensors))
        extra = sorted(set(tensors) - set(must) - set(may))
        if missing or extra:
            raise InputError(
                f"{self._export.weights}: tensors missing: {missing}, that "
                f"{self._engine.title} does not read: {extra}"
            )
        for name, tensor in tensors.items():
            shape = (must | may)[name]
            if tuple(tensor.shape) != shape:
                raise self._wrong(name, f"is {list(tensor.shape)}", f"{list(shape)}")
            kinds = {"d2t": (torch.int64, torch.int32), "t2d": (torch.bool,)}.get(name)
            if tensor.dtype not in kinds if kinds else not tensor.is_floating_point():
                raise self._wrong(name, f"is of {tensor.dtype}", f"{kinds or 'floats'}")

    def _expected(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Shapes of the tensors that must be there, and of those that may be."""
        shape, engine = self._shape, self._engine
        if not shape.own_head and "output_head" not in self._golden.tensors:
            raise self._wrong(OUTPUT, "is missing", "the head's own: it would take the target's")
        must, may = shape.tensors(), dict[str, tuple[int, ...]]()
        if shape.eagle3 and shape.draft_vocab_size != shape.vocab_size:
            must["d2t"] = (shape.draft_vocab_size,)
            if engine.t2d is not Place.no:
                (must if engine.t2d is Place.must else may)["t2d"] = (shape.vocab_size,)
        embedding = must if engine.embedding is Place.must else may
        embedding[EMBEDDING] = (shape.vocab_size, shape.hidden_size)
        return must, may

    def _drafted(self, tensors: dict[str, Tensor]) -> Tensor:
        """[W] the target ids of the output head's rows."""
        draft_ids = torch.arange(self._shape.draft_vocab_size)
        offsets = tensors.get("d2t")
        if offsets is None:
            return draft_ids
        targets = draft_ids + offsets.long()
        problem = self._disagreement(targets, tensors.get("t2d"))
        if problem is None:
            return targets
        if self._disagreement(offsets.long(), tensors.get("t2d")) is None:
            problem += ": it holds absolute target ids"
        raise self._wrong("d2t", problem, "offsets: target id minus draft id")

    def _disagreement(self, targets: Tensor, mask: Tensor | None) -> str | None:
        if targets.min() < 0 or targets.max() >= self._shape.vocab_size:
            return f"leads to ids of {int(targets.min())}..{int(targets.max())}"
        if len(targets.unique()) != len(targets):
            return "leads to the same id twice"
        if mask is not None and not (mask[targets].all() and mask.sum() == len(targets)):
            return "leads to other ids than t2d marks"
        return None

    def _wrong(self, name: str, found: str, needed: str) -> InputError:
        return InputError(
            f"{self._export.weights}: {name} {found}: {self._engine.title} needs {needed}"
        )


def read(export: Export, golden: Golden) -> ServedEagle:
    """See `eval.parity.gate.Reader`."""
    return ServedEagle(export, golden, ENGINES[export.format, export.kind])
