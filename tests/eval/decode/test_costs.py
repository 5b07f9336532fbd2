"""Memory and operations of decoding, which no clock is needed for."""

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from toys import random_target

from conf.settings.eagle import EagleConfig
from eval.decode.engine import NoDraft, decode
from heads.decoding.cache import compute_capacity
from heads.decoding.drafting import Drafter
from heads.decoding.tree import Tree
from heads.eagle.eagle import EagleHead
from heads.eagle.network import EagleDrafter
from heads.medusa import MedusaDrafter, MedusaHead
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts.bench.harness import measure_peak_bytes

PROMPT = [5, 17, 40, 8, 77, 23, 61]


class Operations(TorchDispatchMode):
    """Counts operations by name, composite ones by their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.is_inference_mode_enabled() and func._can_decompose():
            # Autograd, which is off, is what takes such operations apart.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def a_step(target: Target) -> Counter[str]:
    """Operations of a plain step by name: what more steps add, by their number."""
    counts, steps = [], []
    for length in (12, 24):
        with Operations() as counted:
            steps.append(len(decode(target, NoDraft(), PROMPT, length).steps))
        counts.append(counted.counts)
    more = counts[1].copy()
    more.subtract(counts[0])
    return Counter({name: round(number / (steps[1] - steps[0])) for name, number in more.items()})


def target_of(num_layers: int) -> Target:
    return random_target("qwen3", num_hidden_layers=num_layers, eos_token_id=None)


def test_a_plain_step_builds_no_mask_and_scatters_nothing() -> None:
    counts = a_step(target_of(4))
    assert counts["_scaled_dot_product_flash_attention_for_cpu"] == 4
    assert counts["embedding"] == 1
    for name in ("masked_fill_", "index_put_", "_index_put_impl_", "scatter_", "where"):
        assert counts[name] == 0


def compiled(num_layers: int) -> Target:
    """A target whose compiled regions, captured whole, are not counted."""
    torch._dynamo.reset()
    usual = torch.compile

    def uncounted(run: Any, **settings: Any) -> Any:
        whole = usual(run, fullgraph=True, **settings)

        def call(*args: Any) -> Any:
            with _disable_current_modes():
                return whole(*args)

        return call

    target = target_of(num_layers)
    with patch.object(torch, "compile", uncounted):
        target.compile(128, backend="eager")
    return target


@pytest.mark.slow
def test_what_a_compiled_target_leaves_to_launch_does_not_grow_with_its_layers() -> None:
    one, two = (a_step(compiled(num_layers)).total() for num_layers in (1, 2))
    assert one == two < 40


def long_target() -> Target:
    return random_target(
        vocab_size=128, hidden_size=64, num_hidden_layers=4, intermediate_size=192,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=512,
        eos_token_id=None,
    )  # fmt: skip


def medusa_chain(target: Target) -> Drafter:
    head = MedusaHead.from_target(target, num_heads=2, num_layers=1)
    return MedusaDrafter(head, Tree.make_chain(2))


def eagle_chain(target: Target) -> Drafter:
    vocab = DraftVocab.make_full(target.vocab_size)
    return EagleDrafter(
        EagleHead.from_settings(target, EagleConfig(layers=[1, 2, 3]), vocab, seed=0), 2
    )


@pytest.mark.parametrize(
    ("make", "num_cached"),
    [(lambda _: NoDraft(), 4), (medusa_chain, 4), (eagle_chain, 5)],
    ids=["none", "medusa", "eagle"],
)  # fmt: skip
def test_memory_beyond_the_cache_does_not_grow_with_a_prompt(
    make: Callable[[Target], Drafter], num_cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddingsAndOutputHead, "prefill_chunk", 64)
    target = long_target()

    def beyond(num_tokens: int) -> int:
        prompt = torch.randint(128, (num_tokens,), generator=torch.Generator()).tolist()
        drafter = make(target)
        gc.collect()  # what is let go of while it is measured would be taken off
        peak = measure_peak_bytes(lambda: decode(target, drafter, prompt, 2), target.device)
        # Keys and values of a head of 32 channels, float32, in each layer and in EAGLE's.
        return peak - num_cached * 2 * 32 * 4 * compute_capacity(num_tokens)

    one, six = beyond(64), beyond(384)
    assert 0 < six < 2 * one
