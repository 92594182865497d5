"""Objects that notebooks display as tables: their text is escaped, wide ones scroll, and a terminal shows lines."""

import copy
import pickle
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark.store import html_tables
from rmq_spark.store.group_tables import LAG
from rmq_spark.store.testing.brokers import RunningCluster
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store
from rmq_spark.store.tools.check_report import CheckReport
from rmq_spark.store.tools.finding import Action, Area, Finding, Severity
from rmq_spark.store.tools.repair_plan import RepairPlan, RepairStep
from rmq_spark.store.view.summary import GroupLag

EVIL = "<script>alert('&\"')</script>"
SEGMENT = f"{0:020}"


class Page(HTMLParser):
    """A piece of HTML: its elements, its text, its style, and the cells of its last table."""

    def __init__(self, shown: Any) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.depth = 0
        self.text = ""
        self.styles: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(shown._repr_html_())
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.depth += 1
        self.styles += [value or "" for name, value in attributes if name == "style"]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.depth -= 1

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def page_of(shown: Any) -> Page:
    """Return the page of an object. Each element is closed, none is a script, and the whole scrolls if it is wide."""
    page = Page(shown)
    assert page.depth == 0
    assert page.tags <= {"div", "b", "table", "thead", "tbody", "tr", "td", "th", "span", "pre", "details", "summary"}
    assert "overflow-x:auto" in page.styles[0]
    return page


def finding(number: int = 0) -> Finding:
    return Finding(
        severity=Severity.DAMAGE,
        area=Area.COMMIT_LOG,
        what=f"{EVIL} {number}",
        path=f"/store/{EVIL}",
        position=1_234_567,
        expected=EVIL,
        found="x" * 1_000,
        topic=EVIL,
        queue_id=3,
        messages=5,
        next_step=EVIL,
        action=Action.CUT,
    )


def report(count: int) -> CheckReport:
    findings = tuple(finding(number) for number in range(count))
    return CheckReport(f"/{EVIL}", "closed", findings, 1, 2, 3, 4, 5, 0, 6)


class Shown:
    """An object with the HTML of a table."""

    def __init__(self, html: str) -> None:
        self._html = html

    def _repr_html_(self) -> str:
        return self._html


def test_table_escapes_names_values_and_what_follows() -> None:
    columns = [html_tables.text_column(EVIL, [EVIL, None, 7]), html_tables.number_column(EVIL, [1_000, None, EVIL])]
    columns += [html_tables.bar_column([1, None, 2]), html_tables.text_column("long", [EVIL] * 3, is_long=True)]
    rest = html_tables.table(columns, EVIL) + html_tables.text_block(EVIL, EVIL, EVIL)
    page = page_of(Shown(html_tables.box(EVIL, EVIL, {EVIL: EVIL}, html_tables.folded(EVIL, rest))))
    assert page.text.count(EVIL) == 4 + 1 + 2 + 1 + 1 + 3 + 1 + 3
    assert page.rows[2:] == [[EVIL, "1,000", "", EVIL], ["-", "-", "", EVIL], ["7", EVIL, "", page.rows[4][3]]]


def test_a_long_value_is_cut_and_its_length_is_shown() -> None:
    (cell,) = html_tables.text_column("value", ["x" * 1_000]).cells
    assert cell == "x" * 400 + "… (1,000 characters)"


def test_check_shows_a_row_for_each_finding(golden: Path) -> None:
    page = page_of(report(2))
    assert len([row for row in page.rows if row[0] == "damage"]) == 2
    assert page.rows[-1][:5] == ["damage", f"{EVIL} 1", f"/store/{EVIL}", "1,234,567", EVIL]
    assert "not healthy" in page.text
    assert repr(report(1)) == str(report(1))
    healthy = rmq_spark.check(golden / "demo")
    assert "healthy" in page_of(healthy).text
    assert repr(healthy).startswith(f"{golden / 'demo'}: healthy")


def test_check_shows_at_most_50_findings_and_says_how_many_are_left_out() -> None:
    page = page_of(report(60))
    assert len([row for row in page.rows if row[0] == "damage"]) == 50
    assert "… and 10 more: to_arrow() has all" in page.text


def test_plan_repair_shows_a_row_for_each_step(tmp_store: Callable[[str], Path]) -> None:
    steps = (RepairStep(Action.CUT, EVIL, f"/{EVIL}", 1_200), RepairStep(Action.LEAVE, EVIL, "/x"))
    plan = RepairPlan(f"/{EVIL}", None, report(1), steps, 0)
    page = page_of(plan)
    assert page.rows[-2:] == [["cut", EVIL, f"/{EVIL}", "1,200"], ["leave", EVIL, "/x", "0"]]
    assert "2, 1 of them by repair" in page.text
    assert repr(plan) == str(plan)
    long = RepairPlan("/x", None, report(1), steps * 30, 0)
    assert len(str(long).splitlines()) == 61
    assert repr(long).splitlines()[51:] == ["… and 10 more: to_arrow() has all"]
    store = tmp_store("demo")
    (store / "checkpoint").unlink()
    real = rmq_spark.plan_repair(store)
    assert [row[0] for row in page_of(real).rows[-len(real.steps) :]] == [str(step.action) for step in real.steps]


def test_dump_shows_the_first_entries_and_names_the_rest(tmp_path: Path) -> None:
    messages = [SampleMessage("orders", tags=EVIL, keys=(f"k{number}",)) for number in range(60)]
    build_store(tmp_path / "store<b>", messages)
    found = rmq_spark.dump(tmp_path / "store<b>" / "commitlog" / SEGMENT)
    page = page_of(found)
    head = next(row for row in page.rows if row[0] == "position")
    rows = page.rows[page.rows.index(head) + 1 :]
    assert len(rows) == 50
    assert rows[0][head.index("tags")] == EVIL
    assert rows[0][head.index("topic")] == "orders"
    assert "found" not in head, "no entry has a value for it"
    assert "… and more: to_arrow() has all" in page.text
    lines = str(found).splitlines()
    assert len(lines) == 1 + 20 + 1
    assert lines[1].split()[:2] == ["0", "record"]
    assert "topic=orders" in lines[1]
    assert re.search(r"storeTimestamp=\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3},", lines[1])
    assert max(map(len, lines)) <= 240 or len(lines[0]) > 240
    assert lines[1].endswith("…")
    assert found.to_arrow().num_rows >= 60
    assert "store<b>" in repr(found)


def test_dump_of_few_or_no_entries_says_nothing_about_more(golden: Path) -> None:
    path = golden / "demo" / "consumequeue" / "orders" / "0" / SEGMENT
    page = page_of(rmq_spark.dump(path, limit=2))
    assert "more" not in page.text
    assert page.rows[-1][1] == "unit"
    assert "no entries" in page_of(rmq_spark.dump(path, position=path.stat().st_size)).text


def test_printing_the_name_of_a_dump_reads_nothing(tmp_path: Path) -> None:
    file = tmp_path / "commitlog" / SEGMENT
    file.parent.mkdir()
    file.write_bytes(bytes(64))
    found = rmq_spark.dump(file)
    file.unlink()
    assert "commitlog" in repr(found)


def test_group_lag_is_shown_and_still_is_a_table(golden: Path) -> None:
    lag = rmq_spark.group_lag(golden / "demo", "reporting", now_ms=1_800_000_000_000)
    assert "270 messages" in page_of(lag).text
    assert "orders/0 ok, 67 messages" in repr(lag)
    assert lag.at_ms == 1_800_000_000_000
    table = lag.to_arrow()
    assert isinstance(table, pa.Table)
    assert lag.to_pylist() == table.to_pylist()
    assert lag["queueId"].equals(table["queueId"])
    assert (len(lag), lag.num_rows, lag.schema, lag.column_names) == (4, 4, LAG, LAG.names)
    assert lag.select(["topic"]).num_columns == 1
    assert pa.table(lag).equals(table)
    assert pickle.loads(pickle.dumps(lag)) == copy.copy(lag) == lag
    with pytest.raises(AttributeError, match="lagg"):
        lag.lagg  # noqa: B018


def test_group_lag_escapes_groups_topics_and_members() -> None:
    row = {"group": EVIL, "topic": EVIL, "queueId": 0, "state": "ok", "member": "<b>", "lagMessages": 1}
    page = page_of(GroupLag(f"/{EVIL}", None, 0, pa.Table.from_pylist([row], LAG)))
    assert page.rows[-1][:3] == [EVIL, EVIL, "0"]
    assert page.rows[-1][-1] == "<b>"


def test_open_store_shows_the_topics_of_the_store(tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "store<b>") as store:
        page_of(store)
        for number in range(3):
            store.send("orders", f"{number}")
        assert ["orders", "4", "3", ""] in page_of(store).rows
        for number in range(60):
            store.create_topic(f"topic{number:02}", queues=1)
        assert "… and 11 more: topics() has all" in page_of(store).text
        assert repr(store) == f"<Producer of the store at {tmp_path / 'store<b>'}: open>"
    assert "closed" in repr(store)
    assert "closed" in page_of(store).text
    (tmp_path / "store<b>").rename(tmp_path / "elsewhere")
    assert "problem" in page_of(store).text


@pytest.mark.parametrize("count", [1, 2])
def test_open_store_shows_the_problem_of_a_topic_beside_the_others(tmp_path: Path, count: int) -> None:
    with rmq_spark.open_store(tmp_path / "store", queues=2) as store:
        for topic in ("orders", "payments"):
            for queue_id in (0, 1):
                store.send(topic, "x", queue_id=queue_id)
        for queue_id in range(count):
            file = tmp_path / "store" / "consumequeue" / "payments" / f"{queue_id}" / SEGMENT
            file.write_bytes(file.read_bytes()[:-3])
        page = page_of(store)
    rows = {row[0]: row[1:] for row in page.rows}
    assert rows["orders"] == ["2", "2", "", ""]
    assert rows["payments"][:2] == ["2", f"{2 - count}"]
    assert f"{tmp_path / 'store' / 'consumequeue' / 'payments' / '0'}" in rows["payments"][3]
    assert ("2 queues cannot be read" in rows["payments"][3]) == (count == 2)
    assert "problem" not in rows, "the store has none as a whole"


def test_open_reader_and_open_store_of_a_cluster_show_themselves(run_cluster: Callable[..., RunningCluster]) -> None:
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", queues=1)
    cluster.send("orders", "one", "two", broker="broker-a")
    with rmq_spark.open_store(name_server=cluster.address) as store:
        assert "open" in page_of(store).text
    with rmq_spark.open_reader(name_server=cluster.address, request_timeout_ms=300) as reader:
        assert ["orders", "2", "2", ""] in page_of(reader).rows
        cluster.brokers["broker-b"].freeze()
        assert ["orders", "2", "2", "", "1 queue cannot be read"] in page_of(reader).rows
    assert "closed" in page_of(reader).text


def test_open_reader_of_a_cluster_that_does_not_answer_shows_why() -> None:
    with rmq_spark.open_reader(name_server="127.0.0.1:1", request_timeout_ms=300) as reader:
        assert "127.0.0.1:1" in next(row for row in page_of(reader).rows if row[0] == "problem")[1]
