"""Filtered reads: they yield the matching rows of a full read, and read little else.

Bytes of the commit log are counted at each read of a file and each mapped window.
"""

import zlib
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark.store import open_reader
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.mapped_window import MappedWindow
from rmq_spark.store.errors import DamageError, OptionError, StoreChangedError
from rmq_spark.store.filter.row_filter import Expression, compile_filter
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.format.consume_queue_entry import QUEUE_UNIT, Item, encode_items, to_address
from rmq_spark.store.format.record import COMPRESSED
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.log import commit_log
from rmq_spark.store.log import queue_reader as unit_scan
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import BuiltStore, build_store

QUEUE = QueueKey("orders", 0)
TAGS = [None, "A", "B", "Aa", "BB", "中文", "order-created"]
MESSAGES = 1500
SEGMENT_BYTES = 1 << 16

Rows = list[dict[str, object]]


def mixed_messages() -> list[SampleMessage]:
    random = Random(5)
    return [
        SampleMessage(
            "orders",
            0,
            random.randbytes(random.choice([0, 40, 900])),
            tags=random.choice(TAGS),
            properties={"amount": str(random.randrange(10)), "n": str(number)},
        )
        for number in range(MESSAGES)
    ]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """1,500 messages of one queue over 15 segments, with tags that collide and without."""
    path = tmp_path_factory.mktemp("filtered") / "mixed"
    return str(build_store(path, mixed_messages(), segment_bytes=SEGMENT_BYTES).path)


def read(path: str, columns: list[str] | None = None, queue: QueueKey = QUEUE, **given: str) -> Rows:
    """Return all rows of a queue, maps as dicts."""
    mode = given.pop("read_mode", "auto")
    with open_reader(path, read_mode=mode) as store:
        held = store.bounds(queue)
        batches = store.read(queue, held.min_offset, held.max_offset, columns or list(COLUMNS), **given)
        rows = [row for batch in batches for row in batch.to_pylist()]
    return [row | {"properties": dict(row["properties"])} if "properties" in row else row for row in rows]


def tag_in(*tags: str):
    return lambda row: row["tags"] in tags


def amount(row: dict[str, object]) -> int:
    return int(row["properties"]["amount"])  # type: ignore[index]


FILTERS = [
    ({"tags": "A"}, tag_in("A")),
    ({"tags": "Aa"}, tag_in("Aa")),
    ({"tags": "中文 || order-created||A"}, tag_in("中文", "order-created", "A")),
    ({"tags": "|| ||"}, lambda row: False),
    ({"tags": "nobody"}, lambda row: False),
    ({"tags": "*"}, lambda row: True),
    ({"sql92": "amount > 6 AND TAGS = 'A'"}, lambda row: amount(row) > 6 and row["tags"] == "A"),
    ({"sql92": "TAGS IS NULL OR amount IN ('3')"}, lambda row: row["tags"] is None or amount(row) == 3),
    ({"sql92": "TRUE"}, lambda row: True),
    ({"sql92": "n = 777"}, lambda row: row["properties"]["n"] == "777"),
    ({"sql92": "nothing = 1"}, lambda row: False),
]


@pytest.mark.parametrize("read_mode", ["mmap", "pread"])
@pytest.mark.parametrize(
    ("given", "is_wanted"), FILTERS, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_filtered_read_yields_the_matching_rows_of_a_full_read(mixed: str, read_mode: str, given, is_wanted) -> None:
    everything = read(mixed, read_mode=read_mode)
    assert len(everything) == MESSAGES
    expected = [row for row in everything if is_wanted(row)]
    assert read(mixed, read_mode=read_mode, **given) == expected
    assert read(mixed, ["body"], read_mode=read_mode, **given) == [{"body": row["body"]} for row in expected]
    assert len(read(mixed, ["queueOffset"], read_mode=read_mode, **given)) == len(expected)


def test_filtered_read_batches_have_rows_of_many_stretches_within_limits(mixed: str, monkeypatch) -> None:
    monkeypatch.setattr(unit_scan, "BATCH_ROWS", 100)
    everything = [row["queueOffset"] for row in read(mixed, tags="A || B")]
    monkeypatch.setattr(unit_scan, "BATCH_BYTES", 30_000)
    assert [row["queueOffset"] for row in read(mixed, tags="A || B")] == everything
    monkeypatch.setattr(unit_scan, "BATCH_BYTES", 1)
    assert [row["queueOffset"] for row in read(mixed, tags="A || B")] == everything


@pytest.mark.parametrize("looked_at", [1, 64, 1 << 20])
def test_read_with_progress_reports_progress_without_matches(mixed: str, monkeypatch, looked_at: int) -> None:
    monkeypatch.setattr(unit_scan, "_SCANNED_ENTRIES", looked_at)
    for text in ("nobody", "A"):
        with open_reader(mixed) as store:
            wanted = compile_filter(Expression("TAG", text))
            found = list(store.read_with_progress(QUEUE, 3, 1200, ["queueOffset"], DecodeLimits(), wanted))
        ends = [one.next_offset for one in found]
        assert ends == sorted(ends)
        assert ends[-1] == 1200
        if text == "nobody":
            assert len(ends) == -(-1197 // looked_at)
        for one, following in zip(found, [*ends[:0], *ends], strict=True):
            assert all(offset < following for offset in one.batch.column(0).to_pylist())


def test_read_refuses_wrong_filters_before_it_reads(mixed: str) -> None:
    with pytest.raises(OptionError, match="nothing between its separators"):
        read(mixed, tags="||")
    with pytest.raises(OptionError, match="sql92"):
        read(mixed, sql92="amount >")
    with pytest.raises(OptionError, match="tags and sql92 are both given"):
        read(mixed, tags="A", sql92="amount > 1")


# -- reads of the log ------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The number of bytes of the commit log that were read or mapped."""
    counted: list[tuple[str, int]] = []

    def count(how: str, path: str, size: int) -> None:
        if "/commitlog/" in path:
            counted.append((how, size))

    real_read, real_into, real_init = OpenFile.read, OpenFile.read_into, MappedWindow.__init__

    def read_counted(self: OpenFile, position: int, size: int) -> bytes:
        count("read", self.path, size)
        return real_read(self, position, size)

    def into_counted(self: OpenFile, position: int, target: memoryview) -> None:
        count("read", self.path, len(target))
        real_into(self, position, target)

    def init_counted(self: MappedWindow, file: OpenFile, begin: int, end: int, *, mapped: bool) -> None:
        count("map", file.path, end - begin)
        real_init(self, file, begin, end, mapped=mapped)

    monkeypatch.setattr(OpenFile, "read", read_counted)
    monkeypatch.setattr(OpenFile, "read_into", into_counted)
    monkeypatch.setattr(MappedWindow, "__init__", init_counted)
    return counted


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """20,000 messages of about 1.2 KB, of which scattered 200 have the tag `rare`, and the size of the log."""
    path, random, count = str(tmp_path_factory.mktemp("filtered") / "large"), Random(7), 20_000
    rare = set(random.sample(range(count), count // 100))
    bodies = [random.randbytes(1000) for _ in range(100)]
    table = pa.table(
        {
            "body": pa.array([bodies[number % 100] for number in range(count)], pa.binary()),
            "tags": [("rare" if number in rare else f"T{number % 7}") for number in range(count)],
        }
    )
    with rmq_spark.open_store(path, queues=1, segment_bytes=8 << 20) as store:
        store.send_many(table, topic="orders")
    with open_reader(path) as reader:
        return path, reader.record_bytes(QUEUE, 0, count)


def test_filtered_read_for_1_percent_reads_about_1_percent_of_the_log(large, asked) -> None:
    path, log_bytes = large
    with open_reader(path) as store:
        store.bounds(QUEUE)
        asked.clear()
        rows = sum(batch.num_rows for batch in store.read(QUEUE, 0, 20_000, ["body", "keys"], tags="rare"))
        wanted_bytes, how = sum(size for _, size in asked), {how for how, _ in asked}
        asked.clear()
        assert sum(batch.num_rows for batch in store.read(QUEUE, 0, 20_000, ["body", "keys"])) == 20_000
        whole_bytes = sum(size for _, size in asked)
    assert rows == 200
    assert how == {"read"}, "nothing is mapped"
    assert 0.0099 < wanted_bytes / log_bytes < 0.013
    assert whole_bytes > log_bytes


def test_filtered_read_for_most_messages_maps_the_log_as_a_full_read(large, asked) -> None:
    path, _ = large
    with open_reader(path, read_mode="mmap") as store:
        store.bounds(QUEUE)
        asked.clear()
        tags = " || ".join(f"T{number}" for number in range(7))
        assert sum(batch.num_rows for batch in store.read(QUEUE, 0, 20_000, ["body"], tags=tags)) == 19_800
    assert any(how == "map" for how, _ in asked)


def test_filtered_read_maps_a_bounded_part_of_the_log(large, asked, monkeypatch) -> None:
    path, _ = large
    monkeypatch.setattr(commit_log, "WINDOW_BYTES", 1 << 20)
    with open_reader(path, read_mode="mmap") as store:
        store.bounds(QUEUE)
        asked.clear()
        rows = sum(batch.num_rows for batch in store.read(QUEUE, 0, 20_000, ["body"], tags="T1"))
        assert rows == sum(row["tags"] == "T1" for row in read(path, ["tags"]))
    windows = [size for how, size in asked if how == "map"]
    assert len(windows) > 20
    assert max(windows) <= 1 << 20


def test_filtered_read_without_matches_does_not_read_the_log(large, asked) -> None:
    path, _ = large
    with open_reader(path) as store:
        store.bounds(QUEUE)
        asked.clear()
        assert list(store.read(QUEUE, 0, 20_000, ["body"], tags="nobody")) == []
    assert asked == []


def test_filtered_read_of_copied_files_reads_near_records_together(large, asked) -> None:
    path, log_bytes = large
    with open_reader(path, read_mode="pread") as store:
        store.bounds(QUEUE)
        asked.clear()
        assert sum(batch.num_rows for batch in store.read(QUEUE, 0, 20_000, ["body"], tags="rare")) == 200
    assert len(asked) < 150
    assert sum(size for _, size in asked) < log_bytes / 2


# -- damage -----------------------------------------------------------------------------------------------------------


def build(path: Path, messages: list[SampleMessage], **given) -> BuiltStore:
    return build_store(path, messages, segment_bytes=SEGMENT_BYTES, **given)


def spoil(path: Path, queue: QueueKey, offset: int, at: int = 0, data: bytes = b"\xff" * 60) -> None:
    """Overwrite a part of a message's record."""
    with open_reader(str(path)) as store:
        place = store.proof(queue, offset).physical_offset
    with open(path / "commitlog" / f"{place // SEGMENT_BYTES * SEGMENT_BYTES:020d}", "r+b") as file:
        file.seek(place % SEGMENT_BYTES + at)
        file.write(data)


def test_filtered_read_reports_damage_only_in_records_that_it_reads(tmp_path) -> None:
    path = tmp_path / "store"
    build(path, [SampleMessage("orders", 0, b"x" * 100, tags=tag) for tag in ["C", "Aa", "C", "BB", "Aa", "C"]])

    def count(**given: str) -> int:
        with open_reader(str(path)) as store:  # as a task does, which does not read bounds: the log ends before damage
            return sum(batch.num_rows for batch in store.read(QUEUE, 0, 6, ["body"], **given))

    spoil(path, QUEUE, 2)
    assert count(tags="Aa") == 2
    with pytest.raises(DamageError, match="message 2 of queue orders/0"):
        count()
    spoil(path, QUEUE, 3)
    assert count(tags="nobody") == 0
    with pytest.raises(DamageError, match="message 3 of queue orders/0"):
        count(tags="Aa")


@pytest.mark.parametrize("check_crc", [False, True])
def test_filtered_read_does_not_decode_bodies_of_other_messages(tmp_path, check_crc: bool) -> None:
    bodies = [zlib.compress(b"one"), b"no zlib at all", zlib.compress(b"three")]
    zipped = COMPRESSED if COMPRESSED.bit_count() == 1 else 1
    messages = [
        SampleMessage("orders", 0, body, sys_flag=zipped, properties={"n": str(number)})
        for number, body in enumerate(bodies)
    ]
    build(tmp_path / "store", messages)
    spoil(tmp_path / "store", QUEUE, 1, 90, b"\0\0")
    path = str(tmp_path / "store")
    with open_reader(path) as store:
        batches = store.read(QUEUE, 0, 3, ["body"], sql92="n <> 1", check_crc=check_crc)
        assert [row["body"] for batch in batches for row in batch.to_pylist()] == [b"one", b"three"]
        with pytest.raises(DamageError, match="message 1 of queue orders/0"):
            list(store.read(QUEUE, 0, 3, ["body"], sql92="n = 1", check_crc=check_crc))


def test_filtered_read_does_not_decode_bodies_whose_tag_hash_collides(tmp_path) -> None:
    """Records whose entries pass are decoded together. If that fails, or not all match, the others are left out."""
    bodies = {"Aa": zlib.compress(b"wanted"), "BB": b"no zlib at all"}
    messages = [SampleMessage("orders", 0, bodies[tag], tags=tag, sys_flag=1) for tag in ("Aa", "BB", "Aa")]
    path = str(build(tmp_path / "store", messages).path)
    assert read(path, ["queueOffset", "body"], tags="Aa") == [
        {"queueOffset": 0, "body": b"wanted"},
        {"queueOffset": 2, "body": b"wanted"},
    ]
    with pytest.raises(DamageError, match="message 1 of queue orders/0"):
        read(path, ["body"], tags="BB")


def test_filtered_read_without_matches_reports_a_hole_in_the_queue(tmp_path) -> None:
    path = tmp_path / "store"
    build(path, [SampleMessage("orders", 0, b"x", tags="C") for _ in range(20)])
    (file,) = (path / "consumequeue" / "orders" / "0").iterdir()
    data = bytearray(file.read_bytes())
    data[5 * 20 : 8 * 20] = bytes(3 * 20)
    file.write_bytes(data)
    with open_reader(str(path)) as store, pytest.raises(DamageError, match="entry of queue offset 5"):
        list(store.read(QUEUE, 0, 20, ["body"], tags="nobody"))


def test_filtered_read_yields_matches_before_later_damage(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(unit_scan, "BATCH_ROWS", 10)
    path = tmp_path / "store"
    build(path, [SampleMessage("orders", 0, b"x", tags="CA"[number == 3]) for number in range(30)])
    (file,) = (path / "consumequeue" / "orders" / "0").iterdir()
    data = bytearray(file.read_bytes())
    data[25 * 20 : 26 * 20] = bytes(20)
    file.write_bytes(data)
    with open_reader(str(path)) as store:
        batches = store.read(QUEUE, 0, 30, ["queueOffset"], tags="A")
        assert next(batches).to_pylist() == [{"queueOffset": 3}]
        with pytest.raises(DamageError):
            next(batches)


def test_filtered_read_reports_a_file_that_shrank(large, tmp_path) -> None:
    path = tmp_path / "store"
    build(path, [SampleMessage("orders", 0, b"x" * 100, tags="AB"[number % 2]) for number in range(200)])
    with open_reader(str(path)) as store:
        store.bounds(QUEUE)
        segment = min((path / "commitlog").iterdir())
        with open(segment, "r+b") as file:
            file.truncate(4096)
        with pytest.raises(StoreChangedError):
            list(store.read(QUEUE, 0, 200, ["body"], tags="A"))


# -- entries without a hash -------------------------------------------------------------------------------------------


def test_filtered_read_checks_each_message_of_a_batch(tmp_path) -> None:
    queue = QueueKey("batches", 0)
    texts = [b"TAGS\x01A\x02n\x010\x02", b"TAGS\x01B\x02n\x011\x02", b"n\x012\x02", b"TAGS\x01A\x02n\x013\x02"]

    def batch(first: int, tags: str | None = None) -> SampleMessage:
        items = encode_items([Item(0, b"%d/%d" % (first, at), text) for at, text in enumerate(texts)])
        properties = {"INNER_NUM": "4", "INNER_BASE": str(first)}
        return SampleMessage("batches", 0, items, tags=tags, properties=properties, message_count=4)

    messages = [batch(0), SampleMessage("batches", 0, b"one", tags="B", properties={"n": "9"}), batch(5, "Z")]
    path = str(build(tmp_path / "store", messages, batch_topics=["batches"]).path)
    everything = read(path, queue=queue)
    assert len(everything) == 9
    for given, is_wanted in [
        ({"tags": "A"}, tag_in("A")),
        ({"tags": "B"}, tag_in("B")),
        ({"tags": "Z"}, tag_in("Z")),
        ({"sql92": "n > 2"}, lambda row: int(row["properties"]["n"]) > 2),
        ({"sql92": "n = 1 OR n = 9"}, lambda row: row["properties"]["n"] in ("1", "9")),
    ]:
        assert read(path, queue=queue, **given) == [row for row in everything if is_wanted(row)]
    with open_reader(path) as store:
        found = [row for part in store.read(queue, 3, 8, ["queueOffset"], tags="A") for row in part.to_pylist()]
    assert [row["queueOffset"] for row in found] == [3, 5]


def test_filtered_read_checks_messages_with_extended_entries(tmp_path) -> None:
    path = build(tmp_path / "store", [SampleMessage("orders", 0, b"x", tags="AB"[n % 2]) for n in range(6)]).path
    (file,) = (path / "consumequeue" / "orders" / "0").iterdir()
    data = bytearray(file.read_bytes())
    for number in range(6):
        at = number * QUEUE_UNIT.itemsize + 12
        data[at : at + 8] = to_address(number * 20).to_bytes(8, "big", signed=True)
    file.write_bytes(data)
    assert [row["queueOffset"] for row in read(str(path), tags="B")] == [1, 3, 5]


def test_filtered_read_of_waiting_messages_compares_tags_not_times(tmp_path) -> None:
    path = str(tmp_path / "store")
    with rmq_spark.open_store(path) as store:
        for number in range(4):
            store.send("orders", b"%d" % number, tags="AB"[number % 2], delay_level=18)
    queue = QueueKey("SCHEDULE_TOPIC_XXXX", 17)
    assert [row["body"] for row in read(path, queue=queue, tags="B")] == [b"1", b"3"]


def test_filtered_read_with_messages_of_other_queues_between(tmp_path) -> None:
    random = Random(11)
    messages = [
        SampleMessage(random.choice(["orders", "others"]), random.randrange(3), b"x" * 50, tags=random.choice("ABC"))
        for _ in range(600)
    ]
    path = str(build(tmp_path / "store", messages).path)
    for queue_id in range(3):
        queue = QueueKey("orders", queue_id)
        expected = [row for row in read(path, queue=queue) if row["tags"] == "C"]
        assert read(path, queue=queue, tags="C") == expected
