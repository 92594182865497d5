"""Pulls from real stores: what is found is what a reader reads, and what is not found is answered by a status."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError, NotFoundError, OptionError, StoreChangedError
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.format.consume_queue_entry import Item, encode_items
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.properties import TAGS, encode
from rmq_spark.store.group.pull import DEFAULT_COLUMNS, has_wanted, pull
from rmq_spark.store.group.pull_limits import PullLimits
from rmq_spark.store.group.pull_reader import PullReader
from rmq_spark.store.model import QueueKey
from rmq_spark.store.pull_result import Accept, GetMessageStatus, PullStatus
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

QUEUE, OTHER, BATCHES = QueueKey("T", 0), QueueKey("T", 1), QueueKey("B", 0)
FILE_UNITS = 50
SEGMENT_BYTES = 1 << 11
ON_DISK = PullLimits(memory_bytes=1)
NO_LIMITS = PullLimits(
    max_bytes_in_memory=1 << 40, max_count_in_memory=1 << 40, max_bytes_on_disk=1 << 40, max_count_on_disk=1 << 40
)

STORES = ["basic", "batchcq-cqext", "broker497", "crashed", "demo", "livekill533", "preblank", "propcrc", "timer"]


def tagged(tag: str) -> Accept:
    return lambda codes: codes == string_hash(tag)


def opened(path: Path) -> PullReader:
    reader = PullReader(str(path))
    reader.refresh()
    return reader


def bodies(messages: pa.Table) -> list[bytes]:
    return messages.column("body").to_pylist()


def pull_all(
    reader: PullReader, queue: QueueKey, columns: tuple[str, ...] = DEFAULT_COLUMNS, begin: int = 0
) -> list[pa.Table]:
    """Pull until there is nothing new, as a client does."""
    tables = []
    while True:
        found = pull(reader, queue, begin, columns=columns)
        if found.pull_status is PullStatus.NO_NEW_MSG:
            return tables
        assert found.next_begin_offset > begin
        tables.append(found.messages)
        begin = found.next_begin_offset


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PullReader]:
    """5000 messages a queue; only 799 of queue 0 and 800 of queue 1 have the tag "wanted". Files hold 3000 entries."""
    messages = [
        SampleMessage("T", queue_id, b"%d" % number, tags="wanted" if number == 799 + queue_id else "other")
        for queue_id in (0, 1)
        for number in range(5_000)
    ]
    built = build_store(
        tmp_path_factory.mktemp("filtered") / "store", messages, segment_bytes=1 << 20, queue_file_bytes=3_000 * 20
    )
    with opened(built.path) as reader:
        yield reader


NOBODY = tagged("nobody")


@pytest.mark.parametrize(("max_messages", "scanned"), [(1, 800), (32, 800), (800, 800), (1_000, 1_000)])
def test_a_filter_that_wants_nothing_is_answered_after_800_units(
    filtered: PullReader, max_messages: int, scanned: int
) -> None:
    found = pull(filtered, QUEUE, 7, max_messages, accept=NOBODY)
    assert (found.status, found.next_begin_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, 7 + scanned)
    assert found.messages.num_rows == 0
    assert found.messages.column_names == list(DEFAULT_COLUMNS)
    assert (found.min_offset, found.max_offset) == (0, 5_000)


def test_the_last_of_800_units_is_found(filtered: PullReader) -> None:
    found = pull(filtered, QUEUE, 0, accept=tagged("wanted"))
    assert (found.status, found.next_begin_offset) == (GetMessageStatus.FOUND, 800)
    assert bodies(found.messages) == [b"799"]


def test_the_one_after_800_units_is_found_by_the_second_pull(filtered: PullReader) -> None:
    found = pull(filtered, OTHER, 0, accept=tagged("wanted"))
    assert (found.status, found.next_begin_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, 800)
    found = pull(filtered, OTHER, 800, accept=tagged("wanted"))
    assert (found.status, found.next_begin_offset, bodies(found.messages)) == ("FOUND", 1_600, [b"800"])


def test_a_scan_ends_where_the_queues_file_ends(filtered: PullReader) -> None:
    found = pull(filtered, QUEUE, 2_990, accept=NOBODY)
    assert (found.status, found.next_begin_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, 3_000)
    found = pull(filtered, QUEUE, 2_990, limits=NO_LIMITS, max_messages=100)
    assert (found.status, found.next_begin_offset) == (GetMessageStatus.FOUND, 3_000)


def test_a_scan_ends_where_the_queue_ends(filtered: PullReader) -> None:
    found = pull(filtered, QUEUE, 4_990, accept=NOBODY)
    assert (found.status, found.next_begin_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, 5_000)


def test_what_lies_far_behind_the_end_of_the_log_comes_8_at_a_time(filtered: PullReader) -> None:
    assert pull(filtered, QUEUE, 0).messages.num_rows == 32
    found = pull(filtered, QUEUE, 0, limits=ON_DISK)
    assert (found.messages.num_rows, found.next_begin_offset) == (8, 8)


def test_whether_new_messages_are_wanted_is_told_by_the_filter(filtered: PullReader) -> None:
    assert not has_wanted(filtered, QUEUE, 0, 799, tagged("wanted"))
    assert has_wanted(filtered, QUEUE, 0, 800, tagged("wanted"))
    assert not has_wanted(filtered, QUEUE, 800, 2_900, tagged("wanted"))
    assert has_wanted(filtered, QUEUE, 800, 850, None)
    assert has_wanted(filtered, QUEUE, 2_990, 3_001, NOBODY), "it cannot be told for more than a file"


@pytest.mark.parametrize("columns", [DEFAULT_COLUMNS, tuple(COLUMNS)], ids=["default", "all"])
@pytest.mark.parametrize("name", STORES)
def test_what_is_pulled_from_a_brokers_store_is_what_is_read(name: str, columns: tuple[str, ...], golden: Path) -> None:
    with opened(golden / name) as reader:
        count = 0
        for queue in (queue for topic in reader.topics() for queue in reader.queues(topic)):
            held = reader.bounds(queue)
            if held.min_offset == held.max_offset:
                continue
            pulled = pa.concat_tables(pull_all(reader, queue, columns, held.min_offset))
            assert pulled.equals(
                pa.Table.from_batches(reader.read(queue, held.min_offset, held.max_offset, columns))
            ), queue
            count += pulled.num_rows
        assert count


def test_columns_are_those_asked_for(filtered: PullReader) -> None:
    found = pull(filtered, QUEUE, 3, 2, columns=("queueOffset", "msgId"))
    assert found.messages.column_names == ["queueOffset", "msgId"]
    assert found.messages.column("queueOffset").to_pylist() == [3, 4]
    assert pull(filtered, QUEUE, 3, 2, columns=()).messages.num_columns == 0


# -- outside of the queue ---------------------------------------------------------------------------------------------


def numbered(count: int, queue: QueueKey = QUEUE) -> list[SampleMessage]:
    return [SampleMessage(queue.topic, queue.queue_id, b"%03d" % number, tags="t") for number in range(count)]


def test_offsets_outside_the_queue_are_answered_by_its_bounds(tmp_path: Path) -> None:
    built = build_store(
        tmp_path / "store",
        numbered(5),
        segment_bytes=SEGMENT_BYTES,
        log_begin=SEGMENT_BYTES,
        first_offsets={QUEUE: 60},
        queue_file_bytes=FILE_UNITS * 20,
        empty_topics={"T": 2},
    )
    with opened(built.path) as reader:
        for queue, offset, status, said, next_offset in (
            (QUEUE, -1, "OFFSET_TOO_SMALL", "OFFSET_ILLEGAL", 60),
            (QUEUE, 59, "OFFSET_TOO_SMALL", "OFFSET_ILLEGAL", 60),
            (QUEUE, 60, "FOUND", "FOUND", 65),
            (QUEUE, 65, "OFFSET_OVERFLOW_ONE", "NO_NEW_MSG", 65),
            (QUEUE, 66, "OFFSET_OVERFLOW_BADLY", "OFFSET_ILLEGAL", 65),
            (OTHER, 0, "NO_MESSAGE_IN_QUEUE", "NO_NEW_MSG", 0),
            (OTHER, 7, "NO_MESSAGE_IN_QUEUE", "OFFSET_ILLEGAL", 0),
        ):
            found = pull(reader, queue, offset)
            assert (found.status, found.pull_status, found.next_begin_offset) == (status, said, next_offset), offset
            assert found.messages.num_rows == (5 if status == "FOUND" else 0)
            assert (found.min_offset, found.max_offset) == ((60, 65) if queue == QUEUE else (0, 0))


def test_where_the_first_file_of_a_queue_goes_the_next_pull_begins_with_the_second(tmp_path: Path) -> None:
    built = build_store(tmp_path / "store", numbered(120), queue_file_bytes=FILE_UNITS * 20)
    with opened(built.path) as reader:
        reader.bounds(QUEUE)
        (built.path / "consumequeue" / "T" / "0" / f"{0:020d}").unlink()
        found = pull(reader, QUEUE, 10)
        assert (found.status, found.pull_status) == (GetMessageStatus.OFFSET_FOUND_NULL, PullStatus.NO_NEW_MSG)
        assert found.next_begin_offset == FILE_UNITS
        assert has_wanted(reader, QUEUE, 10, 12, NOBODY)
        assert bodies(pull(reader, QUEUE, FILE_UNITS, 2).messages) == [b"050", b"051"]


def test_where_the_file_of_the_queues_end_goes_a_pull_is_refused(tmp_path: Path) -> None:
    built = build_store(tmp_path / "store", numbered(120), queue_file_bytes=FILE_UNITS * 20)
    folder = built.path / "consumequeue" / "T" / "0"
    last = folder / f"{FILE_UNITS * 2 * 20:020d}"
    complete = {file: file.read_bytes() for file in folder.iterdir()}
    with opened(built.path) as reader:
        assert reader.bounds(QUEUE).max_offset == 120
        last.unlink()
        with pytest.raises(StoreChangedError, match="is gone"):
            pull(reader, QUEUE, 110)
        last.write_bytes(complete[last])
        assert pull(reader, QUEUE, 110).next_begin_offset == 120
        for file in complete:
            file.unlink()
        with pytest.raises(StoreChangedError, match="is gone"):
            pull(reader, QUEUE, 10)
        assert has_wanted(reader, QUEUE, 10, 12, NOBODY)
    for file, data in complete.items():
        file.write_bytes(data)
    with opened(built.path) as reader:
        reader.refresh()
        for file in complete:
            file.unlink()
        with pytest.raises(StoreChangedError, match="its file was deleted"):
            reader.bounds(QUEUE)


def test_where_a_file_of_a_batch_queue_goes_the_next_pull_begins_at_0(tmp_path: Path) -> None:
    built = build_store(tmp_path / "store", batches(140, 2), batch_topics=["B"], batch_queue_file_bytes=FILE_UNITS * 46)
    with opened(built.path) as reader:
        reader.bounds(BATCHES)
        (built.path / "batchconsumequeue" / "B" / "0" / f"{FILE_UNITS * 46:020d}").unlink()
        found = pull(reader, BATCHES, 2 * FILE_UNITS + 6)
        assert (found.status, found.next_begin_offset) == (GetMessageStatus.OFFSET_FOUND_NULL, 0)


@pytest.fixture
def expiring(tmp_path: Path) -> Path:
    """A store of 100 messages, about 20 in each segment; the queue has one file."""
    return build_store(tmp_path / "store", numbered(100), segment_bytes=SEGMENT_BYTES, queue_file_bytes=200 * 20).path


def segment(path: Path, number: int) -> Path:
    return path / "commitlog" / f"{number * SEGMENT_BYTES:020d}"


def first_in_segment(reader: PullReader, number: int) -> int:
    places = pa.Table.from_batches(reader.read(QUEUE, 0, 100, ["commitLogOffset"])).column(0).to_numpy()
    return int(np.searchsorted(places, number * SEGMENT_BYTES))


def test_messages_whose_segment_has_expired_are_passed_over_and_counted(expiring: Path) -> None:
    with opened(expiring) as reader:
        second = first_in_segment(reader, 1)
        assert 4 < second < 30
        reader.bounds(QUEUE)
        segment(expiring, 0).unlink()
        found = pull(reader, QUEUE, 0, 3)
        assert found.status is GetMessageStatus.FOUND
        assert bodies(found.messages) == [b"%03d" % number for number in range(second, second + 3)]
        assert found.next_begin_offset == second + 3
        found = pull(reader, QUEUE, 0, 3, PullLimits(max_scanned_bytes=4 * 20))
        assert (found.status, found.next_begin_offset) == (GetMessageStatus.MESSAGE_WAS_REMOVING, 4)
        found = pull(reader, QUEUE, 0, 3, PullLimits(max_scanned_bytes=4 * 20), accept=NOBODY)
        assert (found.status, found.next_begin_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, 4)
        reader.refresh()
        found = pull(reader, QUEUE, 0)
        assert (found.status, found.next_begin_offset) == (GetMessageStatus.OFFSET_TOO_SMALL, second)


def test_a_segment_that_is_missing_in_the_middle_is_passed_over(expiring: Path) -> None:
    with opened(expiring) as reader:
        second, third = first_in_segment(reader, 1), first_in_segment(reader, 2)
        segment(expiring, 1).unlink()
        found = pull(reader, QUEUE, second - 2, 4)
        expected = [second - 2, second - 1, third, third + 1]
        assert bodies(found.messages) == [b"%03d" % number for number in expected]
        assert found.next_begin_offset == third + 2
        found = pull(reader, QUEUE, second, PullLimits().max_count_in_memory)
        assert bodies(found.messages)[0] == b"%03d" % third


def test_a_segment_that_goes_between_looking_and_reading_is_noticed(
    expiring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(expiring) as reader:
        second = first_in_segment(reader, 1)
        reader.bounds(QUEUE)
        are_gone = PullReader.are_gone

        def look_and_delete(self: PullReader, places: NDArray[np.int64]) -> NDArray[np.bool_]:
            gone = are_gone(self, places)
            segment(expiring, 0).unlink(missing_ok=True)
            return gone

        reader.look_at_log()  # nothing is open that would keep it alive
        monkeypatch.setattr(PullReader, "are_gone", look_and_delete)
        assert bodies(pull(reader, QUEUE, 0, 2).messages) == [b"%03d" % second, b"%03d" % (second + 1)]


def test_segments_that_go_again_and_again_end_the_pull(expiring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_is_gone(self: PullReader, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.zeros(len(places), np.bool_)

    with opened(expiring) as reader:
        reader.bounds(QUEUE)
        segment(expiring, 0).unlink()
        reader.look_at_log()
        monkeypatch.setattr(PullReader, "are_gone", nothing_is_gone)
        with pytest.raises(StoreChangedError, match="Retention deleted it"):
            pull(reader, QUEUE, 0)


# -- batches ----------------------------------------------------------------------------------------------------------


def batch(number: int, count: int, tag: str) -> SampleMessage:
    """A record of several messages. Each has the record's tag, as those of a producer have."""
    items = [Item(0, b"%d.%d" % (number, item), encode({TAGS: tag})) for item in range(count)]
    properties = {"INNER_NUM": str(count)}
    return SampleMessage("B", 0, encode_items(items), tags=tag, properties=properties, message_count=count)


def batches(count: int, each: int) -> list[SampleMessage]:
    return [batch(number, each, "odd" if number % 2 else "even") for number in range(count)]


@pytest.fixture(scope="module")
def of_batches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PullReader]:
    built = build_store(
        tmp_path_factory.mktemp("batches") / "store",
        batches(60, 10),
        batch_topics=["B"],
        batch_queue_file_bytes=FILE_UNITS * 46,
    )
    with opened(built.path) as reader:
        yield reader


def test_a_batch_comes_whole_and_counts_with_all_its_messages(of_batches: PullReader) -> None:
    found = pull(of_batches, BATCHES, 0, 32)
    assert (found.messages.num_rows, found.next_begin_offset, found.max_offset) == (30, 30, 600)
    found = pull(of_batches, BATCHES, 0, 3)
    assert (found.messages.num_rows, found.next_begin_offset) == (10, 10)


def test_a_pull_from_inside_a_batch_begins_there(of_batches: PullReader) -> None:
    found = pull(of_batches, BATCHES, 17, 5)
    assert bodies(found.messages) == [b"1.7", b"1.8", b"1.9"]
    assert found.messages.column("queueOffset").to_pylist() == [17, 18, 19]
    assert found.next_begin_offset == 20


def test_a_filter_wants_a_batch_or_not(of_batches: PullReader) -> None:
    found = pull(of_batches, BATCHES, 0, 20, accept=tagged("odd"))
    assert found.messages.column("queueOffset").to_pylist() == [*range(10, 20), *range(30, 40)]
    assert found.next_begin_offset == 40


def test_a_scan_of_batches_ends_after_16000_bytes_of_messages_and_with_the_file(of_batches: PullReader) -> None:
    found = pull(of_batches, BATCHES, 0, accept=NOBODY)
    assert (found.status, found.next_begin_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, 350)
    found = pull(of_batches, BATCHES, 350, accept=NOBODY)
    assert found.next_begin_offset == 500


# -- everything once, in order ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PullReader]:
    """A queue of 170 messages of all sizes and 5 tags, and 90 batches of 1 to 7, over many files of both kinds."""
    random = np.random.default_rng(7)
    messages = []
    for _ in range(170):
        messages.append(SampleMessage("T", 0, bytes(int(random.integers(0, 900))), tags=f"t{random.integers(5)}"))
    for number in range(90):
        messages.append(batch(number, int(random.integers(1, 8)), f"t{random.integers(5)}"))
    order = random.permutation(len(messages)).tolist()
    built = build_store(
        tmp_path_factory.mktemp("mixed") / "store",
        [messages[at] for at in order],
        segment_bytes=SEGMENT_BYTES,
        queue_file_bytes=16 * 20,
        batch_queue_file_bytes=16 * 46,
        batch_topics=["B"],
    )
    with opened(built.path) as reader:
        yield reader


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(data=st.data(), queue=st.sampled_from([QUEUE, BATCHES]))
def test_pulling_from_anywhere_with_any_limits_gives_each_wanted_message_once_and_in_order(
    mixed: PullReader, data: st.DataObject, queue: QueueKey
) -> None:
    held = mixed.bounds(queue)
    begin = data.draw(st.integers(held.min_offset, held.max_offset))
    tags = data.draw(st.sets(st.sampled_from([f"t{number}" for number in range(5)])))
    codes = np.array([string_hash(tag) for tag in tags], np.int64)
    limits = PullLimits(
        max_bytes_in_memory=data.draw(st.integers(1, 5_000)),
        max_count_in_memory=data.draw(st.integers(1, 40)),
        max_bytes_on_disk=data.draw(st.integers(1, 3_000)),
        max_count_on_disk=data.draw(st.integers(1, 9)),
        memory_bytes=data.draw(st.integers(1, 100_000)),
        max_scanned_bytes=data.draw(st.integers(1, 2_000)),
    )
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    pulled, offset = [], begin
    while offset < held.max_offset:
        found = pull(
            mixed,
            queue,
            offset,
            int(random.integers(1, 40)),
            limits,
            lambda seen: np.isin(seen, codes),
            ("queueOffset", "tags", "body"),
        )
        assert found.next_begin_offset > offset, "a client would pull for ever"
        assert (found.status is GetMessageStatus.FOUND) == (found.messages.num_rows > 0)
        pulled += found.messages.to_pylist()
        offset = found.next_begin_offset
    read = [
        row
        for batch in mixed.read(queue, begin, held.max_offset, ["queueOffset", "tags", "body"])
        for row in batch.to_pylist()
    ]
    assert pulled == [row for row in read if row["tags"] in tags]


# -- what no pull takes, and damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda reader: pull(reader, QUEUE, 0, 0), OptionError, "max_messages=0; expected at least 1"),
        (lambda reader: pull(reader, QUEUE, 0, columns=["bdy"]), OptionError, "no such column: bdy"),
        (lambda reader: pull(reader, QueueKey("T", 9), 0), NotFoundError, 'topic "T" has no queue 9'),
        (lambda reader: pull(reader, QueueKey("U", 0), 0), NotFoundError, 'no topic "U"'),
    ],
)
def test_what_no_pull_takes_is_named(
    filtered: PullReader, ask: Callable[[PullReader], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ask(filtered)


def test_a_filter_that_breaks_its_promise_is_a_bug(filtered: PullReader) -> None:
    with pytest.raises(AssertionError):
        pull(filtered, QUEUE, 0, accept=lambda codes: codes[1:] == 0)


@pytest.mark.parametrize(
    ("position", "data", "message"),
    [
        (0, (1 << 40).to_bytes(8, "big"), "a record at or after physical offset"),
        (8, bytes(4), "the consume-queue entry of queue offset 0 of T/0"),
        (8, (77).to_bytes(4, "big"), "size of a record in its consume-queue entry"),
    ],
)
def test_units_that_do_not_ascend_are_damage(tmp_path: Path, position: int, data: bytes, message: str) -> None:
    built = build_store(tmp_path / "store", numbered(40))
    with opened(built.path) as reader:
        reader.bounds(QUEUE)
        with (built.path / "consumequeue" / "T" / "0" / f"{0:020d}").open("r+b") as file:
            file.seek(position)
            file.write(data)
        with pytest.raises(DamageError, match=message):
            pull(reader, QUEUE, 0)


def test_a_record_that_is_not_its_units_is_damage_and_names_the_message(tmp_path: Path) -> None:
    built = build_store(tmp_path / "store", numbered(40))
    with opened(built.path) as reader:
        reader.bounds(QUEUE)
        with (built.path / "commitlog" / f"{0:020d}").open("r+b") as file:
            file.seek(20)  # the record's own queue offset
            file.write((5).to_bytes(8, "big"))
        with pytest.raises(DamageError, match="message 0 of queue T/0 at physical offset 0: expected 0, found 5"):
            pull(reader, QUEUE, 0)
