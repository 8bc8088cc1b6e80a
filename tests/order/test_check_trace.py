"""`check_trace`: PyTorch programs on the fake GPU, each with and without the line that makes it correct."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from sidestream.cli.app import app
from sidestream.errors import ConfigError
from sidestream_kv.device.kinds import CPU, CUDA
from sidestream_kv.types import Access
from sidestream_order.check_trace import Judgement, check_script, touches
from sidestream_order.check_trace.__main__ import main
from sidestream_order.check_trace.judge import Judge
from sidestream_order.check_trace.real import CudaRuntime
from sidestream_order.check_trace.recorder import Recorder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "check_trace"
PRELUDE = """
import torch
from sidestream_order.check_trace import touches

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
x = torch.zeros(64, device="cuda")
torch.cuda.synchronize()
"""

Run = Callable[[str], Judgement]


@pytest.fixture
def judge(tmp_path: Path) -> Run:
    """Judge a program after the prelude, on the fake GPU. It must not fail."""

    def run(code: str) -> Judgement:
        script = tmp_path / "program.py"
        script.write_text(PRELUDE + textwrap.dedent(code), encoding="utf-8")
        result = check_script(script, device=CPU)
        assert not result.failure, result.failure
        return result

    return run


def kinds(result: Judgement) -> list[str]:
    return [finding.kind for finding in result.findings]


# ---------------------------------------------------------------------- waits between streams

READ_ON_SIDE = """
with torch.cuda.stream(side):
    y = x + 1
"""


@pytest.mark.parametrize(
    "wait",
    [
        "side.wait_stream(main)",
        "side.wait_event(main.record_event())",
        "e = torch.cuda.Event(); e.record(); e.wait(side)",
        "e = torch.cuda.Event(); main.record_event(e); side.wait_event(e)",
        "third = torch.cuda.Stream(); third.wait_stream(main); side.wait_stream(third)",
        "e = torch.cuda.Event(); e.record(side); e.record(main); side.wait_event(e)",
    ],
)
def test_a_read_on_another_stream_needs_a_wait(judge: Run, wait: str) -> None:
    found = judge("x.fill_(1)" + READ_ON_SIDE)
    assert kinds(found) == ["race"]
    (race,) = found.findings
    assert "program.py:8 <module>, `fill_`" in race.first
    assert "program.py:10 <module>, `add`" in race.second
    assert (race.streams, race.accesses) == (("default", "stream1"), ("writes", "reads"))
    assert kinds(judge(f"x.fill_(1)\n{wait}" + READ_ON_SIDE)) == []


@pytest.mark.parametrize(
    "no_wait",
    [
        "side.wait_event(torch.cuda.Event())",  # never recorded
        "main.wait_stream(side)",
        "e = main.record_event(); x.add_(1); side.wait_event(e)",
        "e = torch.cuda.Event(); e.record(main); side.wait_event(e); x.add_(1); e.record(main)",
    ],
)
def test_a_wait_orders_only_work_before_the_event_was_recorded(judge: Run, no_wait: str) -> None:
    assert "race" in kinds(judge(f"x.fill_(1)\n{no_wait}" + READ_ON_SIDE))


@pytest.mark.parametrize(
    "wait",
    [
        "main.synchronize()",
        "torch.cuda.synchronize()",
        "main.record_event().synchronize()",
        "assert main.query()",
        "assert main.record_event().query()",
        "x.sum().item()",
        "x.cpu()",
        "x.tolist()",
        "x.to('cpu')",
        "print(x)",
        "bool(x.any())",
        "torch.nonzero(x)",
        "x[x > 0]",
        "torch.empty(64).copy_(x)",
        "torch.empty(64, pin_memory=True).copy_(x)",
        "x.copy_(torch.ones(64))",
    ],
)
def test_a_wait_of_the_host_orders_streams(judge: Run, wait: str) -> None:
    assert kinds(judge(f"x.fill_(1)\n{wait}" + READ_ON_SIDE)) == []


@pytest.mark.parametrize(
    "no_wait", ["x.sum()", "x.to('cpu', non_blocking=True)", "side.synchronize()", "torch.cuda.Event().synchronize()"]
)
def test_the_host_without_a_wait_does_not_order_streams(judge: Run, no_wait: str) -> None:
    assert "race" in kinds(judge(f"x.fill_(1)\n{no_wait}" + READ_ON_SIDE))


# ---------------------------------------------------------------------- copies and the host

READS = ["h.numpy()", "h.tolist()", "h.sum()", "h[3].item()", "torch.empty(64).copy_(h)", "x + h[0]"]


@pytest.mark.parametrize("read", READS)
def test_the_host_reads_a_copy_only_after_it_has_waited(judge: Run, read: str) -> None:
    copy = "h = torch.empty(64, pin_memory=True); h.copy_(x, non_blocking={})\n"
    assert kinds(judge(copy.format(True) + read)) == ["race"]
    assert kinds(judge(copy.format(True) + "main.synchronize()\n" + read)) == []
    assert kinds(judge(copy.format(False) + read)) == []


def test_the_host_changes_a_pinned_source_only_after_the_copy(judge: Run) -> None:
    program = "h = torch.zeros(64){}; y = h.to('cuda', non_blocking={}){}\nh.fill_(2)"
    assert kinds(judge(program.format(".pin_memory()", True, ""))) == ["race"]
    assert kinds(judge(program.format(".pin_memory()", True, "; main.synchronize()"))) == []
    assert kinds(judge(program.format(".pin_memory()", False, ""))) == []
    assert kinds(judge(program.format("", True, ""))) == []  # pageable: the driver has copied it


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("on_main", "on_side", "races"),
    [
        ("x[:32].fill_(1)", "x[32:].fill_(2)", False),
        ("x[:33].fill_(1)", "x[32:].fill_(2)", True),
        ("x.view(8, 8)[:, 0].fill_(1)", "x.view(8, 8)[:, 1].fill_(2)", False),
        ("x.view(8, 8)[:, :2].fill_(1)", "x.view(8, 8)[:, 1].fill_(2)", True),
        ("x.sum()", "x.sum()", False),
        ("x.sum()", "x.view(8, 8).t()", False),
        ("x.sum()", "torch.add(x, 1, out=x)", True),
        ("x.sum()", "torch._foreach_add_([x], 1)", True),
        ("x.sum()", "x[torch.tensor([1], device='cuda')] = 0", True),
        ("x.sum()", "x.detach().zero_()", True),
        ("x.sum()", "x.expand(2, 64).sum()", False),
        ("touches(writes=[x[:8]], label='kernel')", "x[:8].sum()", True),
        ("touches(writes=[x[:8]], label='kernel')", "x[8:].sum()", False),
        ("touches(reads=[x])", "x.sum()", False),
        ("touches(reads=[x])", "x.zero_()", True),
    ],
)
def test_accesses_to_the_same_bytes_race_if_one_is_a_write(judge: Run, on_main: str, on_side: str, races: bool) -> None:
    result = judge(f"{on_main}\nwith torch.cuda.stream(side):\n    {on_side}")
    assert kinds(result) == (["race"] if races else [])


def test_a_declaration_outside_of_a_recording_does_nothing() -> None:
    touches(reads=[torch.ones(1)])


def test_work_submitted_by_other_threads_is_checked(judge: Run) -> None:
    program = """
    import threading
    x.fill_(1)
    def work():
        {}
        assert torch.cuda.current_stream() is main
        with torch.cuda.stream(side):
            x.sum()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    """
    assert kinds(judge(program.format("pass"))) == ["race"]
    assert kinds(judge(program.format("side.wait_stream(main)"))) == []


def test_the_backward_pass_is_checked(judge: Run) -> None:
    program = "w = torch.ones(4, device='cuda', requires_grad=True)\n(w * w).sum().backward()\n{}\n"
    read = "with torch.cuda.stream(side):\n    w.grad.sum()"
    assert kinds(judge(program.format("") + read)) == ["race"]
    assert kinds(judge(program.format("side.wait_stream(main)") + read)) == []


# ---------------------------------------------------------------------- the caching allocator

USED_ON_SIDE = """
side.wait_stream(main)
with torch.cuda.stream(side):
    x.sum()
{}
del x
{}
y = torch.empty(64, device="cuda")
"""


def test_deleting_a_storage_that_another_stream_uses_is_found(judge: Run) -> None:
    found = judge(USED_ON_SIDE.format("", ""))
    assert kinds(found) == ["early_release"]
    assert "the deletion at" in str(found) and "program.py:13 <module> freed storage" in str(found)
    assert "nor did record_stream name the stream" in str(found)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x.record_stream(side)", ""),
        ("x[3:].record_stream(side)", ""),
        ("main.wait_stream(side)", ""),
        ("", "main.wait_stream(side)"),
        ("side.synchronize()", ""),
        ("", "torch.cuda.synchronize()"),
        ("kept = x[1:]", ""),
        ("torch.cuda.set_stream(side)", ""),  # the next allocation is of the other stream
    ],
)
def test_a_storage_may_be_deleted_if_its_memory_is_reused_late_enough(judge: Run, before: str, after: str) -> None:
    assert kinds(judge(USED_ON_SIDE.format(before, after))) == []


@pytest.mark.parametrize("wrong", ["x.record_stream(main)", "e = side.record_event(); x.record_stream(main)"])
def test_record_stream_with_a_wrong_stream_does_not_protect_a_storage(judge: Run, wrong: str) -> None:
    assert kinds(judge(USED_ON_SIDE.format(wrong, ""))) == ["early_release"]


def test_an_allocation_too_large_for_freed_memory_does_not_reuse_it(judge: Run) -> None:
    assert kinds(judge(USED_ON_SIDE.format("", "").replace("empty(64", "empty(65"))) == []


def test_repeated_findings_of_a_loop_are_reported_once(judge: Run) -> None:
    loop = (
        "for _ in range(5):\n    y = torch.ones(8, device='cuda')\n    with torch.cuda.stream(side):\n        y.sum()"
    )
    assert sorted(kinds(judge(loop))) == ["early_release", "race"]


# ---------------------------------------------------------------------- CUDA graphs

FORK = """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x.add_(1)
    {fork}
    with torch.cuda.stream(side):
        {inside}
    torch.cuda.current_stream().wait_stream(side)
graph.replay()
graph.replay()
assert x[0].item() == 4, x
"""


def test_work_inside_a_graph_is_ordered_by_the_waits_of_the_capture(judge: Run) -> None:
    fork = "side.wait_stream(torch.cuda.current_stream())"
    assert kinds(judge(FORK.format(fork=fork, inside="x.add_(1)"))) == []
    late = FORK.format(fork=fork + "\n    x.sum()", inside="x.add_(1)")
    found = judge(late)
    assert set(kinds(found)) == {"race"}
    assert "`add_, captured at" in found.findings[0].message and "program.py:15" in found.findings[0].message


def test_a_graph_replay_is_ordered_like_other_work_of_its_stream(judge: Run) -> None:
    program = """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    x.fill_(3)
    {}
    with torch.cuda.stream(side):
        graph.replay()
    main.wait_stream(side)
    assert y[0].item() == 6
    """
    assert kinds(judge(program.format(""))) == ["race"]
    assert kinds(judge(program.format("side.wait_stream(main)"))) == []


def test_replays_of_one_graph_do_not_overlap(judge: Run) -> None:
    program = """
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    for graph in (first, second):
        with torch.cuda.graph(graph):
            x.add_(1)
    first.replay()
    with torch.cuda.stream(side):
        {}.replay()
    """
    assert kinds(judge(program.format("first"))) == []
    assert kinds(judge(program.format("second"))) == ["race"]


def test_captured_work_is_not_executed_and_does_not_race(judge: Run) -> None:
    program = """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        graph.capture_begin()
        x.fill_(5)
        graph.capture_end()
    assert x[0].item() == 0
    x.sum()
    """
    assert kinds(judge(program)) == []


def test_external_events_order_each_graph_replay(judge: Run) -> None:
    program = """
    ready, graph = torch.cuda.Event(external=True), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        {}
        y = x * 2
    with torch.cuda.stream(side):
        x.fill_(3)
        ready.record()
    graph.replay()
    """
    assert kinds(judge(program.format("ready.wait()"))) == []
    assert kinds(judge(program.format("pass"))) == ["race"]


def test_an_external_event_is_recorded_at_each_graph_replay(judge: Run) -> None:
    program = """
    done, graph = torch.cuda.Event(external=True), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        {}
    graph.replay()
    side.wait_event(done)
    with torch.cuda.stream(side):
        y.sum()
    """
    assert kinds(judge(program.format("done.record()"))) == []
    assert kinds(judge(program.format("pass"))) == ["race"]


def test_a_capture_may_not_wait_for_an_event_of_another_stream(judge: Run) -> None:
    program = """
    e, graph = side.record_event(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            e.wait()
    except RuntimeError as error:
        assert "uncaptured work" in str(error)
    else:
        raise AssertionError("CUDA refuses this")
    """
    assert kinds(judge(program)) == []


# ---------------------------------------------------------------------- the fake GPU


def test_tensors_on_the_fake_gpu_behave_as_on_a_gpu(judge: Run) -> None:
    judge("""
    assert torch.cuda.is_available() and x.is_cuda and x.device == torch.device("cuda", 0) and "cuda:0" in repr(x)
    host = torch.arange(4.0)
    y = host.cuda(non_blocking=True)
    assert y.device.type == "cuda" and y.cpu().device.type == "cpu" and y.tolist() == [0, 1, 2, 3]
    assert torch.tensor([1, 2], device="cuda").sum().item() == 3
    assert host.pin_memory().is_pinned() and not host.is_pinned() and y.to("cpu", non_blocking=True).is_pinned()
    y[1:3] = 7
    assert y.cpu().numpy().tolist() == [0, 7, 7, 3] and (y[y > 1] == y[1:]).all()
    assert f"{y[1]:.1f}" == "7.0" and repr(y).endswith("device='cuda:0')")
    model = torch.nn.Linear(4, 2).to("cuda")
    assert model(torch.ones(3, 4, device="cuda")).shape == (3, 2) and next(model.parameters()).is_cuda
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4, device="cuda")).sum().backward()
    optimizer.step()
    try:
        y.numpy()
    except TypeError:
        pass
    else:
        raise AssertionError
    """)
    assert torch.ones(1).to(CPU).is_cpu and not hasattr(torch.cuda.Stream, "runtime")  # all names are back


# ---------------------------------------------------------------------- the examples and the command


EXAMPLE_KINDS = [
    ("two_stream_offloader", "", None),
    ("two_stream_offloader", "store", "race"),
    ("two_stream_offloader", "load", "race"),
    ("two_stream_offloader", "reuse", "early_release"),
    ("captured_decode", "", None),
    ("captured_decode", "wait", "race"),
    ("captured_decode", "input", "unleased"),
]


@pytest.mark.parametrize(("example", "drop", "kind"), EXAMPLE_KINDS)
def test_an_example_has_a_finding_only_without_its_wait(example: str, drop: str, kind: str | None) -> None:
    result = check_script(EXAMPLES / f"{example}.py", ["--drop", drop] if drop else [], device=CPU)
    assert not result.failure
    assert kinds(result) == ([] if kind is None else [kind])
    assert f"{example}.py:" in str(result) or kind is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("example", "drop", "kind"), EXAMPLE_KINDS)
def test_an_example_has_the_same_findings_on_a_gpu(example: str, drop: str, kind: str | None) -> None:
    command = [sys.executable, "-m", "sidestream_order.check_trace", "--device", CUDA, str(EXAMPLES / f"{example}.py")]
    done = subprocess.run([*command, *(["--drop", drop] if drop else [])], capture_output=True, text=True, check=False)
    # Without a wait, the bytes may really be wrong, and the example says so.
    assert done.returncode == 0 if kind is None else done.returncode in (1, 3), done.stderr
    assert [line.partition(":")[0] for line in done.stderr.splitlines() if line.startswith(f"{kind}:")] == (
        [] if kind is None else [kind]
    )


def command(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["check-trace", "--device", CPU, *arguments], prog_name="sidestream")
    return result.exit_code, result.stdout, result.stderr


def test_the_report_goes_to_stderr_and_not_to_stdout() -> None:
    status, out, err = command(str(EXAMPLES / "two_stream_offloader.py"), "--drop", "store")
    assert (status, out) == (1, "all blocks came back\n")
    assert err.startswith("race: `copy_`") and "missing: default:1 ──▶ stream1:1" in err
    assert "storage1: 262144 bytes on cuda:0, first seen as float32[65536]" in err
    assert err.rstrip().endswith("check-trace: 1 finding in 19 works on default, stream1")


def test_the_ordering_page_shows_the_report() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "ordering.md").read_text(encoding="utf-8")
    shown = page.partition("two_stream_offloader.py --drop store\n")[2].partition("```")[0].split()
    _, out, err = command(str(EXAMPLES / "two_stream_offloader.py"), "--drop", "store")
    pattern = ".*".join(map(re.escape, " ".join(shown).split("…")))
    assert re.fullmatch(pattern, " ".join((out + err).split()))


def test_a_script_runs_with_its_own_arguments_as_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "program.py"
    script.write_text("import json, sys\nprint(json.dumps(sys.argv[1:]), __name__)\n", encoding="utf-8")
    assert command(str(script), "--help-all")[1] == '["--help-all"] __main__\n'
    monkeypatch.setattr(sys, "argv", ["check_trace", "--device", CPU, str(script), "--device", "x"])
    assert main() == 0
    assert capsys.readouterr() == (
        f"{json.dumps(['--device', 'x'])} __main__\n",
        "check-trace: no finding in 0 works on no stream\n",
    )
    monkeypatch.setattr(sys, "argv", ["check_trace", str(tmp_path / "gone.py")])
    assert main() == 2
    out, err = capsys.readouterr()
    assert out == "" and "gone.py': give the path of a Python file" in err


def test_a_script_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    status, _, err = command(str(tmp_path / "gone.py"))
    assert status == 2
    assert "no script" in err and "give the path of a Python file" in err


def test_a_failing_script_is_reported_with_its_line_and_earlier_findings(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + "x.fill_(1)\n" + READ_ON_SIDE + "raise ValueError('no more')\n", encoding="utf-8")
    status, _, err = command(str(script))
    assert status == 3
    assert "program.py raised ValueError:" in err and "line 12" in err and "runpy" not in err
    assert "race: `add`" in err and "the script failed" in err


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit", 0), ("raise SystemExit(4)", 3)])
def test_the_exit_status_of_the_script_is_kept(tmp_path: Path, code: str, status: int) -> None:
    script = tmp_path / "program.py"
    script.write_text(code, encoding="utf-8")
    assert check_script(script, device=CPU).status == status


def test_unavailable_and_unknown_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script = tmp_path / "program.py"
    script.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no GPU for torch: give cpu"):
        check_script(script, device=CUDA)
    with pytest.raises(ConfigError, match="device 'tpu' is unknown: give one of cuda, cpu"):
        check_script(script, device="tpu")


# ---------------------------------------------------------------------- the judge, and the names of a real GPU


def test_a_storage_collected_while_the_judge_works_is_freed_afterwards() -> None:
    judge = Judge()
    judge.made("storage1", 64, "default", "on a GPU")
    judge.submitted("default", [Access("storage1", 0, 64, write=True)], "write")
    judge.submitted("stream1", [Access("storage1", 0, 64, write=False)], "read")
    with judge._exclusive():
        judge.freed("storage1")
        assert "storage1" in judge._storages
    judge.made("storage2", 64, "default", "on a GPU")
    assert [finding.kind for finding in judge.findings] == ["race", "early_release"]


def test_records_of_deleted_storages_are_dropped() -> None:
    judge = Judge()
    for number in range(20):
        name = f"storage{number}"
        judge.made(name, 64, "default", "on a GPU")
        judge.submitted("stream1" if number % 2 else "default", [Access(name, 0, 64, write=True)], "write")
        judge.recorded_stream(name, "stream1")
        judge.freed(name)
    assert not judge.findings and not judge.origins and not judge._checker._memories.shadows


class Stub:
    """Stands for a class of `torch.cuda` whose methods do nothing."""

    answer = True

    def __init__(self, stream_id: int = 0) -> None:
        self.stream_id, self.device_index = stream_id, 0

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return self.answer

    def capture_begin(self) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The wrapped names of a real GPU, over stubs, and two streams: 0 and 7."""
    here = Stub()
    names = {name: type(name, (Stub,), {}) for name in ("Stream", "Event", "CUDAGraph")}
    for name, value in {**names, "current_stream": lambda device=None: here, "synchronize": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    judge = Judge()
    runtime = CudaRuntime()
    side = torch.cuda.Stream(7)
    judge.made("storage1", 64, "default", "on a GPU")

    def use(stream: object, write: bool) -> None:
        judge.submitted(runtime.name_of(stream), [Access("storage1", 0, 64, write=write)], "work")

    with runtime.patched(Recorder(judge, runtime)):
        yield SimpleNamespace(judge=judge, here=torch.cuda.current_stream(), side=side, use=use)


@pytest.mark.parametrize(
    ("case", "races"),
    [
        ("nothing", True),
        ("wait", False),
        ("wait for a fresh event", True),
        ("event.synchronize", False),
        ("event.query", False),
        ("event.query is false", True),
        ("stream.synchronize", False),
        ("synchronize", False),
    ],
)
def test_wrapped_methods_of_a_real_gpu_report_to_the_judge(real: SimpleNamespace, case: str, races: bool) -> None:
    event, stream = torch.cuda.Event(), torch.cuda.Stream(0)
    real.use(stream, True)
    if case != "wait for a fresh event":
        event.record()
    Stub.answer = case != "event.query is false"
    match case:
        case "wait" | "wait for a fresh event":
            event.wait(real.side)
        case "event.synchronize":
            event.synchronize()
        case "event.query" | "event.query is false":
            event.query()
        case "stream.synchronize":
            stream.synchronize()
        case "synchronize":
            torch.cuda.synchronize()
    real.use(real.side, False)
    assert [finding.kind for finding in real.judge.findings] == (["race"] if races else [])


def test_work_in_graphs_of_a_real_gpu_is_reported_at_replay(real: SimpleNamespace) -> None:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    real.use(real.here, True)
    graph.capture_end()
    real.use(real.side, True)
    assert not real.judge.findings
    graph.replay()
    assert [finding.streams for finding in real.judge.findings] == [("stream1", "default")]
