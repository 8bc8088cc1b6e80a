"""The files of batches, in the format of OpenAI's Batch API: a line of JSON for each request or answer.

A file of requests is read line by line, and may have any size. A file of answers grows by whole lines; it says which
requests are answered, so nothing else is stored for a resume. Used by `sidestream batch` and by the runner of
`/v1/batches`; a file by one thread at a time.
"""

from __future__ import annotations

import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import xxhash

from sidestream.errors import ConfigError, SidestreamError
from sidestream.server.body import to_json

if TYPE_CHECKING:
    import httpx

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_BEGIN = b'{"id":"batch_req_'  # of each line that `Answers` writes
_LINE_BYTES = 64 << 20


class Fields(msgspec.Struct):
    """Fields of a body that are checked here. The server checks all of them."""

    stream: Any = None


class Request(msgspec.Struct):
    """One line of requests. `body` is the body's text as it was given."""

    custom_id: str
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")

    def fault(self) -> tuple[str, str] | None:
        """A code and a message, if this request cannot be sent."""
        if self.method != "POST":
            return "invalid_method", f"method is {self.method!r:.100}: give POST"
        if self.url not in URLS:
            return "invalid_url", f"url is {self.url!r:.100}: give one of {', '.join(URLS)}"
        try:
            if msgspec.json.decode(self.body, type=Fields).stream:
                return "invalid_request", "stream is true: an answer in a batch is one object; remove the field"
        except (msgspec.DecodeError, ValueError, RecursionError) as fault:
            return "invalid_request", f"the body is not a JSON object: {fault}"
        return None


class _Status(msgspec.Struct):
    status_code: int


class _Answered(msgspec.Struct):
    custom_id: str
    response: _Status | None


def key_of(custom_id: str) -> int:
    """The id's 128-bit hash, which takes less memory than an id."""
    return xxhash.xxh3_128_intdigest(custom_id.encode())


def read_requests(path: Path) -> Iterator[tuple[int, Request]]:
    """Number and request of each line that is not blank. Raises ConfigError for a line without a request and its
    `custom_id`, and for a file that cannot be read.
    """
    decode, number = msgspec.json.Decoder(Request).decode, 0
    try:
        with path.open("rb") as file:
            while line := file.readline(_LINE_BYTES + 1):
                number += 1
                if len(line) > _LINE_BYTES:
                    raise ConfigError(f"{path}, line {number} has over {_LINE_BYTES} bytes: shorten or remove it")
                if not line.isspace():
                    request = decode(line)
                    if not request.custom_id:
                        raise ConfigError(f"{path}, line {number}: custom_id is empty: give each request its own")
                    yield number, request
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise ConfigError(f"{path}, line {number} is not a request with a custom_id: {fault}; correct it") from None
    except OSError as fault:
        raise ConfigError(f"{path} cannot be read: {fault.strerror or fault}; check the path") from fault


def keys_of(path: Path) -> set[int]:
    """The keys of all requests, of which no two may be equal. Takes about 100 bytes of memory for each. Raises
    ConfigError.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file, which can be read twice: write the requests into one first")
    keys: set[int] = set()
    for number, request in read_requests(path):
        before = len(keys)
        keys.add(key_of(request.custom_id))
        if len(keys) == before:
            raise ConfigError(f"{path}, line {number}: custom_id {request.custom_id!r:.100} is given twice: change one")
    return keys


class Answers:
    """The file of answers. A context manager that holds the file's lock, against a second command with this file.

    count    answers in the file
    faults   those of them with an error or a status of 400 or more
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file. Raises ConfigError."""
        self.path, self.count, self.faults, self._bytes = path, 0, 0, 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
        except OSError as fault:
            raise ConfigError(f"{path} cannot be written: {fault.strerror or fault}; give another path") from fault
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise ConfigError(f"{path} is not a regular file: give a path for the answers")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise ConfigError(f"{path} is written by another command: wait for its end, or give another path") from None
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._file)

    def remove_answered(self, keys: set[int]) -> None:
        """Remove the keys of answered requests from `keys`. Cuts an incomplete last line off, which a killed command
        has left. Raises ConfigError, and changes nothing, if the file has anything but answers to these requests.
        """
        with os.fdopen(self._file, "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
                    break
                try:
                    answered = msgspec.json.decode(line, type=_Answered)
                    keys.remove(key_of(answered.custom_id))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
                    reason = f"is not an answer of a batch ({fault})"
                    raise ConfigError(f"{self.path}, line {number} {reason}: give another path") from None
                except KeyError:
                    reason = f"answers {answered.custom_id!r:.100}, which is not asked, or answered above"
                    raise ConfigError(f"{self.path}, line {number} {reason}: give another path") from None
                self._add(len(line), answered.response.status_code if answered.response else None)
        os.ftruncate(self._file, self._bytes)

    def append(
        self,
        custom_id: str,
        *,
        status: int | None = None,
        request_id: str = "",
        body: bytes = b"",
        error: tuple[str, str] | None = None,
    ) -> None:
        """Write one answer: a reply's status and JSON body, or an error's code and message. Raises SidestreamError if
        the file system refuses it; then the file is as before.
        """
        response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
        line = to_json(
            {
                "id": f"batch_req_{uuid.uuid4().hex}",
                "custom_id": custom_id,
                "response": None if status is None else response,
                "error": None if error is None else {"code": error[0], "message": error[1]},
            }
        )
        left = memoryview(line + b"\n")
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except BaseException as fault:
            os.ftruncate(self._file, self._bytes)
            if isinstance(fault, OSError):
                raise self._unwritable(fault) from fault
            raise
        self._add(len(line) + 1, status)

    def append_reply(self, custom_id: str, reply: httpx.Response) -> None:
        """Write the answer of a server's reply. Raises SidestreamError."""
        try:
            body = msgspec.json.format(reply.content, indent=-1)
        except (msgspec.DecodeError, RecursionError):
            body = msgspec.json.encode(reply.text)
        request_id = reply.headers.get("x-request-id", "")
        self.append(custom_id, status=reply.status_code, request_id=request_id, body=body)

    def sync(self) -> None:
        """Wait until the file is on the disk. Raises SidestreamError."""
        try:
            os.fsync(self._file)
        except OSError as fault:
            raise self._unwritable(fault) from fault

    def _add(self, num_bytes: int, status: int | None) -> None:
        self._bytes += num_bytes
        self.count += 1
        self.faults += status is None or status >= 400

    def _unwritable(self, fault: OSError) -> SidestreamError:
        return SidestreamError(
            f"{self.path} cannot be written: {fault.strerror}; it keeps its {self.count} answers: make room, then run "
            "the same command again"
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """A file of requests, the keys of those that are to be asked, and the file of answers."""

    source: Path
    keys: set[int]
    answers: Answers

    def requests(self) -> Iterator[Request]:
        """The requests with one of the keys, which are removed. Raises ConfigError as `read_requests`."""
        for _, request in read_requests(self.source):
            if (key := key_of(request.custom_id)) in self.keys:
                self.keys.remove(key)
                yield request
