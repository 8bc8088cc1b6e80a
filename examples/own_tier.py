"""A tier of one's own: KV blocks in an SQLite file, behind host memory. docs/tiers.md explains each step.

python examples/own_tier.py [MODEL]
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import sys
import threading
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sidestream import ConfigError, OffloadConfig, SidestreamError
from sidestream.errors import TierCorrupt, TierError, TierFull
from sidestream_kv.config import parse_bytes
from sidestream_kv.offload.tiers.base import Block, Entry, TierContext, TierIndex, TierKind, WriteGrant
from sidestream_kv.offload.tiers.stack import register

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "sqlite"


class SqliteTier:
    """One row for each entry. A transaction makes a write whole or void; SQLite's lock keeps other engines out."""

    def __init__(self, path: Path, context: TierContext, *, capacity_bytes: int) -> None:
        block_bytes = context.layout.block_bytes
        model = json.dumps({**context.layout.describe(), "fingerprint": context.fingerprint}, sort_keys=True)
        self._lock = threading.Lock()  # one connection: reads and writes take turns
        self._closed = False
        self._db = sqlite3.connect(path, check_same_thread=False, timeout=0)
        try:
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            with self._db:
                self._db.execute("CREATE TABLE IF NOT EXISTS model (description TEXT)")
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS block (key BLOB, serial INTEGER PRIMARY KEY, sum BLOB, data BLOB)"
                )
                found = self._db.execute("SELECT description FROM model").fetchone()
                if found is None:
                    self._db.execute("INSERT INTO model VALUES (?)", (model,))
                elif found[0] != model:
                    raise ConfigError(f"{path} was written by another model: give another path, or delete it")
                entries = self._entries(max_entries := capacity_bytes // block_bytes)
        except (sqlite3.Error, ConfigError) as error:
            self._db.close()
            raise (
                error if isinstance(error, ConfigError) else ConfigError(f"{path}: {error}: give another path")
            ) from error
        self._index = TierIndex(
            entries,
            name=NAME,
            max_entries=max_entries,
            entry_bytes=block_bytes,
            next_serial=1 + max((entry.serial for entry in entries), default=-1),
            tracer=context.tracer,
        )

    def _entries(self, max_entries: int) -> list[Entry]:
        """The newest entries, oldest first; the others are deleted, and so are older entries of the same key."""
        rows = self._db.execute("SELECT key, MAX(serial) FROM block GROUP BY key ORDER BY MAX(serial)").fetchall()
        kept = [Entry(key, serial) for key, serial in rows][-max_entries:]
        self._db.execute(
            "CREATE TEMP TABLE kept AS SELECT value AS serial FROM json_each(?)",
            (json.dumps([e.serial for e in kept]),),
        )
        self._db.execute("DELETE FROM block WHERE serial NOT IN (SELECT serial FROM kept)")
        return kept

    @property
    def index(self) -> TierIndex:
        """The keys in the file."""
        return self._index

    def write(self, grant: WriteGrant, payload: Block) -> None:
        """Delete the victim and insert the entry, in one transaction."""
        data = bytes(payload)
        with self._turn(), self._db:
            if grant.victim is not None:
                self._db.execute("DELETE FROM block WHERE serial = ?", (grant.victim.serial,))
            entry = grant.entry
            self._db.execute("INSERT INTO block VALUES (?, ?, ?, ?)", (entry.key, entry.serial, _sum(data), data))
        grant.victim = None
        grant.written = True

    def read(self, entry: Entry, out: Block) -> None:
        """Copy the row's bytes, if they match their checksum."""
        with self._turn():
            row = self._db.execute("SELECT sum, data FROM block WHERE serial = ?", (entry.serial,)).fetchone()
            if row is None:
                raise TierCorrupt(f"entry {entry.serial} is gone")
            if row[0] != _sum(row[1]):
                with self._db:
                    self._db.execute("DELETE FROM block WHERE serial = ?", (entry.serial,))
                raise TierCorrupt(f"entry {entry.serial} does not match its checksum: deleted")
        memoryview(out).cast("B")[:] = row[1]

    def close(self) -> None:
        """Delete doomed entries and let the file go."""
        if not self._closed:
            self._closed = True
            with closing(self._db), self._db:
                self._db.executemany(
                    "DELETE FROM block WHERE serial = ?", [(e.serial,) for e in self._index.take_doomed()]
                )

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The connection, for one thread at a time; its errors as a tier's."""
        try:
            with self._lock:
                yield
        except sqlite3.Error as error:
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            raise (TierFull if full else TierError)(f"sqlite tier: {error}") from error


def _sum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _open(config: OffloadConfig, context: TierContext) -> SqliteTier | None:
    options = config.tiers.get(NAME)
    if options is None:
        return None
    capacity = parse_bytes(options.get("capacity", "1GiB"), option="sqlite capacity")
    return SqliteTier(Path(options["path"]), context, capacity_bytes=capacity)


KIND = TierKind(NAME, _open)


def main(model: str) -> None:
    """Answer a question twice, in two engines: the second one finds the prompt's KV in the file."""
    from sidestream import LLM, SamplingParams

    register(KIND)
    prompt = "The tide turns twice a day, and the harbour with it. " * 20
    for _ in range(2):
        offload = OffloadConfig(host="256MiB", tiers={NAME: {"path": "kv.db", "capacity": "1GiB"}})
        with LLM(model, offload=offload) as llm:
            output = llm.generate([prompt], SamplingParams(max_tokens=16))[0]
            print(output.cached.by_tier, repr(output.text))


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct")
    except SidestreamError as error:
        sys.exit(f"error: {error}")
