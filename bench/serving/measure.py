"""The figures of a server, compared with the same engine without a server; and the figures of any server that already
runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from bench.serving.answers import (
    Answer,
    Measured,
    StepsSoFar,
    burst_share,
    gaps_ms,
    steady_window,
    tokens_per_second,
    whole_run,
)
from bench.serving.baseline import EngineAlone
from bench.serving.clients import Clients, Target
from bench.serving.server import Server, ended_by_sigterm, fetch, metric
from bench.serving.workload import MOST_IDS, Arrivals, Loads
from proof.report import Bound, Figure, at_least, at_most, percentile
from sidestream.errors import SidestreamError
from sidestream_kv.device.kinds import CPU, CUDA

if TYPE_CHECKING:
    from bench.serving.options import LoadSizes

SERVED = "served"
_MODEL = "measured"


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds for one model on one kind of device.

    over_engine   lower bound of tokens per second through HTTP, divided by those of the engine without a server
    sizes         numbers of clients for which `over_engine` and the share of bursts have bounds
    on_gpu        times have bounds, too
    """

    over_engine: float
    sizes: frozenset[int]
    on_gpu: bool


_GPU_SIZES = frozenset({1, 32, 128, 256})
LIMITS = {
    ("qwen3-8b", CUDA): Limits(0.97, _GPU_SIZES, on_gpu=True),
    ("llama-3.2-1b", CUDA): Limits(0.90, _GPU_SIZES, on_gpu=True),
    ("smollm2-135m-instruct", CPU): Limits(0.95, frozenset({8}), on_gpu=False),
}
"""Bounds for each combination of model (or shape) and device. Other combinations have no bounds."""
_NO_LIMITS = Limits(0.0, frozenset(), on_gpu=False)


def measure(
    path: str,
    *,
    name: str,
    device: str,
    sizes: LoadSizes,
    engine_arguments: Sequence[str],
    serve_arguments: Sequence[str],
    on_progress: Callable[[str], None],
) -> list[Figure]:
    """Run the same requests on an engine without a server and on a server with the same engine, never on both at once.
    Figures are medians over the repetitions. On a CPU, engine and server alternate, because the speed of a machine
    changes within minutes. A GPU has no memory for both engines, so the server starts when the engine without a server
    has ended.

    path               the model's directory
    name               name of the model or shape in `LIMITS`
    engine_arguments   engine options of `sidestream serve`, for the engine and for the server
    serve_arguments    other options of the server
    """
    arguments = [*engine_arguments, *serve_arguments, "--served-model-name", _MODEL]
    limits = LIMITS.get((name, device), _NO_LIMITS)
    ids = vocabulary_of(path)
    repetitions = [sizes.loads(ids, repetition) for repetition in range(sizes.repetitions)]
    measured: list[list[Figure]] = []
    with ended_by_sigterm(), EngineAlone(path, engine_arguments, text_of=1) as alone:
        on_progress("the engine without a server")
        if device != CPU:
            engines = [[alone.measure(load) for load in loads] for loads in repetitions]
            alone.close()
        on_progress("starting the server")
        with Server(path, arguments) as server:
            for number, loads in enumerate(repetitions):
                engine, served = list[Measured](), list[Measured]()
                for load in loads:
                    on_progress(f"{load.loop.clients} clients, {number + 1} of {len(repetitions)}")
                    engine.append(alone.measure(load) if device == CPU else engines[number][len(engine)])
                    served += measure_url(server.url, _MODEL, [load], lambda text: None, steps=True)
                counts = [load.loop.clients for load in loads]
                figures = _figures(served, engine, counts, limits, exact=device == CPU)
                arrivals = sizes.arrivals_of(ids, number)
                rate = capacity(SERVED, figures, max(counts), sizes.output_tokens)
                measured.append(figures + arrival_rows(server.url, _MODEL, SERVED, arrivals, rate, on_progress))
    return [Figure(f"{SERVED}_ready_s", server.ready_s, "s"), *medians(measured)]


def capacity(label: str, figures: Sequence[Figure], clients: int, output_tokens: int) -> float:
    """Requests per second of the closed loop with `clients` clients, over the whole run."""
    name = f"{label}_tok_s_b{clients}"
    return next(figure.value for figure in figures if figure.name == name) / output_tokens


def arrival_rows(
    url: str,
    model: str,
    label: str,
    arrivals: Sequence[Arrivals],
    rate: float,
    on_progress: Callable[[str], None],
) -> list[Figure]:
    """Figures with Poisson arrivals at shares of `rate`, in requests per second."""
    figures = list[Figure]()
    if not arrivals:
        return figures
    with Clients(Target.at(url, model), most=max(one.requests for one in arrivals)) as clients:
        for one in arrivals:
            offered = rate * one.percent / 100
            on_progress(f"Poisson arrivals, {offered:.3g} requests/s")
            answers = clients.run(one.workload(offered))
            figures.append(Figure(f"{label}_requests_per_s_{one.name}", offered, "requests/s"))
            figures += run_row(label, one.name, answers)
    return figures


def medians(repetitions: Sequence[Sequence[Figure]]) -> list[Figure]:
    """The median of each figure over the repetitions that have it."""
    named: dict[str, list[Figure]] = {}
    for figures in repetitions:
        for figure in figures:
            named.setdefault(figure.name, []).append(figure)
    return [replace(same[0], value=median(figure.value for figure in same)) for same in named.values()]


def _figures(
    served: Sequence[Measured], engine: Sequence[Measured], sizes: Sequence[int], limits: Limits, *, exact: bool
) -> list[Figure]:
    """All figures of one repetition.

    exact   the texts of the server and of the engine must be equal
    """
    figures: list[Figure] = []
    for size, ours, alone in zip(sizes, served, engine, strict=True):
        figures += _compared(size, ours, alone, limits)
    largest = sizes.index(max(sizes))
    ours_ms, alone_ms = served[largest].step_ms, engine[largest].step_ms
    if ours_ms is not None and alone_ms is not None:
        bound = at_most(1.03) if limits.on_gpu and max(sizes) == 256 else None
        figures.append(Figure("engine_step_served_over_alone", ours_ms / alone_ms, "ratio", bound))
    if 1 in sizes:
        at = sizes.index(1)
        equal = _texts(served[at]) == _texts(engine[at])
        figures.append(Figure("texts_identical", float(equal), "1 if so", at_least(1) if exact else None))
    return figures


def measure_url(
    url: str, model: str, loads: Sequence[Loads], on_progress: Callable[[str], None], *, steps: bool
) -> list[Measured]:
    """Measure a running server. `steps`: read the engine's step times from the /metrics of a Sidestream server."""
    measured = []
    with Clients(Target.at(url, model), most=max(load.loop.clients for load in loads)) as clients:
        for load in loads:
            on_progress(f"{load.loop.clients} clients")
            clients.run(load.warm)
            loop = clients.run(load.loop)
            marks: dict[str, StepsSoFar] = {}

            def begun(marks: dict[str, StepsSoFar] = marks) -> None:
                if "nearly" not in marks:
                    count, seconds = _steps(url) if steps else (0, 0.0)
                    marks["begun"] = StepsSoFar(time.perf_counter_ns(), count, seconds)

            def nearly(marks: dict[str, StepsSoFar] = marks) -> None:
                now_ns = time.perf_counter_ns()
                marks["nearly"] = StepsSoFar(now_ns, *(_steps(url) if steps else (1, 0.0)))

            calm = clients.run(load.calm, on_begun=begun, on_nearly=nearly)
            measured.append(Measured(loop, calm, marks.get("begun"), marks.get("nearly")))
    return measured


def row(label: str, size: int, measured: Measured, *, burst: Bound | None = None) -> list[Figure]:
    """Figures of a closed loop: of the whole run, and the rate while all clients are busy (`steady`, if there is such a
    time).
    """
    figures = run_row(label, f"b{size}", measured.loop, burst=burst)
    if window := steady_window(measured.loop):
        rate = tokens_per_second(measured.loop, window)
        figures.append(Figure(f"{label}_steady_tok_s_b{size}", rate, "tokens/s"))
    return figures


def run_row(label: str, load: str, answers: Sequence[Answer], *, burst: Bound | None = None) -> list[Figure]:
    """Figures of all requests of a run, from the first request sent to the last token received. Their names begin with
    `label` and end with `load`.
    """
    window = whole_run(answers)
    gaps = gaps_ms(answers, window)
    if not gaps:
        raise SidestreamError("no answer came in two pieces: use more output tokens")
    times = {
        "ttft": [answer.ttft_ms for answer in answers],
        "itl": gaps,
        "tpot": [answer.tpot_ms for answer in answers],
        "e2e": [answer.e2e_ms for answer in answers],
    }
    return [
        Figure(f"{label}_tok_s_{load}", tokens_per_second(answers, window), "tokens/s"),
        *(
            Figure(f"{label}_{name}_ms_p{percent}_{load}", percentile(values, percent), "ms")
            for name, values in times.items()
            for percent in (50, 90, 99)
        ),
        Figure(f"{label}_burst_share_{load}", burst_share(gaps), "share", burst),
    ]


def _compared(size: int, served: Measured, engine: Measured, limits: Limits) -> list[Figure]:
    bounded = size in limits.sizes
    ours = row(SERVED, size, served, burst=at_most(0.02 if size <= 32 else 0.05) if bounded else None)
    alone = [figure for figure in row("engine", size, engine) if "burst_share" not in figure.name]
    rate, median_ms, _, p99_ms = ((ours[at].value, alone[at].value) for at in range(4))
    figures = [
        Figure(
            f"served_over_engine_tok_s_b{size}",
            rate[0] / rate[1],
            "ratio",
            at_least(limits.over_engine) if bounded else None,
        ),
        *ours,
        *alone,
    ]
    if size == 1:
        figures.append(
            Figure("ttft_added_ms", median_ms[0] - median_ms[1], "ms", at_most(3) if limits.on_gpu else None)
        )
    bound = at_most(20) if limits.on_gpu and size == 128 else None
    figures.append(Figure(f"ttft_added_ms_p99_b{size}", p99_ms[0] - p99_ms[1], "ms", bound))
    window, step_ms = served.calm_window, served.step_ms
    if window is not None and step_ms is not None and (gaps := gaps_ms(served.calm, window)):
        bound = at_most(1.5) if limits.on_gpu and size == 32 else None
        figures.append(Figure(f"itl_p99_over_step_b{size}", percentile(gaps, 99) / step_ms, "ratio", bound))
        figures.append(Figure(f"served_step_ms_b{size}", step_ms, "ms"))
    if engine.step_ms is not None:
        figures.append(Figure(f"engine_step_ms_b{size}", engine.step_ms, "ms"))
    return figures


def _steps(url: str) -> tuple[int, float]:
    page = fetch(f"{url}/metrics").decode()
    return int(metric(page, "sidestream_step_seconds_count")), metric(page, "sidestream_step_seconds_sum")


def _texts(measured: Measured) -> list[str]:
    return [answer.text for answer in sorted(measured.loop, key=lambda answer: (answer.client, answer.round))]


def measure_against(
    url: str, *, label: str, sizes: LoadSizes, rate: float | None, on_progress: Callable[[str], None]
) -> list[Figure]:
    """Measure any OpenAI-compatible server that already runs. Raises SidestreamError if it serves no model.

    rate   requests per second of which the Poisson arrivals are shares; None: the server's own capacity
    """
    url = url.rstrip("/")
    Target.at(url, "")  # reject an invalid URL before any request
    model = served_model(url)
    loads = sizes.loads(MOST_IDS)
    measured = measure_url(url, model, loads, on_progress, steps=False)
    figures = [
        figure for load, one in zip(loads, measured, strict=True) for figure in row(label, load.loop.clients, one)
    ]
    if rate is None:
        rate = capacity(label, figures, max(sizes.clients), sizes.output_tokens)
    return figures + arrival_rows(url, model, label, sizes.arrivals_of(MOST_IDS), rate, on_progress)


def served_model(url: str) -> str:
    """The name of the served model, from /v1/models. Raises SidestreamError."""
    try:
        name = json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"]
    except (ValueError, LookupError, TypeError) as error:
        raise SidestreamError(
            f"{url}/v1/models names no model: is it the URL of an OpenAI-compatible server, without /v1?"
        ) from error
    return str(name)


def vocabulary_of(path: str) -> int:
    """Vocabulary size of a checkpoint's model. Raises ModelError."""
    from sidestream.checkpoint_files import read_json
    from sidestream.models.loader import config_directory

    config = read_json(config_directory(path) / "config.json")
    return int({**config, **config.get("text_config", {})}["vocab_size"])
