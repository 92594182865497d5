"""`explain`: our error out of the texts that Spark 4.3 made of it, or the useful lines of another error."""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark import explain
from rmq_spark.error_texts import _find_ours, _first_lines
from rmq_spark.store.errors import NotFoundError, OptionError

MISSING = 'NotFoundError: no topic "missing" in the store at "/data/store". Topics there: orders.'
FRAMES = """Traceback (most recent call last):
  File "/env/rmq_spark/datasource/spark/batch_reader.py", line 102, in partitions
    return view.plan(lambda: self._plan(view))
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/env/rmq_spark/store/log/store_reader.py", line 143, in queues
    raise NotFoundError(describe_missing_topic(topic, self.topics(), self.path))
"""
PLANNING = f"""[PYTHON_DATA_SOURCE_ERROR] Failed to generate Python data source read partitions: rmq_spark.{MISSING}
 SQLSTATE: 38000"""
WITH_FRAMES = f"""[PYTHON_DATA_SOURCE_ERROR] Failed to generate Python data source read partitions: \
{FRAMES}rmq_spark.{MISSING}
 SQLSTATE: 38000

JVM stacktrace:
org.apache.spark.sql.AnalysisException: [PYTHON_DATA_SOURCE_ERROR] {FRAMES}rmq_spark.{MISSING}
\tat org.apache.spark.sql.errors.QueryCompilationErrors$.pythonDataSourceError(QueryCompilationErrors.scala:4100)
Caused by: org.apache.spark.api.python.PythonException: {FRAMES}rmq_spark.OptionError: another
"""
TASK = """An exception was thrown from the Python worker:
rmq_spark.OptionError: partition 0, row 0, topic 'orders': its body is null. Give a body, which may be b''"""
IN_JAVA = """An error occurred while calling o72.count.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times, most recent \
failure: Lost task 0.0 in stage 1.0 (TID 1) (127.0.0.1 executor driver): org.apache.spark.api.python.PythonException: \
rmq_spark.DamageError: damaged store: /data/store/commitlog/00000000000000004096, position 0: the record's magic. \
Read around the position.

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:860)
Driver stacktrace:
"""
STREAM = f"""[STREAM_FAILED] Query [id = e499e049-ab71-4ec4-98c7-f8cb08baedcc, runId = 3c613f8b] terminated with \
exception: [PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR] Failed when Python streaming data source perform latestOffset: \
rmq_spark.{MISSING}
 SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = e499e049-ab71-4ec4-98c7-f8cb08baedcc, runId = 3c613f8b]
Current Committed Offsets: {{}}

Current State: INITIALIZING
Thread State: RUNNABLE"""
NOTES = """An exception was thrown from the Python worker:
rmq_spark.OffsetRangeError: queue orders/0 holds the queue offsets [5, 10)
The offset is from startingOffsets. Give one in the range."""
CHAINED = """Traceback (most recent call last):
  File "/env/a.py", line 1, in f
rmq_spark.DamageError: the first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/env/a.py", line 3, in f
rmq_spark.StoreError: the second"""
OTHER_PYTHON = """[PYTHON_DATA_SOURCE_ERROR] Failed to create Python data source instance: \
ImportError: format("rmq"): /usr/bin/python3 found pyspark_rmq, but cannot import rmq_spark: No module named 'numpy'.
 SQLSTATE: 38000"""


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        pytest.param(PLANNING, MISSING, id="planning"),
        pytest.param(WITH_FRAMES, MISSING, id="frames and a Java stack"),
        pytest.param(TASK, f"OptionError: {TASK.split('OptionError: ')[1]}", id="a task"),
        pytest.param(
            IN_JAVA,
            "DamageError: damaged store: /data/store/commitlog/00000000000000004096, position 0: the record's magic. "
            "Read around the position.",
            id="an error of Py4J",
        ),
        pytest.param(STREAM, MISSING, id="a stream"),
        pytest.param(NOTES, NOTES.split("rmq_spark.")[1], id="a note in a line of its own"),
        pytest.param(CHAINED, "StoreError: the second", id="an error while another one was handled"),
        pytest.param(
            OTHER_PYTHON,
            'ImportError: format("rmq"): /usr/bin/python3 found pyspark_rmq, but cannot import rmq_spark: No module '
            "named 'numpy'.",
            id="an interpreter without rmq_spark",
        ),
        pytest.param("[TABLE_OR_VIEW_NOT_FOUND] The table or view `rmq_spark` cannot be found.", None, id="not ours"),
    ],
)
def test_explain_finds_our_error_in_the_texts_of_spark(text: str, ours: str | None) -> None:
    assert _find_ours(text) == ours
    if ours is not None:
        assert explain(RuntimeError(text)) == ours


def test_explain_returns_an_error_of_ours_with_its_notes() -> None:
    error = OptionError("queues=0 is not possible.")
    error.add_note("Nothing was written.")
    assert explain(error) == "OptionError: queues=0 is not possible.\nNothing was written."


def test_explain_finds_an_error_of_ours_that_another_one_was_raised_from() -> None:
    error = RuntimeError("the job failed")
    error.__cause__ = NotFoundError("no topic there")
    assert explain(error) == "NotFoundError: no topic there"


def test_explain_of_no_error_is_empty() -> None:
    assert explain(None) == ""


LONG = "\n".join(["[UNRESOLVED_COLUMN] first line", *(f"line {number}" for number in range(2, 20))])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("division by zero", "RuntimeError: division by zero", id="one line"),
        pytest.param("", "RuntimeError", id="no text"),
        pytest.param(
            "[UNRESOLVED_COLUMN] A column `bodi` cannot be resolved. SQLSTATE: 42703;\n'Project ['bodi]\n+- Relation",
            "RuntimeError: [UNRESOLVED_COLUMN] A column `bodi` cannot be resolved.",
            id="without the plan",
        ),
        pytest.param(
            "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: boom SQLSTATE: XXKST\n"
            "=== Streaming Query ===\nIdentifier: 1",
            "RuntimeError: boom",
            id="a stream",
        ),
        pytest.param(
            "An error occurred while calling o72.count.\n: java.lang.Exception: stopped\n\tat a.b.c(D.java:1)",
            "RuntimeError: java.lang.Exception: stopped",
            id="an error of Py4J",
        ),
        pytest.param(
            f"An exception was thrown from the Python worker:\n{FRAMES}ValueError: bad\n SQLSTATE: 38000",
            "RuntimeError: An exception was thrown from the Python worker:\nValueError: bad",
            id="without frames",
        ),
        pytest.param(
            '[UNSUPPORTED_DATA_SOURCE_SAVE_MODE] The data source "rmq" cannot be written in the "ErrorIfExists" mode. '
            'Please use either the "Append" or "Overwrite" mode instead. SQLSTATE: 0A000',
            'RuntimeError: [UNSUPPORTED_DATA_SOURCE_SAVE_MODE] The data source "rmq" cannot be written in the '
            '"ErrorIfExists" mode. Please use either the "Append" or "Overwrite" mode instead.\n'
            'Write with .mode("append"): a topic supports appending only, so Overwrite is refused too.',
            id="without a mode",
        ),
        pytest.param(
            '[UNSUPPORTED_DATA_SOURCE_SAVE_MODE] The data source "other" cannot be written. SQLSTATE: 0A000',
            'RuntimeError: [UNSUPPORTED_DATA_SOURCE_SAVE_MODE] The data source "other" cannot be written.',
            id="another source without a mode",
        ),
        pytest.param(LONG, "RuntimeError: " + "\n".join(LONG.splitlines()[:10]) + "\n… and 9 more lines", id="long"),
        pytest.param(
            "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: rmq. Make sure … SQLSTATE: 42K02",
            "RuntimeError: [DATA_SOURCE_NOT_FOUND] Failed to find the data source: rmq. Make sure …\nCall "
            "rmq_spark.register(spark) first, or install rmq-spark for the interpreter that PYSPARK_PYTHON names "
            "(docs/GUIDE.md, Linking).",
            id="the source was not found",
        ),
    ],
)
def test_explain_shows_the_useful_lines_of_other_errors(text: str, shown: str) -> None:
    assert explain(RuntimeError(text)) == shown
    assert _first_lines(RuntimeError(text), text) == shown


def test_explain_imports_neither_spark_nor_numpy() -> None:
    code = "import sys, rmq_spark; rmq_spark.explain(ValueError('x')); print({'pyspark', 'numpy'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


# What Spark shows.


def load(spark: Any, store: str, folder: Path) -> None:
    spark.read.format("rmq").load(store, subscribe="orders", failOnDataLoss="perhaps")


def plan(spark: Any, store: str, folder: Path) -> None:
    spark.read.format("rmq").load(store, subscribe="orders").count()


def stream(spark: Any, store: str, folder: Path) -> None:
    frame = spark.readStream.format("rmq").load(store, subscribe="orders")
    with contextlib.closing(Stopping(frame.writeStream.format("noop").trigger(availableNow=True), folder)) as query:
        query.run()


def write_task(spark: Any, store: str, folder: Path) -> None:
    rows = spark.sql("SELECT CAST(NULL AS STRING) AS body")
    rows.write.format("rmq").mode("append").save(store, topic="fresh")


def stream_write(spark: Any, store: str, folder: Path) -> None:
    frame = spark.readStream.format("rmq").load(store, subscribePattern=".*", startingOffsets="earliest")
    writer = frame.selectExpr("CAST(NULL AS STRING) AS body").writeStream.format("rmq")
    writer = writer.options(path=store, topic="fresh").trigger(availableNow=True)
    with contextlib.closing(Stopping(writer, folder)) as query:
        query.run()


class Stopping:
    """A query that is stopped when it is closed."""

    def __init__(self, writer: Any, folder: Path) -> None:
        self._query = writer.option("checkpointLocation", str(folder / "checkpoint")).start()

    def run(self) -> None:
        """Wait until the query ends. Raises its error."""
        assert self._query.awaitTermination(120)

    def close(self) -> None:
        """Stop the query."""
        self._query.stop()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize(
    ("provoke", "beginning"),
    [
        pytest.param(load, 'OptionError: failOnDataLoss="perhaps"', id="load"),
        pytest.param(plan, 'NotFoundError: no topic "orders" in the store', id="planning a batch"),
        pytest.param(stream, 'NotFoundError: no topic "orders" in the store', id="planning a stream"),
        pytest.param(write_task, "OptionError: partition 0, row 0, topic 'fresh': its body is null", id="a task"),
        pytest.param(stream_write, "OptionError: partition 0, row 0, topic 'fresh': its body is null", id="a sink"),
    ],
)
def test_errors_in_spark_have_no_frames_of_workers(
    spark: Any, tmp_path: Path, provoke: Callable[[Any, str, Path], None], beginning: str
) -> None:
    store = str(tmp_path / "store")
    with rmq_spark.open_store(store) as opened:
        opened.send("payments", b"x")
    with pytest.raises(Exception, match="rmq_spark") as caught:
        provoke(spark, store, tmp_path)
    assert "Traceback" not in str(caught.value)
    assert "worker.py" not in str(caught.value)
    assert explain(caught.value).startswith(beginning)
