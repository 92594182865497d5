"""Small ranges of many queues that are read together: the rows of reading each alone, or None."""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.format.consume_queue_entry import QUEUE_UNIT, encode_entries
from rmq_spark.store.format.record import COMPRESSED
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueKey, QueueRange
from rmq_spark.store.testing.backend_fixtures import sql92_filter, tags_filter
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import BuiltStore, build_store

QUEUES = 40
LIMITS = DecodeLimits(check_crc=True)
FILTERS = [None, tags_filter("A || B"), tags_filter("nothing"), sql92_filter("n > 100")]
ALL = list(COLUMNS)


def messages(count: int = 400) -> list[SampleMessage]:
    random = Random(7)
    found = []
    for number in range(count):
        body = random.randbytes(random.choice([0, 40, 900]))
        is_packed = random.random() < 0.2
        found.append(
            SampleMessage(
                "orders",
                random.randrange(QUEUES),
                zlib.compress(body) if is_packed else body,
                tags=random.choice([None, "A", "B", "Aa", "BB"]),
                properties={"n": str(number)},
                sys_flag=COMPRESSED if is_packed else 0,
            )
        )
    return found


@pytest.fixture
def built(tmp_path: Path) -> BuiltStore:
    """400 messages of 40 queues over several segments."""
    return build_store(tmp_path / "store", messages(), segment_bytes=1 << 15)


@pytest.fixture(params=[True, False], ids=["refreshed", "new"])
def reader(built: BuiltStore, request: pytest.FixtureRequest) -> Iterator[StoreReader]:
    """A reader whose last refresh has confirmed entries of the last segment, and one that has read nothing."""
    with StoreReader(str(built.path)) as opened:
        if request.param:
            opened.refresh()
        yield opened


def alone(
    reader: StoreReader, parts: Sequence[QueueRange], columns: list[str], wanted: RowFilter | None = None
) -> pa.Table:
    """Read each range alone."""
    batches = [
        found.batch
        for part in parts
        for found in reader.read_with_progress(part.queue, part.begin, part.end, columns, LIMITS, wanted)
    ]
    return pa.Table.from_batches(batches).combine_chunks()


def random_ranges(built: BuiltStore, seed: int) -> list[QueueRange]:
    random = Random(seed)
    parts = []
    for queue, bounds in sorted(built.bounds.items()):
        begin, end = sorted((random.randrange(bounds.max_offset), random.randrange(bounds.max_offset)))
        if random.random() < 0.8:
            parts.append(QueueRange(queue, begin, end + 1))
    return parts


@pytest.mark.parametrize("wanted", FILTERS, ids=["all", "tags", "none", "sql92"])
def test_read_returns_the_rows_of_reading_each_range_alone(
    reader: StoreReader, built: BuiltStore, wanted: RowFilter | None
) -> None:
    for seed in range(2):
        parts = random_ranges(built, seed)
        for columns in (ALL, ["body"], ["queueOffset", "tags"]):
            found = reader.small_ranges.read(parts, columns, LIMITS, wanted)
            assert found is not None
            assert pa.Table.from_batches([found]).equals(alone(reader, parts, columns, wanted))


def test_read_without_columns_counts_the_rows(reader: StoreReader, built: BuiltStore) -> None:
    parts = random_ranges(built, 1)
    found = reader.small_ranges.read(parts, [], LIMITS, None)
    assert found is not None
    assert (found.num_columns, found.num_rows) == (0, sum(part.count for part in parts))


def test_proofs_and_record_bytes_are_those_of_each_range(reader: StoreReader, built: BuiltStore) -> None:
    parts = random_ranges(built, 2)
    at = [(part.queue, offset) for part in parts for offset in (part.begin, part.end - 1)]
    assert reader.small_ranges.proofs(at) == {one: reader.proof(*one) for one in at}
    sizes = {part: reader.record_bytes(part.queue, part.begin, part.end) for part in parts}
    assert reader.small_ranges.record_bytes(parts) == sizes


def test_refreshed_reader_opens_no_queue_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_store(tmp_path / "store", messages(), segment_bytes=1 << 20)
    parts = random_ranges(built, 3)
    with StoreReader(str(built.path)) as reader:
        reader.refresh()
        opened: list[str] = []
        real = OpenFile.__init__
        monkeypatch.setattr(OpenFile, "__init__", lambda self, path: (opened.append(path), real(self, path))[1])
        assert reader.small_ranges.read(parts, ["body"], LIMITS, None) is not None
        assert reader.small_ranges.proofs([(part.queue, part.begin) for part in parts])
        assert not [path for path in opened if "consumequeue" in path]


def nothing_together(reader: StoreReader, parts: list[QueueRange]) -> bool:
    """Return whether the ranges must be read one by one."""
    return reader.small_ranges.read(parts, ALL, LIMITS, None) is None


def test_ranges_beyond_the_end_or_of_no_queue_are_read_one_by_one(reader: StoreReader, built: BuiltStore) -> None:
    queue, bounds = min(built.bounds.items())
    first = QueueRange(queue, 0, 1)
    assert not nothing_together(reader, [first])
    for other in (
        QueueRange(queue, bounds.max_offset, bounds.max_offset + 1),
        QueueRange(QueueKey("orders", 99), 0, 1),
    ):
        assert nothing_together(reader, [first, other])
        assert reader.small_ranges.proofs([(queue, 0), (other.queue, other.begin)]) is None
        assert reader.small_ranges.record_bytes([first, other]) is None


def test_expired_messages_are_read_one_by_one(built: BuiltStore) -> None:
    min((built.path / "commitlog").iterdir()).unlink()
    parts = [QueueRange(queue, 0, 1) for queue in sorted(built.bounds)]
    with StoreReader(str(built.path)) as reader:
        assert nothing_together(reader, parts)
        assert reader.small_ranges.proofs([(part.queue, 0) for part in parts]) is None


def test_batch_queues_are_read_one_by_one(tmp_path: Path) -> None:
    found = [SampleMessage("orders", number % 2, b"body") for number in range(4)]
    built = build_store(tmp_path / "store", found, batch_topics=["orders"])
    parts = [QueueRange(queue, 0, 2) for queue in sorted(built.bounds)]
    with StoreReader(str(built.path)) as reader:
        assert nothing_together(reader, parts)
        reader.refresh()
        assert nothing_together(reader, parts)


def spoil_body(path: Path, place: int) -> None:
    with open(min((path / "commitlog").iterdir()), "r+b") as file:
        file.seek(place + 90)
        file.write(b"spoilt")


def entry_file(path: Path, queue_id: int) -> Path:
    return min((path / "consumequeue" / "orders" / str(queue_id)).iterdir())


def swap_entries(path: Path, _: int) -> None:
    """Let two queues have each other's first entry."""
    files = [entry_file(path, queue_id) for queue_id in (0, 1)]
    texts = [file.read_bytes() for file in files]
    for file, own, other in zip(files, texts, reversed(texts), strict=True):
        file.write_bytes(other[: QUEUE_UNIT.itemsize] + own[QUEUE_UNIT.itemsize :])


def repeat_entry(path: Path, _: int) -> None:
    """Let two queues have the same first entry."""
    text = entry_file(path, 0).read_bytes()[: QUEUE_UNIT.itemsize]
    entry_file(path, 1).write_bytes(text + entry_file(path, 1).read_bytes()[QUEUE_UNIT.itemsize :])


def clear_entry(path: Path, _: int) -> None:
    size = QUEUE_UNIT.itemsize
    entry_file(path, 1).write_bytes(bytes(size) + entry_file(path, 1).read_bytes()[size:])


@pytest.mark.parametrize("spoil", [spoil_body, swap_entries, repeat_entry, clear_entry])
def test_damage_is_read_one_by_one(tmp_path: Path, spoil: object) -> None:
    found = [SampleMessage("orders", number % 2, b"body of the message") for number in range(4)]
    built = build_store(tmp_path / "store", found)
    parts = [QueueRange(queue, 0, 2) for queue in sorted(built.bounds)]
    with StoreReader(str(built.path)) as reader:
        assert not nothing_together(reader, parts)
    spoil(built.path, 0)  # type: ignore[operator]
    with StoreReader(str(built.path)) as reader:
        assert nothing_together(reader, parts)


def test_bodies_that_fill_a_result_are_read_one_by_one(tmp_path: Path) -> None:
    packed = zlib.compress(bytes(3000))
    found = [SampleMessage("orders", number % 2, packed, sys_flag=COMPRESSED) for number in range(4)]
    built = build_store(tmp_path / "store", found)
    parts = [QueueRange(queue, 0, 2) for queue in sorted(built.bounds)]
    with StoreReader(str(built.path)) as reader:
        assert reader.small_ranges.read(parts, ["body"], DecodeLimits(), None) is not None
        small = DecodeLimits(result_decompressed_bytes=8000)
        assert reader.small_ranges.read(parts, ["body"], small, None) is None


@pytest.mark.parametrize("abort", [True, False], ids=["live", "closed"])
def test_refresh_of_many_queues_leaves_out_an_entry_for_a_record_of_another_topic(tmp_path: Path, abort: bool) -> None:
    found = [SampleMessage("orders", queue_id, b"body", tags="A") for queue_id in range(QUEUES)]
    found += [SampleMessage("other", 3, b"body", tags="A") for _ in range(3)]
    built = build_store(tmp_path / "store", found, abort=abort)
    with StoreReader(str(built.path)) as reader:
        reader.refresh()
        stale = reader.proof(QueueKey("other", 3), 1).physical_offset
        size = reader.record_bytes(QueueKey("other", 3), 1, 2)
        code = 65
    file = entry_file(built.path, 3)
    text = file.read_bytes()
    file.write_bytes(text[: QUEUE_UNIT.itemsize] + encode_entries([stale], [size], [code]) + text[40:])
    with StoreReader(str(built.path)) as reader:
        reader.refresh()
        bounds = {queue_id: reader.bounds(QueueKey("orders", queue_id)).max_offset for queue_id in range(QUEUES)}
        assert bounds == dict.fromkeys(range(QUEUES), 1)


@pytest.mark.parametrize("abort", [True, False], ids=["live", "closed"])
def test_refresh_of_many_queues_waits_for_the_tags_code_of_an_entry(tmp_path: Path, abort: bool) -> None:
    found = [SampleMessage("orders", queue_id, b"body", tags="A") for queue_id in range(QUEUES)]
    built = build_store(tmp_path / "store", found, abort=abort)
    file = entry_file(built.path, 3)
    text = file.read_bytes()
    file.write_bytes(text[:12] + bytes(8) + text[20:])
    with StoreReader(str(built.path)) as reader:
        reader.refresh()
        bounds = {queue_id: reader.bounds(QueueKey("orders", queue_id)).max_offset for queue_id in range(QUEUES)}
        assert bounds == {**dict.fromkeys(range(QUEUES), 1), 3: 0 if abort else 1}
