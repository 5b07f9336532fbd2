import time

import pytest
import torch

from eval.clock import PartClock, timed


class Machine:
    """Its time passes only where something is done; the device is 10 seconds behind the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: self.work(10))

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 1), ("cuda", 11)])
def test_a_call_takes_until_the_device_is_done(monkeypatch, device: str, seconds: float) -> None:
    machine = Machine(monkeypatch)
    assert timed(lambda: machine.work(1), torch.device(device)) == seconds


def test_parts_add_up_and_the_rest_is_the_hosts(monkeypatch) -> None:
    machine = Machine(monkeypatch)
    clock = PartClock(torch.device("cpu"))
    for part, seconds in [("prefill", 8), ("draft", 1), ("verify", 4), ("draft", 2)]:
        with clock.part(part):
            machine.work(seconds)
        machine.work(0.5)
    clock.stop()
    times = clock.times
    assert (times.prefill, times.draft, times.verify, times.accept) == (8, 3, 4, 0)
    assert (times.total, times.decode, times.host) == (17, 9, 2)
