"""Draw a timeline file as an SVG picture: `python -m bench.picture TIMELINE.json OUT.svg [FROM_MS TO_MS]`.

There is one track per stream, with time from left to right. A span has its name if it is wide enough.
"""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path
from typing import Any

_WIDTH, _LEFT, _ROW, _TOP = 1180, 110, 34, 40
_TRACKS = ("engine", "compute", "store", "load", "disk-write", "disk-read-0", "disk-read-1")
_COLOURS = {
    "engine": "#8f6fc1",
    "compute": "#3c78b4",
    "store": "#d98b2b",
    "load": "#3f9a5a",
    "disk-write": "#b0703a",
    "disk-read-0": "#6ab08a",
    "disk-read-1": "#6ab08a",
}


def draw(trace: dict[str, list[dict[str, Any]]], start_ms: float, stop_ms: float) -> str:
    """The picture of `[start_ms, stop_ms)` of a trace."""
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    spans = [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["ts"] / 1e3 < stop_ms and (event["ts"] + event["dur"]) / 1e3 > start_ms
    ]
    tracks = [track for track in _TRACKS if any(names[span["tid"]] == track for span in spans)]
    scale = (_WIDTH - _LEFT - 10) / (stop_ms - start_ms)
    height = _TOP + _ROW * len(tracks) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
        ' font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    step = _tick(stop_ms - start_ms)
    tick = (int(start_ms / step) + 1) * step
    while tick < stop_ms:
        x = _LEFT + (tick - start_ms) * scale
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP - 10}" x2="{x:.1f}" y2="{height - 14}" stroke="#e3e3e3"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{_TOP - 16}" font-size="11" fill="#777" text-anchor="middle">'
            f"{tick - start_ms:.0f} ms</text>"
        )
        tick += step
    for index, track in enumerate(tracks):
        y = _TOP + index * _ROW
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 17}" font-size="13" fill="#333" text-anchor="end">{track}</text>')
        for span in spans:
            if names[span["tid"]] != track:
                continue
            left = max(start_ms, float(span["ts"]) / 1e3)
            right = min(stop_ms, (float(span["ts"]) + float(span["dur"])) / 1e3)
            x, width = _LEFT + (left - start_ms) * scale, max((right - left) * scale, 0.8)
            name = html.escape(str(span["name"]))
            fill = "#d9d9d9" if name.startswith("wait") else _COLOURS[track]
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 10}" rx="2" fill="{fill}">'
                f"<title>{name}</title></rect>"
            )
            if width > 6.4 * len(name):
                parts.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 16}" font-size="11" fill="#fff" text-anchor="middle">'
                    f"{name}</text>"
                )
    return "\n".join([*parts, "</svg>", ""])


def _tick(span_ms: float) -> float:
    for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000):
        if span_ms / step <= 12:
            return float(step)
    return 10_000.0


def main() -> None:
    """Draw the whole timeline, or the part that was asked for."""
    trace = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    stops = [(event["ts"] + event["dur"]) / 1e3 for event in trace["traceEvents"] if event["ph"] == "X"]
    window = (float(sys.argv[3]), float(sys.argv[4])) if len(sys.argv) > 4 else (0.0, max(stops))
    Path(sys.argv[2]).write_text(draw(trace, *window), encoding="utf-8")


if __name__ == "__main__":
    main()
