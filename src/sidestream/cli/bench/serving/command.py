"""`sidestream bench serve`: options in, one report out."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sidestream.cli.bench.commands import Json, Model
from sidestream.cli.bench.report import Figure, publish
from sidestream.cli.declare import option, whole
from sidestream.cli.options import DEMO_MODEL
from sidestream.cli.progress import Steps
from sidestream.config import unknown_name
from sidestream.errors import ConfigError

_DEVICES = ("cpu", "cuda")
_REPETITIONS = {"cpu": 5, "cuda": 1}
_CLIENTS = {"cpu": "1,8", "cuda": "1,32,128,256"}
_PROMPT_TOKENS = {"cpu": 64, "cuda": 512}
_OUTPUT_TOKENS = {"cpu": 64, "cuda": 128}
_MOST_CLIENTS = 4096
# What the three ways to measure do not use.
_OTHERS = {
    "--against": {
        "model",
        "device",
        "shape",
        "tokenizer",
        "checkpoint",
        "engine_option",
        "serve_option",
        "slow_readers",
        "connections",
        "repetitions",
    },
    "--slow-readers": {"label", "beside", "repetitions"},
    "neither --against nor --slow-readers": {"connections", "label", "beside"},
}


def serve(
    context: typer.Context,
    model: Model = DEMO_MODEL,
    device: Annotated[str, option("--device", metavar="DEVICE", help="`cpu` or `cuda`.")] = "cpu",
    shape: Annotated[
        str | None,
        option(
            "--shape",
            metavar="SHAPE",
            help="Serve random weights in place of MODEL: qwen3-8b, llama-3.2-1b, qwen3-0.6b or tiny.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        option(
            "--tokenizer",
            metavar="DIR",
            help="Model whose tokenizer random weights get.",
            show_default="the demo model",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        option(
            "--checkpoint",
            metavar="DIR",
            help="Keep random weights here for further runs.",
            show_default="a temporary directory",
        ),
    ] = None,
    clients: Annotated[
        str | None,
        option(
            "--clients", metavar="N,N", help="Numbers of clients to measure.", show_default="1,8; on a GPU 1,32,128,256"
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        option(
            "--prompt-tokens", metavar="N", help="Tokens of each prompt.", show_default="64; on a GPU 512", parse=whole
        ),
    ] = None,
    output_tokens: Annotated[
        int | None,
        option(
            "--output-tokens", metavar="N", help="Tokens of each answer.", show_default="64; on a GPU 128", parse=whole
        ),
    ] = None,
    rounds: Annotated[
        int,
        option(
            "--rounds",
            metavar="N",
            help="Requests that each client sends in turn; one client: 17 or more.",
            parse=whole,
        ),
    ] = 4,
    repetitions: Annotated[
        int | None,
        option(
            "--repetitions",
            metavar="N",
            help="Times that engine and server are measured in turn; figures are medians.",
            show_default="5; on a GPU 1",
            parse=whole,
        ),
    ] = None,
    engine_option: Annotated[
        list[str] | None,
        option(
            "--engine-option",
            metavar="NAME=VALUE",
            help="Engine option of `sidestream serve`, such as max-running=64; may be given several times.",
            show_default=False,
        ),
    ] = None,
    serve_option: Annotated[
        list[str] | None,
        option(
            "--serve-option",
            metavar="NAME=VALUE",
            help="Other option of `sidestream serve`; may be given several times.",
            show_default=False,
        ),
    ] = None,
    slow_readers: Annotated[
        int,
        option(
            "--slow-readers",
            metavar="N",
            help="Measure instead what N clients that read a byte a second cost the others.",
            parse=whole,
        ),
    ] = 0,
    connections: Annotated[
        int,
        option(
            "--connections",
            metavar="N",
            help="With --slow-readers, open connections in all; the rest is idle.",
            parse=whole,
        ),
    ] = 1000,
    against: Annotated[
        str | None,
        option("--against", metavar="URL", help="Measure a server that runs already, of any make.", show_default=False),
    ] = None,
    label: Annotated[
        str, option("--label", metavar="NAME", help="With --against, start of its figures' names.")
    ] = "other",
    beside: Annotated[
        list[Path] | None,
        option(
            "--beside",
            metavar="FILE",
            help="With --against, earlier result of this command to compare with; may be given several times.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """What users of the HTTP server see, beside the same engine in process: tokens a second, TTFT, gaps between tokens,
    bursts.
    """
    from sidestream.cli.bench.serving.baseline import config_of
    from sidestream.cli.bench.serving.beside import compared, read_result
    from sidestream.cli.bench.serving.measure import measure, measure_against, vocabulary_of
    from sidestream.cli.bench.serving.stalled import measure_slow_readers
    from sidestream.cli.bench.serving.workload import MOST_IDS, Loads, loads_of
    from sidestream.device.choice import torch_device
    from sidestream.models import precision_of

    mode = (
        "--against"
        if against is not None
        else "--slow-readers"
        if slow_readers
        else "neither --against nor --slow-readers"
    )
    _refuse_unused(context, mode)
    if device not in _DEVICES:
        raise ConfigError(unknown_name("device", device, _DEVICES))
    kind = "cuda" if against is not None else device
    sizes = _sizes(clients or _CLIENTS[kind])
    prompt_tokens = _PROMPT_TOKENS[kind] if prompt_tokens is None else prompt_tokens
    repeated = _REPETITIONS[kind] if repetitions is None else repetitions
    output_tokens = _OUTPUT_TOKENS[kind] if output_tokens is None else output_tokens
    for name, count, least in (
        ("prompt-tokens", prompt_tokens, 1),
        ("output-tokens", output_tokens, 2),
        ("rounds", rounds, 2),
        ("repetitions", repeated, 1),
    ):
        if count < least:
            raise ConfigError(f"--{name} is {count}: it must be {least} or more")

    def loads(ids: int, repetition: int = 0) -> list[Loads]:
        lengths = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
        return [loads_of(clients=size, rounds=rounds, ids=ids, repetition=repetition, **lengths) for size in sizes]

    bench = "serve-slow-readers" if slow_readers else "serve"
    engine_arguments, serve_arguments = _arguments(engine_option), _arguments(serve_option)
    details: dict[str, object] = {}
    with Steps() as steps, contextlib.ExitStack() as ends:
        steps.tell(f"bench {bench}", note="preparing")

        def tell(text: str) -> None:
            steps.tell(f"bench {bench}", note=text)

        if against is not None:
            earlier = [read_result(path, label=label) for path in beside or ()]
            measured = measure_against(against, label=label, loads=loads(MOST_IDS), tell=tell)
            figures = compared(label, measured, earlier)
            details["beside"] = [result.origin for result in earlier]
            name, dtype = f"served at {against}", None
        else:
            path, name = ends.enter_context(_model(context, model, shape, device, tokenizer, checkpoint, tell))
            ids = vocabulary_of(path)
            if slow_readers:
                figures = measure_slow_readers(
                    path,
                    slow=slow_readers,
                    connections=connections,
                    load=max(loads(ids), key=lambda load: load.loop.clients),
                    arguments=["--device", device, *engine_arguments, *serve_arguments],
                    tell=tell,
                )
            else:
                figures = measure(
                    path,
                    name=shape or model,
                    device=device,
                    repetitions=[loads(ids, repetition) for repetition in range(repeated)],
                    engine_arguments=["--device", device, *engine_arguments],
                    serve_arguments=serve_arguments,
                    tell=tell,
                )
            dtype = precision_of(path, dtype=config_of(engine_arguments).dtype, device=torch_device(device)).dtype
    _publish(bench, name, figures, as_json=as_json, dtype=dtype, details=details)


@contextlib.contextmanager
def _model(
    context: typer.Context,
    model: str,
    shape: str | None,
    device: str,
    tokenizer: Path | None,
    checkpoint: Path | None,
    tell: Callable[[str], None],
) -> Iterator[tuple[str, str]]:
    """The directory of the model that is served, and what a report calls it. Raises ConfigError."""
    from sidestream.cli.bench.serving.fresh import in_fresh_process
    from sidestream.device.choice import torch_device
    from sidestream.models.catalog import resolve
    from sidestream.testing.random_models import random_checkpoint

    if shape is None:
        for name, value in (("--tokenizer", tokenizer), ("--checkpoint", checkpoint)):
            if value is not None:
                raise ConfigError(
                    f"{name} is {value}, but MODEL has its own: leave it out, or give --shape for random weights"
                )
        yield resolve(model), model
        return
    if _was_given(context, "model"):
        raise ConfigError(f"the model is {model!r} and --shape is {shape!r}: give one of the two")
    words = Path(resolve(DEMO_MODEL)) if tokenizer is None else tokenizer
    with contextlib.ExitStack() as ends:
        if checkpoint is None:
            checkpoint = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="sidestream-bench-"))) / shape
        tell("writing random weights")
        in_fresh_process(random_checkpoint, shape, checkpoint, tokenizer=words, device=torch_device(device))
        yield str(checkpoint), f"{shape}, random weights"


def _publish(
    bench: str, model: str, figures: list[Figure], *, as_json: bool, dtype: str | None, details: dict[str, object]
) -> None:
    """Print the figures; exit with 1 when a bound does not hold."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call] # the environment names a GPU that this process did not use
    if not publish(bench, model, figures, as_json=as_json, console=Console(), dtype=dtype, details=details):
        raise typer.Exit(1)


def _arguments(options: list[str] | None) -> list[str]:
    """`NAME=VALUE`, or `NAME` of an option without a value, as arguments of `sidestream serve`."""
    return [f"--{name.removeprefix('--')}" for name in options or ()]


def _was_given(context: typer.Context, name: str) -> bool:
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def _refuse_unused(context: typer.Context, mode: str) -> None:
    """Raise ConfigError for an option that would be ignored."""
    for name in sorted(_OTHERS[mode]):
        if _was_given(context, name):
            what = "the model" if name == "model" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"{what} is {context.params[name]!r}, which is not used with {mode}: leave it out")


def _sizes(clients: str) -> tuple[int, ...]:
    """The numbers of clients. Raises ConfigError."""
    try:
        sizes = tuple(int(part) for part in clients.split(","))
    except ValueError:
        raise ConfigError(
            f"--clients is {clients!r}: give whole numbers with commas between them, such as 1,32,128"
        ) from None
    for size in sizes:
        if not 1 <= size <= _MOST_CLIENTS:
            raise ConfigError(f"--clients has {size}: each must be in [1, {_MOST_CLIENTS}]")
    if len(set(sizes)) < len(sizes):
        raise ConfigError(f"--clients is {clients!r}: give each number once")
    return sizes
