"""The Grafana dashboard asks for what is exported, and only with labels that are there."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

from specsync_core.diagnostics.metrics import CHECKS, GAUGES, RANK_LABELS, SITE_COUNTERS, SITE_LABELS, exported_names

TEXT = (files("specsync_core") / "dashboards" / "specsync.json").read_text()
DASHBOARD: dict[str, Any] = json.loads(TEXT)
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
QUERIES += [each["expr"] for each in DASHBOARD["annotations"]["list"] if "expr" in each]
QUERIES += [each["definition"] for each in DASHBOARD["templating"]["list"] if "definition" in each]
LABELS = {f"specsync_{name}_total": SITE_LABELS for name in SITE_COUNTERS}
LABELS |= {f"specsync_{CHECKS}_total": RANK_LABELS} | {
    f"specsync_{name}": labels for name, (_, labels) in GAUGES.items()
}


def test_every_metric_that_it_asks_for_exists_and_none_is_forgotten() -> None:
    asked = {name for query in QUERIES for name in re.findall(r"specsync_\w+", query)}
    assert asked == exported_names() == set(LABELS)


def test_every_label_that_it_asks_for_exists() -> None:
    for query in QUERIES:
        names = re.findall(r"specsync_\w+", query)
        inside = {
            label for braces in re.findall(r"\{(.*?)\}", query) for label in re.findall(r"(\w+)\s*[=!]~?", braces)
        }
        grouped = {label.strip() for labels in re.findall(r"by \((.*?)\)", query) for label in labels.split(",")}
        chosen = set(re.findall(r"label_values\(\w+, (\w+)\)", query))
        for name in names:
            assert inside | grouped | chosen <= set(LABELS[name]), query


def test_it_is_a_dashboard_that_grafana_can_import() -> None:
    assert DASHBOARD["schemaVersion"] >= 39  # Grafana 10.4; newer ones migrate it when it is loaded
    assert DASHBOARD["id"] is None
    assert DASHBOARD["title"] == "specsync"
    panels = DASHBOARD["panels"]
    assert sorted(panel["id"] for panel in panels) == list(range(1, len(panels) + 1))
    for panel in panels:
        assert panel["type"] in {"stat", "timeseries", "table"}
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["title"]
        assert panel["description"]
        assert all(target["refId"] and target["datasource"] == panel["datasource"] for target in panel["targets"])
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "group", "group_rank", "site"}
    used = set(re.findall(r"\$\{?(\w+)", TEXT))
    assert used == variables | {"__range", "__rate_interval"}


def test_panels_do_not_overlap_and_fit_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_queries_have_balanced_brackets() -> None:
    for query in QUERIES:
        for opening, closing in ("()", "[]", "{}"):
            assert query.count(opening) == query.count(closing), query
