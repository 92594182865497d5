"""Recovery makes units and keys by columns, and they are those that it makes record by record."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.batch_body import Item, encode_items, message_count
from rmq_spark.store.format.filenames import SCHEDULE_TOPIC
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.format.java import Host, index_key_hash
from rmq_spark.store.format.properties import KEYS, UNIQ_KEY, parse
from rmq_spark.store.format.record import (
    TRANSACTION_COMMIT,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    Record,
    Torn,
    decode_record,
    encode_record,
)
from rmq_spark.store.format.record_columns import NotWholeError, split_records, walk_records
from rmq_spark.store.format.tags_code import tags_code_of
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.dispatching import dispatch
from rmq_spark.store.log.file_sizes import FileSizes
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.testing import dispatch_twin
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
    root: Path, how: Callable[..., Any], parts: list[tuple[int, int, int]], **options: Any
) -> dict[str, bytes]:
    """Dispatch parts of the log (begin, end, where units begin), and return every file of queues and index."""
    ticks = count(FIRST_STORE_MS)
    store = StoreFiles(str(root), (str(root / "commitlog"),), Disk(), SIZES, lambda: next(ticks), lambda: None)
    last = [how(store, begin, end, unit_begin, **options) for begin, end, unit_begin in parts]
    store.close()
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {**{name: data for name, data in found.items() if "commitlog" not in name}, "last": repr(last).encode()}


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
    slow = dispatched(tmp_path / "other", dispatch_twin.dispatch, parts)
    assert dispatched(tmp_path / "one", dispatch, parts, block_bytes=block_bytes) == slow
    assert len([name for name in slow if name.startswith("index/")]) > 2
    assert len([name for name in slow if "consumequeue/" in name]) > 20


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
