"""`python -m bench serve`: reads its options, measures and prints one report."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    dtype, details = None, dict[str, object]()
    with Steps() as steps, contextlib.ExitStack() as ends:

        def on_progress(text: str) -> None:
            steps.update(f"bench {bench}", note=text)

        on_progress("preparing")
        if against is not None:
            name = f"served at {against}"
            figures, details["beside"] = _measure_against(against, label, sizes, beside or (), on_progress)
        else:
            path, name = ends.enter_context(_model(context, model, shape, device, tokenizer, checkpoint, on_progress))
            options = serve_arguments(engine_option)
            more = serve_arguments(serve_option)
            engine_arguments = ["--device", device, *options]
            if slow_readers:
                figures = _measure_slow(path, slow_readers, connections, sizes, [*engine_arguments, *more], on_progress)
            else:
                from bench.serving.measure import measure

                figures = measure(
                    path,
                    name=shape or model,
                    device=device,
                    sizes=sizes,
                    engine_arguments=engine_arguments,
                    serve_arguments=more,
                    on_progress=on_progress,
                )
            dtype = _dtype(path, device, options)
    _name_gpu()
    publish(bench, name, figures, as_json=as_json, console=Console(), dtype=dtype, details=details)


def _measure_slow(
    path: str, slow: int, connections: int, sizes: LoadSizes, arguments: Sequence[str], on_progress: _OnProgress
) -> list[Figure]:
    """The figures with and without slow readers, for the largest number of clients in `sizes`."""
    from bench.serving.measure import vocabulary_of
    from bench.serving.stalled import measure_slow_readers

    load = max(sizes.loads(vocabulary_of(path)), key=lambda load: load.loop.clients)
    return measure_slow_readers(
        path, slow=slow, connections=connections, load=load, arguments=arguments, on_progress=on_progress
    )


def _dtype(path: str, device: str, engine_arguments: Sequence[str]) -> str:
    """The data type in which the server loads the model."""
    from bench.serving.baseline import config_of
    from sidestream.models import precision_of
    from sidestream_kv.device.choice import torch_device

    return precision_of(path, dtype=config_of(engine_arguments).dtype, device=torch_device(device)).dtype


def _measure_against(
    url: str, label: str, sizes: LoadSizes, beside: Sequence[Path], on_progress: _OnProgress
) -> tuple[list[Figure], list[Mapping[str, object]]]:
    """Measure a server that already runs, and compare it with the results in the files `beside`. Returns the figures,
    and the origins of these results.
    """
    from bench.serving.beside import capacity_of, compared, read_result
    from bench.serving.measure import measure_against

    earlier = [read_result(path, label=label) for path in beside]
    measured = measure_against(url, label=label, sizes=sizes, rate=capacity_of(earlier), on_progress=on_progress)
    return compared(label, measured, earlier), [result.origin for result in earlier]


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


def _name_gpu() -> None:
    """Let `publish` name the GPU, which only child processes have used."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
