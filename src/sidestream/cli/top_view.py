"""The picture of `sidestream top`: one sample of `/metrics/stream` as text. Knows no connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

Sample = Mapping[str, Any]

_SHOWN_US = 4_000_000
_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLOURS = {"engine": "magenta", "compute": "blue", "store": "yellow", "load": "green"}
_TIER_COLOURS = {"device": "blue", "host": "green"}
_OTHER = "red"
_LABEL = 13  # columns of the names at the left
_SILENT_S = 2.0  # figures of this age are the last known ones


class Screen:
    """All figures of the newest sample, and the work of the streams in the last seconds. Rich renders it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._sample: Sample = {}
        self._lost = ""
        self._kept: dict[str, float | None] = {}  # the last known means of figures that are rare
        self._spans: list[tuple[str, int, int]] = []  # track, start and stop in microseconds
        self._now_us = 0

    def add(self, sample: Sample) -> None:
        """Show this sample."""
        self._sample, self._lost = sample, ""
        for name, value in (sample["last"] | sample["engine_thread"]).items():
            self._kept[name] = value if value is not None else self._kept.get(name) or sample["mean"].get(name)
        found, now_us = sample["timeline"], sample["timeline"]["now_us"]
        if now_us < self._now_us:  # another server, with another clock
            self._spans.clear()
        self._now_us = now_us
        self._spans += [
            (track.rstrip("-0123456789"), start, start + length)
            for track, name, start, length in found["spans"]
            if not name.startswith("wait")
        ]
        self._spans = [span for span in self._spans if span[2] > now_us - _SHOWN_US]

    def lose(self, why: str) -> None:
        """Say that there are no new samples."""
        self._lost = why

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 110)
        parts: list[Any] = [self._head(), Text()]
        if self._sample:
            parts += [self._requests(), Text(), *self._streams(width), Text(), self._tiers(width), Text()]
            parts += [self._step(), self._drafts(), self._saved()]
        yield Group(*parts)

    def _head(self) -> Text:
        health = self._sample.get("health", {"status": "", "detail": "", "paused": False})
        good = not self._lost and health["status"] == "ok"
        state = f"not connected: {self._lost}; trying again" if self._lost else health["status"]
        if not self._lost and health["detail"]:
            state += f", {health['detail']}"
        if not self._lost and self._sample.get("age_s", 0.0) > _SILENT_S:
            good, state = False, f"the engine does not answer: figures of {seconds(self._sample['age_s'])} ago"
        return Text.assemble(
            ("● ", "green" if good else "red"),
            (f"{self._sample.get('model', 'Sidestream')}", "bold"),
            f"  {self._url}  ",
            (state, "" if good else "red"),
        )

    def _requests(self) -> Table:
        requests, last = self._sample["requests"], self._kept
        ended = ", ".join(f"{count:.0f} {reason}" for reason, count in requests["ended"].items())
        return _rows(
            ("requests", f"{requests['running']:.0f} running, {requests['waiting']:.0f} waiting, ended: {ended or 0}"),
            (
                "output",
                f"{last['output_tokens_per_s'] or 0:.1f} tokens/s, first token after {seconds(last['ttft_seconds'])}, "
                f"then {seconds(last['itl_seconds'])} per token",
            ),
        )

    def _streams(self, width: int) -> list[Text]:
        """A line for each track: how busy it was, from four seconds ago until now."""
        cells = max(10, width - _LABEL)
        names = dict.fromkeys([*_COLOURS, *sorted({track for track, _, _ in self._spans})])
        return [
            Text.assemble((f"{name:{_LABEL}}", "dim"), (self._busy(name, cells), _COLOURS.get(name, _OTHER)))
            for name in names
        ]

    def _busy(self, track: str, cells: int) -> str:
        size, begin = _SHOWN_US / cells, self._now_us - _SHOWN_US
        shares = [0.0] * cells
        for name, start, stop in self._spans:
            first, last = (start - begin) / size, (stop - begin) / size
            if name == track:
                for cell in range(max(0, int(first)), min(cells, int(last) + 1)):
                    shares[cell] += max(0.0, min(last, cell + 1) - max(first, cell))
        # Work that is short for a cell is still shown.
        return "".join(_BLOCKS[0 if not share else max(1, min(8, round(share * 8)))] for share in shares)

    def _tiers(self, width: int) -> Table:
        device, back = self._sample["device"], self._sample["tokens"]["cached"]
        used, cached, free = (device["blocks"][use] for use in ("used", "cached", "free"))
        held = device["bytes"] * (used + cached) / max(1, used + cached + free)
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=_LABEL - 2)
        for _ in range(4):
            table.add_column(no_wrap=True)
        cells = max(6, min(30, width - 68))
        found = [("device", held, device["bytes"], f"{used:.0f} used, {cached:.0f} cached")]
        for name, tier in self._sample["tiers"].items():
            failed = "; the last write failed" if tier["works"] is False else ""
            down = "; turned down" if tier.get("turned_down") else ""
            gain = f"; saved {seconds(saved_s)}" if (saved_s := tier.get("saved_s")) is not None else ""
            gain += f", lost {seconds(lost_s)}" if (lost_s := tier.get("lost_s")) else ""
            about = f"{tier['blocks']:.0f} blocks{failed}{down}{gain}"
            found.append((name, tier["bytes"], tier["room_bytes"], about))
        for name, num_bytes, room, contents in found:
            filled = round(cells * num_bytes / room) if room else 0
            colour = _TIER_COLOURS.get(name, _OTHER)
            shape = Text.assemble(("█" * filled, colour), ("░" * (cells - filled if room else 0), "dim"))
            size = f"{size_of(num_bytes)} of {size_of(room)}" if room else size_of(num_bytes)
            table.add_row(Text(name, "dim"), shape, size, contents, f"{back.get(name, 0):.0f} back")
        return table

    def _step(self) -> Table:
        last = self._kept
        parts = f"plan and launch {seconds(last['plan_s'])}, wait {seconds(last['wait_s'])}, "
        return _rows(("step", f"{seconds(last['step_seconds'])}: {parts}commit {seconds(last['commit_s'])}"))

    def _drafts(self) -> Table:
        lines = []
        for name, one in self._sample["drafts"].items():
            length = one["last_accept_length"] or one["accept_length"] or 1.0
            most = max(one["lengths"], default=0) or 1
            shape = "".join(_BLOCKS[-(-8 * rows // most)] for rows in one["lengths"]).rstrip()
            accepted = f"{one['accepted']:.0f} of {one['drafted']:.0f} accepted"
            lines.append(("drafts", f"{name}: accept length {length:.2f}, {accepted}  {shape}"))
        return _rows(*(lines or [("drafts", "none")]))

    def _saved(self) -> Table:
        saved = self._sample["saved"]
        time = "" if saved["seconds"] is None else f", about {seconds(saved['seconds'])} of prefill"
        return _rows(("saved", f"{saved['tokens']:.0f} prompt tokens, {size_of(saved['bytes'])} of KV{time}"))


def _rows(*rows: Sequence[str]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=_LABEL - 2, style="dim")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def seconds(value: float | None) -> str:
    """A time with its unit; None: a dash."""
    if value is None:
        return "–"
    for factor, unit, limit in ((1e6, "µs", 1e-3), (1e3, "ms", 1.0)):
        if 0 < value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.1f} s"


def size_of(num_bytes: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if num_bytes >= 10 or unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
