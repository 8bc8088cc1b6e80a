"""The LoRA adapters of an engine: which are loaded, under which names, and which requests use them.

KV depends on the adapter, so the adapter's hash is part of the salt of a request's block keys: no tier gives its KV to
a request with another adapter, or with none.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sidestream.config import MOST_SALT_CHARS
from sidestream.engine.parts import Parts
from sidestream.errors import CallTimeout, DeviceLost, EngineStopped, ModelError, ModelNotFound, RequestRejected
from sidestream.schedule.limits import CheckedRequest, KeysOf
from sidestream_kv.types import Fence

if TYPE_CHECKING:  # importing transformers takes seconds
    from sidestream.models.lora import Adapter, Adapters

_NAME = re.compile(r"[!-~]{1,256}")
_POLL_S = 0.001


class LoadedAdapters:
    """The adapters of one engine. Any thread, except that `ended` is for the engine thread.

    keys_of       as of `RequestChecker`
    call          `Engine.call`
    wait_a_turn   lets the engine work for so many seconds
    """

    def __init__(
        self,
        parts: Parts,
        *,
        keys_of: KeysOf,
        call: Callable[..., None],
        wait_a_turn: Callable[[float], None],
    ) -> None:
        self._matrices, self._executor, self._ranks = parts.adapters, parts.executor, parts.ranks
        self._keys_of = keys_of
        self._call = call
        self._wait_a_turn = wait_a_turn
        self._changing = threading.Lock()  # one adapter is read at a time
        self._lock = threading.Lock()  # guards what follows
        self._loaded: dict[str, tuple[int, str]] = {}  # slot and digest, by name
        self._uses: Counter[int] = Counter()  # unfinished samples, by slot

    @property
    def room(self) -> int:
        """Number of adapters that may be loaded at a time."""
        return 0 if self._matrices is None else self._matrices.slots

    @property
    def names(self) -> dict[str, int]:
        """The slots of the loaded adapters, by name."""
        with self._lock:
            return {name: slot for name, (slot, _) in self._loaded.items()}

    def admit(self, request: CheckedRequest) -> CheckedRequest:
        """The request, which names an adapter, with the slot and the keys of that. The adapter stays in its slot until
        all samples of the request have `ended`. Raises ModelNotFound.
        """
        name = request.params.adapter
        with self._lock:
            if name not in self._loaded:
                raise ModelNotFound(
                    f"no adapter {name[:100]!r} is loaded, and it is not the served model's name: /v1/models lists "
                    "what can be named; load it, or leave it out in Python",
                    param="model",
                )
            slot, digest = self._loaded[name]
            self._uses[slot] += request.params.n  # rule: adapter-stays-while-requests-use-it
        salt = request.cache_salt.ljust(MOST_SALT_CHARS + 1)  # no client can send one of this length
        salt += digest  # rule: keys-depend-on-the-adapter
        tokens: npt.NDArray[np.int64] = np.array(request.prompt, np.int64)
        keys, version = self._keys_of(tokens, salt)
        return replace(request, keys=keys, keys_version=version, cache_salt=salt, adapter=slot)

    def ended(self, slot: int, num_samples: int = 1) -> None:
        """Samples of a request with this slot have ended."""
        with self._lock:
            self._uses[slot] -= num_samples

    def load(self, name: str, path: str, *, timeout_s: float = 60.0) -> None:
        """Read an adapter in PEFT's format from a directory, and serve it under a name. Running requests go on.

        Raises RequestRejected, and changes nothing, for a name that is taken, if no slot is free, and for an adapter
        that cannot be read or does not fit. Raises CallTimeout and EngineStopped.
        """
        matrices = self._matrices
        if matrices is None:
            raise RequestRejected("this engine has no room for adapters: start it with max_loras", param="lora_name")
        if not _NAME.fullmatch(name):
            message = f"lora_name is {name[:300]!r}: give up to 256 characters, no spaces"
            raise RequestRejected(message, param="lora_name")
        with self._changing:
            with self._lock:
                if name in self._loaded:
                    raise RequestRejected(f"an adapter {name!r} is loaded: unload it first", param="lora_name")
                taken = {slot for slot, _ in self._loaded.values()} | {slot for slot in self._uses if self._uses[slot]}
            free = next((slot for slot in range(1, matrices.slots + 1) if slot not in taken), None)
            if free is None:
                message = f"all {matrices.slots} slots are in use: unload an adapter, or start with more max_loras"
                raise RequestRejected(message, param="lora_name")
            try:
                adapter = matrices.read(path)
                self._read_on_ranks(path, adapter, timeout_s)
            except ModelError as error:
                raise RequestRejected(f"the adapter is not loaded: {error}", param="lora_path") from error
            self._put(matrices, free, adapter, timeout_s)
            with self._lock:
                self._loaded[name] = free, adapter.digest

    def unload(self, name: str) -> None:
        """Serve an adapter no more. Requests that use it go on; its slot is free when they have ended. Raises
        ModelNotFound.
        """
        with self._lock:
            if self._loaded.pop(name, None) is None:
                raise ModelNotFound(f"no adapter {name[:100]!r} is loaded", param="lora_name")

    def _read_on_ranks(self, path: str, adapter: Adapter, timeout_s: float) -> None:
        """Wait until every other rank has read the adapter too, so that it is served by all ranks or by none."""
        if self._ranks is None:
            return
        name, progress = self._ranks.read_adapter(path, adapter.digest), self._ranks.progress
        self._wait(lambda: progress.done(name), timeout_s)  # rule: adapter-is-read-on-every-rank
        if (failure := progress.failure(name)) is not None:  # rule: adapter-of-a-failed-rank-is-refused
            raise ModelError(str(failure)) from failure

    def _put(self, matrices: Adapters, slot: int, adapter: Adapter, timeout_s: float) -> None:
        # Behind all launched steps, which may still read what the slot holds.
        fences: list[Fence] = []
        put, ranks = partial(matrices.put, slot, adapter), self._ranks

        def enqueue() -> None:
            fence = self._executor.enqueue(put, label="adapter")
            # rule: adapter-is-put-on-every-rank
            fences.append(fence if ranks is None else ranks.put_adapter(slot, fence))

        self._call(enqueue, timeout_s=timeout_s)
        (fence,) = fences
        self._wait(fence.poll, timeout_s)  # rule: adapter-is-served-once-it-is-there
        if fence.failure is not None:
            raise EngineStopped(f"the adapter did not reach the device: {fence.failure}") from fence.failure

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        try:
            while not is_done():
                if time.monotonic() > until_s:  # rule: adapter-has-a-deadline
                    raise CallTimeout(f"the adapter did not reach the device within {timeout_s:g} s: it is not loaded")
                self._wait_a_turn(_POLL_S)
        except DeviceLost as error:
            raise EngineStopped(f"the adapter did not reach the device: {error}") from error
