import pytest
from toys import random_target

from conf.settings.training import Optimizer
from heads.vocab import DraftVocab
from scripts.bench.training import fresh_objective


@pytest.mark.parametrize(
    ("form", "optimizer", "rates"),
    [
        # Muon's whatever the width; AdamW's over the hidden size.
        ("medusa", Optimizer.muon, (8.4e-2, 2.1 / 64)),
        ("eagle1", Optimizer.muon, (3e-2, 1.5 / 64)),
        ("eagle3", Optimizer.adamw, (1.5 / 64, 1.5 / 64)),
    ],
)
def test_the_usual_rates_of_a_head(
    form: str, optimizer: Optimizer, rates: tuple[float, float]
) -> None:
    target = random_target(hidden_size=64, num_hidden_layers=4)
    vocab = DraftVocab.everything(target.vocab_size)
    assert fresh_objective(form, target, vocab).usual_rates(optimizer) == rates
