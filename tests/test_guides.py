"""Facts in the guides: examples run; options, columns, commands, numbers and errors exist."""

import ast
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql.streaming import StreamingQueryListener, StreamingQueryManager

import rmq_spark
from rmq_spark.datasource.options.option_table import CONNECTION_OPTIONS, OPTIONS, SINK_OPTIONS, guide_row
from rmq_spark.datasource.options.sink_schema import SINK_COLUMNS
from rmq_spark.store.backend import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
GUIDE, ROCKETMQ, OPERATIONS, OPTIONS_PAGE, ERRORS, EXACTLY_ONCE = (
    ROOT / "docs" / f"{name}.md" for name in ("GUIDE", "ROCKETMQ", "OPERATIONS", "OPTIONS", "ERRORS", "EXACTLY_ONCE")
)
PAGES = (README, GUIDE, ROCKETMQ, OPERATIONS)
OTHER_PAGES = ("OPTIONS", "ERRORS", "PROGRAMS", "COMMAND", "CLUSTER", "EXACTLY_ONCE", "COMPARISON")
PAGES_WITH_LINKS = (*PAGES, *(ROOT / "docs" / f"{name}.md" for name in OTHER_PAGES))
BLOCK = re.compile(r"(<!-- not run: .*?-->\s*)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Errors of PySpark itself, and words that the JVM has in no list.
PYSPARK_ERRORS = {"JAVA_GATEWAY_EXITED", "PYTHON_VERSION_MISMATCH", "DATA_SOURCE_PUSHDOWN_DISABLED"}
WORDS_OF_SPARK = {
    "Python worker failed to connect back",
    "No module named 'rmq_spark'",
    "rmq does not support Update mode",
}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def run(page: Path, **given: object) -> dict[str, object]:
    """Run the page's examples in order, with these names; return the names afterwards."""
    namespace: dict[str, object] = {"__name__": page.stem, "rmq_spark": rmq_spark, **given}
    for reason, language, code in BLOCK.findall(page.read_text()):
        if language == "python" and not reason:
            exec(compile(code, page.name, "exec"), namespace)
    return namespace


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Return each table of a page: the cells of its head, and of its rows."""
    for found in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found.splitlines()]
        yield rows[0], [[cell.replace("\\|", "|") for cell in row] for row in rows[2:]]


def section(page: Path, name: str) -> str:
    return page.read_text().split(f"## {name}\n")[1].split("\n## ")[0]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.slow
@pytest.mark.spark
def test_the_guide_s_examples_run_in_order(
    spark: "SparkSession", monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)  # their path is relative
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = str(run(GUIDE)["store"])
    printed = capfd.readouterr().out
    assert "1170 orders\n" in printed
    assert re.search(r"^\d+ of 1170$", printed, re.MULTILINE), "a part of the topic was read"
    assert "1172 messages\n" in printed, "the copy, and two"
    assert "2 copied\n" in printed, "a repeated write in foreachBatch is none"
    assert '"lagMessages": 0' in printed
    assert "'lagMessages': 0" in printed
    shipped = rmq_spark.group_offsets(store, "shipping")
    assert sum(shipped["late-orders"].values()) == 2, "the listener has had both"
    with rmq_spark.open_reader(store) as reader:
        waiting = sum(reader.bounds(queue).max_offset for queue in reader.queues("SCHEDULE_TOPIC_XXXX"))
    assert waiting == 1, "the one that was cancelled waits for another try"


@pytest.mark.slow
@pytest.mark.spark
def test_the_examples_of_the_options_run_in_order(
    spark: "SparkSession",
    tmp_store: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listeners: list[StreamingQueryListener] = []
    add = StreamingQueryManager.addListener
    monkeypatch.setattr(
        StreamingQueryManager, "addListener", lambda self, listener: (listeners.append(listener), add(self, listener))
    )
    store = str(tmp_store("demo"))
    messages = (
        spark.readStream.format("rmq").options(subscribe="orders", startingOffsets="earliest", columns="*").load(store)
    )
    left = run(OPTIONS_PAGE, spark=spark, store=store, messages=messages, checkpoint=str(tmp_path / "checkpoint"))
    left["query"].awaitTermination()  # type: ignore[attr-defined]
    for listener in listeners:  # the session is everybody's
        spark.streams.removeListener(listener)
    assert len(listeners) == 1
    for _ in range(2):
        left["write"](spark.createDataFrame([("once",)], "body string"), 0)  # type: ignore[operator]
    assert left["orders"].count() == 1171, "of the topic, and the one that was written once"  # type: ignore[attr-defined]
    with rmq_spark.open_reader(store) as reader:
        waiting = {queue.queue_id: reader.bounds(queue).max_offset for queue in reader.queues("SCHEDULE_TOPIC_XXXX")}
    assert waiting[2] == 6 + 72, "all that were cancelled wait for another try"


def test_the_examples_of_operations_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = run(OPERATIONS)
    settings = Path(str(left["store"])) / "rmq" / "settings.json"
    assert str(72 * 3_600_000) in settings.read_text(), "the limit is kept"
    printed = capsys.readouterr().out
    assert "not healthy (0 damage, 1 repairable" in printed
    assert "rebuild: queue payments/0" in printed
    assert printed.endswith("True\n"), "the repair made it whole"


@pytest.mark.parametrize("page", PAGES_WITH_LINKS, ids=lambda path: path.name)
def test_a_link_to_a_section_leads_to_one(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        heads = re.findall(r"^#+ (.+)$", (page.parent / target if target else page).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
        assert anchor in anchors, f"{page.name} links to {target}#{anchor}"


@each_page
def test_an_extra_that_is_named_exists(page: Path) -> None:
    cfg = (ROOT / "setup.cfg").read_text()
    for extras in re.findall(r"(?:checkout|rmq-spark)\[([\w,]+)\]", page.read_text()):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} =$", cfg, re.MULTILINE), f"{page.name} names the extra {extra}"


@each_page
def test_a_name_of_rmq_spark_that_a_page_has_exists(page: Path) -> None:
    for name in set(re.findall(r"`rmq_spark\.(\w+)", page.read_text())):
        assert hasattr(rmq_spark, name), f"{page.name} names rmq_spark.{name}"


def test_a_subcommand_that_is_named_exists() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md")) + README.read_text()
    named = set(re.findall(r"(?:`|^)rmq ([a-z]+)(?: [a-z]+)? [A-Z]", text, re.MULTILINE))
    listing = (ROOT / "rmq_spark" / "command" / "all_commands.py").read_text()
    listed = set(re.findall(r'^    "([a-z]+)": _Listed', listing, re.MULTILINE))
    assert len(listed) > 15
    assert named <= listed


def test_the_guide_s_option_tables_are_those_of_the_code() -> None:
    source, sink = GUIDE.read_text().split("\n## Writing data to a store\n")
    # The sink's part leads to the source's table for the other options that connect to a cluster.
    of_sink = [option for option in SINK_OPTIONS if option not in CONNECTION_OPTIONS[1:]]
    for text, options in ((source, OPTIONS), (sink, of_sink)):
        found = [cells for head, rows in tables(text) if head[0] == "Option" for cells in rows]
        rows = [re.split(r"(?<!\\) \| ", guide_row(option)[2:-2]) for option in options]
        assert sorted(found) == sorted([cell.replace("\\|", "|") for cell in cells] for cells in rows)


def test_the_guide_lists_every_column_with_its_type() -> None:
    short = {
        "timestamp[us, tz=UTC]": "timestamp",
        "int32": "int",
        "int64": "long",
        "map<string, string>": "map<string,string>",
    }
    (read, written) = [rows for head, rows in tables(GUIDE.read_text()) if head[:2] == ["Column", "Type"]]
    listed = {names(cells[0])[0]: cells[1].replace("&lt;", "<").replace("&gt;", ">") for cells in read}
    assert listed == {name: short.get(str(kind), str(kind)) for name, kind in COLUMNS.items()}
    listed = {names(cells[0])[0]: cells[1].replace("&lt;", "<").replace("&gt;", ">") for cells in written}
    assert listed == {name: " or ".join(types) for name, types in SINK_COLUMNS.items()}


def test_what_differs_from_kafka_names_only_options_and_columns_that_exist() -> None:
    options = {option.name for option in (*OPTIONS, *SINK_OPTIONS)}
    columns = {*COLUMNS, *SINK_COLUMNS}
    found = dict(
        (head[0], [name for cells in rows for name in names(cells[1])])
        for head, rows in tables(section(GUIDE, "What differs from Kafka's source"))
    )
    assert set(found["Kafka option"]) <= options
    assert len(found["Kafka option"]) > 15
    assert set(found["Kafka column"]) <= columns


@pytest.mark.parametrize("page", [ROCKETMQ, OPERATIONS, README, EXACTLY_ONCE], ids=lambda path: path.name)
def test_an_option_that_a_page_shows_with_a_value_is_accepted(page: Path) -> None:
    options = {option.name: option for option in (*SINK_OPTIONS, *OPTIONS)}
    ours = {name.lower() for name in options}
    for name, value in re.findall(r"`([a-z][A-Za-z]+)=([A-Za-z]+)`", page.read_text()):
        if name.lower() in ours:
            options[name].parse(value)


def test_the_sizes_in_operations_are_those_of_the_files(tmp_path: Path) -> None:
    (sizes,) = [rows for head, rows in tables(section(OPERATIONS, "Sizing"))]
    text = " ".join(cell for cells in sizes for cell in cells)
    with rmq_spark.open_store(tmp_path / "store") as messages:
        plain = messages.send_many(
            pa.table({"body": ["x" * 200] * 2, "queueId": pa.array([0, 0], pa.int32())}), topic="orders"
        )
        worded = pa.table({"body": ["x" * 200] * 2, "tags": ["t" * 10] * 2, "keys": ["k" * 10] * 2})
        with_words = messages.send_many(worded, topic="orders")

    def size(places: pa.Table) -> int:
        first, second = places.column("commitLogOffset").to_pylist()
        return int(second - first)

    head, id_bytes, word = (int(found) for found in re.findall(r"takes? (\d+)", text)[:3])
    assert size(plain) == head + 200 + len("orders") + id_bytes
    assert size(with_words) == size(plain) + 2 * (word + 10)
    (index,) = (tmp_path / "store" / "index").iterdir()
    queue = tmp_path / "store" / "consumequeue" / "orders" / "0" / ("0" * 20)
    assert f"{index.stat().st_size:,} bytes" in text
    assert f"{queue.stat().st_size:,} bytes" in text


@cache
def words_of_the_code() -> str:
    """Return every text in our code, and every piece of a message in the tables that tests walk."""
    found = []
    for folder in ("store", "datasource", "rmq_spark"):
        for path in (ROOT / folder).rglob("*.py"):
            found += [
                node.value
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
    walked = ERRORS.read_text().split("## Errors when reading\n")[1]
    return "\n".join(found + [piece for head, rows in tables(walked) for cells in rows for piece in names(cells[-1])])


def test_errors_are_found_by_words_that_our_code_says() -> None:
    _, ours, _ = tables(section(ERRORS, "By the text of an error"))
    assert ours[0] == ["the message says", "class", "what to do"]
    walked = [cells for _, rows in tables(ERRORS.read_text().split("## Errors when reading\n")[1]) for cells in rows]
    for says, kind, what in ours[1]:
        (name,) = names(kind)
        for words in names(says):
            assert words in words_of_the_code(), f"no message says {words!r}"
            said = {names(cells[-2])[0] for cells in walked if words in cells[-1] and names(cells[-2])}
            assert not said or name in said, f"{words!r} is said by {said}"
        assert issubclass(getattr(rmq_spark, name), rmq_spark.RmqError)
        assert what


def test_failures_of_exactly_once_writes_are_told_by_words_that_our_code_says() -> None:
    (failures,) = tables(section(EXACTLY_ONCE, "When something fails"))
    (options,) = tables(section(EXACTLY_ONCE, "Options"))
    assert failures[0] == ["what you see", "what happens", "what you do"]
    of_spark = {"df.write", "RMQ_SPARK_STAGE"}
    seen = [words for says, *_ in failures[1] for words in names(says) if not words.endswith("Error")]
    pieces = {piece.strip() for words in seen for piece in re.split("…|RMQ_SPARK_STAGE", words)} - of_spark
    assert len(pieces) > 15
    assert not {piece for piece in pieces if piece not in words_of_the_code()}
    listed = {name for cells in options[1] for name in names(cells[0])}
    assert listed <= {option.name for option in SINK_OPTIONS}
    assert listed >= {option.name for option in SINK_OPTIONS if option.conflicts == "delivery=atLeastOnce"}


def test_every_class_of_error_is_found_by_some_text() -> None:
    _, ours, _ = tables(section(ERRORS, "By the text of an error"))
    classes = {name for name in rmq_spark.__all__ if name.endswith("Error")} - {"RmqError"}
    assert {names(kind)[0] for _, kind, _ in ours[1]} == classes


def test_errors_of_spark_have_spark_s_names() -> None:
    spark, *_ = tables(section(ERRORS, "By the text of an error"))
    (jar,) = (Path(pyspark.__path__[0]) / "jars").glob("spark-common-utils_*.jar")
    with zipfile.ZipFile(jar) as opened:
        known = set(json.loads(opened.read("error/error-conditions.json")))
    known |= PYSPARK_ERRORS & set(
        json.loads((Path(pyspark.__path__[0]) / "errors" / "error-conditions.json").read_text())
    )
    named = {name for says, *_ in spark[1] for name in names(says)}
    assert {name for name in named - known if not name.startswith(("rmq_spark", "PYSPARK_"))} == WORDS_OF_SPARK


def test_what_the_command_and_missing_extras_say_is_in_the_code() -> None:
    *_, others = tables(section(ERRORS, "By the text of an error"))
    assert others[0] == ["it says", "because", "what to do"]
    for says, *_ in others[1]:
        for words in names(says):
            assert words in words_of_the_code(), f"nothing says {words!r}"


@pytest.mark.slow
@pytest.mark.spark
def test_spark_s_errors_about_us_are_those_of_the_page(spark: "SparkSession", tmp_path: Path) -> None:
    rows = spark.createDataFrame([("one",)], "body string")
    with pytest.raises(Exception, match=r"DATA_SOURCE_NOT_FOUND.*Failed to find the data source: rmqs"):
        spark.read.format("rmqs").load()
    with pytest.raises(Exception, match="UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):
        rows.write.format("rmq").option("topic", "orders").save(str(tmp_path / "store"))
    stream = spark.readStream.format("rmq").option("subscribe", "orders").load(str(ROOT / "tests/golden/demo"))
    writer = stream.select("body").writeStream.format("rmq").option("topic", "orders").outputMode("update")
    query = writer.option("path", str(tmp_path / "store")).option("checkpointLocation", str(tmp_path / "c")).start()
    with pytest.raises(Exception, match="rmq does not support Update mode"):
        query.awaitTermination()
