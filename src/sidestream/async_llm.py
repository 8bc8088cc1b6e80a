"""`AsyncLLM`, the Python interface for asyncio programs. By default, the engine runs in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from sidestream.client.front_end import FrontEnd
from sidestream.client.in_process import InProcessClient
from sidestream.client.process import EngineProcess
from sidestream.client.remote import RemoteClient
from sidestream.config import EngineConfig
from sidestream.engine.loading import LoadedEngine, OnStage, chosen_config, shown_start
from sidestream.errors import EngineStopped
from sidestream.models.catalog import Progress
from sidestream.models.directory import name_of
from sidestream.tokenizer import Tokenizer


class AsyncLLM(FrontEnd):
    """A model for asyncio programs. An asynchronous context manager.

    The engine runs in a separate process, because in this one it would compete with the event loop for Python's global
    interpreter lock (GIL).

    engine_pid   id of the engine's process; None: the engine runs in this process

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
        on_stage: OnStage | None = None,
        **options: Any,
    ) -> None:
        """Load `model` and start its engine; blocks until it serves. Parameters and errors are those of `LLM`.

        engine_process  False: run the engine on a thread of this process, where it competes for the GIL
        """
        self.config = chosen_config(config, options)
        self._closed = False
        self._close_engine: Callable[..., None]
        if engine_process:
            with shown_start(model, progress, on_stage) as (progress, on_stage):
                process = EngineProcess(
                    str(model),
                    self.config,
                    timeline=timeline,
                    check_order=check_order,
                    progress=progress,
                    on_stage=on_stage,
                )
            try:
                tokenizer = Tokenizer.load(process.info.model)
                remote = RemoteClient.connect(process.attach(), why_gone=process.why_gone)
            except BaseException:
                process.kill()
                raise
            super().__init__(remote, tokenizer, model_name=process.info.model_name)
            self.engine_pid: int | None = process.pid
            self._close_engine = process.close

        else:
            with shown_start(model, progress, on_stage) as (progress, on_stage):
                loaded = LoadedEngine(
                    model, self.config, timeline=timeline, check_order=check_order, progress=progress, on_stage=on_stage
                )
            super().__init__(InProcessClient(loaded.engine), loaded.tokenizer, model_name=name_of(model))
            self.engine_pid = None
            self._close_engine = loaded.close

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Wait up to `drain_s` seconds for running requests and abort the others. Then store all complete blocks and
        end the engine, which frees the weights' memory and, on a GPU, that of KV on device and host. Idempotent.

        Raises ProcessFailed if the engine has not closed 60 s after `drain_s`, because it hangs.
        """
        self._closed = True
        try:
            await asyncio.to_thread(self._close_engine, drain_s=drain_s)
        finally:
            if isinstance(self.client, RemoteClient):
                self.client.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped(f"this {type(self).__name__} is closed: make a new one")

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
