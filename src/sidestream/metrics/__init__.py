"""Metrics of an engine, and a timeline of the work on each stream. Imports no other package of Sidestream."""

from sidestream.metrics.counters import METRICS, Metrics, MetricsSnapshot
from sidestream.metrics.timeline import Timeline

__all__ = ["METRICS", "Metrics", "MetricsSnapshot", "Timeline"]
