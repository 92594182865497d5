"""A real broker writes all kinds of records; we read them while it runs, and after a kill, a close and retention.

Our rows are compared, column by column, with those of its pull consumer and its store classes.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from compat_kit import our_stores
from compat_kit.coverage_table import note
from compat_kit.kinds import PREFIX
from compat_kit.lookups import key_differences, time_differences
from compat_kit.rocketmq import Java, Line, Request, Verifier
from compat_kit.rows import Rows, bound_differences, count, differences, our_bounds, our_rows, table_rows, their_rows
from compat_kit.their_lives import EXTENDED, SIZES, TOLD, Live, Lives, copy_of, extended_places

from rmq_spark import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def lives(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Lives:
    return Lives(java, tmp_path_factory.mktemp(f"theirs-{java.version}"))


def newest(rows: Rows) -> int:
    """Return the physical offset of the newest message."""
    return max(row["commitLogOffset"] for held in rows.values() for row in held)


def up_to(rows: Rows, place: int) -> Rows:
    """Return the messages up to a physical offset."""
    return {queue: [row for row in held if row["commitLogOffset"] <= place] for queue, held in rows.items()}


def as_far_as(rows: Rows, other: Rows) -> Rows:
    """Return the rows of the queues that are in `other`, as far as they go there."""
    ends = {queue: held[-1]["queueOffset"] if held else -1 for queue, held in other.items()}
    return {queue: [row for row in rows.get(queue, []) if row["queueOffset"] <= end] for queue, end in ends.items()}


def check_live(live: Live) -> None:
    """Assert that a reader that followed the broker got exactly the messages that consumers could pull."""
    assert live.problems == []
    assert live.looks > 3
    ours = {queue: rows for queue, rows in live.ours.items() if queue in live.later}
    assert differences(ours, as_far_as(live.later, ours)) == []
    assert differences(as_far_as(ours, live.earlier), live.earlier) == []
    assert newest(live.earlier) < newest(live.ours) < newest(live.later), "the broker kept writing meanwhile"


def look_up_differences(store: Path, report: Line) -> list[str]:
    """Return where our reader finds other messages than the store classes did."""
    lines = bound_differences(our_bounds(store), report["queues"])
    assert report["keys"]
    assert report["times"]
    return lines + key_differences(store, report["keys"]) + time_differences(store, report["times"])


def opened_by_them(store: Path, copy: Path, verifier: Verifier, **conf: object) -> Line:
    """Return the rows of the store classes for a copy of the store."""
    (report,) = verifier.verify([Request(copy_of(store, copy), {**TOLD, **conf}, times=8, keys=300)])
    return report


def test_we_follow_a_broker_that_writes(lives: Lives) -> None:
    """On ::1, with property CRCs and extended units."""
    check_live(lives.first)


def test_we_read_what_a_killed_broker_left(lives: Lives, verifier: Verifier, tmp_path: Path) -> None:
    store = lives.killed
    report = opened_by_them(store, tmp_path / "theirs", verifier, **EXTENDED)
    assert report["recovered"]["abortFile"]
    theirs, ours = their_rows(report["messages"]), our_rows(store)
    # Undispatched messages have no entry; recovery writes one.
    assert differences(ours, up_to(theirs, newest(ours))) == []
    assert look_up_differences(tmp_path / "theirs", report) == []
    copy = copy_of(store, tmp_path / "ours")
    with our_stores.open_small(copy, sizes=SIZES) as writer:
        writer.send("ours", b"x")
    taken_over = our_rows(copy)
    assert differences(up_to(taken_over, newest(theirs)), theirs) == []
    assert count(taken_over) == count(theirs) + 1
    assert note(lives.java.version, "killed", ours, extended_places(store)) == []


def test_we_follow_a_broker_that_has_recovered(lives: Lives) -> None:
    live = lives.second
    check_live(live)
    assert note(lives.java.version, "live", live.ours, live.extended) == []


def test_we_read_what_a_broker_closed_in_order(lives: Lives, verifier: Verifier, tmp_path: Path) -> None:
    store = lives.clean
    assert not (store / "abort").exists()
    report = opened_by_them(store, tmp_path / "theirs", verifier)
    assert report["recovered"]["truncated"] == 0
    ours = our_rows(store)
    assert differences(ours, their_rows(report["messages"])) == []
    assert differences(as_far_as(ours, lives.second.later), lives.second.later) == []
    assert look_up_differences(store, report) == []
    assert note(lives.java.version, "clean", ours, extended_places(store)) == []


@pytest.mark.spark
def test_spark_reads_what_a_broker_closed_in_order(lives: Lives, spark: "SparkSession") -> None:
    """All topics of kinds in one batch: the rows of the engine, which were compared with theirs above."""
    reader = spark.read.format("rmq").option("subscribePattern", f"{PREFIX}.*").option("columns", ",".join(COLUMNS))
    found = table_rows(row.asDict() for row in reader.load(str(lives.clean)).collect())
    ours = {queue: rows for queue, rows in our_rows(lives.clean).items() if queue.topic.startswith(PREFIX)}
    assert count(ours) > 1000
    assert differences(found, ours) == []


def test_we_read_what_retention_left(lives: Lives, verifier: Verifier, tmp_path: Path) -> None:
    store, pulled = lives.trimmed
    report = opened_by_them(store, tmp_path / "theirs", verifier)
    ours, before = our_rows(store), our_rows(lives.clean)
    assert min(row["commitLogOffset"] for rows in ours.values() for row in rows) > 0
    assert differences(ours, their_rows(report["messages"])) == []
    assert differences(as_far_as(ours, pulled), pulled) == []
    assert count(up_to(ours, newest(before))) < count(before)
    assert look_up_differences(tmp_path / "theirs", report) == []
    assert note(lives.java.version, "trimmed", ours, extended_places(store)) == []
