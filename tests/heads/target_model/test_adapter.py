"""What an adapter costs: the target's layers are run again for its gradients, or kept."""

import pytest
import torch
from torch import Tensor
from toys import FAMILIES, random_target

from conf.settings.medusa import AdapterConfig
from heads.layers.documents import Documents
from heads.target_model.adapter import Adapter
from heads.target_model.model import Target
from scripts.bench.harness import peak_bytes

CPU = torch.device("cpu")
LENGTHS = [150, 90, 16]
WITHOUT_DROPOUT = {"mixtral", "qwen3_moe", "qwen3_next"}  # peft has none for experts
MODULES = {  # nor for all of a state space, nor for a router that gives two tensors
    "falcon_h1": ["in_proj", "q_proj"],
    "mamba2": ["in_proj"],
    "llama4_text": ["q_proj", "o_proj"],
}


def adapted(family: str, recompute: bool, **changes: int) -> "Adapted":
    target = random_target(family, max_position_embeddings=512, **changes)
    dropout = 0.0 if family in WITHOUT_DROPOUT else 0.3
    config = AdapterConfig(
        rank=4, dropout=dropout, modules=MODULES.get(family), recompute_layers=recompute
    )
    return Adapted(target, Adapter(target, config, seed=0))


class Adapted:
    """A target and an adapter that has learnt something."""

    def __init__(self, target: Target, adapter: Adapter) -> None:
        self.target, self.adapter = target, adapter
        generator = torch.Generator().manual_seed(1)
        for factor in adapter.factors.values():
            factor.data.normal_(std=0.1, generator=generator)

    def gradients(self) -> list[Tensor]:
        """Of a loss on one packed sequence; dropout is drawn anew alike."""
        torch.manual_seed(7)
        ids = torch.randint(3, 90, (1, sum(LENGTHS)))
        positions = torch.cat([torch.arange(each) for each in LENGTHS])[None]
        numbers = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None]
        states = self.target.read(ids, positions, Documents.of(numbers)).hidden_states
        found = torch.autograd.grad(states.square().mean(), [*self.adapter.parameters()])
        return list(found)


# A family of each kind of layer; what differs in the others is not run again.
OFTEN = ("llama", "gemma4_text", "gpt_oss", "mixtral", "lfm2", "qwen3_next", "falcon_h1")


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in OFTEN else [pytest.mark.slow]) for f in FAMILIES]
)
def test_layers_that_are_run_again_give_the_same_gradients(family: str) -> None:
    kept, again = (adapted(family, recompute).gradients() for recompute in (False, True))
    assert any(each.any() for each in kept)
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


def test_so_they_do_with_masks() -> None:
    found = []
    for recompute in (False, True):
        each = adapted("mistral", recompute)
        each.target.needs_masks = "it is a test"
        found.append(each.gradients())
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_layers_that_are_run_again_take_a_fraction_of_the_memory() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 8}
    kept, again = (
        peak_bytes(adapted("llama", recompute, **sizes).gradients, CPU)
        for recompute in (False, True)
    )
    assert again < kept / 3
