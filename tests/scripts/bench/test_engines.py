"""Readers beside a stand-in for a serving engine."""

import pytest

from scripts.bench import engines

FEW = ["--lengths", "32", "--ranks", "2", "--concurrency", "2", "--ways", "relay"]


def rows(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.slow
def test_the_table_of_readers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ["--shapes", "2x64,1x1000000000", "--seconds", "0.2"]
    monkeypatch.setattr(engines.sys, "argv", ["engines.py", *FEW, *shapes])
    engines.main()
    header, _, small, large = rows(capsys)
    assert header[5:] == ["GB/s", *engines.PARTS, "stand-in", "relay"]
    assert small[:5] == ["2 x 64", "relay", "2", "32", "2"]
    assert all(float(cell) >= 0 for cell in small[5:])
    assert large[:6] == ["1 x 1,000,000,000", "relay", "2", "32", "2", "too large"]


@pytest.mark.slow
def test_the_table_of_trainings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow server is waited for, one that answers at once is not."""
    of_training = ["--train", "--heads", "medusa", "--rates", "200,0", "--steps", "9"]
    monkeypatch.setattr(engines.sys, "argv", ["engines.py", *FEW, *of_training])
    engines.main()
    header, _, slow, fast = rows(capsys)
    assert header[5:] == ["tokens/s of the server", "learnt", "waiting"]
    assert (slow[5], fast[5]) == ("200", "at once")
    assert int(slow[7].rstrip("%")) > 50 > int(fast[7].rstrip("%"))
    assert int(slow[6].replace(",", "")) < 300  # some were on their way before


@pytest.mark.slow
def test_the_memory_of_a_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["engines.py", *FEW, "--heads", "medusa", "--memory", "10"]
    monkeypatch.setattr(engines.sys, "argv", given)
    engines.main()
    told = capsys.readouterr().out
    assert told.startswith("medusa by relay: ")
    assert told.endswith(" MB at 10\n")
