"""Runs one function in a new process, so that all device memory that it used is free when the process has ended."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

from sidestream.errors import SidestreamError

Given = ParamSpec("Given")
Made = TypeVar("Made")


def in_fresh_process(function: Callable[Given, Made], *args: Given.args, **kwargs: Given.kwargs) -> Made:
    """The return value of `function`. Raises SidestreamError if the function raised a SidestreamError (the message is
    the same), or if the process died.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, function, args, kwargs))
    process.start()
    theirs.close()
    try:
        done, value = ours.recv()
        process.join()
    except EOFError:
        process.join()
        raise SidestreamError(
            f"a process of the benchmark ended with code {process.exitcode}: its error is above"
        ) from None
    finally:
        process.terminate()  # the process is alive here only after an interrupt
        process.join()
        ours.close()
    if not done:
        raise SidestreamError(value)
    made: Made = value
    return made


def _run(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        value = function(*args, **kwargs)
    except SidestreamError as error:
        pipe.send((False, str(error)))
    else:
        pipe.send((True, value))
