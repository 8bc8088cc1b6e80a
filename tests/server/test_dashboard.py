"""The Grafana dashboard of the examples queries only metrics and labels that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidestream.server.metrics import render
from sidestream_kv.metrics import METRICS, Metrics

HOME = Path(__file__).resolve().parents[2] / "examples" / "monitoring"
DASHBOARD = json.loads((HOME / "grafana.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target for panel in PANELS for target in panel["targets"]]
OUTSIDE = {"le", "job", "instance"}  # labels of Prometheus


@pytest.fixture(scope="module")
def served() -> set[str]:
    """Names of all series of a server in which each metric was written."""
    metrics = Metrics()
    for name, declared in METRICS.items():
        write = {"counter": metrics.inc, "gauge": metrics.set, "histogram": metrics.observe}[declared.kind]
        write(name, 1, *("x" for _ in declared.labels))
    text = render(metrics.snapshot(), model_name="m").decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def test_every_query_names_metrics_that_the_server_has(served: set[str]) -> None:
    queries = [target["expr"] for target in QUERIES]
    queries += [found["query"] for found in DASHBOARD["templating"]["list"] if found["type"] == "query"]
    named = {name for query in queries for name in re.findall(r"sidestream_\w+", query)}
    assert len(named) > 20 and not named - served
    assert all("sidestream_" in query for query in queries)


def test_every_label_of_a_query_is_one_of_its_metrics_labels() -> None:
    for target in QUERIES:
        names = re.findall(r"sidestream_(\w+?)(?:_bucket)?\{", target["expr"])
        known = {label for name in names for label in METRICS[name].labels} | OUTSIDE
        used = {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
        used |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert used <= known, target


def test_every_panel_has_its_own_number_and_place() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    cells = [
        (at["x"] + column, at["y"] + line)
        for panel in DASHBOARD["panels"]
        for at in [panel["gridPos"]]
        for column in range(at["w"])
        for line in range(at["h"])
    ]
    assert len(set(cells)) == len(cells) and max(column for column, _ in cells) < 24
