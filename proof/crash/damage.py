"""Damages what engines share, behind their back: files of the disk tier, and values of the store."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

_PAGE, _SLOT = 4096, 2 * 4096
_FIELDS, _BLOCK = 60, 192  # bytes of a header's fields, and of a block behind the header's page


def damage_files(directory: Path, rng: random.Random, pattern: str = "*") -> bool:
    """Damage a file of the directory with such a name, up to three times, or lose the directory. Returns whether there
    was one.
    """
    files = sorted(file for file in directory.glob(pattern) if file.is_file())
    if not files:
        return False
    try:
        for _ in range(rng.choice((1, 1, 3))):
            rng.choice(_DAMAGES)(rng.choice(files), rng)
    except FileNotFoundError:  # an engine has just deleted or renamed the file
        return False
    return True


def damage_store(client: Any, rng: random.Random) -> bool:
    """Damage values, or replace them by those of other keys. Returns whether there was one. Raises redis.RedisError."""
    names = sorted(client.keys("*"))
    for name in rng.sample(names, min(len(names), rng.choice((1, 4, 16)))):
        value, other = client.get(name) or b"", rng.choice(names)
        at = rng.randrange(len(value) or 1)
        flipped = value[:at] + bytes([byte ^ 1 << rng.randrange(8) for byte in value[at : at + 1]]) + value[at + 1 :]
        changed = (flipped, flipped, value[:at], value + b"x", rng.randbytes(len(value)), client.get(other) or b"")
        client.set(name, rng.choice(changed))
    return bool(names)


def _flip(file: Path, rng: random.Random) -> None:
    """Flip bits of headers and blocks. Most bytes of a slot are zeros between them."""
    with file.open("r+b") as opened:
        size = os.fstat(opened.fileno()).st_size
        for _ in range(rng.choice((1, 4, 16))):
            slot = _SLOT * rng.randrange(max(1, size // _SLOT))
            at = slot + rng.choice(
                (rng.randrange(_FIELDS), _PAGE - 1, _PAGE + rng.randrange(_BLOCK), rng.randrange(_SLOT))
            )
            opened.seek(at)
            byte = opened.read(1)
            opened.seek(at)
            opened.write(bytes([each ^ 1 << rng.randrange(8) for each in byte]))
            opened.flush()


def _zero(file: Path, rng: random.Random) -> None:
    with file.open("r+b") as opened:
        pages = max(1, os.fstat(opened.fileno()).st_size // _PAGE)
        opened.seek(_PAGE * rng.randrange(pages))
        opened.write(bytes(_PAGE))


def _exchange(file: Path, rng: random.Random) -> None:
    """Two of the file's ranges that begin at a slot change their places."""
    with file.open("r+b") as opened:
        ranges = max(1, os.fstat(opened.fileno()).st_size // (_SLOT))
        places = [_SLOT * rng.randrange(ranges) for _ in range(2)]
        contents = []
        for place in places:
            opened.seek(place)
            contents.append(opened.read(_SLOT))
        for place, content in zip(places, reversed(contents), strict=True):
            opened.seek(place)
            opened.write(content)


def _cut(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size + 1))


def _delete(file: Path, rng: random.Random) -> None:
    file.unlink()


def _replace(file: Path, rng: random.Random) -> None:
    """Other bytes, under the same name."""
    new = file.with_name("new")
    new.write_bytes(rng.randbytes(file.stat().st_size))
    new.chmod(0o600)
    new.rename(file)


def _lose(file: Path, rng: random.Random) -> None:
    """The directory is renamed, as by a user who cleans up, and then deleted."""
    lost = file.parent.with_name(f"lost-{rng.randrange(1 << 32)}")
    file.parent.rename(lost)
    shutil.rmtree(lost, ignore_errors=True)  # an engine may still make files in it


_DAMAGES = (_flip, _flip, _flip, _flip, _exchange, _exchange, _exchange, _zero, _cut, _delete, _replace, _lose)
