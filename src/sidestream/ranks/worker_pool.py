"""Starts, watches and ends the processes of the ranks other than 0, for rank 0's process."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from sidestream.config import GRAMMAR, EngineConfig
from sidestream.errors import ConfigError, EngineStopped, ProcessFailed
from sidestream.processes.child import how_it_ended, plain, start_child
from sidestream.processes.frames import FrameDecoder, FrameEncoder
from sidestream.processes.log_stream import logs_json
from sidestream.ranks.leader import error_named
from sidestream.ranks.link import SocketTransport, decoder_of_reports
from sidestream.ranks.messages import Arrived, Begin, Refused, Serving, ToLeader
from sidestream.ranks.owned_directory import OwnedDirectory
from sidestream.version import VERSION
from sidestream_kv.device.choice import torch_device
from sidestream_kv.device.group import Group, open_group
from sidestream_kv.device.kinds import on_gpu

log = logging.getLogger(__name__)

COLLECTIVE_S = 600.0
"""Longest wait of a rank for the others inside a collective, such as the first one after compiling."""
_START_S = 300.0
_KILL_S = 10.0
_POLL_S = 0.2
_READ_BYTES = 1 << 16


def check_ranks(config: EngineConfig) -> None:
    """Refuse options that ranks do not support, before any process is started. Raises ConfigError."""
    size = config.tensor_parallel
    if size == 1:
        return
    if config.speculative is not None and config.speculative.proposer not in ("ngram", GRAMMAR):
        raise ConfigError(
            f"the proposer {config.speculative.proposer} does not run on {size} ranks yet: use ngram, or one rank"
        )
    if on_gpu(torch_device(config.device)) and (count := torch.cuda.device_count()) < size:
        raise ConfigError(
            f"tensor_parallel is {size}, but this machine has {count} GPUs that can be used: give at most {count}"
        )


def threads_of_rank(config: EngineConfig) -> int:
    """Threads of each rank's forward pass on a CPU. All ranks together use as many as one rank alone would."""
    return config.compute_threads or max(1, torch.get_num_threads() // config.tensor_parallel)


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The program of the processes of the other ranks.

    module       its function `main` runs a rank, as `engine.worker_main.main` does
    environment  further environment variables
    """

    module: str = "sidestream.engine.worker_main"
    environment: Mapping[str, str] = field(default_factory=dict)


RANK_PROGRAM = RankProgram()
"""The product's own program. The torture test runs another one, which delays the work of its rank."""


class RankProcesses:
    """The processes of ranks 1 to `size` - 1. They end when this process ends, however it ends.

    group       the ranks' collectives
    transport   the sockets of the ranks, with the engine's handle of them
    """

    def __init__(self, model: str, config: EngineConfig, *, program: RankProgram = RANK_PROGRAM) -> None:
        """Start the processes and join their group; then all ranks load. Raises the error of a rank that cannot start,
        after all of them have ended.
        """
        self.size = config.tensor_parallel
        self._program = program
        self._directory = OwnedDirectory("sidestream-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self._decoders: list[FrameDecoder] = []
        self._messages: list[deque[ToLeader]] = []  # messages that were received and not handled yet
        self._ending = threading.Lock()
        self._started = threading.Event()  # set when the start has ended, with or without an error
        device = torch_device(config.device)
        try:
            for rank in range(1, self.size):
                self._start(rank, model, config, device)
            for rank in range(1, self.size):
                self._expect(rank, Arrived)
            self.group: Group = open_group(
                self._directory.path,
                rank=0,
                size=self.size,
                device=device,
                timeout_s=COLLECTIVE_S,
                check=self._check_running,
            )
            self.transport = SocketTransport(self._sockets, self._decoders, how_ended=self._how, end=self._end_all)
            threading.Thread(target=self._watch_start, name="sidestream-start", daemon=True).start()
        except BaseException as error:
            reason = self.explain(error)
            self.kill()
            raise reason from (error if reason is not error else None)

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank from 1."""
        return [process.pid for process in self._processes]

    def start_serving(self) -> None:
        """Wait until every rank has loaded its share and follows. Raises the error of a rank that cannot."""
        for rank in range(1, self.size):
            self._expect(rank, Serving)
        self._started.set()
        self.transport.start(self._messages)

    def explain(self, error: BaseException) -> BaseException:
        """The reason of an error of the start on rank 0: a rank's own error if one was refused, else `error`."""
        if not isinstance(error, Exception):
            return error
        for rank in range(1, len(self._sockets) + 1):
            try:
                self._expect(rank, Serving, timeout_s=1.0)
            except ProcessFailed:
                continue
            except Exception as theirs:
                return theirs
        return error

    def close(self) -> None:
        """Wait for the processes, which have received `End`, and end the group. Blocks. Idempotent. Close the engine
        first, see `Group.close`.
        """
        for process in self._processes:
            try:
                process.wait(_KILL_S)
            except subprocess.TimeoutExpired:
                log.warning("rank process %d did not end and is killed", process.pid)
        self.kill()

    def kill(self) -> None:
        """Kill the processes, and end the group. Blocks. Idempotent; any thread."""
        self._started.set()
        with self._ending:
            for process in self._processes:
                if process.poll() is None:
                    process.kill()
            for process in self._processes:
                process.wait(_KILL_S)
            if hasattr(self, "transport"):  # otherwise the start failed before
                self.transport.close()
            for each in self._sockets:
                each.close()
            if hasattr(self, "group"):  # otherwise the start failed before the group existed
                self.group.close()
            self._directory.remove()

    def _start(self, rank: int, model: str, config: EngineConfig, device: torch.device) -> None:
        environment = {**self._program.environment, "OMP_NUM_THREADS": str(threads_of_rank(config))}
        if on_gpu(device):
            given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            names = (given or list(map(str, range(self.size))))[: self.size]
            # A rank's own GPU is its first one. It sees the others, to map their memory.
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[rank:] + names[:rank])
        process, connection = start_child(self._program.module, environment=environment)
        self._processes.append(process)
        self._sockets.append(connection)
        self._decoders.append(decoder_of_reports())
        self._messages.append(deque())
        begin = Begin(
            version=VERSION,
            model=model,
            config=plain(config),
            rank=rank,
            size=self.size,
            directory=str(self._directory.path),
            log_level=logging.getLogger("sidestream").getEffectiveLevel(),
            log_json=logs_json(),
        )
        connection.sendall(FrameEncoder().encode(begin))

    def _expect(self, rank: int, kind: type[ToLeader], *, timeout_s: float = _START_S) -> None:
        """Wait for a rank's next message. Raises its error, or ProcessFailed if it ended or sent nothing in time."""
        connection, decoder = self._sockets[rank - 1], self._decoders[rank - 1]
        connection.settimeout(timeout_s)
        messages = self._messages[rank - 1]
        while not messages:
            try:
                data = connection.recv(_READ_BYTES)
            except TimeoutError:
                raise ProcessFailed(f"rank {rank} of {self.size} did not start within {timeout_s:g} s") from None
            except OSError as error:
                raise ProcessFailed(f"rank {rank} of {self.size}: {error}") from error
            if not data:
                raise ProcessFailed(self._ended(rank))
            messages += decoder.feed(data)
        match messages.popleft():
            case Refused(name, text):
                raise error_named(name, text)
            case message if not isinstance(message, kind):
                raise EngineStopped(f"rank {rank} sent {message}, not {kind.__name__}")

    def _check_running(self) -> None:
        """Raises ProcessFailed if a rank has ended."""
        for rank, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                raise ProcessFailed(self._ended(rank))

    def _ended(self, rank: int) -> str:
        return f"rank {rank} of {self.size} ended while it started: {self._how(rank)}; its messages are above"

    def _watch_start(self) -> None:
        """End rank 0's collectives if another rank ends during the start: a GPU would wait for it for
        `COLLECTIVE_S`. From the end of the start, the transport notices that a rank has ended.
        """
        while not self._started.wait(_POLL_S):
            if any(process.poll() is not None for process in self._processes):
                self.group.abort()
                return

    def _how(self, rank: int) -> str:
        try:
            return how_it_ended(self._processes[rank - 1].wait(1.0))
        except subprocess.TimeoutExpired:
            return "its process still runs"

    def _end_all(self) -> None:
        for process in self._processes:
            process.kill()
        self.group.abort()  # otherwise rank 0's GPU would wait for the killed ranks forever
