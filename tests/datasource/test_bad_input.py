"""Walks the table of docs/ERRORS.md: every bad input against real Spark, with its class and its message."""

import fcntl
import os
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import rmq_spark
from rmq_spark.store import GroupSession, GroupTerms
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parent.parent.parent
WITHIN_S = 180  # or it hangs
SEGMENT_BYTES = 4096
GROUP = "billing"
STRATEGIES = "tests.datasource.faulty_strategies"


@dataclass(frozen=True)
class Situation:
    situation: str
    error: str
    parts: list[str]


def read_table() -> list[Situation]:
    section = (ROOT / "docs" / "ERRORS.md").read_text().split("## Errors when reading\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    quoted = re.compile(r"`([^`]+)`")
    return [Situation(row[0].strip(), quoted.findall(row[2])[0], quoted.findall(row[3])) for row in rows[2:]]


@dataclass
class Case:
    """Fixtures of one situation: a Spark session, a folder, and a store with 40 messages."""

    spark: "SparkSession"
    folder: Path
    rows: "list[Row]" = field(default_factory=list)  # of streams

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def segment(self, number: int) -> Path:
        return sorted((self.store / "commitlog").iterdir())[number]

    def read(self, path: Any = None, schema: str | None = None, **given: str) -> None:
        """Run a batch query, by default over the topic orders, to its last row."""
        reader = self.spark.read.format("rmq").options(**({"subscribe": "orders"} | given))
        if schema:
            reader = reader.schema(schema)
        reader.load(path or str(self.store)).collect()

    def stream(self, during: "Callable[[], object]" = lambda: None, **given: str | None) -> None:
        """Run a stream until all is read; `during` happens between the plan of each batch and its read."""

        def collect(frame: "DataFrame", _: int) -> None:
            during()
            self.rows += frame.collect()

        options = {"subscribe": "orders", "startingOffsets": "earliest"} | given
        options = {name: text for name, text in options.items() if text is not None}
        frame = self.spark.readStream.format("rmq").options(**options).load(str(self.store))
        writer = frame.writeStream.foreachBatch(collect).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.folder / "checkpoint")).start()
        try:
            assert query.awaitTermination(WITHIN_S), "hangs"
        finally:
            query.stop()

    def join(self, **given: str | None) -> None:
        """Run a stream of the group over topic orders until all is read."""
        self.stream(**({"consumerGroup": GROUP} | given))

    def share(self, **given: str | None) -> None:
        """Run a stream that has its share of the group's queues until all is read."""
        self.join(**({"assignment": "shared", "startingOffsets": None} | given))

    def set_offsets(self, text: str, name: str = "consumerOffset.json") -> None:
        """Write the file of group offsets like another program."""
        (self.store / "config").mkdir(exist_ok=True)
        (self.store / "config" / name).write_text(text)

    def overwrite(self, file: Path, position: int, data: bytes) -> None:
        with open(file, "r+b") as opened:
            opened.seek(position)
            opened.write(data)

    def build(self, count: int = 40, size: int = 300, body: bytes | None = None, **given: Any) -> None:
        messages = [SampleMessage("orders", 0, b"x" * size if body is None else body, **given) for _ in range(count)]
        build_store(self.store, messages, segment_bytes=SEGMENT_BYTES if body is None else 16 << 20)


def other_version(case: Case) -> None:
    case.stream()
    offsets = case.folder / "checkpoint" / "offsets" / "0"
    offsets.write_text(offsets.read_text().replace('"v": 1', '"v": 2'))
    (offsets.parent / f".{offsets.name}.crc").unlink(missing_ok=True)
    case.stream()


def other_source(case: Case) -> None:
    case.stream()
    offsets = case.folder / "checkpoint" / "offsets" / "0"
    *head, _ = offsets.read_text().splitlines()
    offsets.write_text("\n".join([*head, "5"]))
    (offsets.parent / f".{offsets.name}.crc").unlink(missing_ok=True)
    case.stream()


def other_topic(case: Case) -> None:
    case.stream()
    messages = [SampleMessage(topic, 0, b"x") for topic in ("orders", "payments") for _ in range(3)]
    shutil.rmtree(case.store)
    build_store(case.store, messages)
    case.stream(subscribe="payments")


def rebuilt_shorter(case: Case) -> None:
    case.stream()
    shutil.rmtree(case.store)
    case.build(5)
    case.stream()


def overtaken(case: Case) -> None:
    case.stream(endingOffsets='{"orders": {"0": 5}}')
    case.segment(0).unlink()
    case.stream()


def replace_store(case: Case) -> None:
    shutil.rmtree(case.store)
    case.build(size=301)


def table_in_catalog(case: Case) -> None:
    case.spark.sql(f"CREATE TABLE rmq_orders USING rmq OPTIONS (subscribe 'orders', path '{case.store}')")


def bomb(case: Case) -> None:
    shutil.rmtree(case.store)
    packer = zlib.compressobj(1)
    data = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1 << 10)) + packer.flush()
    case.build(1, body=data, sys_flag=1)
    case.read()


def beside(run: Callable[[Case], object], **terms: str) -> Callable[[Case], None]:
    """Run a query while another one of its group lives, in this process."""

    def provoke(case: Case) -> None:
        other = GroupSession(str(case.store), GroupTerms(GROUP, query_name="nightly", **terms))  # type: ignore[arg-type]
        other.join()
        try:
            run(case)
        finally:
            other.leave({})

    return provoke


def beside_a_broker(case: Case) -> None:
    with open(case.store / "lock", "w+b") as lock:
        lock.write(b"lock")
        lock.flush()
        fcntl.lockf(lock, fcntl.LOCK_EX, 1, 0)
        case.join(commitOffsets="required")


def group_ahead(case: Case) -> None:
    case.join(endingOffsets='{"orders": {"0": 5}}')
    case.set_offsets(offsets_at(30))
    case.join(onOffsetConflict="fail")


def offsets_at(offset: int) -> str:
    """Return the offset file that a broker writes for a group at this offset."""
    return f'{{"offsetTable":{{"orders@{GROUP}":{{0:{offset}}}}}}}'


def then(*steps: Callable[[Case], object]) -> Callable[[Case], None]:
    def provoke(case: Case) -> None:
        for step in steps:
            step(case)

    return provoke


def expire(case: Case) -> None:
    case.segment(0).unlink()


PROVOKE: dict[str, Callable[[Case], object]] = {
    "an unknown option": lambda case: case.read(startingOffset="earliest"),
    "a wrong filter": lambda case: case.read(sql92="price >"),
    "tags without a tag": lambda case: case.read(tags="||"),
    "tags with another separator": lambda case: case.read(tags="a,b"),
    "two filters for one topic": lambda case: case.read(tags="A", sql92="price > 10"),
    "a filter for a topic that the query does not read": lambda case: case.read(tags='{"payments": "A"}'),
    "a value that is not accepted": lambda case: case.read(startingOffsets="earlyest"),
    "a value of a wrong type": lambda case: case.stream(maxOffsetsPerTrigger="many"),
    "a zero limit": lambda case: case.stream(maxOffsetsPerTrigger="0"),
    "a negative limit": lambda case: case.stream(maxBytesPerTrigger="-64m"),
    "a time without a zone": lambda case: case.read(startingTimestamp="2026-01-31T12:00:00"),
    "a time in seconds": lambda case: case.read(startingTimestamp="1700000000"),
    "bad JSON": lambda case: case.read(startingOffsets='{"orders": {"0": 5}'),
    "no subscription": lambda case: case.spark.read.format("rmq").load(str(case.store)).collect(),
    "contradictory options": lambda case: case.read(assign='{"orders": [0]}'),
    "two starts": lambda case: case.read(startingTimestamp="-10m", startingOffsets='{"orders": {"0": 5}}'),
    "a minimum above the maximum": lambda case: case.stream(minOffsetsPerTrigger="11", maxOffsetsPerTrigger="10"),
    "a batch query that starts at its end": lambda case: case.read(startingOffsets="latest"),
    "a search in a stream": lambda case: case.stream(keys="order-1"),
    "a topic name with a path in it": lambda case: case.read(subscribe="../../etc"),
    "a pattern that does not compile": lambda case: (
        case.spark.read.format("rmq").option("subscribePattern", "orders-(").load(str(case.store))
    ),
    "a column that does not exist": lambda case: case.read(columns="bodi"),
    "a column of another type": lambda case: case.read(schema="body string"),
    "a table in Spark's catalog": table_in_catalog,
    "several paths": lambda case: case.read(["one", "two"]),
    "a path that is not local": lambda case: case.read("s3://bucket/store"),
    "a checkpoint of another version": other_version,
    "a checkpoint of another source": other_source,
    "a checkpoint of another topic": other_topic,
    "no such path": lambda case: case.read("/nowhere"),
    "a path that is a file": lambda case: case.read(str(case.segment(0))),
    "a path without a store": then(
        lambda case: (case.folder / "other").mkdir(),
        lambda case: (case.folder / "other" / "notes.txt").touch(),
        lambda case: case.read(str(case.folder / "other")),
    ),
    "a store of DLedger": then(lambda case: (case.store / "dledger-n0").mkdir(), Case.read),
    "a store with queues in RocksDB": then(
        lambda case: (case.store / "consumequeue" / "MANIFEST-000004").touch(), Case.read
    ),
    "a store with tiered storage": then(
        lambda case: (case.store / "config" / "tieredStoreMetadata.json").write_text("{}"), Case.read
    ),
    "an unknown file in the commit log": then(lambda case: (case.store / "commitlog" / "notes.txt").touch(), Case.read),
    "a missing topic": lambda case: case.read(subscribe="order"),
    "a missing queue": lambda case: (
        case.spark.read.format("rmq").option("assign", '{"orders": [7]}').load(str(case.store)).collect()
    ),
    "an offset of a missing queue": lambda case: case.read(startingOffsets='{"orders": {"7": 1}}'),
    "an offset beyond the end": lambda case: case.read(startingOffsets='{"orders": {"0": 99}}'),
    "an offset that retention deleted": then(expire, lambda case: case.read(startingOffsets='{"orders": {"0": 0}}')),
    "retention that overtakes a stream": overtaken,
    "a queue that became shorter": rebuilt_shorter,
    "no message since a time": lambda case: case.read(startingTimestamp="2100-01-01T00:00:00Z"),
    "a damaged record": then(lambda case: case.overwrite(case.segment(1), 4, b"\1\2\3\4"), Case.read),
    "a damaged body": then(
        lambda case: case.overwrite(case.segment(1), 200, b"y"), lambda case: case.read(checkCrc="true")
    ),
    "a damaged consume-queue entry": then(
        lambda case: case.overwrite(
            next((case.store / "consumequeue/orders/0").iterdir()), 100, b"\0" * 6 + b"\xff\xff"
        ),
        Case.read,
    ),
    "a truncated segment": then(lambda case: os.truncate(case.segment(1), 1000), Case.read),
    "a segment that shrinks while it is read": lambda case: case.stream(
        lambda: os.truncate(case.segment(1), 1000), handOverBytes="0"
    ),
    "a segment that is deleted while it is read": lambda case: case.stream(lambda: expire(case), handOverBytes="0"),
    "another store on the executor": lambda case: case.stream(lambda: replace_store(case), handOverBytes="0"),
    "no store on the executor": lambda case: case.stream(lambda: shutil.rmtree(case.store), handOverBytes="0"),
    "a body that decompresses to gigabytes": bomb,
    "a group name that RocketMQ refuses": lambda case: case.join(consumerGroup="billing team"),
    "a start at the group's offset without a group": lambda case: case.stream(startingOffsets="group"),
    "an option of groups without a group": lambda case: case.stream(assignment="shared"),
    "a start offset for one of several members": lambda case: case.share(startingOffsets="earliest"),
    "a heartbeat interval that is too long": lambda case: case.join(leaseHeartbeat="90s"),
    "a handover time that is not a duration": lambda case: case.share(handoverTimeout="0s"),
    "a handover time that is too short": lambda case: case.share(handoverTimeout="999ms"),
    "a handover time for a query that does not share queues": lambda case: case.join(handoverTimeout="10s"),
    "an unknown strategy": lambda case: case.share(allocateStrategy="average"),
    "a strategy that cannot be imported": lambda case: case.share(allocateStrategy="billing_shares:fair"),
    "a strategy that allocates a queue twice": lambda case: case.share(allocateStrategy=f"{STRATEGIES}:twice"),
    "a strategy that omits a queue": lambda case: case.share(allocateStrategy=f"{STRATEGIES}:all_but_one"),
    "a strategy that raises": lambda case: case.share(allocateStrategy=f"{STRATEGIES}:failing"),
    "a second query of a group": beside(Case.join),
    "another subscription in one group": beside(
        Case.share, assignment="shared", subscription='subscribe="payments" with %RETRY%billing'
    ),
    "a group that is ahead of the checkpoint": group_ahead,
    "a group offset beyond the end of its queue": then(
        lambda case: case.set_offsets(offsets_at(56)), lambda case: case.join(startingOffsets="group")
    ),
    "damaged group offsets": then(lambda case: case.set_offsets("{"), Case.join),
    "group offsets while a broker runs": beside_a_broker,
}

ROWS = read_table()
# The document's code to extract our message from Spark's.
(RECIPE,) = re.findall(r"^print\((rmq_spark\..*)\)  #", (ROOT / "docs" / "ERRORS.md").read_text(), re.MULTILINE)
# Advice must be something that a reader can follow: an option, a call, a file; no command line of ours exists.
COMMAND = re.compile(r"\b(?:rmq (?!cannot)[a-z]+|python -m \S+|make [a-z]+)")


def test_the_table_and_this_test_name_the_same_situations() -> None:
    assert [row.situation for row in ROWS] == list(PROVOKE)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.situation)
def test_a_bad_input_is_answered_as_the_table_says(row: Situation, spark: "SparkSession", tmp_path: Path) -> None:
    message = provoke(row, Case(spark, tmp_path / "bad"))
    for part in row.parts:
        assert part in message, f"{part!r} is not in: {message}"
    assert not COMMAND.search(message), message


def provoke(row: Situation, case: Case) -> str:
    """Return our message at the end of Spark's."""
    case.build()
    with pytest.raises(Exception) as caught:  # noqa: PT011
        PROVOKE[row.situation](case)
    text = str(caught.value)
    assert f"rmq_spark.{row.error}: " in text, text
    query = SimpleNamespace(exception=lambda: caught.value)
    ours = str(eval(RECIPE, {"rmq_spark": rmq_spark, "query": query}))
    assert ours.startswith(f"{row.error}: "), ours
    assert "Traceback" not in ours
    assert "During handling" not in ours
    return ours


def test_group_offsets_that_are_half_written_are_taken_from_their_backup(spark: "SparkSession", tmp_path: Path) -> None:
    case = Case(spark, tmp_path)
    case.build()
    case.set_offsets(offsets_at(30)[:20])
    case.set_offsets(offsets_at(25), "consumerOffset.json.bak")
    case.join(startingOffsets="group")
    assert [row.queueOffset for row in case.rows] == list(range(25, 40))
    assert rmq_spark.group_offsets(case.store, GROUP) == {"orders": {0: 40}}
