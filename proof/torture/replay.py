"""Writes a failing schedule to a file and reads it: the workload, the mutation (removed rule), and which actor (host,
stream or thread) runs after each decision.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof.mutations import find
from proof.torture.workload import Workload, from_plain, plain
from sidestream.errors import ConfigError
from sidestream.version import VERSION

_KIND = "python -m proof torture schedule"


@dataclass(frozen=True, slots=True)
class Replay:
    """Everything that determines a schedule, except the version of Sidestream.

    mutation   name of the removed rule; None: unmodified code
    turns      decision number → actor; at all other decisions the running actor continues
    oracle     the oracle (check) that reported the failure, and its message; information only
    """

    workload: Workload
    turns: dict[int, str]
    mutation: str | None
    oracle: str
    said: str

    def save(self, path: Path) -> None:
        """Write the file, replacing an existing one. Raises ConfigError."""
        values = {
            "kind": _KIND,
            "version": VERSION,
            "mutation": self.mutation,
            "oracle": self.oracle,
            "said": self.said,
            "workload": plain(self.workload),
            "turns": [[at, name] for at, name in sorted(self.turns.items())],
        }
        try:
            path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"schedule {path} cannot be written: {error.strerror or error}: give a file that you may write"
            ) from error


def load_replay(path: Path) -> Replay:
    """Read a schedule from a file. Raises ConfigError when it is no schedule, damaged, or of another version."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"schedule {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"schedule {path} is no JSON: give a file that `python -m proof torture` wrote") from error
    if not isinstance(values, dict) or values.get("kind") != _KIND:
        raise ConfigError(f"{path} holds no schedule: give a file that `python -m proof torture` wrote")
    if values.get("version") != VERSION:
        raise ConfigError(
            f"schedule {path} was written by version {values.get('version')} of Sidestream, this is {VERSION}, "
            "in which the same decisions mean something else: run it with that version"
        )
    try:
        return _replay(values)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"schedule {path} is damaged: {type(error).__name__}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"schedule {path} is damaged: {error}") from error


def _replay(values: dict[str, Any]) -> Replay:
    turns: dict[int, str] = {}
    for at, name in values["turns"]:
        if type(at) is not int or at < 0 or type(name) is not str:
            raise ValueError(f"a turn is {[at, name]!r}, not the number of a decision and a name")
        turns[at] = name
    mutation = values["mutation"]
    if mutation is not None:
        mutation = find(str(mutation)).name
    return Replay(from_plain(values["workload"]), turns, mutation, str(values["oracle"]), str(values["said"]))
