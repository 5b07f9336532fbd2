"""Layers that carry a state along the text: state spaces, linear attention, short convolutions.

transformers runs such a mixer over texts from the start, or from the state after the last token.
Here it also reads packed documents, each from an empty state, and draft trees, where each token
continues its parent's state. The nodes of one depth are one call, and a rejected node is undone by
continuing from another.

Letters: B texts, n tokens of one, m tokens, w nodes of a level.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers.cache_utils import Cache, DynamicCache

from conf.errors import InputError
from heads.decoding.cache import RecurrentStates, TreeCache
from heads.devices import to_device
from heads.target_model.attention import DocumentPass, current_pass
from heads.target_model.decoder import MODEL_ERRORS, call_decoder

MIXERS = "recurrent layers, document by document"
WASTE = 1.25  # tokens run per token read, with documents padded to one length


def wrap_mixers(decoder: Any, name: str) -> None:
    """Replace the `forward` of every recurrent part of a decoder by `_run_mixer`.

    One token is run to find these parts: the innermost modules that get a cache and store more than
    keys and values there.

    Raises:
        InputError: the decoder does not run with a cache of transformers' own.
    """
    model_type = decoder.config.get_text_config().model_type
    cache = _StateKeepers(config=decoder.config)
    with ExitStack() as undo, torch.no_grad():
        for module in decoder.modules():
            undo.callback(
                module.register_forward_pre_hook(cache.record_entry, with_kwargs=True).remove
            )
            undo.callback(module.register_forward_hook(cache.record_exit, with_kwargs=True).remove)
        device = decoder.get_input_embeddings().weight.device
        try:
            call_decoder(decoder, torch.zeros(1, 1, dtype=torch.int64, device=device), cache=cache)
        except MODEL_ERRORS as error:
            raise InputError(
                f"target.path={name}: {model_type} is not supported: one token with a cache of "
                f"transformers' own: {type(error).__name__}: {error}"
            ) from error
    for number, (module, layer) in enumerate(cache.layer_by_module.items()):
        module.forward = partial(_run_mixer, number, layer, module.forward)


class _StateKeepers(DynamicCache):
    """Cache that notes which module keeps a state in which layer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.layer_by_module: dict[Any, int] = {}
        self.inside: list[nn.Module] = []

    def record_entry(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self in (*args, *kwargs.values()):
            self.inside.append(module)

    def record_exit(self, module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
        if self in (*args, *kwargs.values()):
            assert self.inside.pop() is module

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self.layer_by_module[self.inside[-1]] = layer_idx
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self.layer_by_module[self.inside[-1]] = layer_idx
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)


def _run_mixer(
    number: int, layer: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a recurrent part on tokens [B, n, ...], after those of a cache or as documents.

    `number` is its index among the model's mixers; by `layer` it finds its state in a cache.
    """
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    now = current_pass()
    if isinstance(cache, TreeCache):
        assert cache.states is not None
        return _run_pending(_Call(forward, args, kwargs), cache.states, number, layer)
    if cache is None and isinstance(now, DocumentPass):
        return _run_documents(_Call(forward, args, kwargs), now)
    return forward(*args, **kwargs)


def _run_pending(call: "_Call", states: RecurrentStates, number: int, layer: int) -> Any:
    """Run certain tokens, texts with equally many together; or draft tokens by depth."""

    def run_rows(texts: Tensor, tokens: Tensor, before: Tensor, after: Tensor) -> None:
        """Run rows [m, n] of texts and tokens, each from one state [m] to another."""
        state = states.select_states(number, texts[:, 0], before)
        call.run_tokens(texts, tokens, states.make_layer_cache(layer, state))
        states.store_states(number, texts[:, 0], after, states.collect_layer_states(layer))

    if states.num_certain:
        for texts, tokens in states.group_by_length(call.device):
            committed = torch.zeros_like(texts[:, 0])
            run_rows(texts, tokens, before=committed, after=committed)
        return call.collect_output()
    for level in states.by_depth:
        nodes, parents = (
            numbers.to(call.device).expand(call.shape[0], -1).reshape(-1, 1)
            for numbers in (level.nodes, level.parents)
        )
        texts = torch.arange(call.shape[0], device=call.device).unsqueeze(1)
        texts = texts.expand(-1, level.nodes.shape[1]).reshape(-1, 1)
        after = 1 + states.num_earlier + nodes[:, 0]
        run_rows(texts, nodes, before=parents[:, 0], after=after)
    return call.collect_output()


def _run_documents(call: "_Call", document_pass: DocumentPass) -> Any:
    """Read each document from an empty state; pad those of similar length and run them together."""
    runs_on = document_pass.runs
    if call.device not in runs_on:
        lengths = document_pass.documents.lengths
        runs_on[call.device] = _build_runs(lengths, call.shape[1], call.device)
    runs, places = runs_on[call.device]
    for texts, tokens in runs:
        call.run_tokens(texts, tokens, None)
    # Select each token's place among all that were run.
    return call.arrange_output(lambda rows: rows.index_select(0, places))


def _build_runs(
    lengths: tuple[int, ...], num_tokens: int, device: torch.device
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Group documents of sequences with `num_tokens` into runs, with one copy to the device.

    Returns:
        Texts and tokens [a, b] int64 of each run, and the place of each token [S] in the
        concatenated runs.
    """
    every = torch.arange(sum(lengths))
    begins = every.split(list(lengths))
    groups = [
        nn.utils.rnn.pad_sequence([begins[n] for n in group], True, -1)
        for group in _group_documents(lengths)
    ]
    run = torch.cat([tokens.flatten() for tokens in groups])
    is_real = (run >= 0).nonzero().squeeze(1)
    places = torch.empty_like(every).index_copy_(0, run[is_real], is_real)
    indices = to_device(torch.cat([run.clamp_min(0), places]), device)
    run, places = indices.split([len(run), len(places)])
    parts = zip(run.split([tokens.numel() for tokens in groups]), groups, strict=True)
    rows = [part.view(tokens.shape) for part, tokens in parts]
    return [(tokens // num_tokens, tokens % num_tokens) for tokens in rows], places


def _group_documents(lengths: tuple[int, ...]) -> list[list[int]]:
    """Group documents to run together, the longest first."""
    groups: list[list[int]] = []
    num_run = num_embeddings = 0
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        length = lengths[number]
        if groups and num_run + lengths[groups[-1][0]] <= WASTE * (num_embeddings + length):
            groups[-1].append(number)
            num_run, num_embeddings = num_run + lengths[groups[-1][0]], num_embeddings + length
        else:
            groups.append([number])
            num_run = num_embeddings = length
    return groups


class _Call:
    """Call of a recurrent module on tokens [B, n, ...].

    The module runs on groups of the tokens, one call each; `collect_output` and `arrange_output`
    put the results back into the order of the tokens.

    Attributes:
        shape: B and n.
        device: device of the inputs.
    """

    def __init__(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        # Grouping replaces masks.
        unmasked = {name: None if name == "attention_mask" else e for name, e in kwargs.items()}
        self._forward, self._given = forward, (args, unmasked)
        states = next(e for e in (*args, *kwargs.values()) if isinstance(e, Tensor))
        self.shape, self.device = states.shape[:2], states.device
        self._places: list[Tensor] = []
        self._outputs: list[list[Any]] = []
        self._structure: Any = None

    def run_tokens(self, texts: Tensor, tokens: Tensor, cache: Cache | None) -> None:
        """Run some tokens.

        Args:
            texts: [a, b] or [a, 1] int64 text of each token, for a runs of b tokens.
            tokens: [a, b] int64 index of each token.
            cache: cache that replaces the given one.
        """

        def pick(value: Any) -> Any:
            if isinstance(value, Cache):
                return cache
            if not isinstance(value, Tensor):
                return value
            if value.shape[0] not in (1, self.shape[0]) or value.shape[1] != self.shape[1]:
                raise NotImplementedError(f"a recurrent layer is given {list(value.shape)}")
            return value.expand(self.shape[0], *value.shape[1:])[texts, tokens]

        args, kwargs = tree_map(pick, self._given)
        values, self._structure = tree_flatten(self._forward(*args, **kwargs))
        self._places.append((texts * self.shape[1] + tokens).flatten())
        self._outputs.append(
            [value.flatten(0, 1) if isinstance(value, Tensor) else value for value in values]
        )

    def collect_output(self) -> Any:
        """Collect the module's output for all tokens, with zeros for tokens not run."""
        places = torch.cat(self._places)

        def put(rows: Tensor) -> Tensor:
            return rows.new_zeros(self.shape.numel(), *rows.shape[1:]).index_put((places,), rows)

        return self.arrange_output(put)

    def arrange_output(self, in_order: Callable[[Tensor], Tensor]) -> Any:
        """Arrange the module's output by token; `in_order` sorts the rows of concatenated runs."""
        return tree_unflatten(
            [
                in_order(torch.cat(parts)).unflatten(0, self.shape)
                if isinstance(parts[0], Tensor)
                else parts[0]
                for parts in zip(*self._outputs, strict=True)
            ],
            self._structure,
        )
