"""Walks the table of docs/ERRORS.md about writing: every bad input against real Spark, with its class and message."""

import fcntl
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rmq_spark
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parent.parent.parent
SEGMENT_BYTES = 1 << 13
WITHIN_S = 180


@dataclass(frozen=True)
class Row:
    situation: str
    error: str
    parts: list[str]


def read_table() -> list[Row]:
    section = (ROOT / "docs" / "ERRORS.md").read_text().split("## Errors when writing")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    quoted = re.compile(r"`([^`]+)`")
    return [Row(row[0].strip(), quoted.findall(row[2])[0], quoted.findall(row[3])) for row in rows[2:]]


class Case:
    """Fixtures of one situation: a Spark session, a folder, and a store with some messages."""

    def __init__(self, spark: "SparkSession", folder: Path) -> None:
        self.spark, self.folder, self.store = spark, folder, folder / "store"
        messages = [SampleMessage("orders", 0, b"x") for _ in range(3)]
        build_store(self.store, messages, segment_bytes=SEGMENT_BYTES, empty_topics={"orders": 4})

    def frame(self, **columns: Any) -> "DataFrame":
        """Return one row with a body and the columns of that SQL; a body that is None is left out."""
        texts = {"body": "'x'"} | columns
        return self.spark.range(1).selectExpr(*(f"{text} AS `{name}`" for name, text in texts.items() if text))

    def write(
        self,
        frame: "DataFrame | None" = None,
        path: Any = None,
        mode: str = "append",
        other: dict[str, str] | None = None,
        **given: Any,
    ) -> None:
        options = {"topic": "orders"} | given | (other or {})
        writer = (self.frame() if frame is None else frame).write.format("rmq").mode(mode)
        writer.options(**{name: value for name, value in options.items() if value is not None}).save(
            str(self.store if path is None else path)
        )

    def stream(self, **given: str) -> None:
        """Run a stream over all files below `input/` until all is written; a batch takes one file."""
        source = self.spark.readStream.schema("body string").option("maxFilesPerTrigger", 1)
        query = (
            source.text(str(self.folder / "input"))
            .writeStream.format("rmq")
            .options(**({"topic": "orders", "path": str(self.store)} | given))
            .option("checkpointLocation", str(self.folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(WITHIN_S), "hangs"
        finally:
            query.stop()

    def feed(self, number: int, text: str = "row\n") -> None:
        """Give the stream one more file."""
        (self.folder / "input").mkdir(exist_ok=True)
        (self.folder / "input" / f"{number}.txt").write_text(text)

    def set_perm(self, perm: int) -> None:
        topics = self.store / "config" / "topics.json"
        text = topics.read_text()
        topics.write_text(re.sub(r'"perm":\s*\d+', f'"perm":{perm}', text))
        assert text != topics.read_text()

    def contents(self) -> tuple[bytes, list[str]]:
        """Return all bytes of the commit log, and the topics' names."""
        log = b"".join(file.read_bytes() for file in sorted((self.store / "commitlog").iterdir()))
        return log, list(json.loads((self.store / "config" / "topics.json").read_text())["topicConfigTable"])

    def half_written(self) -> list[str]:
        """Return the files of a write that was neither finished nor undone."""
        side = self.store / "rmq"
        found = [*side.glob("staging/**/*.arrow"), *side.glob("intents/*"), *self.store.rglob("*.tmp")]
        found += [path for path in (self.store / "abort", side / "holder.json") if path.exists()]
        for path in (self.store / "lock", side / "turn"):
            lock = FileLock(str(path))
            if path.exists() and not lock.try_take():
                found.append(path)
            lock.release()
        return [str(path.relative_to(self.store)) for path in found]

    @contextmanager
    def small_disk(self) -> Iterator[Callable[[str], None]]:
        """Put a small file system under the store; yields a function that gives it other mount options."""
        mount = ["mount", "-t", "tmpfs", "-o", "size=33m", "tmpfs", str(self.store)]
        kept = shutil.copytree(self.store, self.folder / "kept")
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("only who may mount file systems can have a small one")
        try:
            shutil.copytree(kept, self.store, dirs_exist_ok=True)
            yield (
                lambda other: subprocess.run(["mount", "-o", f"remount,{other}", str(self.store)], check=True) and None
            )
            assert self.half_written() == []
        finally:
            subprocess.run(["umount", str(self.store)], check=True)


def complete_mode(case: Case) -> None:
    case.feed(0)
    source = case.spark.readStream.schema("body string").text(str(case.folder / "input"))
    query = (
        source.groupBy("body")
        .count()
        .select("body")
        .writeStream.format("rmq")
        .outputMode("complete")
        .options(topic="orders", path=str(case.store), checkpointLocation=str(case.folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(WITHIN_S)


def broker(case: Case) -> None:
    with open(case.store / "lock", "r+b") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX, 1, 0)
        case.write()


def open_for_writing(case: Case) -> None:
    with open(case.store / "lock", "r+b"):
        case.write(lockTimeout="1s")


def never_released(case: Case) -> None:
    settings = WriterSettings(application="nightly import")
    writer = StoreWriter(str(case.store), Disk(), settings, wall_clock_ms, time.sleep)
    with writer, writer.section():
        case.write(lockTimeout="1s")


def read_only(case: Case) -> None:
    with case.small_disk() as remount:
        remount("ro")
        case.write()


def full_disk(case: Case) -> None:
    with case.small_disk() as remount:
        # Of the 33 MiB a writer leaves 32 for all that is not log.
        large = case.spark.range(0, 400, 1, 2).selectExpr("repeat(uuid(), 150) body")
        before = case.contents()
        with pytest.raises(Exception, match="DiskFullError") as caught:
            case.write(large)
        assert (case.contents(), case.half_written()) == (before, [])
        remount("size=400m")
        case.write(large)
        assert case.spark.read.format("rmq").option("subscribe", "orders").load(str(case.store)).count() == 403
        raise caught.value


def staged_file_gone(case: Case) -> None:
    staging = str(case.store / "rmq" / "staging")

    def take_away(row: tuple[str]) -> tuple[str]:
        if row[0] == "1":  # the second task removes the staged file of the first one
            end = time.monotonic() + WITHIN_S
            while not (files := list(Path(staging).rglob("*.arrow"))) and time.monotonic() < end:
                time.sleep(0.01)
            files[0].unlink()
        return row

    rows = case.spark.sparkContext.parallelize([("0",), ("1",)], 2).map(take_away)
    case.write(case.spark.createDataFrame(rows, "body string"))


def other_version(case: Case) -> None:
    case.write()
    settings = case.store / "rmq" / "settings.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"v": 99}))
    case.write()


def time_in_a_store_for_4_9(case: Case) -> None:
    rmq_spark.open_store(case.store, broker_version="4.9").close()
    case.write(case.frame(deliverTimestamp="current_timestamp() + interval 1 minute"))


def forget_commit(case: Case, number: int) -> None:
    """Make Spark run a batch again, as after a crash just before it noted the commit."""
    for name in (str(number), f".{number}.crc"):
        (case.folder / "checkpoint" / "commits" / name).unlink(missing_ok=True)


def other_rows(case: Case) -> None:
    case.feed(0)
    case.stream()
    forget_commit(case, 0)
    case.feed(0, "another row\n")
    case.stream()


def restored(case: Case) -> None:
    case.feed(0)
    case.stream()
    copy = shutil.copytree(case.store, case.folder / "copy")
    for number in (1, 2):
        case.feed(number)
        case.stream()
    shutil.rmtree(case.store)
    copy.rename(case.store)
    case.feed(3)
    case.stream()


def txn_with_other_rows(case: Case) -> None:
    case.write(txnAppId="copy", txnVersion=7)
    case.write(case.frame(body="'y'"), txnAppId="copy", txnVersion=7)


def stream_txn(case: Case) -> None:
    case.feed(0)
    case.stream(txnAppId="copy", txnVersion="1")


def async_progress(case: Case) -> None:
    """Start a stream that Spark itself would let run."""
    case.feed(0)
    writer = case.spark.readStream.schema("body string").text(str(case.folder / "input")).writeStream.format("rmq")
    writer = writer.options(topic="orders", path=str(case.store), checkpointLocation=str(case.folder / "checkpoint"))
    writer = writer.options(asyncProgressTrackingEnabled="true", _asyncProgressTrackingOverrideSinkSupportCheck="true")
    query = writer.trigger(processingTime="0 seconds").start()
    try:
        query.awaitTermination(WITHIN_S)
    finally:
        query.stop()


def other_folder(case: Case) -> None:
    (case.folder / "other").mkdir()
    (case.folder / "other" / "notes.txt").touch()
    case.write(path=case.folder / "other")


def dledger(case: Case) -> None:
    (case.store / "dledger-n0").mkdir()
    case.write()


def no_write_permission(case: Case) -> None:
    case.set_perm(4)
    case.write()


def copy_with_offsets(case: Case) -> None:
    case.write(case.spark.read.format("rmq").option("subscribe", "orders").load(str(case.store)))


PROVOKE: dict[str, Callable[[Case], object]] = {
    "an unknown option": lambda case: case.write(compresion="zlib"),
    "an option of the source": lambda case: case.write(subscribe="orders"),
    "failed messages without a group": lambda case: case.write(topic=None, other={"mode": "sendBack"}),
    "a value that is not accepted": lambda case: case.write(flush="fsync"),
    "no queues": lambda case: case.write(queues=0),
    "half a transaction": lambda case: case.write(txnAppId="copy"),
    "a transaction in a stream": stream_txn,
    "asynchronous progress tracking": async_progress,
    "no path": lambda case: case.frame().write.format("rmq").mode("append").option("topic", "orders").save(),
    "a path that is not local": lambda case: case.write(path="s3://bucket/store"),
    "Spark's own save mode": lambda case: case.write(mode="errorifexists"),
    "overwriting": lambda case: case.write(mode="overwrite"),
    "a stream in complete mode": complete_mode,
    "no body": lambda case: case.write(case.frame(body=None, value="'x'").withColumnRenamed("value", "tags")),
    "a body under another name": lambda case: case.write(case.frame(body=None, value="'x'")),
    "no topic": lambda case: case.write(topic=None),
    "columns that the store assigns": copy_with_offsets,
    "a column that cannot be written": lambda case: case.write(case.frame(priority="3")),
    "a column of another type": lambda case: case.write(case.frame(queueId="7L")),
    "a body that is null": lambda case: case.write(case.frame(body="if(id = 0, null, 'x')")),
    "a topic that is null": lambda case: case.write(case.frame(topic="if(id = 0, null, 'x')"), topic=None),
    "a topic name that no broker takes": lambda case: case.write(case.frame(topic="'a/b'"), topic=None),
    "an internal topic of RocketMQ": lambda case: case.write(topic="SCHEDULE_TOPIC_XXXX"),
    "a missing topic": lambda case: case.write(topic="order", createTopic="false"),
    "a topic without permission to write": no_write_permission,
    "a queue that the topic does not have": lambda case: case.write(case.frame(queueId="4")),
    "a time too far ahead": lambda case: case.write(
        case.frame(deliverTimestamp="current_timestamp() + interval 1 year")
    ),
    "a time in a store for 4.9": time_in_a_store_for_4_9,
    "a property without a name": lambda case: case.write(case.frame(properties="map('', 'x')")),
    "a property name with a separator": lambda case: case.write(case.frame(properties="map('a\u0001b', 'x')")),
    "a property value with a separator": lambda case: case.write(case.frame(properties="map('a', 'b\u0002c')")),
    "properties that are too long": lambda case: case.write(case.frame(properties="map('a', repeat('x', 40000))")),
    "a body that is too large": lambda case: case.write(case.frame(body="repeat('x', 4194305)")),
    "a message that no segment holds": lambda case: case.write(case.frame(body="repeat('x', 9000)")),
    "a path that is a file": lambda case: case.write(path=case.store / "checkpoint"),
    "a folder that is not a store": other_folder,
    "a store of DLedger": dledger,
    "a store of a later release": other_version,
    "a path where no folder can be created": lambda case: case.write(path="/proc/nothing/store"),
    "a folder without write permission": lambda case: case.write(path="/sys/nothing"),
    "a read-only store": read_only,
    "a full disk": full_disk,
    "a store that a broker holds": broker,
    "a lock file that another process has open": open_for_writing,
    "a lock that is never released": never_released,
    "a missing staging file": staged_file_gone,
    "the same batch with other rows": other_rows,
    "a store from an older copy": restored,
    "the same transaction with other rows": txn_with_other_rows,
}

# Situations that first write successfully, and then fail.
WRITTEN_BEFORE = {
    "a store of a later release",
    "the same batch with other rows",
    "a store from an older copy",
    "the same transaction with other rows",
}

ROWS = read_table()
# Advice must be something that a reader can follow: an option, a call, a file; no command line of ours exists.
COMMAND = re.compile(r"(?<![/\w])(?:rmq [a-z]+|python -m \S+|make (?:setup|demo|test|lint|clean))")


def test_the_table_and_this_test_name_the_same_situations() -> None:
    assert [row.situation for row in ROWS] == list(PROVOKE)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.situation)
def test_a_bad_write_is_answered_as_the_table_says(row: Row, spark: "SparkSession", tmp_path: Path) -> None:
    message = provoke(row, Case(spark, tmp_path))
    for part in row.parts:
        assert part in message, f"{part!r} is not in: {message}"
    assert not COMMAND.search(message), message


def provoke(row: Row, case: Case) -> str:
    """Return our message at the end of Spark's."""
    before = case.contents()
    with pytest.raises(Exception) as caught:  # noqa: PT011
        PROVOKE[row.situation](case)
    assert (case.contents() == before) is (row.situation not in WRITTEN_BEFORE), "nothing is written with an error"
    assert case.half_written() == []
    text = str(caught.value)
    if row.error == "AnalysisException":
        assert type(caught.value).__name__ == row.error
        return text
    assert f"rmq_spark.{row.error}: " in text, text
    # Spark shows errors of its own around ours; ours is the last one that Python raised.
    ours = text[text.index(f"rmq_spark.{row.error}: ") :]
    assert "\nTraceback" not in ours
    assert "During handling" not in ours
    return ours.split("SQLSTATE")[0]
