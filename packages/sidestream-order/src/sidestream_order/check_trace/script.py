"""Runs a script under the recorder, and reports the judge's findings.

Exit statuses: 0 without findings, 1 with findings, 2 if the script or the device does not exist, 3 if the script
failed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from sidestream_kv.device.kinds import CPU, CUDA
from sidestream_kv.errors import ConfigError
from sidestream_order.check_trace.fakes import FakeCuda
from sidestream_order.check_trace.judge import Judge, Origin
from sidestream_order.check_trace.real import CudaRuntime
from sidestream_order.check_trace.recorder import Recorder, Runtime, recording
from sidestream_order.findings import Finding
from sidestream_order.trace import explain

CLEAN, FOUND, WRONG_INPUT, FAILED = 0, 1, 2, 3
DEVICES = (CUDA, CPU)
_STORAGE = re.compile(r"storage\d+")


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of one run of a script.

    findings  the checker's findings
    origins   name of a storage in the findings → its origin
    works     number of operators, copies and declared kernels on streams
    streams   names of the streams that were used
    failure   why the script failed, with its traceback; "": it did not fail
    """

    findings: tuple[Finding, ...]
    origins: dict[str, Origin]
    works: int
    streams: tuple[str, ...]
    failure: str

    @property
    def status(self) -> int:
        """The exit status of the command."""
        return FAILED if self.failure else FOUND if self.findings else CLEAN

    def __str__(self) -> str:
        """The report: each finding with its call sites and storages, then one summary line."""
        parts = [self.failure] if self.failure else []
        for finding in self.findings:
            lines = [str(finding), explain(finding)]
            names = dict.fromkeys(_STORAGE.findall(finding.message))
            lines += [f"  {name}: {self.origins[name].text}" for name in names if name in self.origins]
            parts.append("\n".join(line for line in lines if line))
        count = len(self.findings)
        found = "no finding" if not count else "1 finding" if count == 1 else f"{count} findings"
        seen = f"{self.works} works on {', '.join(self.streams) or 'no stream'}"
        early = "; the script failed, so its end was not judged" if self.failure else ""
        return "\n\n".join([*parts, f"check-trace: {found} in {seen}{early}"])


def check_script(script: str | os.PathLike[str], arguments: Sequence[str] = (), *, device: str = "") -> Judgement:
    """Run a Python script in this process as `__main__`, and check its use of CUDA streams. Blocks until the script
    ends.

    `device` is the GPU, or the CPU for a fake GPU (see `fakes`); by default the GPU if there is one. The script's
    output is not redirected. Raises ConfigError before the start if the script or the device does not exist.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"no script {str(path)!r}: give the path of a Python file")
    available = torch.cuda.is_available()
    device = device or (CUDA if available else CPU)
    if device not in DEVICES:
        raise ConfigError(f"device {device!r} is unknown: give one of {', '.join(DEVICES)}")
    if device == CUDA and not available:
        raise ConfigError(f"this machine has no GPU for torch: give {CPU} as device to run the script on a fake GPU")
    judge = Judge()
    runtime: Runtime = CudaRuntime() if device == CUDA else FakeCuda(judge)
    failure = ""
    with _as_main(path, arguments), recording(Recorder(judge, runtime)):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                failure = f"{path.name} ended with status {end.code}"
        except Exception as error:
            shown = _from_script(error, path)
            failure = f"{path.name} raised {type(error).__name__}:\n{shown}".rstrip()
        findings = _without_repetitions(judge)
    return Judgement(findings, judge.origins, judge.num_works, tuple(judge.streams), failure)


@contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Inside this context, `sys.argv` and `sys.path` are as Python sets them for a script."""
    argv, places = sys.argv, list(sys.path)
    sys.argv, sys.path[:] = [str(path), *arguments], [str(path.resolve().parent), *places]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, places


def _from_script(error: BaseException, path: Path) -> str:
    """The traceback, beginning with the script's first frame."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != str(path):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__))


def _without_repetitions(judge: Judge) -> tuple[Finding, ...]:
    """Keep one finding for each pair of source lines, because a loop may cause one for each of its storages."""
    found: dict[tuple[str, str, str], Finding] = {}
    for finding in judge.findings:
        found.setdefault((finding.kind, finding.first, _STORAGE.sub("", finding.second)), finding)
    return tuple(_readable(finding, judge) for finding in found.values())


def _readable(finding: Finding, judge: Judge) -> Finding:
    """Translate a finding of the checker into terms of PyTorch. In the checker, a storage is a pool with one id, and
    the next allocation of reused bytes is work on a stream.
    """
    message = re.sub(r"(storage\d+) 0 \(([^)]*)\)", r"\2", finding.message)
    message = re.sub(r"`release of (storage\d+)` \(host, ([^)]*)\) released", r"the deletion at \2 freed", message)
    message = re.sub(
        r": the host had not seen (\S+) done, and no fence given with a release comes after it \(given: [^)]*\)",
        r": the allocator may give its bytes to another tensor before \1 is done: neither the stream of the storage"
        r" waited for \1 before its next allocation, nor did record_stream name the stream",
        message,
    )
    message = message.replace(
        "which had no open lease when it was submitted", "all tensors of which were deleted before"
    )
    return dataclasses.replace(finding, message=message)
