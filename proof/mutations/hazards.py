"""Hazards between streams, host, tiers and processes, by stable numbers, in one sentence each."""

from __future__ import annotations

from collections.abc import Mapping

HAZARDS: Mapping[str, str] = {
    "H1": "a store reads a block before compute wrote it",
    "H2": "a store still reads a block that was freed, taken again and overwritten",
    "H3": "a load writes a block that its old owner's step still uses",
    "H4": "a fill of fresh blocks lands after the load",
    "H5": "compute reads before its load ended",
    "H6": "a host slot is freed while a copy or the disk uses it",
    "H7": "a key is visible before its bytes are complete",
    "H8": "blocks from before a reset or new weights are found after it",
    "H9": "the result of a failed or partial transfer or step is used",
    "H10": "a late transfer writes into memory that has a new owner",
    "H11": "two movers own the same block",
    "H12": "bookkeeping counts tokens as computed before the device has run the step",
    "H13": "ranks disagree on completed work",
    "H14": "a key lacks a part of its block's identity",
    "H15": "a block is partly present",
    "H16": "a row or slot of a finished request is used again while its overrun step runs",
    "H17": "a buffer is filled again while a copy still reads it",
    "H18": "a padded row keeps values of an earlier batch",
    "H19": "the next step reads a value that is published late",
    "H20": "a mutable flag is read twice",
    "H21": "a request that ends during a step frees its blocks twice, or leaves them findable and free at once",
    "H22": "a deferred release never happens",
    "H23": "work is enqueued in the wrong order",
    "H24": "a client receives the end before its request's resources are released",
    "H25": "a chunk that is not the last one yields a token",
    "H26": "no request makes progress",
    "H32": "a message between processes is lost, duplicated, late or out of order, or crosses another one",
    "H34": "a process ends, and its requests continue, or its replacement receives their outputs",
    "H35": "unread messages accumulate",
}
