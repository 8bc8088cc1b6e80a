"""Metrics of an engine, a timeline of the work on each stream, and progress of long work as lines. Imports no other
package of Sidestream.
"""

from sidestream_kv.metrics.counters import METRICS, Metrics, MetricsSnapshot
from sidestream_kv.metrics.timeline import Recent, Timeline

__all__ = ["METRICS", "Metrics", "MetricsSnapshot", "Recent", "Timeline"]
