"""`python -m bench serve`: reads its options, measures and prints one report."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import typer
from rich.console import Console

from bench.options import EitherDevice
from bench.serving.options import (
    Against,
    ArrivalShares,
    Beside,
    CheckpointDir,
    ClientCounts,
    Connections,
    EngineOptions,
    Label,
    LoadSizes,
    OutputTokens,
    PromptTokens,
    RandomShape,
    Repetitions,
    Rounds,
    ServeOptions,
    SlowReaders,
    TokenizerDir,
    refuse_unused,
    serve_arguments,
)
from proof.report import Figure, publish, was_given
from sidestream.cli.options import DEMO_MODEL, AsJson, Model
from sidestream.cli.progress import Steps
from sidestream.errors import ConfigError
from sidestream_kv.config import unknown_name
from sidestream_kv.device.kinds import CPU, CUDA

_OnProgress = Callable[[str], None]


def serve(
    context: typer.Context,
    model: Model = DEMO_MODEL,
    device: EitherDevice = CPU,
    shape: RandomShape = None,
    tokenizer: TokenizerDir = None,
    checkpoint: CheckpointDir = None,
    clients: ClientCounts = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = None,
    rounds: Rounds = 4,
    arrivals: ArrivalShares = "80",
    repetitions: Repetitions = None,
    engine_option: EngineOptions = None,
    serve_option: ServeOptions = None,
    slow_readers: SlowReaders = 0,
    connections: Connections = 1000,
    against: Against = None,
    label: Label = "other",
    beside: Beside = None,
    as_json: AsJson = False,
) -> None:
    """Tokens per second, TTFT, ITL and bursts that HTTP clients see, compared with the same engine without a server."""
    mode = "--slow-readers" if slow_readers else "neither --against nor --slow-readers"
    refuse_unused(context, mode if against is None else "--against")
    if device not in (CPU, CUDA):
        raise ConfigError(unknown_name("device", device, (CPU, CUDA)))
    sizes = LoadSizes.of_options(
        device if against is None else CUDA,
        clients=clients,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        rounds=rounds,
        repetitions=repetitions,
        arrivals=arrivals,
    )
    bench = "serve-slow-readers" if slow_readers else "serve"
    with Steps() as steps, contextlib.ExitStack() as ends:

        def on_progress(text: str) -> None:
            steps.update(f"bench {bench}", note=text)

        on_progress("preparing")
        if against is not None:
            result = _measure_against(against, label, sizes, beside or (), on_progress)
        else:
            served = _ServedModel(
                *ends.enter_context(_model(context, model, shape, device, tokenizer, checkpoint, on_progress)),
                limits_of=shape or model,
                device=device,
                engine_arguments=serve_arguments(engine_option),
                serve_arguments=serve_arguments(serve_option),
            )
            figures = (
                served.measure_slow_readers(slow_readers, connections, sizes, on_progress)
                if slow_readers
                else served.measure(sizes, on_progress)
            )
            result = _Result(served.name, figures, served.dtype())
    _publish(bench, result, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Result:
    """Content of a report. `dtype` is None if the benchmark did not start the server."""

    name: str
    figures: list[Figure]
    dtype: str | None = None
    details: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _ServedModel:
    """A model and the options of its server.

    path        the model's directory
    name        the model's name in the report
    limits_of   name of the model or shape in `measure.LIMITS`, the table of bounds
    """

    path: str
    name: str
    limits_of: str
    device: str
    engine_arguments: list[str]
    serve_arguments: list[str]

    def measure(self, sizes: LoadSizes, on_progress: _OnProgress) -> list[Figure]:
        """The figures of the server and of the engine without a server."""
        from bench.serving.measure import measure

        return measure(
            self.path,
            name=self.limits_of,
            device=self.device,
            sizes=sizes,
            engine_arguments=["--device", self.device, *self.engine_arguments],
            serve_arguments=self.serve_arguments,
            on_progress=on_progress,
        )

    def measure_slow_readers(
        self, slow: int, connections: int, sizes: LoadSizes, on_progress: _OnProgress
    ) -> list[Figure]:
        """The figures with and without slow readers, for the largest number of clients in `sizes`."""
        from bench.serving.measure import vocabulary_of
        from bench.serving.stalled import measure_slow_readers

        return measure_slow_readers(
            self.path,
            slow=slow,
            connections=connections,
            load=max(sizes.loads(vocabulary_of(self.path)), key=lambda load: load.loop.clients),
            arguments=["--device", self.device, *self.engine_arguments, *self.serve_arguments],
            on_progress=on_progress,
        )

    def dtype(self) -> str:
        """The data type in which the server loads the model."""
        from bench.serving.baseline import config_of
        from sidestream.models import precision_of
        from sidestream_kv.device.choice import torch_device

        config = config_of(self.engine_arguments)
        return precision_of(self.path, dtype=config.dtype, device=torch_device(self.device)).dtype


def _measure_against(
    url: str, label: str, sizes: LoadSizes, beside: Sequence[Path], on_progress: _OnProgress
) -> _Result:
    """Measure a server that already runs, and compare it with the results in the files `beside`."""
    from bench.serving.beside import capacity_of, compared, read_result
    from bench.serving.measure import measure_against

    earlier = [read_result(path, label=label) for path in beside]
    measured = measure_against(url, label=label, sizes=sizes, rate=capacity_of(earlier), on_progress=on_progress)
    details: dict[str, object] = {"beside": [result.origin for result in earlier]}
    return _Result(f"served at {url}", compared(label, measured, earlier), details=details)


@contextlib.contextmanager
def _model(
    context: typer.Context,
    model: str,
    shape: str | None,
    device: str,
    tokenizer: Path | None,
    checkpoint: Path | None,
    on_progress: _OnProgress,
) -> Iterator[tuple[str, str]]:
    """Context manager: the directory of the model to serve, and its name in the report. Raises ConfigError."""
    from bench.serving.fresh import in_fresh_process
    from proof.random_models import random_checkpoint
    from sidestream.models.catalog import resolve
    from sidestream_kv.device.choice import torch_device

    if shape is None:
        for name, value in (("--tokenizer", tokenizer), ("--checkpoint", checkpoint)):
            if value is not None:
                raise ConfigError(
                    f"{name} is {value}, but MODEL has its own: leave it out, or give --shape for random weights"
                )
        yield resolve(model), model
        return
    if was_given(context, "model"):
        raise ConfigError(f"the model is {model!r} and --shape is {shape!r}: give only one of the two")
    tokenizer = tokenizer or Path(resolve(DEMO_MODEL))
    with contextlib.ExitStack() as ends:
        if checkpoint is None:
            checkpoint = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="sidestream-bench-"))) / shape
        on_progress("writing random weights")
        in_fresh_process(random_checkpoint, shape, checkpoint, tokenizer=tokenizer, device=torch_device(device))
        yield str(checkpoint), f"{shape}, random weights"


def _publish(bench: str, result: _Result, *, as_json: bool) -> None:
    """Print the figures; exit with 1 if a bound does not hold."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call] # `publish` names the GPU, which only child processes used
    publish(
        bench,
        result.name,
        result.figures,
        as_json=as_json,
        console=Console(),
        dtype=result.dtype,
        details=result.details,
    )
