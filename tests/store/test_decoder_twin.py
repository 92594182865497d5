"""The fast decoder of columns against its slow twin: every column, any messages, any range, both ways to read."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.arrow_rows import Row, arrow_rows
from support.row_twin import slow_rows

from rmq_spark.store import COLUMNS, StoreReader, open_reader
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store
from rmq_spark.store.testing.strategies import inner_batches, messages

NAMES = list(COLUMNS)
BATCH_TOPIC = "batches"
TOPICS = ("t", "a" * 127, "%RETRY%group", "%RETRY%" + "g" * 193, "标签")
READ_MODES = ("mmap", "pread")

# A long message is a fine example; nobody is to shrink it for minutes because it takes long to print.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr:hypothesis.errors.HypothesisWarning")

usual = settings(deadline=None, derandomize=True, max_examples=150, suppress_health_check=list(HealthCheck))
long = settings(deadline=None, max_examples=20_000, suppress_health_check=list(HealthCheck), print_blob=True)


@contextmanager
def store_of(content: list[SampleMessage]) -> Iterator[Path]:
    """A store of these messages on disk for as long as it is looked at."""
    with tempfile.TemporaryDirectory() as folder:
        yield build_store(Path(folder) / "s", content, batch_topics=[BATCH_TOPIC]).path


@st.composite
def contents(draw: st.DrawFn) -> list[SampleMessage]:
    """Messages of two queues of one plain topic and of one batch consume queue, in any order."""
    topic = draw(st.sampled_from(TOPICS))
    one = st.one_of(
        messages(topic, 0),
        messages(topic, 0),
        messages(topic, 7),
        messages(BATCH_TOPIC, 0),
        inner_batches(BATCH_TOPIC, 0),
    )
    return draw(st.lists(one, min_size=1, max_size=25))


def asked(rows: list[Row], columns: list[str]) -> list[Row]:
    """Return the rows with just these columns."""
    return [{name: row[name] for name in columns} for row in rows]


def assert_same(
    reader: StoreReader, queue: QueueKey, begin: int, end: int, columns: list[str], rows: list[Row]
) -> None:
    found = arrow_rows(reader.read(queue, begin, end, columns, check_crc=True))
    assert found == asked(rows[begin:end], columns)


def hold_against_each_other(data: st.DataObject, content: list[SampleMessage]) -> None:
    with store_of(content) as path:
        twin = slow_rows(path)
        for read_mode in READ_MODES:
            with open_reader(str(path), read_mode=read_mode) as reader:
                for queue, rows in twin.items():
                    assert reader.bounds(queue).max_offset == len(rows)
                    assert_same(reader, queue, 0, len(rows), NAMES, rows)
                    begin = data.draw(st.integers(0, len(rows)), "begin")
                    end = data.draw(st.integers(begin, len(rows)), "end")
                    columns = data.draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1), "columns")
                    assert_same(reader, queue, begin, end, columns, rows)


@pytest.mark.slow
@usual
@given(st.data(), contents())
def test_fast_and_slow_give_the_same_rows(data: st.DataObject, content: list[SampleMessage]) -> None:
    hold_against_each_other(data, content)


@pytest.mark.torture
@long
@given(st.data(), contents())
def test_fast_and_slow_give_the_same_rows_of_many_more(data: st.DataObject, content: list[SampleMessage]) -> None:
    hold_against_each_other(data, content)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(parent=usual, max_examples=8)
@given(st.lists(st.one_of(messages("t", 0), messages("t", 0)), min_size=1, max_size=12))
def test_a_column_alone_is_the_same_as_among_all(name: str, content: list[SampleMessage]) -> None:
    with store_of(content) as path, open_reader(str(path)) as reader:
        whole = arrow_rows(reader.read(QueueKey("t", 0), 0, len(content), NAMES))
        alone = arrow_rows(reader.read(QueueKey("t", 0), 0, len(content), [name]))
        assert alone == asked(whole, [name])


@pytest.mark.parametrize("read_mode", READ_MODES)
def test_messages_of_one_shape_are_read_like_any(tmp_path: Path, read_mode: str) -> None:
    """Equal names and lengths in every row take short cuts of their own; so do runs over several segments."""
    content = [
        SampleMessage(
            "t",
            number % 2,
            b"%04d" % number,
            tags="TagA",
            keys=f"k{number:04d}",
            properties={"UNIQ_KEY": f"{number:032d}"},
        )
        for number in range(3000)
    ]
    built = build_store(tmp_path / "s", content, queue_file_bytes=2000)
    twin = slow_rows(built.path)
    with open_reader(str(built.path), read_mode=read_mode) as reader:
        for queue, rows in twin.items():
            assert_same(reader, queue, 0, 1500, NAMES, rows)
            assert_same(reader, queue, 99, 1401, ["properties", "body"], rows)


def test_one_odd_message_among_equal_ones_changes_only_itself(tmp_path: Path) -> None:
    """The short cuts for equal shapes must see a difference in any one place."""
    plain = SampleMessage("t", properties=b"UNIQ_KEY\x01abc\x02KEYS\x01k\x02TAGS\x01T\x02")
    odd_texts = [
        b"UNIQ_KEX\x01abc\x02KEYS\x01k\x02TAGS\x01T\x02",
        b"UNIQ_KEY\x01abc\x02KEYT\x01k\x02TAGS\x01T\x02",
        b"UNIQ_KEY\x01a\x01c\x02KEYS\x01k\x02TAGS\x01T\x02",
        b"UNIQ_KEY\x01abc\x02KEYS\x01k\x02TAGS\x01T",
        b"UNIQ_KEY\x01abc\x02KEYS\x01\x02TAGS\x01Tx\x02",
        b"UNIQ_KEY\x01abc\x02KEYS\x02k\x01TAGS\x01T\x02",
        b"KEYS\x01abc\x02KEYS\x01k\x02KEYS\x01T\x02",
        b"UNIQ_KEY\x01a\x02c\x02KEYS\x01k\x02TAGS\x01T\x02",
        b"UNIQ_KEY\x01abc\x02KEYS\x01k\x02TAGS\x01\xff\x02",
        b"UNIQ_KEY\x01abc\x02KEYS\x01k\x02TAGS\x01Tt",
        b"",
    ]
    for number, (text, place) in enumerate(product(odd_texts, (0, 5, 18))):
        content = [plain] * place + [SampleMessage("t", properties=text)] + [plain] * (18 - place)
        built = build_store(tmp_path / str(number), content)
        with open_reader(str(built.path)) as reader:
            assert_same(reader, QueueKey("t", 0), 0, 19, NAMES, slow_rows(built.path)[QueueKey("t", 0)])


@pytest.mark.parametrize(
    "text",
    [
        b"A\x01%04d\x02B\x01%03d",  # as 4.9 ends it
        b"A\x01%04d\x02A\x01%03d\x02",
        b"A\x01%04d\x02B\x01\xff%03d\x02",
        b"A\x01\x01%04d\x02B\x01%03d\x02",
        b"A\x01%04d\x02\x02B\x01%03d\x02",
        b"\xe6\xa0\x87\x01%04d\x02TAGS\x01\xe7\xad\xbe%03d\x02",
        b"%04d%03d",
    ],
)
def test_texts_of_one_shape_obey_the_rules_for_any_text(tmp_path: Path, text: bytes) -> None:
    content = [SampleMessage("t", properties=text % (number, number % 7)) for number in range(2100)]
    built = build_store(tmp_path / "s", content)
    with open_reader(str(built.path)) as reader:
        rows = slow_rows(built.path)[QueueKey("t", 0)]
        assert_same(reader, QueueKey("t", 0), 0, len(rows), NAMES, rows)


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize(
    "text",
    [
        b"\xff\x01a\x02\xfe\x01b\x02",
        b"\xff\x01a\x02k\x01x\x02\xef\xbf\xbd\x01b\x02",  # a name that is the replacement character itself
        b"abcdefgh\xff\x01a\x02abcdefgh\xfe\x01b\x02",
        b"\xff\x01a\x02" * 30 + b"\xfe\x01b\x02",
    ],
)
def test_names_that_read_the_same_are_one_name(tmp_path: Path, text: bytes, count: int) -> None:
    """A map has each name once: the later value wins, whatever bytes its name is made of."""
    for number, odd in enumerate([text, text + b"more\x01\xff\x02", text[:-2] + b"longer\x02"]):
        content = [SampleMessage("t", properties=text)] * count + [SampleMessage("t", properties=odd)]
        built = build_store(tmp_path / str(number), content)
        with open_reader(str(built.path)) as reader:
            batches = list(reader.read(QueueKey("t", 0), 0, count + 1, ["properties"]))
            names = [[name for name, _ in row] for batch in batches for row in batch.column(0).to_pylist()]
            assert all(len(set(row)) == len(row) for row in names)
            assert_same(reader, QueueKey("t", 0), 0, count + 1, NAMES, slow_rows(built.path)[QueueKey("t", 0)])
