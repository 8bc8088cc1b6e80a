"""The torture test of a whole engine on a real device: on a CPU, and on a GPU if there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from proof.mutations import applied, find
from proof.torture import EAGER_GATES, GATES, hunt_service, torture_service
from sidestream.errors import ConfigError

pytestmark = pytest.mark.slow

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
# What wrong indexes end a process on a GPU with.
DEVICE_FAULTS = ("device-side assert", "misaligned address", "illegal memory access")
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


@pytest.mark.parametrize("device", DEVICES)
def test_every_answer_equals_the_models_without_a_pool(device: str) -> None:
    report = torture_service(device, requests=120, seed=1)

    assert report.findings == []
    assert (report.wrong, report.requests) == (0, 120)
    assert (
        min(
            report.aborted,
            report.from_device,
            report.from_host,
            report.preemptions,
            report.failed_slices,
            report.accepted,
        )
        > 0
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", ["release-keeps-its-fences", "store-waits-for-step", "only-committed-blocks-are-published"]
)
def test_a_rule_that_is_missing_shows_in_the_answers(device: str, name: str) -> None:
    assert _shown_without(name, device)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("cpu", "length-is-published-by-its-step"),
        # There a kernel of ours publishes it, and steps are captured.
        pytest.param("cuda", "row-positions-come-from-the-device", marks=ON_GPU),
    ],
)
def test_a_row_that_goes_on_from_elsewhere_shows_in_the_answers(device: str, name: str) -> None:
    assert _shown_without(name, device)


@pytest.mark.parametrize(
    ("device", "name"),
    [("cpu", name) for name in GATES["cpu"]] + [pytest.param("cuda", name, marks=ON_GPU) for name in GATES["cuda"]],
)
def test_a_gate_that_is_missing_shows_in_the_answers_h5(device: str, name: str) -> None:
    assert _shown_without(name, device)


def _shown_without(name: str, device: str) -> bool:
    """Whether answers are wrong with a rule taken out. On a GPU in a process of its own: numbers that are read too
    early may be wrong indexes, which end it, and everything that was on it.
    """
    if device == "cpu":
        return _wrong_without(name, device, 300)
    call = f"from test_service import _wrong_without; print('wrong:', _wrong_without({name!r}, {device!r}, 3000))"
    done = subprocess.run(
        [sys.executable, "-c", call],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "wrong:" in done.stdout or any(fault in done.stderr for fault in DEVICE_FAULTS), done.stderr
    return "wrong: False" not in done.stdout


def _wrong_without(name: str, device: str, requests: int) -> bool:
    with applied(find(name)):
        report = torture_service(device, requests=requests, seed=1, eager=name in EAGER_GATES)
    return report.wrong > 0 and any(found in report.findings[0] for found in ("is wrong", *DEVICE_FAULTS))


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="requests is 0: give a whole number from 1"):
        torture_service("cpu", requests=0)
    with pytest.raises(ConfigError, match="no device gpu"):
        torture_service("gpu", requests=1)
    with pytest.raises(ConfigError, match="no mutation for a whole engine on cpu store-waits-for-step"):
        hunt_service("cpu", ["store-waits-for-step"], requests=1)
