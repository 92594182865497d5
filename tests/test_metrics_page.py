"""docs/METRICS.md and the dashboard docs/grafana.json, against the table of metrics."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rmq_spark
from rmq_spark.metric_table import METRICS

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "METRICS.md"  # METRICS.md
NAME = re.compile(r"\brmq_[a-z_]+\b")
BLOCK = re.compile(r"(<!-- not run: .*?-->\s*)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def is_known(name: str) -> bool:
    return name in METRICS or re.sub("_(bucket|sum|count)$", "", name) in METRICS


def test_METRICS_lists_every_metric() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    listed = [(name, kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows]
    assert listed == [(name, one.kind, one.labels, one.help) for name, one in METRICS.items()]


def test_METRICS_names_only_metrics_in_its_alerts() -> None:
    section = PAGE.read_text().split("## Alerts")[1]
    cells = re.findall(r"^\| [^|]* \| (.*) \|$", section, re.MULTILINE)[2:]  # without head and line
    expressions = [re.fullmatch(r"`([^`]*rmq_[^`]*)`", cell) for cell in cells]
    assert len(cells) >= 7
    assert not [cell for cell, one in zip(cells, expressions, strict=True) if one is None], "one expression a cell"
    texts = [one[1] for one in expressions if one is not None]
    assert not [text for text in texts if text.count("(") != text.count(")")]
    assert not [name for text in texts for name in NAME.findall(text) if not is_known(name)]


def test_METRICS_example_serves(tmp_store: Callable[[str], Path], capsys: Any) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    (code,) = (code for reason, language, code in blocks if language == "python" and not reason)
    namespace: dict[str, Any] = {"store": tmp_store("demo"), "rmq_spark": rmq_spark}
    exec(compile(code, PAGE.name, "exec"), namespace)
    namespace["server"].close()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics\n", capsys.readouterr().out)


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DOCS / "grafana.json").read_text())["panels"]
    return found


def expressions() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])


def test_every_expression_of_the_dashboard_uses_metrics_and_labels_that_exist() -> None:
    for expression in expressions():
        names = NAME.findall(expression)
        assert names, expression
        for name in names:
            assert is_known(name), expression
        of_names = set(METRICS[re.sub("_bucket$", "", names[0])].labels) | {"le"}
        filters = re.findall(r"(\w+)=~", expression)
        groupings = re.findall(r"by \(([\w, ]+)\)", expression)
        used = {*filters, *(label for one in groupings for label in one.split(", "))}
        assert used <= of_names, expression
        assert expression.count("(") == expression.count(")"), expression
        assert expression.count("{") == expression.count("}"), expression


def test_the_dashboard_shows_every_metric() -> None:
    shown = {re.sub("_bucket$", "", name) for expression in expressions() for name in NAME.findall(expression)}
    assert shown == set(METRICS)


def test_counters_of_the_dashboard_are_rates() -> None:
    for expression in expressions():
        for name in NAME.findall(expression):
            if name.endswith(("_total", "_bucket")):
                assert re.search(rf"(rate|increase)\({name}", expression), expression
            else:
                assert not re.search(rf"(rate|increase)\({name}", expression), f"a gauge: {expression}"


def test_panels_of_the_dashboard_have_ids_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for panel in panels()
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_variables_of_the_dashboard_are_labels() -> None:
    board = json.loads((DOCS / "grafana.json").read_text())
    for variable in board["templating"]["list"]:
        for metric, label in re.findall(r"label_values\((\w+), (\w+)\)", variable["query"]):
            assert label in METRICS[metric].labels
