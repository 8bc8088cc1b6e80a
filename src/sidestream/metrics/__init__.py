"""Counters of everything that happens, and a timeline of what each stream did when. Knows no other room."""

from sidestream.metrics.counters import METRICS, Metrics, MetricsSnapshot
from sidestream.metrics.timeline import Timeline

__all__ = ["METRICS", "Metrics", "MetricsSnapshot", "Timeline"]
