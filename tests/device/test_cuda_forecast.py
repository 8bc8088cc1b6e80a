"""The forecast of a step's end, and the wait that uses it, also when it is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_rig import FakeGpu

from sidestream_kv.device.channel import Bell
from sidestream_kv.device.cuda import CudaDevice
from sidestream_kv.device.cuda import wait as wait_module
from sidestream_kv.device.cuda.forecast import Forecast
from sidestream_kv.device.cuda.stream import CudaFence, CudaStream


def test_work_is_forecast_to_take_the_shortest_recent_time_of_its_name() -> None:
    forecast = Forecast()
    assert forecast.soonest_end_s("decode 2", 1.0) is None
    now = 1.0
    for took in (0.5, 0.2, 0.4):
        forecast.ended("decode 2", now, now + took)
        now += took
    assert forecast.soonest_end_s("decode 2", now) == pytest.approx(now + 0.2)
    assert forecast.soonest_end_s("prefill 9", now) is None
    for _ in range(7):  # the eighth pushes the shortest one out
        forecast.ended("decode 2", now, now + 0.4)
        now += 0.4
    assert forecast.soonest_end_s("decode 2", now) == pytest.approx(now + 0.4)


def test_work_is_forecast_to_begin_when_earlier_work_ends() -> None:
    forecast = Forecast()
    forecast.ended("a", 1.0, 1.5)
    forecast.ended("b", 1.1, 1.7)  # was launched behind a
    assert forecast.soonest_end_s("b", 1.0) == pytest.approx(1.7 + 0.2)
    assert forecast.soonest_end_s("b", 3.0) == pytest.approx(3.0 + 0.2)


def test_the_forecast_forgets_names_not_seen_recently() -> None:
    forecast = Forecast()
    for number in range(300):
        forecast.ended(f"prefill {number}", number, number + 0.5)
        forecast.ended("decode 1", number + 0.5, number + 0.75)
    assert len(forecast._seconds) <= 256
    assert forecast.soonest_end_s("prefill 0", 400.0) is None
    assert forecast.soonest_end_s("decode 1", 400.0) == pytest.approx(400.25)


class Clock:
    """Goes on by sleeping, and by a microsecond when it is looked at. Stands for the module `time`."""

    def __init__(self, gpu: FakeGpu, ends_s: float) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []
        self._gpu, self._ends_s = gpu, ends_s

    def perf_counter(self) -> float:
        self._go_on(1e-6)
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self._go_on(seconds)

    def _go_on(self, seconds: float) -> None:
        before, self.now_s = self.now_s, self.now_s + seconds
        if before < self._ends_s <= self.now_s:
            self._gpu.run()


@pytest.fixture
def device(gpu: FakeGpu) -> Iterator[CudaDevice]:
    device = CudaDevice(driver=gpu)  # type: ignore[arg-type]
    yield device
    gpu.run()
    device.close()


@pytest.fixture
def fence(device: CudaDevice, gpu: FakeGpu) -> CudaFence:
    stream = device.stream("compute")
    assert isinstance(stream, CudaStream)
    return stream.submit(lambda: gpu.launch(stream.external, lambda: None), label="decode 1")


@pytest.mark.parametrize(
    ("due_s", "ends_s", "late_s", "blocks"),
    [
        pytest.param(0.010, 0.010, 3e-6, False, id="when it was due"),
        pytest.param(0.010, 0.0100_9, 3e-6, False, id="a little later"),
        pytest.param(0.010, 0.002, 0.0005, False, id="far sooner"),
        pytest.param(None, 0.0000_5, 3e-6, False, id="at once, and it is the first of its name"),
        pytest.param(0.010, 0.0109, 3e-6, False, id="later by what it often is"),
        pytest.param(0.002, 0.020, 0.0, True, id="far later"),
        pytest.param(0.0009, 0.0009, 3e-6, False, id="too soon to sleep"),
    ],
)
def test_a_wait_sleeps_until_shortly_before_the_forecast_end_and_then_polls(
    device: CudaDevice,
    gpu: FakeGpu,
    fence: CudaFence,
    monkeypatch: pytest.MonkeyPatch,
    due_s: float | None,
    ends_s: float,
    late_s: float,
    blocks: bool,
) -> None:
    clock = Clock(gpu, ends_s)
    monkeypatch.setattr(wait_module, "time", clock)
    assert device._waiter.wait_until(fence, due_s, None)
    assert fence.poll()
    if blocks:
        assert clock.now_s < ends_s  # the driver let it go on
    else:
        assert ends_s <= clock.now_s <= ends_s + late_s + 2e-6
    if due_s is not None:
        until_s = max(0.0, due_s - wait_module._AHEAD_S)
        assert sum(clock.slept) <= until_s + 1e-9
        assert max(clock.slept, default=0.0) <= wait_module._NAP_S
        assert ends_s < due_s or sum(clock.slept) >= 0.9 * until_s


def test_a_bell_interrupts_the_sleep_and_not_the_polling_near_the_end(
    device: CudaDevice, gpu: FakeGpu, fence: CudaFence, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, bell = Clock(gpu, 0.0009), Bell()
    monkeypatch.setattr(wait_module, "time", clock)
    bell.ring()
    assert not device._waiter.wait_until(fence, 0.010, bell)
    assert (clock.slept, bell.rung, fence.poll()) == ([], False, False)
    bell.ring()
    assert device._waiter.wait_until(fence, 0.0009, bell)  # so short a step has no time in which nobody looks
    assert (bell.rung, fence.poll()) == (True, True)


def test_a_step_that_ends_after_an_interrupted_wait_updates_the_forecast(
    device: CudaDevice, gpu: FakeGpu, fence: CudaFence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device._waiter, "wait_until", lambda *given: False)
    assert not device.wait_host(fence, reason="step", bell=Bell())
    gpu.run()
    assert device.wait_host(fence, reason="step", bell=Bell())
    assert device._waiter.forecasts["compute"].soonest_end_s("decode 1", 0.0) is not None


def test_waits_update_the_forecast_of_their_stream(device: CudaDevice, gpu: FakeGpu) -> None:
    stream = device.stream("compute")
    assert isinstance(stream, CudaStream)
    for _ in range(2):
        fence = stream.submit(lambda: gpu.launch(stream.external, lambda: None), label="decode 7")
        assert device.wait_host(fence, reason="step")
    assert device._waiter.forecasts["compute"].soonest_end_s("decode 7", 0.0) is not None
    assert device.host_waits() == {"step": 2}
