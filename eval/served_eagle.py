"""Reads an exported EAGLE head as its engine would, and computes its logits.

Letters as in `eval/served_chain.py`; R compared ids, L layers of the target.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from conf.schema import InputError
from eval.served_chain import LAYER, Chain
from eval.served_engines import Engine, Place
from eval.served_files import Export, Golden
from eval.served_shape import read_shape

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
        self._shape = read_shape(export, golden, engine, own_head=OUTPUT in tensors)
        self._check(tensors)
        self._targets = self._drafted(tensors)
        self._weights = {n: t.float() for n, t in tensors.items() if t.is_floating_point()}
        self._check_embedding(tensors)

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
        token_ids = golden.need("token_ids", (None,))
        embeds = self._embeds(token_ids)
        chain = Chain(shape, self._weights)
        for states in chain.states(self._features(len(position_ids)), embeds, position_ids):
            if not shape.own_head:
                rows = golden.need("output_head", (len(ids), shape.hidden_size))
                yield shape.logit_scale * states @ rows.T, None
                continue
            drafted = shape.logit_scale * functional.linear(states, self._weights[OUTPUT])
            every = torch.full((len(states), shape.vocab_size), -torch.inf)
            every[:, self._targets] = drafted
            yield every[:, ids], drafted.logsumexp(dim=-1)

    def _features(self, num_rows: int) -> Tensor:
        shape = (num_rows, self._shape.target_hidden_size)
        layers = self._shape.layers or (self._golden.num_layers,)
        return torch.cat([self._golden.need(f"hidden_states.{i}", shape) for i in layers], dim=-1)

    def _embeds(self, token_ids: Tensor) -> Tensor:
        """[S + D, H] of the embedding that the engine uses."""
        if EMBEDDING in self._weights and not self._shares_embedding:
            return functional.embedding(token_ids, self._weights[EMBEDDING])
        return self._golden.need("token_embeddings", (len(token_ids), self._shape.hidden_size))

    @property
    def _shares_embedding(self) -> bool:
        """Whether the engine drops the head's embedding for the target's."""
        same = self._shape.hidden_size == self._shape.target_hidden_size
        return self._engine.embedding is Place.no and same

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
        shape = self._shape
        expected = shape.tensors()
        if not shape.own_head and "output_head" not in self._golden.tensors:
            raise self._wrong(OUTPUT, "is missing", "the head's own; it would put another there")
        embedding = Place.may if self._engine.embedding is Place.no else self._engine.embedding
        places: dict[str, tuple[Place, tuple[int, ...]]]
        places = {EMBEDDING: (embedding, (shape.vocab_size, shape.hidden_size))}
        reduced = shape.draft_vocab_size != shape.vocab_size
        if shape.eagle3 and reduced:
            expected["d2t"] = (shape.draft_vocab_size,)
            places["t2d"] = self._engine.t2d, (shape.vocab_size,)
        must = {name: each for name, (place, each) in places.items() if place is Place.must}
        may = {name: each for name, (place, each) in places.items() if place is Place.may}
        expected |= must
        allowed = expected | may
        missing = sorted(set(expected) - set(tensors))
        extra = sorted(set(tensors) - set(allowed))
        if missing or extra:
            raise InputError(
                f"{self._export.weights}: tensors missing: {missing}, that "
                f"{self._engine.title} does not read: {extra}"
            )
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != allowed[name]:
                raise self._wrong(name, f"is {list(tensor.shape)}", f"{list(allowed[name])}")
            kinds = {"d2t": (torch.int64, torch.int32), "t2d": (torch.bool,)}.get(name)
            if tensor.dtype not in kinds if kinds else not tensor.is_floating_point():
                raise self._wrong(name, f"is of {tensor.dtype}", f"{kinds or 'floats'}")

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

    def _check_embedding(self, tensors: dict[str, Tensor]) -> None:
        """An embedding that the engine drops must be the target's."""
        if EMBEDDING not in tensors or not self._shares_embedding:
            return
        token_ids = self._golden.need("token_ids", (None,))
        theirs = self._embeds(token_ids).to(tensors[EMBEDDING].dtype)
        if not torch.equal(tensors[EMBEDDING][token_ids], theirs):
            raise self._wrong(EMBEDDING, "is not the target's", "the target's: it takes that")

    def _wrong(self, name: str, found: str, needed: str) -> InputError:
        return InputError(
            f"{self._export.weights}: {name} {found}: {self._engine.title} needs {needed}"
        )
