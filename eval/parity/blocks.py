"""A block drafter computed from an engine's names, one block after another.

Plain torch in float32. Letters: S rows of a text, R rows of a block, D slots, H hidden, W drafted
ids, Q heads, d head size.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from conf.errors import InputError
from eval.parity.block_shape import TITLES, BlockShape
from eval.parity.files import Export, Golden

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"


class ServedBlocks:
    """An exported block drafter; a kind adds what it has beyond DFlash.

    Args:
        export: the engine's files.
        golden: sizes of the target.
        shape: what the engine builds.
        more: shapes of the tensors of the kind.

    Raises:
        InputError: the engine would refuse the files, guess, or serve another head.
    """

    def __init__(
        self, export: Export, golden: Golden, shape: BlockShape, more: dict[str, tuple[int, ...]]
    ) -> None:
        self.export, self.golden, self.shape = export, golden, shape
        self.title = TITLES[export.format]
        self._own = OUTPUT in export.tensors
        self._check(shape.tensors() | more)
        self.weights = {
            name: each.float()
            for name, each in export.tensors.items()
            if each.is_floating_point() and name != EMBEDDING
        }
        self.targets = self._drafted()

    @property
    def lines(self) -> list[str]:
        """What was found, a line for each kind of check."""
        shape = self.shape
        rows = "one after another" if shape.causal else "all at once"
        seen = "all of the text" if shape.window is None else f"{shape.window} tokens"
        return [
            f"config.json: {self.title} reads hidden states {list(shape.layers)}, "
            f"{shape.block_size} rows that see {seen} and each other {rows}",
            f"{self.export.weights.name}: {len(self.export.tensors)} tensors of "
            f"{self.export.dtype}, none missing, none to spare",
            f"vocabulary: drafts {shape.draft_vocab_size} of {shape.vocab_size} ids with "
            f"{'its own' if self._own else 'the target' + chr(39) + 's'} output head",
        ]

    def logits(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """[S, R] logits of the golden ids, and [S] their logsumexp over all, of each slot."""
        golden, shape = self.golden, self.shape
        position_ids, ids = golden.need("position_ids", (None,)), golden.need("ids", (None,))
        tokens = golden.need("token_ids", (None,))
        num_rows = len(position_ids)
        outputs = torch.stack([self._block(row, position_ids) for row in range(num_rows)])
        state: Tensor | None = None
        for slot in range(outputs.shape[1]):
            before = tokens[slot : slot + num_rows]
            base = self._base(outputs[:, slot])
            drawn, state = self.step(base, outputs[:, slot], before, state)
            every = torch.full((num_rows, shape.vocab_size), -torch.inf)
            every[:, self.targets] = drawn
            yield every[:, ids], drawn.logsumexp(-1) if self._whole else None

    @property
    def _whole(self) -> bool:
        return "output_head" not in self.golden.tensors

    def _base(self, outputs: Tensor) -> Tensor:
        if OUTPUT in self.weights:
            return outputs @ self.weights[OUTPUT].T
        ids = self.golden.need("ids", (None,))
        rows = self.golden.need("output_head", (len(ids), self.shape.hidden_size))
        # Of ids that nobody compares, nothing is known.
        found = torch.full((len(outputs), self.shape.vocab_size), -torch.inf)
        found[:, ids] = outputs @ rows.T
        return found

    def step(
        self, base: Tensor, outputs: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [S, W] of a slot behind tokens [S], and the next state; DFlash's stay."""
        del outputs, before
        return base, state

    def _block(self, row: int, position_ids: Tensor) -> Tensor:
        """[D, H] what the slots of the block behind a row project."""
        golden, shape = self.golden, self.shape
        embeds = golden.need("token_embeddings", (None, shape.hidden_size))
        mask = golden.need("mask_embedding", (1, shape.hidden_size))
        states = torch.cat([embeds[row : row + 1], mask.expand(shape.block_size - 1, -1)])
        states = self._own_rows(states, row)
        wanted = (None, shape.target_hidden_size)
        features = [golden.need(f"hidden_states.{i}", wanted)[: row + 1] for i in shape.layers]
        context = self._norm(torch.cat(features, -1) @ self.weights["fc.weight"].T, "hidden_norm")
        places = position_ids[row] + 1 + torch.arange(shape.block_size)
        for number in range(shape.num_layers):
            states = self.layer(number, states, context, position_ids, places)
        return self._norm(states, "norm")[shape.slots]

    def _own_rows(self, states: Tensor, row: int) -> Tensor:
        """With the head's own embedding, if it brings one."""
        if EMBEDDING not in self.export.tensors:
            return states
        token = int(self.golden.need("token_ids", (None,))[row])
        mask = int(self.golden.need("mask_token_id", (1,)))
        ids = torch.tensor([token] + [mask] * (len(states) - 1))
        return self.export.tensors[EMBEDDING][ids].float()

    def layer(
        self, number: int, states: Tensor, context: Tensor, position_ids: Tensor, places: Tensor
    ) -> Tensor:
        """[R, H] of a layer over its block [R, H] and features [s, H]."""
        name = f"layers.{number}."

        def attend(inputs: Tensor) -> Tensor:
            return self._attended(number, inputs, context, position_ids[: len(context)], places)

        states = states + self.around(
            f"{name}attention", self._norm(states, f"{name}input_layernorm"), attend
        )
        inputs = self._norm(states, f"{name}post_attention_layernorm")
        return states + self.around(f"{name}mlp", inputs, lambda each: self._mlp(name, each))

    def around(self, name: str, inputs: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """[R, H] of a sublayer; a kind may put something around it."""
        del name
        return sublayer(inputs)

    def _mlp(self, name: str, inputs: Tensor) -> Tensor:
        gate = functional.silu(self.linear(inputs, f"{name}mlp.gate_proj"))
        return self.linear(gate * self.linear(inputs, f"{name}mlp.up_proj"), f"{name}mlp.down_proj")

    def _attended(
        self, number: int, inputs: Tensor, context: Tensor, before: Tensor, places: Tensor
    ) -> Tensor:
        shape, attention = self.shape, f"layers.{number}.self_attn."
        query = self._heads(inputs, attention, "q", places)
        keys = torch.cat([self._heads(context, attention, "k", before),
                          self._heads(inputs, attention, "k", places)])  # fmt: skip
        values = torch.cat([self._split(each, attention, "v") for each in (context, inputs)])
        groups = shape.num_heads // shape.num_kv_heads
        keys, values = (each.repeat_interleave(groups, 1) for each in (keys, values))
        scores = torch.einsum("rqd,sqd->qrs", query, keys) * shape.head_dim**-0.5
        weights = scores.masked_fill(~self._seen(number, len(context)), -torch.inf).softmax(-1)
        found = torch.einsum("qrs,sqd->rqd", weights, values).flatten(1)
        return self.linear(found, f"{attention}o_proj")

    def _seen(self, number: int, num_tokens: int) -> Tensor:
        """[R, s + R] bool of a layer, by how many tokens lie between."""
        shape = self.shape
        keys = torch.arange(num_tokens + shape.block_size)
        rows = keys[num_tokens:].unsqueeze(1)
        seen = torch.ones(len(rows), len(keys), dtype=torch.bool)
        if number in shape.full:
            return seen
        if shape.causal:
            seen &= keys <= rows
        return seen if shape.window is None else seen & ((rows - keys).abs() < shape.window)

    def _heads(self, inputs: Tensor, attention: str, which: str, places: Tensor) -> Tensor:
        normed = self._norm(self._split(inputs, attention, which), f"{attention}{which}_norm")
        return self.shape.rope.rotate(normed, places)

    def _split(self, inputs: Tensor, attention: str, which: str) -> Tensor:
        projected = self.linear(inputs, f"{attention}{which}_proj")
        return projected.unflatten(-1, (-1, self.shape.head_dim))

    def linear(self, inputs: Tensor, name: str) -> Tensor:
        """By a weight of the file."""
        return inputs @ self.weights[f"{name}.weight"].T

    def _norm(self, states: Tensor, name: str) -> Tensor:
        mean = states.square().mean(-1, keepdim=True)
        return states * torch.rsqrt(mean + self.shape.eps) * self.weights[f"{name}.weight"]

    def _check(self, must: dict[str, tuple[int, ...]]) -> None:
        """Names, shapes and integer types."""
        shape, found = self.shape, self.export.tensors
        may: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_size, shape.hidden_size)}
        reduced = shape.draft_vocab_size != shape.vocab_size
        head = {OUTPUT: (shape.draft_vocab_size, shape.hidden_size)}
        needed = reduced or self._whole
        must, may = (must | head, may) if needed else (must, may | head)
        if reduced:
            must = must | {"d2t": (shape.draft_vocab_size,)}
            may = may | {"t2d": (shape.vocab_size,)}
        missing, extra = sorted(set(must) - set(found)), sorted(set(found) - set(must) - set(may))
        if missing or extra:
            raise InputError(
                f"{self.export.weights}: tensors missing: {missing}, that {self.title} does not "
                f"read: {extra}"
            )
        for name, tensor in found.items():
            if tuple(tensor.shape) != (must | may)[name]:
                raise self._wrong(name, f"is {list(tensor.shape)}", f"{list((must | may)[name])}")
            kinds = {"d2t": (torch.int64, torch.int32), "t2d": (torch.bool,)}.get(name)
            if tensor.dtype not in kinds if kinds else not tensor.is_floating_point():
                raise self._wrong(name, f"is of {tensor.dtype}", f"{kinds or 'floats'}")

    def _drafted(self) -> Tensor:
        """[W] the target ids of the output head's rows."""
        ids, offsets = torch.arange(self.shape.draft_vocab_size), self.export.tensors.get("d2t")
        if offsets is None:
            return ids
        targets = ids + offsets.long()
        if (
            targets.min() < 0
            or targets.max() >= self.shape.vocab_size
            or len(targets.unique()) != len(targets)
        ):
            found = f"leads to ids of {int(targets.min())}..{int(targets.max())}, or one twice"
            raise self._wrong("d2t", found, "offsets: target id minus draft id")
        return targets

    def _wrong(self, name: str, found: str, needed: str) -> InputError:
        return InputError(f"{self.export.weights}: {name} {found}: {self.title} needs {needed}")
