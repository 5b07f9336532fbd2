import time

import pytest
import torch

from conf.command.clock import (
    PART,
    PartClock,
    Stopwatch,
    measure_busy_seconds,
    measure_seconds,
    sum_busy_seconds,
)


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
    machine, begun = Machine(monkeypatch), list[float]()

    def call() -> None:
        begun.append(machine.now)
        machine.work(1)

    assert measure_seconds(call, torch.device(device)) == seconds
    # What the device had to do before is done before the call.
    assert begun == [seconds - 1]


def test_parts_add_up_and_the_rest_is_the_hosts(monkeypatch) -> None:
    machine = Machine(monkeypatch)
    clock = PartClock(torch.device("cpu"))
    for part, seconds in [("prefill", 8), ("draft", 1), ("verify", 4), ("draft", 2)]:
        with clock.measure_part(part):
            machine.work(seconds)
        machine.work(0.5)
    clock.finish_timing()
    [times] = clock.times
    assert (times.prefill, times.draft, times.verify, times.accept) == (8, 3, 4, 0)
    assert (times.total, times.decode, times.host) == (17, 9, 2)


def test_texts_share_what_they_do_together(monkeypatch) -> None:
    """Both, then the second alone, then a third beside it."""
    machine = Machine(monkeypatch)
    clock = PartClock(torch.device("cpu"), 3)
    for seconds, texts in [(4, [0, 1]), (3, [1]), (2, [1, 2])]:
        with clock.measure_part("verify", texts):
            machine.work(seconds)
        machine.work(0.5)
        assert clock.end_lap(texts) == machine.now
    clock.finish_timing([2])
    assert [times.verify for times in clock.times] == [2, 6, 1]
    assert [times.total for times in clock.times] == [2.25, 7, 1.25]


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 1), ("cuda", 11)])
def test_only_the_last_lap_waits_for_the_device(monkeypatch, device: str, seconds: float) -> None:
    machine = Machine(monkeypatch)
    clock = PartClock(torch.device(device))
    begun = machine.now
    machine.work(1)
    assert clock.end_lap() == machine.now - begun == 1
    clock.finish_timing()
    assert clock.times[0].total == seconds


def test_what_is_set_aside_is_in_no_total(monkeypatch) -> None:
    machine = Machine(monkeypatch)
    clock = PartClock(torch.device("cuda"), 2)
    begun = machine.now
    machine.work(1)
    with clock.pause_timing([0, 1]):
        machine.work(100)
    machine.work(2)
    # What the device still had to do before it is the texts'; what it did inside is not.
    assert clock.end_lap([0, 1]) == machine.now - begun - 110 == 13
    assert [times.total for times in clock.times] == [6.5, 6.5]
    assert [(times.capture, times.num_captures) for times in clock.times] == [(55, 0.5)] * 2


def test_processor_time_is_that_of_this_process_alone(monkeypatch) -> None:
    busy = iter([3.0, 3.5])
    monkeypatch.setattr(time, "process_time", lambda: next(busy))
    assert Stopwatch().processor_seconds() == 0.5


def test_the_devices_work_belongs_to_the_part_that_launched_it() -> None:
    """A kernel of 2 s in a part of 5; what runs late, and what no part launched."""

    def event(category: str, name: str, start: float, end: float, correlation: int = 1) -> dict:
        times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
        return {"ph": "X", "cat": category, "name": name, **times,
                "args": {"correlation": correlation}}  # fmt: skip

    parts = [("draft", 0, 5), ("verify", 6, 10), ("draft", 11, 12)]
    events = [event("user_annotation", PART + n, a, b) for n, a, b in parts]
    # An operation of torch counts from 1 as well, and is no launch.
    events.append(event("cpu_op", "aten::add", 7, 8))
    launches = [(1, 1), (2, 4), (3, 6), (4, 10.5), (5, 11.5)]
    events += [event("cuda_runtime", "cudaLaunchKernel", t, t, n) for n, t in launches]
    kernels = [(1, 1, 3), (2, 8, 9), (3, 9, 13), (4, 13, 20), (5, 20, 21)]
    events += [event("kernel", "gemm", a, b, n) for n, a, b in kernels]
    events.append(event("gpu_user_annotation", PART + "draft", 0, 21))
    assert sum_busy_seconds([{"ph": "M"}, *events]) == {"draft": 4.0, "verify": 4.0}


def test_a_profile_shows_the_parts(monkeypatch, recwarn) -> None:
    """On a CPU no device worked; that parts are found is seen by their names."""
    seen = []
    monkeypatch.setattr("torch.profiler.profiler._WARNINGS_SHOWN", set())
    monkeypatch.setattr(
        "conf.command.clock.sum_busy_seconds", lambda events: seen.extend(events) or {}
    )

    def run() -> None:
        with torch.profiler.record_function(PART + "draft"):
            torch.ones(2)

    assert measure_busy_seconds(run) == {}
    shown = [each["name"] for each in seen if each.get("cat") == "user_annotation"]
    assert shown == ["part: draft"]
    # Progress bars stand there.
    assert not [each for each in recwarn if "clears events" in str(each.message)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_slow_host_is_not_taken_for_a_busy_device() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)

    def run(pause: float) -> PartClock:
        clock = PartClock(device)
        with clock.measure_part("verify"):
            for _ in range(10):
                matrix @ matrix
                time.sleep(pause)
        clock.finish_timing()
        return clock

    run(0)
    alone, busy = run(0).times[0].verify, measure_busy_seconds(lambda: run(0.05))["verify"]
    assert run(0.05).times[0].verify > 0.5
    assert busy == pytest.approx(alone, rel=0.3)
