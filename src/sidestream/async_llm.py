"""A model for event loops: prompts and conversations in, text out, with the engine in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sidestream.client.in_process import InProcessClient
from sidestream.client.process import EngineProcess
from sidestream.client.remote import RemoteClient
from sidestream.config import EngineConfig
from sidestream.errors import EngineStopped
from sidestream.front_end import FrontEnd
from sidestream.loading import LoadedEngine, Tell, name_of
from sidestream.models.catalog import Progress
from sidestream.tokenizer import Tokenizer


class AsyncLLM(FrontEnd):
    """A model for event loops. An asynchronous context manager.

    sampling_defaults  the sampling options of requests that leave them out
    engine_pid         of the engine's process; None: the engine runs in this one

    The engine runs in a process of its own, so that work of this event loop never holds it up, nor the other way round.

    >>> question = [{"role": "user", "content": "Why do whales sing?"}]
    >>> async with AsyncLLM("smollm2-135m-instruct") as llm:
    ...     async for delta in llm.chat(question, SamplingParams(max_tokens=64)):
    ...         print(delta.text, end="")
    """

    def __init__(
        self,
        model: str | Path,
        *,
        config: EngineConfig | None = None,
        engine_process: bool = True,
        timeline: str | Path | None = None,
        check_order: bool = False,
        progress: Progress | None = None,
        tell: Tell = lambda what, done, total: None,
        **options: Any,
    ) -> None:
        """Load `model` (a directory, a hub id or a name of `sidestream models`) and start an engine; blocks until it
        serves.

        options         fields of EngineConfig, such as `kv_memory="2GiB"` or `offload=OffloadConfig(...)`; not together
                        with `config`
        engine_process  False: the engine runs on a thread of this process, and shares its interpreter lock
        tell            is told what the start is at, in words, and how much of that is done, of how much (0 of 0:
                        unknown)
        timeline        file that `close` writes: what each stream did when, for ui.perfetto.dev
        check_order     judge with vector clocks that nothing is read or reused too early
                        (`sidestream.testing.checker`); `close` raises RaceError if anything was. For finding bugs: a
                        step takes up to twice as long

        Raises ConfigError (ModelError for the model's part).
        """
        if config is not None and options:
            raise TypeError(f"give either config or options ({', '.join(options)}), not both")
        self.config = config or EngineConfig(**options)
        self._closed = False
        self._close_engine: Callable[[float], None]
        if engine_process:
            process = EngineProcess(
                str(model), self.config, timeline=timeline, check_order=check_order, progress=progress, tell=tell
            )
            try:
                tokenizer = Tokenizer.load(process.facts.model)
                remote = RemoteClient.connect(process.attach(), why_gone=process.why_gone)
            except BaseException:
                process.kill()
                raise
            super().__init__(remote, tokenizer, model_name=process.facts.model_name)
            self.engine_pid: int | None = process.pid

            def close(drain_s: float) -> None:
                process.close(drain_s=drain_s)

        else:
            loaded = LoadedEngine(
                model, self.config, timeline=timeline, check_order=check_order, progress=progress, tell=tell
            )
            super().__init__(InProcessClient(loaded.engine), loaded.tokenizer, model_name=name_of(model))
            self.engine_pid = None

            def close(drain_s: float) -> None:
                loaded.close(drain_s=drain_s)

        self._close_engine = close

    async def flush(self, *, timeout_s: float = 60.0) -> bool:
        """Wait until what is complete rests in the tiers; False when `timeout_s` passed first."""
        self._check_open()
        return await self.client.flush(timeout_s=timeout_s)

    async def reset_cache(self) -> None:
        """Make every stored block of every tier unreachable at once. Requests that run go on."""
        self._check_open()
        await self.client.reset_cache()

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Abort what runs (after `drain_s` seconds), bring what is complete to the tiers, end the engine and its
        process. Idempotent.
        """
        self._closed = True
        try:
            await asyncio.to_thread(self._close_engine, drain_s)
        finally:
            if isinstance(self.client, RemoteClient):
                self.client.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped(f"this {type(self).__name__} is closed: make a new one")

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
