from pathlib import Path

import pytest
import torch
from devices import on_cuda
from torch.utils.flop_counter import flop_registry
from toys import Watched, random_target

from conf.settings.training import Optimizer
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts.bench.training import (
    FLASH_FLOPS,
    RunSizes,
    count_flops,
    make_objective,
    measure_part_fractions,
    measure_training,
    open_run,
    reset_peak_memory,
    start_run,
)
from scripts.bench.training import make_random_target as target_of_sizes

FORWARD, BACKWARD = (
    torch.ops.aten._flash_attention_forward,
    torch.ops.aten._flash_attention_backward,
)


@pytest.mark.parametrize(
    ("form", "optimizer", "rates"),
    [
        # Muon's whatever the width; AdamW's over the hidden size.
        ("medusa", Optimizer.muon, (8.4e-2, 2.1 / 64)),
        ("eagle1", Optimizer.muon, (3e-2, 1.5 / 64)),
        ("eagle3", Optimizer.adamw, (1.5 / 64, 1.5 / 64)),
    ],
)
def test_the_usual_rates_of_a_head(form, optimizer, rates) -> None:
    target = random_target(hidden_size=64, num_hidden_layers=4)
    vocab = DraftVocab.make_full(target.vocab_size)
    assert make_objective(form, target, vocab).compute_default_rates(optimizer) == rates


@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_attention_counts_each_head_of_queries_within_its_document(num_kv_heads: int) -> None:
    """Documents of 5 and 7 tokens: 2 or 5 products of 8 heads with 16 numbers, 25 + 49 pairs."""
    query = torch.empty(12, 8, 16, device="meta")
    text = [query[:, :num_kv_heads]] * 2
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    rest = (bounds, bounds, 7, 7, 0.0, True)
    norm, unused = torch.empty(8, 12, device="meta"), torch.empty(2)
    calls = {
        FORWARD: (query, *text, *rest, False),
        BACKWARD: (query, query, *text, query, norm, *rest, unused, unused),
    }
    found = {each: FLASH_FLOPS[each](*given, scale=0.25) for each, given in calls.items()}
    assert found == {
        FORWARD: 2 * 2 * 8 * 16 * (25 + 49),
        BACKWARD: 2 * 5 * 8 * 16 * (25 + 49),
    }
    if num_kv_heads == 8:  # which torch 2.11 counts as well
        own = {each: flop_registry[each](*given, scale=0.25) for each, given in calls.items()}
        assert found == own


def test_products_are_counted_as_torch_counts_them() -> None:
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    assert count_flops(lambda: a @ b) == 2 * 3 * 5 * 7


def test_a_random_target_is_made_in_its_own_dtype() -> None:
    sizes = RunSizes(hidden=64, layers=2, vocab=256, dtype="bfloat16")
    made: list[torch.Tensor] = []
    with Watched(lambda _func, _args, found: made.append(found)):
        target = target_of_sizes(sizes, torch.device("cpu"))
    assert {each.dtype for each in target.model.parameters()} == {torch.bfloat16}
    wide = [e.numel() for e in made if isinstance(e, torch.Tensor) and e.dtype is torch.float32]
    assert max(wide) < 64 * 64  # no weight, only frequencies of positions
    spread = target.output_head.weight.float().std().item()
    assert spread == pytest.approx(0.02, rel=0.02)


def test_a_run_on_stored_states_has_the_ends_of_its_target_alone(tmp_path: Path) -> None:
    sizes = RunSizes(hidden=64, layers=6, vocab=256, draft_vocab=96, max_length=32)
    run, packed = start_run(sizes, tmp_path, stored=True)
    target = run.job.objective.target
    assert not isinstance(target, Target)
    assert [each.weight.shape for each in (target.embedding, target.output_head)] == [(256, 64)] * 2
    row = run.job.train[0]
    states = {name: each for name, each in row.items() if each.dim() == 2}
    layers = run.job.objective.head.taps.layers
    assert states.keys() == {"hidden_states", *(f"layers.{layer}" for layer in layers)}
    assert len(layers) == 3
    found = {(tuple(each.shape), each.dtype) for each in states.values()}
    assert found == {((32, 64), torch.bfloat16)}
    assert torch.equal(row["input_ids"], packed[0]["input_ids"])
    assert run.optimizer_step() > 0
    run.close()


@pytest.mark.parametrize("head", ["medusa", "eagle3", "dflash"])
def test_the_parts_of_a_step_share_its_time(head: str) -> None:
    sizes = RunSizes(head, hidden=32, layers=6, vocab=64, max_length=64, batch_size=1)
    with open_run(sizes) as (run, _):
        run.optimizer_step()
        shares = measure_part_fractions(run, 1)
    work = {name: share for name, share in shares.items() if name != "waiting"}
    assert list(work) == ["target", "head", "loss", "backward", "optimizer"]
    assert min(work.values()) > 0
    assert sum(shares.values()) < 1


@pytest.mark.slow
def test_training_on_stored_states_has_the_figures_of_training() -> None:
    own, stored = (dict(measure_training("eagle3", "small", each)) for each in (False, True))
    assert own.keys() == stored.keys()
    assert stored["peak, GB, estimated"] < own["peak, GB, estimated"]


@pytest.mark.gpu
@on_cuda
def test_the_peak_of_memory_begins_anew() -> None:
    device = torch.device("cuda")
    torch.empty(2**28, device=device)
    reset_peak_memory(device)
    assert torch.cuda.max_memory_allocated(device) < 2**28
