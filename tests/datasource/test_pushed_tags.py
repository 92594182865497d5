"""Conditions on tags, the filters of options, and keys and ids that are looked up, all in one query of one plan."""

import logging
import pickle
from pathlib import Path
from random import Random

import pytest
from pyspark.sql.datasource import EqualNullSafe, EqualTo, Filter, In, Not
from support.index_twin import IndexKey, write_one_by_one
from support.parsed_options import parse_options
from support.row_twin import walk_records

from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.spark.batch_reader import RmqBatchReader
from rmq_spark.datasource.spark.partition_reader import read_partition
from rmq_spark.store.format.consume_queue_entry import QUEUE_UNIT, Item, encode_items
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.format.java import index_key_hash
from rmq_spark.store.log.key_search import keys_of
from rmq_spark.store.log.queue_reader import RecordRun
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

RETRY, WAITING, BATCHES = "%RETRY%g", "SCHEDULE_TOPIC_XXXX", "batches"
COLUMNS = ("queueOffset", "tags", "body")
EVERYTHING = ("physicalTopic", "queueId", *COLUMNS, "keys", "msgId", "properties")
TAGS = [None, "", "A", "A", "B", "Aa", "BB", "A || B", " A"]
MESSAGES = 608
Row = tuple[object, ...]


def messages() -> list[SampleMessage]:
    random, found = Random(8), []
    for number in range(MESSAGES - 8):
        topic = random.choice(["orders"] * 5 + ["payments", RETRY, WAITING])
        properties = {"amount": str(random.randrange(10)), "UNIQ_KEY": f"{number:032X}"}
        if topic == RETRY:
            properties["RETRY_TOPIC"] = "orders"
        if topic == WAITING:
            properties |= {"REAL_TOPIC": "orders", "REAL_QID": "0", "DELAY": "3"}
        words = random.sample(["a", "Aa", "BB", "d", f"k{number}"], random.randrange(3))
        queue_id = {"orders": random.randrange(2), WAITING: 2}.get(topic, 0)
        body = b"%d" % number
        found.append(
            SampleMessage(
                topic, queue_id, body, tags=random.choice(TAGS), keys=" ".join(words) or None, properties=properties
            )
        )
    texts = [b"TAGS\x01A\x02amount\x017\x02KEYS\x01a\x02", b"TAGS\x01B\x02", b"amount\x019\x02", b"TAGS\x01Aa\x02"]
    for first in (0, 4):
        items = encode_items([Item(0, b"in %d" % (first + at), text) for at, text in enumerate(texts)])
        properties = {"INNER_NUM": "4", "INNER_BASE": str(first)}
        found.append(SampleMessage(BATCHES, 0, items, tags="Z", properties=properties, message_count=4))
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two topics, a retry topic, messages that wait and inner batches, all with tags of all kinds, and their index."""
    path = tmp_path_factory.mktemp("tagged") / "store"
    build_store(path, messages(), batch_topics=[BATCHES])
    for units in (path / "consumequeue" / WAITING / "2").iterdir():
        data = bytearray(units.read_bytes())
        for at in range(0, len(data), QUEUE_UNIT.itemsize):  # the due time is in place of a hash
            if any(data[at + 8 : at + 12]):
                data[at + 12 : at + 20] = (1_700_000_000_000 + at).to_bytes(8, "big")
        units.write_bytes(data)
    keys = [
        IndexKey(index_key_hash(f"{record.topic.decode()}#{word}"), record.physical_offset, record.store_timestamp)
        for record in walk_records(path)
        for word in filter(None, keys_of(record))
    ]
    (path / "index").mkdir()
    for number, file in enumerate(write_one_by_one(keys, IndexShape(50, 400))):
        (path / "index" / f"{20240101000000000 + number}").write_bytes(file)
    return path


def reader_of(path: Path, columns: tuple[str, ...], *filters: Filter, **given: str) -> RmqBatchReader:
    assign = f'{{"orders": [0, 1], "payments": [0], "{RETRY}": [0], "{WAITING}": [2], "{BATCHES}": [0]}}'
    options = parse_options({"path": str(path), "assign": assign} | given, 0)
    reader = RmqBatchReader(options, ReadSettings(columns, True, 1 << 20, True, options.filters))
    asked_again = list(reader.pushFilters(list(filters)))
    assert asked_again == list(filters), "Spark asks each row again"
    return reader


def read(path: Path, columns: tuple[str, ...], *filters: Filter, **given: str) -> list[Row]:
    """Return the rows as tasks give them, before Spark asks again."""
    reader = reader_of(path, columns, *filters, **given)
    task, rows = pickle.loads(pickle.dumps(reader)), []
    for partition in reader.partitions():
        for batch in task.read(pickle.loads(pickle.dumps(partition))):
            assert tuple(batch.schema.names) == columns
            rows += [tuple(row.values()) for row in batch.to_pylist()]
    return sorted(rows, key=str)


@pytest.fixture(scope="module")
def everything(path: Path) -> list[dict[str, object]]:
    """All rows, as a reader without filters gives them, each with its properties."""
    rows = [dict(zip(EVERYTHING, row, strict=True)) for row in read(path, EVERYTHING)]
    assert len(rows) == MESSAGES
    return [dict(row["properties"]) | row for row in rows]  # type: ignore[call-overload]


def chosen(rows: list[dict[str, object]], *tests) -> list[Row]:
    return sorted((tuple(row[name] for name in COLUMNS) for row in rows if all(test(row) for test in tests)), key=str)


def tag_in(tags: set[str] | None):
    return lambda row: tags is None or row["tags"] in tags


TAG_CONDITIONS = [
    ((EqualTo(("tags",), "A"),), {"A"}),
    ((EqualNullSafe(("tags",), "A"),), {"A"}),
    ((In(("tags",), ("Aa", "A || B", None)),), {"Aa", "A || B"}),
    ((EqualTo(("tags",), " A"),), {" A"}),
    ((EqualTo(("tags",), ""),), {""}),
    ((In(("tags",), ("A", "B", "BB")), EqualTo(("tags",), "BB")), {"BB"}),
    ((EqualTo(("tags",), None),), set()),
    ((EqualTo(("tags",), "nobody"),), set()),
]
OPTIONS = [
    ({}, lambda row: True),
    ({"tags": "A || Aa"}, lambda row: row["physicalTopic"] == RETRY or row["tags"] in ("A", "Aa")),
    ({"sql92": "amount > 5"}, lambda row: row["physicalTopic"] == RETRY or int(row.get("amount", 0)) > 5),
    (
        {"tags": '{"orders": "BB || A", "%RETRY%g": "A"}', "sql92": '{"batches": "amount = 7"}'},
        lambda row: {
            "orders": row["tags"] in ("BB", "A"),
            RETRY: row["tags"] == "A",
            BATCHES: row.get("amount") == "7",
        }.get(row["physicalTopic"], True),
    ),
]
LOOK_UPS = [
    ({}, lambda row: True),
    ({"keys": "Aa k17"}, lambda row: bool({"Aa", "k17"} & {*(row["keys"] or "").split(" ")})),
    ({"msgId": f"{7:032X}"}, lambda row: row["msgId"] == f"{7:032X}"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "passes"), OPTIONS, ids=["none", "tags", "sql92", "by topic"])
@pytest.mark.parametrize(("look_up", "is_sought"), LOOK_UPS, ids=["all", "keys", "msgId"])
def test_tags_of_conditions_filters_and_what_is_sought_must_all_hold(
    path, everything, options, passes, look_up, is_sought
) -> None:
    given = options | look_up
    for filters, tags in [((), None), *TAG_CONDITIONS]:
        expected = chosen(everything, tag_in(tags), passes, is_sought)
        assert read(path, COLUMNS, *filters, **given) == expected, filters


@pytest.mark.parametrize("damage", ["absent", "damaged", "partial"])
def test_what_is_read_instead_of_a_bad_index_is_filtered_all_the_same(
    path, everything, tmp_path, caplog, damage
) -> None:
    """The unknown ranges are read with their filter, and asked for the key."""
    (tmp_path / "store").mkdir()
    for folder in path.iterdir():
        if folder.name != "index":
            (tmp_path / "store" / folder.name).symlink_to(folder)
    if damage != "absent":
        (tmp_path / "store" / "index").mkdir()
        for number, file in enumerate(sorted((path / "index").iterdir())):
            data = bytearray(file.read_bytes())
            if damage == "damaged":
                data[45:] = b"\x7f" * (len(data) - 45)
            if damage == "damaged" or number:
                (tmp_path / "store" / "index" / file.name).write_bytes(data)
    for options, passes in OPTIONS:
        for look_up, is_sought in LOOK_UPS[1:]:
            for filters, tags in [((), None), *TAG_CONDITIONS[:2]]:
                expected = chosen(everything, tag_in(tags), passes, is_sought)
                assert read(tmp_path / "store", COLUMNS, *filters, **options, **look_up) == expected
    assert ("the key index does not cover" in caplog.text) == (damage != "partial")


@pytest.mark.parametrize(
    "one",
    [
        Not(EqualTo(("tags",), "A")),
        EqualNullSafe(("tags",), None),
        Not(In(("tags",), ("A", "B"))),
        EqualTo(("tags", "part"), "A"),
        EqualTo(("tags",), "A\ufffd"),
        In(("tags",), tuple(map(str, range(1001)))),
    ],
    ids=["not", "null", "not in", "part", "no text", "many"],
)
def test_other_conditions_on_tags_leave_nothing_out(path, one) -> None:
    assert len(read(path, COLUMNS, one)) == MESSAGES


def test_messages_of_other_tags_are_not_looked_at(path, monkeypatch) -> None:
    looked_at: list[int] = []
    real = RecordRun.__init__
    monkeypatch.setattr(
        RecordRun, "__init__", lambda run, *given: (looked_at.append(len(given[2])), real(run, *given))[1]
    )
    assign = '{"orders": [0, 1], "%RETRY%g": [0]}'
    count = len(read(path, COLUMNS, EqualTo(("tags",), "B"), assign=assign))
    assert 0 < count == sum(looked_at)
    looked_at.clear()
    assert not read(path, COLUMNS, EqualTo(("tags",), "B"), assign=assign, tags='{"orders": "A", "%RETRY%g": "A"}')
    assert sum(looked_at) == 0, "no hash is of both"


def test_a_partition_without_tags_of_a_condition_is_as_before_and_one_with_them_stays_small(path) -> None:
    plain, *_ = reader_of(path, COLUMNS).partitions()
    tagged, *_ = reader_of(path, COLUMNS, EqualTo(("tags",), "A")).partitions()
    assert (plain.tags, tagged.tags) == (None, ("A",))
    assert pickle.loads(pickle.dumps(tagged)).tags == ("A",)
    assert len(pickle.dumps(tagged)) < len(pickle.dumps(plain)) + 20
    none, *_ = reader_of(path, COLUMNS, EqualTo(("tags",), None)).partitions()
    again = pickle.loads(pickle.dumps(none))
    assert again.tags == ()
    assert not list(read_partition(again, ReadSettings(COLUMNS, False, 1 << 20, True)))


def test_the_log_says_about_how_much_is_read_for_its_tag(path, caplog) -> None:
    caplog.set_level("INFO", "rmq_spark")
    for assign in ('{"orders": [0, 1]}', f'{{"{BATCHES}": [0]}}'):
        reader_of(path, COLUMNS, EqualTo(("tags",), "B"), assign=assign).partitions()
    everything = [row for row in messages() if row.topic == "orders"]
    tagged = [row for row in everything if row.tags == "B"]
    of_orders, of_batches = [record.message for record in caplog.records]
    assert of_orders.startswith(
        f"rmq: pushed down: tags = 'B'. Reads about {len(tagged)} of {len(everything)} messages, about "
    )
    assert of_batches.startswith("rmq: pushed down: tags = 'B'. Reads about 8 of 8 messages, "), "only messages tell"


def test_who_has_set_up_no_logging_sees_the_line_on_standard_error(path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("rmq_spark"), "hasHandlers", lambda: False)
    reader_of(path, COLUMNS, EqualTo(("tags",), "B"), assign='{"orders": [0, 1]}').partitions()
    assert capsys.readouterr().err.startswith("rmq: pushed down: tags = 'B'. Reads about ")
