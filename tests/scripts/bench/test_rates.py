from pathlib import Path

import pytest
from toys import save_target

from scripts.bench import rates as bench_rates
from scripts.bench.rates import Place, arguments, recipe, usual_rates


def test_the_usual_rates_of_each_kind_at_a_width(tmp_path: Path) -> None:
    place = Place(str(save_target(tmp_path, num_hidden_layers=4)), "", 64)
    # Muon's whatever the width; AdamW's 1.5 over the hidden size.
    assert usual_rates(place, "medusa", "muon") == (8.4e-2, 2.1 / 64)
    assert usual_rates(place, "eagle1", "muon") == (3e-2, 1.5 / 64)
    assert usual_rates(place, "eagle3_1", "adamw") == (1.5 / 64, 1.5 / 64)


def test_a_target_of_another_width_has_heads_of_the_same_size() -> None:
    wide = recipe(512)
    assert (wide.hidden_size, wide.intermediate_size) == (512, 1408)
    assert (wide.num_heads, wide.num_kv_heads) == (16, 8)


def test_the_table_holds_the_usual_rates_against_the_best(monkeypatch, capsys) -> None:
    taus = {0.3: 2.0, 1.0: 2.2, 3.0: 2.3}
    monkeypatch.setattr(bench_rates, "places", lambda _: [Place("some/target", "chats", 96)])
    monkeypatch.setattr(
        bench_rates, "trained", lambda _place, _head, factor, _options: taus[factor]
    )
    bench_rates.main(["--heads", "eagle1", "--factors", "0.3", "1", "3"])
    row = next(line for line in capsys.readouterr().out.splitlines() if "eagle1" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "target", "96", "eagle1", "2.000", "2.200", "2.300", "95.7%"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--factors", "0.5", "2"], "1.0 must be among them"),
        (["--target", "x"], "--target and --data go together"),
    ],
)
def test_what_cannot_be_compared_is_refused(words, message, capsys) -> None:
    with pytest.raises(SystemExit):
        arguments(words)
    assert message in capsys.readouterr().err
