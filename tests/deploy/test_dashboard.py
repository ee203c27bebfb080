"""The Grafana dashboard asks for metrics and labels that exist."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from chunkattn.engine.metrics import EngineMetrics
from chunkattn.gateway.metrics import GatewayMetrics, merge
from chunkattn.web.http_state import HttpMetrics

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "chunkattn.json").read_text(encoding="utf-8"))
PANELS = [pytest.param(panel, id=panel["title"]) for panel in DASHBOARD["panels"]]
UNITS = {"short", "percentunit", "reqps", "ops", "s", "bytes"}
"""Units of Grafana that fit our metrics: their times are in seconds."""


@pytest.fixture(scope="module")
def known():
    """Labels of each sample by its name, in a scrape that has `replica` on all of them."""
    gateway = CollectorRegistry()
    GatewayMetrics(gateway)
    found = {}
    for registry in (gateway, HttpMetrics().registry, EngineMetrics().registry):
        for family in registry.collect():
            labels = {*registry._names_to_collectors[family.name]._labelnames, "replica"}
            if family.type == "histogram":
                found |= {
                    f"{family.name}_sum": labels,
                    f"{family.name}_count": labels,
                    f"{family.name}_bucket": {*labels, "le"},
                }
            else:
                found[family.name + "_total" * (family.type == "counter")] = labels
    return found


def targets(panel):
    return [target["expr"] for target in panel["targets"]]


def names(expression):
    found = re.findall(r"\bchunkattn_\w+", expression)
    assert found
    return found


@pytest.mark.parametrize("panel", PANELS)
def test_metrics_and_labels_exist(panel, known):
    for target in panel["targets"]:
        asked = names(target["expr"])
        assert set(asked) <= known.keys()
        selected = [re.findall(r"(\w+)[!=]~?\"", labels) for labels in re.findall(r"\{(.*?)\}", target["expr"])]
        grouped = [re.findall(r"\w+", labels) for labels in re.findall(r"\bby \((.*?)\)", target["expr"])]
        for labels in (*selected, *grouped):
            assert all(set(labels) <= known[name] for name in asked)
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown == {label for labels in grouped for label in labels} - {"le"}


@pytest.mark.parametrize("panel", PANELS)
def test_functions_fit_the_metrics(panel):
    for expression in targets(panel):
        assert expression.count("(") == expression.count(")")
        for name in names(expression):
            is_rate = re.search(rf"rate\({name}(\{{[^}}]*\}})?\[\$__rate_interval\]\)", expression) is not None
            assert is_rate == name.endswith(("_total", "_bucket"))
        assert ("histogram_quantile" in expression) == any(name.endswith("_bucket") for name in names(expression))


@pytest.mark.parametrize("panel", PANELS)
def test_panels_have_title_text_and_unit(panel):
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    place = panel["gridPos"]
    assert 0 <= place["x"] < place["x"] + place["w"] <= 24


def test_panels_do_not_overlap():
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_replicas_are_chosen_by_a_label_that_names_them():
    """The gateway's own metrics of a replica keep the replica's name; its other metrics are those of `gateway`."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    metrics.ready.labels("http://10.0.0.1:8000").set(1)
    text = merge(generate_latest(registry).decode(), {})
    (variable,) = [entry for entry in DASHBOARD["templating"]["list"] if entry["type"] == "query"]
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
    assert f'{name}{{{label}="http://10.0.0.1:8000"}} 1.0' in text
    assert variable["name"] == "replica"
