"""The commands of `python -m bench`. Each command reads its options, measures and prints one report. The measurements
are in the other modules of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.options import (
    SHAPE_HELP,
    EitherDevice,
    GpuDevice,
    OutputTokens,
    PromptTokens,
    Requests,
    Shape,
    check_at_least,
    label,
)
from proof.report import Figure, publish, was_given
from sidestream.cli.declare import Command, option, whole
from sidestream.cli.options import DEMO_MODEL, AsJson, Model
from sidestream.cli.progress import Steps
from sidestream.errors import ConfigError
from sidestream_kv.config import unknown_name
from sidestream_kv.device.kinds import CPU, CUDA

_PARTS = {
    "prefill": "Prefill time of a prompt on a GPU, divided by the time of its matrix products alone.",
    "ttft": "TTFT without cached KV; TTFT with KV in host memory, divided by the time to load that KV.",
    "resume": "Slowdown of decoding requests while the KV of a long request is loaded.",
    "async": "Tokens per second of asynchronous execution, divided by those of synchronous execution; equal tokens.",
}
_BLOCKS = "blocks of Qwen3-8B"


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("prefix", cls=Command)(prefix)
    app.command("decode", cls=Command)(decode)
    app.command("overhead", cls=Command)(overhead)
    app.command("self-check", cls=Command)(self_check)
    app.command("soak", cls=Command)(soak)
    app.command("replicas", cls=Command)(replicas)
    app.command("scale", cls=Command)(scale)
    app.command("ranks", cls=Command)(ranks)
    app.command("hybrid", cls=Command)(hybrid)
    app.command("hybrid-engine", cls=Command)(hybrid_engine)
    app.command("windows", cls=Command)(windows)
    app.command("transfer", cls=Command)(transfer)
    app.command("interference", cls=Command)(interference)
    app.command("forward-thread", cls=Command)(forward_thread)
    app.command("host-time", cls=Command)(host_time)
    app.command("identity", cls=Command)(identity)
    app.command("mailbox", cls=Command)(mailbox)
    for part in ("prefill", "ttft", "resume", "async"):
        app.command(part, help=_PARTS[part], cls=Command)(_part(part))
    app.command("engine", cls=Command)(engine)
    app.command("throughput", cls=Command)(throughput)
    app.command("host-tier", cls=Command)(host_tier)
    app.command("speculative", cls=Command)(speculative)


def prefix(
    model: Model = DEMO_MODEL,
    prompt_tokens: PromptTokens = 2000,
    rounds: Annotated[
        int,
        option(
            "--rounds",
            metavar="N",
            help="Number of prompts; each runs without cached KV, with KV from host memory, and from disk.",
            parse=whole,
        ),
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """TTFT of a long prompt with KV from host memory, or from disk in a new process, divided by TTFT without any KV."""
    from bench.prefix import measure

    _report(
        "prefix",
        model,
        as_json,
        lambda on_progress: measure(model, prompt_tokens=prompt_tokens, rounds=rounds, on_progress=on_progress),
        served=(model, "auto", CPU),
    )


def decode(
    context: typer.Context,
    model: Model = DEMO_MODEL,
    output_tokens: OutputTokens = 96,
    rounds: Annotated[
        int, option("--rounds", metavar="N", help="Repetitions; Sidestream and generate alternate.", parse=whole)
    ] = 5,
    dtype: Annotated[str, option("--dtype", metavar="TYPE", help="Data type of both engines.")] = "auto",
    device: Annotated[
        str,
        option(
            "--device",
            metavar="DEVICE",
            help="`cpu`; or `cuda`: step time with random weights, divided by the time to read the weights.",
        ),
    ] = CPU,
    shape: Annotated[
        str,
        option("--shape", metavar="SHAPE", help="Model shape on `cuda`: qwen3-8b, llama-3.2-1b, qwen3-0.6b or tiny."),
    ] = "qwen3-8b",
    as_json: AsJson = False,
) -> None:
    """Tokens per second of one request and of eight concurrent requests, divided by those of transformers' generate."""
    if device not in (CPU, CUDA):
        raise ConfigError(unknown_name("device", device, (CPU, CUDA)))
    on_gpu = device == CUDA
    unused = {"model", "output_tokens", "rounds", "dtype"} if on_gpu else {"shape"}
    for name in sorted(name for name in unused if was_given(context, name)):
        instead = (
            "that device measures a model shape with random weights: give --shape only"
            if on_gpu
            else "that device measures a model: give the model"
        )
        raise ConfigError(
            f"{label(name)} is {context.params[name]!r}, which has no effect with --device {device}: {instead}"
        )
    if on_gpu:
        _engine(["decode"], device, shape, as_json)
        return
    from bench.decode import measure

    _report(
        "decode",
        model,
        as_json,
        lambda on_progress: measure(
            model, output_tokens=output_tokens, rounds=rounds, dtype=dtype, on_progress=on_progress
        ),
        served=(model, dtype, CPU),
    )


def overhead(
    model: Model = DEMO_MODEL,
    rounds: Annotated[
        int, option("--rounds", metavar="N", help="Repetitions; runs with and without offload alternate.", parse=whole)
    ] = 9,
    as_json: AsJson = False,
) -> None:
    """Step time with offload, with and without blocks to store, divided by step time without offload; and the number of
    times that the host waits for a transfer.
    """
    from bench.overhead import measure

    _report(
        "overhead",
        model,
        as_json,
        lambda on_progress: measure(model, rounds=rounds, on_progress=on_progress),
        served=(model, "auto", CPU),
    )


def self_check(
    device: GpuDevice = CUDA,
    shape: Annotated[
        str | None,
        option("--shape", metavar="SHAPE", help=SHAPE_HELP, show_default="qwen3-8b, on a CPU tiny"),
    ] = None,
    rounds: Annotated[
        int, option("--rounds", metavar="N", help="Repetitions; engines with several shares alternate.", parse=whole)
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """Step time with `--self-check 0.01`, divided by step time without; and the differences that the checks found."""
    from bench.self_check import measure

    check_at_least({"rounds": (rounds, 1)})
    chosen = shape or ("qwen3-8b" if device == CUDA else "tiny")
    _report(
        "self-check",
        f"{chosen}, random weights",
        as_json,
        lambda on_progress: measure(device=device, shape=chosen, rounds=rounds, on_progress=on_progress),
        bounded=device == CUDA,
    )


def soak(
    model: Model = DEMO_MODEL,
    requests: Annotated[
        int,
        option(
            "--requests",
            metavar="N",
            help="Number of requests; memory growth is measured from request 200 on.",
            parse=whole,
        ),
    ] = 2000,
    as_json: AsJson = False,
) -> None:
    """Memory growth of the process over many requests."""
    from bench.soak import measure

    _report(
        "soak",
        model,
        as_json,
        lambda on_progress: measure(model, num_requests=requests, on_progress=on_progress),
        served=(model, "auto", CPU),
    )


def replicas(
    model: Model = DEMO_MODEL,
    conversations: Annotated[
        int, option("--conversations", metavar="N", help="Number of conversations; each is a session.", parse=whole)
    ] = 40,
    turns: Annotated[int, option("--turns", metavar="N", help="Turns of each conversation.", parse=whole)] = 6,
    as_json: AsJson = False,
) -> None:
    """Replicas on Ray Serve: cached prompt tokens of conversations with two replicas, divided by those with one; and
    the outcomes of requests when one of two replicas is killed.
    """
    from bench.replicas import measure

    _check_positive(conversations=conversations, turns=turns)
    _report(
        "replicas",
        model,
        as_json,
        lambda on_progress: measure(model, conversations=conversations, turns=turns, on_progress=on_progress),
        served=(model, "auto", CPU),
    )


def scale(
    ranks: Annotated[
        list[int] | None,
        option(
            "--ranks",
            metavar="N",
            help="Number of ranks, including rank 0, which sends the plans; may be given several times.",
            show_default="2, 4, 8",
            parse=whole,
        ),
    ] = None,
    seconds: Annotated[
        int, option("--seconds", metavar="S", help="Seconds of sending plans, for each transport.", parse=whole)
    ] = 5,
    output_tokens: OutputTokens = 64,
    rounds: Annotated[
        int, option("--rounds", metavar="N", help="Repetitions; one rank and two ranks alternate.", parse=whole)
    ] = 3,
    as_json: AsJson = False,
) -> None:
    """Tensor parallelism on this CPU: time to send a step's plan to all ranks, compared with a ring buffer in shared
    memory and with Gloo; CPU time of a rank; and tokens per second of two ranks, divided by those of one rank.
    """
    from bench.scale import SIZES, measure

    _check_positive(seconds=seconds, output_tokens=output_tokens, rounds=rounds)
    check_at_least({"ranks": (min(ranks or SIZES), 2)})
    _report(
        "scale",
        "random weights, 100M parameters",
        as_json,
        lambda on_progress: measure(
            sizes=sorted(set(ranks or SIZES)),
            seconds=seconds,
            rounds=rounds,
            output_tokens=output_tokens,
            on_progress=on_progress,
        ),
    )


def ranks(
    parts: Annotated[list[str] | None, typer.Argument(help="decode, ttft, resume; default: all.")] = None,
    device: GpuDevice = CUDA,
    shape: Shape = "qwen3-8b",
    tensor_parallel: Annotated[
        int, option("--tensor-parallel", metavar="N", help="Number of ranks to compare with one rank.", parse=whole)
    ] = 2,
    kv_memory: Annotated[
        str | None,
        option("--kv-memory", metavar="SIZE", help="KV memory of each rank.", show_default="8GiB; on a CPU 8MiB"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tensor parallelism on GPUs: step time, TTFT, and TTFT with KV in host memory, of several ranks, divided by those
    of one rank; and the bandwidth of loads from host memory.
    """
    from bench.ranks import PARTS, measure

    check_at_least({"tensor_parallel": (tensor_parallel, 2)})
    _report(
        "ranks",
        f"{shape}, random weights",
        as_json,
        lambda on_progress: measure(
            device=device,
            shape=shape,
            ranks=tensor_parallel,
            kv_memory=kv_memory,
            parts=parts or PARTS,
            on_progress=on_progress,
        ),
        bounded=device == CUDA,
    )


def hybrid(
    families: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FAMILY",
            help="Families of tiny hybrid models. Default: qwen3_next, nemotron_h, falcon_h1 and lfm2.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[int, option("--prompts", metavar="N", help="Prompts for each family.", parse=whole)] = 200,
    turns: Annotated[int, option("--turns", metavar="N", help="Turns of the conversation.", parse=whole)] = 30,
    system_tokens: Annotated[
        int, option("--system-tokens", metavar="N", help="Tokens of the system prompt of all turns.", parse=whole)
    ] = 6000,
    as_json: AsJson = False,
) -> None:
    """Models with recurrent state: whether tokens are equal with KV from each tier, and the share of a conversation's
    prompt tokens that come from the cache.
    """
    from bench.hybrid import measure
    from proof.tiny_models import HYBRIDS

    chosen = families or ["qwen3_next", "nemotron_h", "falcon_h1", "lfm2"]
    for family in chosen:
        if family not in HYBRIDS:
            raise ConfigError(unknown_name("family", family, sorted(HYBRIDS)))
    _report(
        "hybrid",
        "tiny " + ", ".join(chosen),
        as_json,
        lambda on_progress: measure(
            chosen, num_prompts=prompts, turns=turns, system_tokens=system_tokens, on_progress=on_progress
        ),
    )


def hybrid_engine(
    device: GpuDevice = CUDA,
    shape: Annotated[str, option("--shape", metavar="SHAPE", help="Model shape: qwen3.5-9b or tiny-hybrid.")] = (
        "qwen3.5-9b"
    ),
    block_tokens: Annotated[
        int | None,
        option("--block-tokens", metavar="N", help="Tokens of a block.", show_default="64, on a CPU 16", parse=whole),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Models with recurrent state and random weights: step time without and with drafts, and TTFT with KV in host
    memory.
    """
    from bench.hybrid_engine import measure

    _report(
        "hybrid-engine",
        f"{shape}, random weights",
        as_json,
        lambda on_progress: measure(device=device, shape=shape, block_tokens=block_tokens, on_progress=on_progress),
        bounded=device == CUDA and shape == "qwen3.5-9b",
    )


def windows(
    device: GpuDevice = CUDA,
    shape: Annotated[str, option("--shape", metavar="SHAPE", help="Model shape: gemma3-4b or tiny-windows.")] = (
        "gemma3-4b"
    ),
    as_json: AsJson = False,
) -> None:
    """Models whose layers have sliding windows, with random weights: TTFT with KV in host memory, if loads leave out
    what no window reaches, and if they do not.
    """
    from bench.windows import measure

    _report(
        "windows",
        f"{shape}, random weights",
        as_json,
        lambda on_progress: measure(device=device, shape=shape, on_progress=on_progress),
        bounded=device == CUDA and shape == "gemma3-4b",
    )


def transfer(
    device: GpuDevice = CUDA,
    mib: Annotated[int, option("--mib", metavar="N", help="MiB to store and load in each round.", parse=whole)] = 1024,
    rounds: Annotated[
        int,
        option(
            "--rounds",
            metavar="N",
            help="Repetitions; measurements of the link and of the transfers alternate.",
            parse=whole,
        ),
    ] = 7,
    as_json: AsJson = False,
) -> None:
    """Bandwidth of stores and loads of scattered blocks, divided by that of one large pinned copy."""
    from bench.transfer import measure

    _report(
        "transfer",
        _BLOCKS,
        as_json,
        lambda on_progress: measure(device=device, mib=mib, rounds=rounds, on_progress=on_progress),
        bounded=device == CUDA,
    )


def interference(
    device: GpuDevice = CUDA,
    rounds: Annotated[
        int,
        option("--rounds", metavar="N", help="Repetitions; runs with and without transfers alternate.", parse=whole),
    ] = 7,
    as_json: AsJson = False,
) -> None:
    """Slowdown of a decode step and of a large matrix product during transfers at full rate."""
    from bench.interference import measure

    _report(
        "interference",
        _BLOCKS,
        as_json,
        lambda on_progress: measure(device=device, rounds=rounds, on_progress=on_progress),
        bounded=device == CUDA,
    )


def forward_thread(
    device: GpuDevice = CUDA,
    requests: Annotated[
        int, option("--requests", metavar="N", help="Running requests that store and load KV.", parse=whole)
    ] = 1000,
    steps: Annotated[int, option("--steps", metavar="N", help="Steps of the loop.", parse=whole)] = 400,
    pending: Annotated[
        int,
        option("--pending", metavar="N", help="Pending transfers in the second measurement.", parse=whole),
    ] = 100_000,
    as_json: AsJson = False,
) -> None:
    """Engine-thread time that transfers take in each step, and the longest time that they block the thread."""
    from bench.forward_thread import measure

    _report(
        "forward-thread",
        _BLOCKS,
        as_json,
        lambda on_progress: measure(
            device=device, requests=requests, steps=steps, pending=pending, on_progress=on_progress
        ),
        bounded=device == CUDA,
    )


def host_time(
    device: GpuDevice = CUDA,
    shape: Shape = "qwen3-0.6b",
    requests: Requests = 256,
    output_tokens: OutputTokens = 128,
    rounds: Annotated[int, option("--rounds", metavar="N", help="Repetitions.", parse=whole)] = 3,
    as_json: AsJson = False,
) -> None:
    """Engine-thread time per step with many running requests and with offload; waits for steps are not counted."""
    from bench.host_time import measure

    _check_positive(requests=requests, output_tokens=output_tokens, rounds=rounds)
    _report(
        "host-time",
        f"{shape}, random weights",
        as_json,
        lambda on_progress: measure(
            device=device,
            shape=shape,
            requests=requests,
            output_tokens=output_tokens,
            rounds=rounds,
            on_progress=on_progress,
        ),
        bounded=device == CUDA,
    )


def identity(
    device: GpuDevice = CUDA,
    shape: Shape = "qwen3-0.6b",
    requests: Requests = 8,
    prompt_tokens: PromptTokens = 512,
    output_tokens: OutputTokens = 128,
    as_json: AsJson = False,
) -> None:
    """Compare greedy tokens and log-probabilities: with and without offload, with asynchronous and synchronous
    execution, with CUDA graphs and without.
    """
    from bench.identity import measure

    _check_positive(requests=requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    _report(
        "identity",
        f"{shape}, random weights",
        as_json,
        lambda on_progress: measure(
            device=device,
            shape=shape,
            requests=requests,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            on_progress=on_progress,
        ),
    )


def mailbox(
    device: GpuDevice = CUDA,
    mib: Annotated[int, option("--mib", metavar="N", help="MiB to store during the measurement.", parse=whole)] = 1024,
    tokens: Annotated[int, option("--tokens", metavar="N", help="Number of timed tokens.", parse=whole)] = 2000,
    as_json: AsJson = False,
) -> None:
    """Time until the host sees a sampled token while blocks are being stored."""
    from bench.mailbox import measure

    _report(
        "mailbox",
        _BLOCKS,
        as_json,
        lambda on_progress: measure(device=device, mib=mib, tokens=tokens, on_progress=on_progress),
        bounded=device == CUDA,
    )


def engine(
    parts: Annotated[
        list[str] | None, typer.Argument(help="decode, prefill, ttft, resume, async; default: all.")
    ] = None,
    device: GpuDevice = CUDA,
    shape: Shape = "qwen3-8b",
    as_json: AsJson = False,
) -> None:
    """Step time, prefill time and TTFT of an engine on a GPU, divided by the shortest time that the hardware allows."""
    _engine(parts or [], device, shape, as_json)


def _part(name: str) -> Callable[..., None]:
    """One part of `engine` as a separate command."""

    def run(device: GpuDevice = CUDA, shape: Shape = "qwen3-8b", as_json: AsJson = False) -> None:
        _engine([name], device, shape, as_json)

    return run


def _engine(parts: list[str], device: str, shape: str, as_json: bool) -> None:
    from bench.engine import PARTS, measure

    _report(
        "engine",
        f"{shape}, random weights",
        as_json,
        lambda on_progress: measure(device=device, shape=shape, parts=parts or PARTS, on_progress=on_progress),
        bounded=device == CUDA and shape == "qwen3-8b",
    )


def throughput(
    device: GpuDevice = CUDA,
    shape: Shape = "qwen3-8b",
    as_json: AsJson = False,
) -> None:
    """Tokens per second with offload, divided by tokens per second without offload: for requests that reuse no KV, and
    for conversations whose KV is four times the size of the device's pool.
    """
    from bench.throughput import measure

    _report(
        "throughput",
        f"{shape}, random weights",
        as_json,
        lambda on_progress: measure(device=device, shape=shape, on_progress=on_progress),
        bounded=device == CUDA and shape == "qwen3-8b",
    )


def host_tier(
    device: GpuDevice = CUDA,
    shape: Shape = "qwen3-8b",
    host: Annotated[str, option("--host", metavar="SIZE", help="Memory of the host tier.")] = "40GiB",
    rounds: Annotated[
        int, option("--rounds", metavar="N", help="Number of times that the host memory is pinned.", parse=whole)
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """Time until all memory of the host tier is pinned, and the share of prompt tokens that the first conversations
    find there.
    """
    from bench.host_tier import measure

    _report(
        "host-tier",
        f"{shape}, random weights",
        as_json,
        lambda on_progress: measure(device=device, shape=shape, host=host, rounds=rounds, on_progress=on_progress),
        bounded=device == CUDA and shape == "qwen3-8b",
    )


def speculative(
    model: Model = DEMO_MODEL,
    head: Annotated[
        Path | None,
        option(
            "--head",
            metavar="PATH",
            help="MTP head for the model; with a head, the proposer mtp is measured, too.",
            show_default="the shipped head of the demo model",
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        option(
            "--draft-model",
            metavar="MODEL",
            help="Smaller model with the same tokenizer; with it, the proposer draft is measured, too.",
        ),
    ] = None,
    device: EitherDevice = CPU,
    batch: Annotated[
        list[int] | None,
        option(
            "--batch",
            metavar="N",
            help="Concurrent requests; may be given several times.",
            show_default="1, 8",
            parse=whole,
        ),
    ] = None,
    output_tokens: OutputTokens = 96,
    rounds: Annotated[
        int, option("--rounds", metavar="N", help="Repetitions; runs with and without drafts alternate.", parse=whole)
    ] = 3,
    as_json: AsJson = False,
) -> None:
    """Speculative decoding: tokens per second with drafts, divided by tokens per second without; tokens per step; and
    whether tokens in float32 are equal with and without drafts.
    """
    from bench.speculative import measure
    from sidestream_kv.device.choice import torch_device

    torch_device(device)
    _report(
        "speculative",
        model,
        as_json,
        lambda on_progress: measure(
            model,
            head=head,
            draft_model=draft_model,
            device=device,
            batches=batch or (1, 8),
            output_tokens=output_tokens,
            rounds=rounds,
            on_progress=on_progress,
        ),
        served=(model, "auto", device),
    )


def _check_positive(**counts: int) -> None:
    check_at_least({name: (count, 1) for name, count in counts.items()})


def _report(
    name: str,
    model: str,
    as_json: bool,
    measure: Callable[[Callable[[str], None]], list[Figure]],
    *,
    bounded: bool = True,
    served: tuple[str, str, str] | None = None,
) -> None:
    """Run one measurement and print its figures; exit with 1 if a bound does not hold. Progress goes to stderr.

    bounded   False: drop the bounds, because they do not apply to this device or shape
    served    the loaded model and its options `dtype` and `device`; None: no model is loaded
    """
    with Steps() as steps:
        steps.update(f"bench {name}", note="preparing")
        figures = measure(lambda text: steps.update(f"bench {name}", note=text))
    if not bounded:
        figures = [Figure(figure.name, figure.value, figure.unit) for figure in figures]
    dtype = None if served is None else _dtype(*served)
    publish(name, model, figures, as_json=as_json, console=Console(), dtype=dtype)


def _dtype(model: str, dtype: str, device: str) -> str:
    from sidestream.models import precision_of
    from sidestream.models.catalog import resolve
    from sidestream_kv.device.choice import torch_device

    return precision_of(resolve(model), dtype=dtype, device=torch_device(device)).dtype
