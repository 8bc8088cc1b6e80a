"""Replays the KV events of an engine as a router does, and compares the result with the engine's findable keys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator

from sidestream.engine import Engine
from sidestream.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, block_hash
from sidestream_kv.types import Key


class EventReplay:
    """What a router knows from the events. Called by the thread that publishes them.

    held    the blocks that can be reused, by medium
    wrong   sentences about events that say nothing new, and about blocks on which events and engine disagree; without
            duplicates
    """

    def __init__(self, engine: Engine, *, parts: Container[Key] = ()) -> None:
        """Subscribes to the engine's events. Call it before the engine's first step. `parts`: keys of parts of blocks,
        which no event names.
        """
        self._parts = engine.parts
        self._hidden = parts
        self._tokens: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.held: defaultdict[str, set[int]] = defaultdict(set)
        self.wrong: dict[str, None] = {}
        engine.on_kv_events(lambda sequence, batch: self._take(batch))

    def compare(self) -> None:
        """Compare the held blocks with the findable keys. Call it when no change of the keys is unpublished."""
        for medium, keys in self._findable().items():
            findable, held = {block_hash(key) for key in keys}, self.held[medium]
            self._object(medium, held - findable, "is not findable, but no event removes it")
            self._object(medium, findable - held, "is findable, but no event stores it")

    def _take(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            match event:
                case BlockStored(block_hashes, medium=str(medium)):
                    self._object(medium, self.held[medium].intersection(block_hashes), "is stored twice")
                    self._object(medium, self._changed(event), "is stored with other tokens or after another block")
                    self.held[medium].update(block_hashes)
                case BlockRemoved(block_hashes, str(medium)):
                    self._object(medium, set(block_hashes) - self.held[medium], "is removed, but was not stored")
                    self.held[medium].difference_update(block_hashes)
                case AllBlocksCleared():
                    self.held["GPU"].clear()

    def _changed(self, event: BlockStored) -> Iterator[int]:
        """The blocks of the event that an earlier event described differently. Only the device describes blocks."""
        size, parent = event.block_size, event.parent_block_hash
        for index, block in enumerate(event.block_hashes if event.medium == "GPU" else ()):
            described = parent, event.token_ids[index * size : (index + 1) * size]
            if self._tokens.setdefault(block, described) != described or len(described[1]) != size:
                yield block
            parent = block

    def _object(self, medium: str, blocks: Iterable[int], text: str) -> None:
        self.wrong.update(dict.fromkeys(f"block {block:016x} of {medium} {text}" for block in sorted(blocks)))

    def _findable(self) -> dict[str, Iterable[Key]]:
        """The findable keys of each medium. Tiers of a model whose prefixes need parts send no events."""
        parts = self._parts
        findable: dict[str, Iterable[Key]] = {"GPU": [key for key in parts.blocks._index if key not in self._hidden]}
        if parts.tiers is not None and not parts.scheduler.has_parts:
            findable["CPU"] = parts.tiers.host.pool._index
            media = {"disk": "DISK", "redis": "EXTERNAL"}
            findable |= {media[name]: tier.index for name, tier in parts.tiers.persistent.items()}
        return findable
