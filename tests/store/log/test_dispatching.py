"""Recovery makes units and keys by columns, and they are those that it makes record by record."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import dispatch_twin
from support.row_twin import walk_records as twin_records

from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.consume_queue_entry import BLANK_FILL_SIZE, QUEUE_UNIT, Item, encode_items, message_count
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.format.index_keys import tags_code_of
from rmq_spark.store.format.java import Host, index_key_hash
from rmq_spark.store.format.properties import KEYS, UNIQ_KEY, parse
from rmq_spark.store.format.record import (
    MAGIC_BLANK,
    TRANSACTION_COMMIT,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    Record,
    Torn,
    decode_record,
    encode_record,
)
from rmq_spark.store.format.record_batch import NotWholeError, split_records, walk_records
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.redispatch import dispatch
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.names import SCHEDULE_TOPIC
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import FIRST_STORE_MS, build_store
from rmq_spark.store.testing.strategies import inner_batches, messages

SEGMENT_BYTES = 8192
SIZES = FileSizes(SEGMENT_BYTES, 400, 10 * 46, IndexShape(50, 120))
usual = settings(deadline=None, derandomize=True, max_examples=150, suppress_health_check=list(HealthCheck))
LONG = "a" * 150  # takes a record of version 2


def mixed(seed: int, number_of: int = 400) -> list[SampleMessage]:
    """Return messages of every kind that a log holds, to several topics."""
    random, found = Random(seed), []
    for number in range(number_of):
        topic = random.choice(["T", "T", "T", "Grüße", LONG, "Batch", SCHEDULE_TOPIC])
        keys = random.choice([None, f"k{number}", f"k{number} {number} ", " ", "schlüssel €😀"])
        message = SampleMessage(
            topic,
            random.randrange(3),
            b"b" * random.randrange(200),
            tags=random.choice([None, "A", "", "größer"]),
            keys=keys,
            properties=random.choice([{}, {UNIQ_KEY: f"id{number}"}, {"DELAY": str(random.randrange(22)), "x": "\0y"}]),
            sys_flag=random.choice([0, 0, 0, TRANSACTION_PREPARED, TRANSACTION_COMMIT, TRANSACTION_ROLLBACK]),
            born_host=random.choice([Host("10.1.2.3", 5), Host("2001:db8::1", 5)]),
            store_host=random.choice([Host("10.1.2.3", 5), Host("10.1.2.3", 5), Host("2001:db8::1", 5)]),
        )
        if topic == "Batch":
            items = [Item(0, b"x", b"") for _ in range(random.randint(1, 4))]
            message = replace(
                message,
                body=encode_items(items),
                message_count=len(items),
                sys_flag=0,
                properties={"INNER_NUM": str(len(items))},
            )
        found.append(message)
    return found


def dispatched(
    root: Path,
    how: Callable[..., Any],
    parts: list[tuple[int, int, int]],
    levels: DelayLevels = DEFAULT_DELAY_LEVELS,
    **options: Any,
) -> dict[str, bytes]:
    """Dispatch parts of the log (begin, end, where units begin), and return every file of queues and index."""
    ticks = count(FIRST_STORE_MS)
    store = StoreFiles(str(root), (str(root / "commitlog"),), Disk(), SIZES, lambda: next(ticks), lambda: None)
    store.levels = levels
    last = [how(store, begin, end, unit_begin, **options) for begin, end, unit_begin in parts]
    store.close()
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    derived = {name: data for name, data in found.items() if not name.startswith(("commitlog", "rmq/"))}
    return {**derived, "last": repr(last).encode()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block_bytes", [600, 3000, 1 << 20])
def test_units_and_keys_are_those_made_record_by_record(tmp_path: Path, seed: int, block_bytes: int) -> None:
    built = build_store(tmp_path / "one", mixed(seed), segment_bytes=SEGMENT_BYTES, batch_topics=["Batch"])
    for tree in ("consumequeue", "batchconsumequeue"):
        shutil.rmtree(tmp_path / "one" / tree)
    log = CommitLog((str(tmp_path / "one" / "commitlog"),), mapped=False)
    middle = log.segments.segments[2].begin
    log.close()
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    # Keys of a first part; then of all, of which the index has some, and units; then what is there already.
    parts = [(0, middle, built.log_end), (0, built.log_end, 0), (0, built.log_end, 0)]
    levels = DEFAULT_DELAY_LEVELS if seed else DelayLevels.parse("7s 1h")
    slow = dispatched(tmp_path / "other", dispatch_twin.dispatch, parts, levels)
    assert dispatched(tmp_path / "one", dispatch, parts, levels, block_bytes=block_bytes) == slow
    assert len([name for name in slow if name.startswith("index/")]) > 2
    assert len([name for name in slow if "consumequeue/" in name]) > 20


BOTH = pytest.mark.parametrize("how", [dispatch, dispatch_twin.dispatch], ids=["columns", "one_by_one"])


@BOTH
@pytest.mark.parametrize("said", [0, 1, -1, 2**31 - 1, "a record less", "a record more"])
def test_a_filler_leads_to_the_next_segment_whatever_length_it_names(
    tmp_path: Path, how: Callable[..., Any], said: int | str
) -> None:
    """RocketMQ asks no filler for its length (CommitLog#checkMessageAndReturnSize), and a power cut may tear it."""
    sent = [SampleMessage("T", 0, b"x" * 1000, keys=f"k{number}") for number in range(20)]
    built = build_store(tmp_path / "whole", sent, segment_bytes=SEGMENT_BYTES)
    shutil.rmtree(tmp_path / "whole" / "consumequeue")
    shutil.copytree(tmp_path / "whole", tmp_path / "torn")
    path = tmp_path / "torn" / "commitlog" / f"{0:020d}"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:4], "big")
    at = raw.rindex(MAGIC_BLANK.to_bytes(4, "big")) - 4
    remaining = SEGMENT_BYTES - at
    assert int.from_bytes(raw[at : at + 4], "big") == remaining
    length = {"a record less": remaining - size, "a record more": remaining + size}.get(str(said), said)
    path.write_bytes(raw[:at] + int(length).to_bytes(4, "big", signed=True) + raw[at + 4 :])
    whole = dispatched(tmp_path / "whole", how, [(0, built.log_end, 0)])
    assert dispatched(tmp_path / "torn", how, [(0, built.log_end, 0)]) == whole


def log_of(root: Path, offsets: list[int], counts: dict[int, int] | None = None) -> int:
    """Write a log of messages of one queue with these queue offsets; return where it ends.

    `counts` says how many messages a record of a batch is, by its row.
    """
    (root / "commitlog").mkdir(parents=True)
    raw = b""
    for row, offset in enumerate(offsets):
        size = (counts or {}).get(row, 0)
        message = SampleMessage("T", 0, b"%04d" % row, keys=f"k{row}")
        if size:
            items = [Item(0, b"x", b"") for _ in range(size)]
            message = SampleMessage(
                "T", 0, encode_items(items), message_count=size, properties={"INNER_NUM": str(size)}
            )
        raw += encode_record(message.as_record(offset, len(raw), FIRST_STORE_MS + row))
    assert len(raw) <= SEGMENT_BYTES - 8
    (root / "commitlog" / f"{0:020d}").write_bytes(raw.ljust(SEGMENT_BYTES, b"\0"))
    return len(raw)


def rows_of_queue(files: dict[str, bytes], root: Path) -> list[tuple[int, int]]:
    """Return the queue offset of each unit, and the row of its record in the log, as far as units were written."""
    places = {record.physical_offset: row for row, record in enumerate(twin_records(root))}
    units = [
        (int(name.rsplit("/", 1)[1]) // QUEUE_UNIT.itemsize + number, unit)
        for name in sorted(files)
        if name.startswith("consumequeue/T/0/")
        for number, unit in enumerate(np.frombuffer(files[name], QUEUE_UNIT))
    ]
    return [
        (offset, places[int(unit["physical_offset"])])
        for offset, unit in units
        if unit["record_size"] > 0 and unit["record_size"] != BLANK_FILL_SIZE
    ]


ONE_BLOCK, BLOCK_PER_RECORD = {"block_bytes": 1 << 20}, {"block_bytes": 100}
ANY_BLOCK = pytest.mark.parametrize("options", [ONE_BLOCK, BLOCK_PER_RECORD, {}], ids=["block", "blocks", "one_by_one"])


def rows_made(root: Path, offsets: list[int], options: dict[str, int]) -> list[tuple[int, int]]:
    end = log_of(root, offsets)
    how: Callable[..., Any] = dispatch if options else dispatch_twin.dispatch
    return rows_of_queue(dispatched(root, how, [(0, end, 0)], **options), root)


@ANY_BLOCK
@pytest.mark.parametrize("new_count", [1, 5, 15])
def test_units_are_made_for_the_last_life_of_a_topic_that_was_deleted_and_made_again(
    tmp_path: Path, options: dict[str, int], new_count: int
) -> None:
    """Deleting a topic takes its queues, and leaves its messages in the log; a queue that is made again begins at 0."""
    offsets = [*range(10), *range(3), *range(new_count)]
    assert rows_made(tmp_path, offsets, options) == [(offset, 13 + offset) for offset in range(new_count)]


@ANY_BLOCK
def test_what_is_left_of_an_earlier_life_does_not_say_where_the_queue_begins(
    tmp_path: Path, options: dict[str, int]
) -> None:
    assert rows_made(tmp_path, [7, 8, 9, 0, 1], options) == [(0, 3), (1, 4)]


@ANY_BLOCK
def test_a_queue_whose_first_messages_expired_begins_where_the_log_has_it(
    tmp_path: Path, options: dict[str, int]
) -> None:
    assert rows_made(tmp_path, [7, 8, 9], options) == [(7, 0), (8, 1), (9, 2)]


@ANY_BLOCK
def test_of_two_messages_with_one_offset_the_first_has_the_unit(tmp_path: Path, options: dict[str, int]) -> None:
    """A broker passes over what lies before a queue's end (ConsumeQueue#putMessagePositionInfo)."""
    assert rows_made(tmp_path, [0, 1, 2, 3, 2, 3, 4, 1, 5], options) == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 6),
        (5, 8),
    ]


@ANY_BLOCK
@pytest.mark.parametrize(
    ("offsets", "expected", "found"),
    [
        ([0, 1, 2, 3, 9, 5, 6], 4, 9),
        ([0, 1, 2, 4], 3, 4),
        ([5, 6, 8], 7, 8),
        ([0, 1, 0, 1, 3], 2, 3),
    ],
)
def test_a_gap_in_a_queue_is_an_error_that_says_where(
    tmp_path: Path, options: dict[str, int], offsets: list[int], expected: int, found: int
) -> None:
    end = log_of(tmp_path, offsets)
    how: Callable[..., Any] = dispatch if options else dispatch_twin.dispatch
    place = next(one for one in twin_records(tmp_path) if one.queue_offset == found).physical_offset
    says = f"position {place}: queue T/0 ends at queue offset {expected}, and the next message in the log has {found}"
    with pytest.raises(DamageError, match=says) as error:
        dispatched(tmp_path, how, [(0, end, 0)], **options)
    assert "changed" not in str(error.value), "recovery may have changed something before it met this"


@ANY_BLOCK
def test_messages_of_a_batch_count_where_the_next_one_follows(tmp_path: Path, options: dict[str, int]) -> None:
    how: Callable[..., Any] = dispatch if options else dispatch_twin.dispatch
    sizes = {0: 3, 2: 2, 3: 4}
    end = log_of(tmp_path / "s", [0, 3, 0, 2, 6], sizes)
    made = dispatched(tmp_path / "s", how, [(0, end, 0)], **options)
    assert [row for _, row in rows_of_queue(made, tmp_path / "s")] == [2, 3, 4]
    end = log_of(tmp_path / "gap", [0, 3, 0, 2, 7], sizes)
    with pytest.raises(DamageError, match="ends at queue offset 6"):
        dispatched(tmp_path / "gap", how, [(0, end, 0)], **options)


@usual
@given(data=st.data())
def test_whatever_the_offsets_are_columns_and_single_records_agree(data: st.DataObject) -> None:
    """Few different offsets, so that lives, repetitions and gaps all come up."""
    offsets = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    options = data.draw(st.sampled_from([ONE_BLOCK, BLOCK_PER_RECORD, {"block_bytes": 400}]))
    answers = []
    for given_options in (options, {}):  # without options the twin
        with TemporaryDirectory() as folder:
            try:
                found: Any = rows_made(Path(folder), offsets, given_options)
            except DamageError as error:
                found = error.what, error.position
            answers.append(found)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("table", ["1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h", "7s", "2d 3s 1h"])
@pytest.mark.parametrize("born", ["10.1.2.3", "2001:db8::1"])
def test_the_tags_code_of_a_waiting_message_is_when_it_is_due_by_the_stores_table(table: str, born: str) -> None:
    levels = DelayLevels.parse(table)
    texts = [None, "", "0", "-1", "1", "2", "3", "18", "19", "25", "007", "x", "9999999999", "\uff11", "+1"]
    raw, records = b"", []
    for number, text in enumerate(texts * 3):
        properties = {} if text is None else {"DELAY": text, "REAL_TOPIC": "T"}
        topic = "T" if number % 7 == 6 else SCHEDULE_TOPIC
        message = SampleMessage(topic, 0, b"b", tags="A", properties=properties, born_host=Host(born, 1))
        records.append(message.as_record(number, len(raw), FIRST_STORE_MS + number))
        raw += encode_record(records[-1])
    positions, end = walk_records(raw)
    columns = split_records(raw, positions, end, 0, levels)
    assert columns.tags_codes.tolist() == [tags_code_of(record, levels) for record in records]
    due = {text: code for text, code in zip(texts, columns.tags_codes.tolist(), strict=False)}
    assert due["1"] == FIRST_STORE_MS + texts.index("1") + levels.delays_ms[0]
    assert due["25"] == FIRST_STORE_MS + texts.index("25") + levels.delays_ms[-1]
    assert due["0"] == due[None] == due["x"] == 65  # the hash of its tags: it does not wait


def test_many_topics_of_one_block_are_told_apart() -> None:
    count_of, raw = 3000, b""
    for number in range(count_of):
        topic = f"T{number * 7 % count_of}"
        raw += encode_record(SampleMessage(topic).as_record(0, len(raw), FIRST_STORE_MS))
    positions, end = walk_records(raw)
    columns = split_records(raw, positions, end, 0)
    assert [columns.topics[number] for number in columns.topic_numbers] == [
        f"T{number * 7 % count_of}" for number in range(count_of)
    ]


@pytest.mark.slow
@usual
@given(data=st.data())
def test_columns_of_odd_records_are_those_of_each_record(data: st.DataObject) -> None:
    one = st.one_of(messages("T", 1), messages(LONG, 0), messages("Grüße", 2), inner_batches("Batch", 0))
    sent = data.draw(st.lists(one, min_size=1, max_size=8))
    raw, records = b"", []
    for number, message in enumerate(sent):
        records.append(message.as_record(number, 1000 + len(raw), FIRST_STORE_MS + number))
        raw += encode_record(records[-1])
    positions, end = walk_records(raw)
    assert end == len(raw)
    columns = split_records(raw, positions, end, 1000)
    for row, record in enumerate(records):
        topic, properties = record.topic.decode(), parse(record.properties)
        assert columns.places[row] == record.physical_offset
        assert columns.sizes[row] == record.total_size
        assert columns.store_times[row] == record.store_timestamp
        assert columns.sys_flags[row] == record.sys_flag
        assert columns.queue_ids[row] == record.queue_id
        assert columns.queue_offsets[row] == record.queue_offset
        assert columns.topics[columns.topic_numbers[row]] == topic
        assert columns.tags_codes[row] == tags_code_of(record)
        assert columns.message_counts[row] == message_count(record)
        keys = [properties[UNIQ_KEY]] if UNIQ_KEY in properties else []
        keys += [key for key in properties.get(KEYS, "").split(" ") if key]
        hashes = columns.key_hashes[columns.key_rows == row].tolist()
        assert hashes == [index_key_hash(f"{topic}#{key}") for key in keys]


@usual
@given(data=st.data())
def test_what_is_no_record_is_none_for_the_columns_either(data: st.DataObject) -> None:
    """Change a byte of a record somewhere: columns and decoder agree whether it is one still."""
    message = data.draw(messages("T", 1))
    changed = bytearray(encode_record(message.as_record(0, 0, FIRST_STORE_MS)))
    at = data.draw(st.one_of(st.integers(0, len(changed) - 1), st.integers(0, min(100, len(changed) - 1))))
    changed[at] ^= data.draw(st.integers(1, 255))
    raw = bytes(changed)
    found = decode_record(raw)
    is_whole = isinstance(found, Record) and found.physical_offset == 0
    positions, end = walk_records(raw)
    try:
        is_taken = len(split_records(raw, positions, end, 0)) == 1 if len(positions) else False
    except NotWholeError:
        is_taken = False
    assert is_taken == is_whole, found.why if isinstance(found, Torn) else found


@pytest.mark.parametrize("position", [4, 0, 28, 84])
def test_a_hole_in_the_log_is_an_error_that_says_where(tmp_path: Path, position: int) -> None:
    built = build_store(tmp_path / "s", [SampleMessage("T", 0, b"x" * 50) for _ in range(20)])
    (segment,) = (tmp_path / "s" / "commitlog").iterdir()
    size = built.log_end // 20
    raw = bytearray(segment.read_bytes())
    raw[size * 7 + position : size * 7 + position + 4] = b"\x7f\xff\xff\xff"
    segment.write_bytes(raw)
    with pytest.raises(DamageError, match=f"position {size * 7}: a record before the log's end"):
        dispatched(tmp_path / "s", dispatch, [(0, built.log_end, 0)])
