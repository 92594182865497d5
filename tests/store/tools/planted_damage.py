"""Damage of every kind, and of every field that can be verified, planted into copies of stores.

A damage is a function of a copy and a random generator, whose seed is the damage's name; `ALL` has the name and the
store of each. Fields without any redundancy are left out, because no check can detect a change: flag, born time and
host, store host, reconsumeTimes and the text of a property.
"""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from rmq_spark.store.format.checkpoint import CHECKPOINT_FIELDS
from rmq_spark.store.format.consume_queue_entry import BATCH_UNIT, QUEUE_UNIT, UNIT_EXT_HEAD
from rmq_spark.store.format.index_file import INDEX_HEADER, INDEX_UNIT
from rmq_spark.store.format.record import RECORD_HEAD, Blank, Record, decode_record
from rmq_spark.store.format.timer import TIMER_CHECK, TIMER_UNIT

Damage = Callable[[Path, Random], None]
ALL: dict[str, tuple[str, Damage]] = {}


def at(layout: np.dtype[Any], name: str) -> tuple[int, int]:
    fields: Any = layout.fields
    return fields[name][1], fields[name][0].itemsize


def change(path: Path, position: int, data: bytes) -> None:
    whole = bytearray(path.read_bytes())
    assert whole[position : position + len(data)] != data, "the damage must change something"
    whole[position : position + len(data)] = data
    path.write_bytes(whole)


def flip(path: Path, position: int, count: int, random: Random) -> None:
    whole = bytearray(path.read_bytes())
    whole[position + random.randrange(count)] ^= 1 << random.randrange(8)
    path.write_bytes(whole)


def segments(store: Path) -> list[Path]:
    return sorted((store / "commitlog").iterdir())


def records(store: Path) -> list[tuple[Path, int, Record]]:
    """Return file, position and record of the log, in order, IPv4 hosts only."""
    found = []
    for path in segments(store):
        data, place = path.read_bytes(), 0
        while isinstance(record := decode_record(data[place:]), Record):
            if not record.sys_flag & 0x30:
                found.append((path, place, record))
            place += record.total_size
    return found


def a_record(store: Path, random: Random, *, inner: bool = False) -> tuple[Path, int, Record]:
    """Return a record with a body and a consume-queue entry; not the first or the last of the log."""
    found = [one for one in records(store)[1:-1] if one[2].body and one[2].sys_flag & 0xC == 0]
    return random.choice([one for one in found if bool(one[2].sys_flag & 0x80) == inner])


def named(store: str, name: str) -> Callable[[Damage], Damage]:
    def keep(damage: Damage) -> Damage:
        assert name not in ALL, name
        ALL[name] = store, damage
        return damage

    return keep


def head_field(store: str, name: str) -> None:
    def damage(path: Path, random: Random) -> None:
        file, place, _ = a_record(path, random)
        position, size = at(RECORD_HEAD, name)
        flip(file, place + position, size, random)

    ALL[f"{store}: a record's {name}"] = store, damage


for _store in ("basic", "demo", "broker497"):
    for _name in ("total_size", "magic", "body_crc", "queue_id", "queue_offset", "physical_offset", "body_size"):
        head_field(_store, _name)


def queue_files(store: Path, tree: str = "consumequeue") -> list[Path]:
    return sorted(path for path in (store / tree).rglob("*") if path.is_file() and path.read_bytes().strip(b"\0"))


def unit_field(store: str, tree: str, layout: np.dtype[Any], name: str) -> None:
    def damage(path: Path, random: Random) -> None:
        file = random.choice([one for one in queue_files(path, tree) if "SCHEDULE" not in str(one)])
        data = file.read_bytes()
        step = layout.itemsize
        units = [begin for begin in range(0, len(data) - step + 1, step) if data[begin : begin + step].strip(b"\0")]
        position, size = at(layout, name)
        flip(file, random.choice(units) + position, size, random)

    ALL[f"{store}: {tree} {name}"] = store, damage


for _store in ("basic", "demo"):
    for _name in QUEUE_UNIT.names or ():
        unit_field(_store, "consumequeue", QUEUE_UNIT, _name)
for _name in ("physical_offset", "record_size", "tags_code", "store_timestamp", "base_offset", "message_count"):
    unit_field("batchcq-cqext", "batchconsumequeue", BATCH_UNIT, _name)
for _name in ("unit_size", "tags_code", "store_timestamp"):

    def _ext(path: Path, random: Random, name: str = _name) -> None:
        (file,) = queue_files(path, "consumequeue_ext")
        position, size = at(UNIT_EXT_HEAD, name)
        flip(file, random.randrange(3) * UNIT_EXT_HEAD.itemsize + position, size, random)

    ALL[f"batchcq-cqext: extension {_name}"] = "batchcq-cqext", _ext
for _name in INDEX_HEADER.names or ():

    def _header(path: Path, random: Random, name: str = _name) -> None:
        position, size = at(INDEX_HEADER, name)
        flip(next((path / "index").iterdir()), position, size, random)

    ALL[f"basic: index header {_name}"] = "basic", _header
for _name in INDEX_UNIT.names or ():

    def _index_unit(path: Path, random: Random, name: str = _name) -> None:
        position, size = at(INDEX_UNIT, name)
        flip(next((path / "index").iterdir()), 40 + 400 + random.randrange(2, 60) * 20 + position, size, random)

    ALL[f"basic: index unit {_name}"] = "basic", _index_unit


@named("basic", "an index slot")
def _(path: Path, random: Random) -> None:
    flip(next((path / "index").iterdir()), 40 + random.randrange(100) * 4, 4, random)


@named("demo", "an index slot of many")
def _(path: Path, random: Random) -> None:
    file = next((path / "index").iterdir())
    data = file.read_bytes()
    used = [slot for slot in range(1000) if data[40 + 4 * slot :][:4].strip(b"\0")]
    change(file, 40 + 4 * random.choice(used), bytes(4))


@named("basic", "an index file cut")
def _(path: Path, random: Random) -> None:
    file = next((path / "index").iterdir())
    file.write_bytes(file.read_bytes()[: random.randrange(500, 1500)])


@named("demo", "index units zeroed")
def _(path: Path, random: Random) -> None:
    change(next((path / "index").iterdir()), 40 + 4000 + 20 * random.randrange(2, 3000), bytes(200))


@named("basic", "a body's byte")
def _(path: Path, random: Random) -> None:
    file, place, record = a_record(path, random)
    flip(file, place + RECORD_HEAD.itemsize, len(record.body), random)


@named("demo", "a compressed body's byte")
def _(path: Path, random: Random) -> None:
    file, place, record = random.choice([one for one in records(path) if one[2].sys_flag & 1])
    flip(file, place + RECORD_HEAD.itemsize, len(record.body), random)


@named("batchcq-cqext", "an inner batch's byte")
def _(path: Path, random: Random) -> None:
    file, place, record = a_record(path, random, inner=True)
    flip(file, place + RECORD_HEAD.itemsize, len(record.body), random)


def _tail(record: Record) -> int:
    return record.total_size - len(record.properties) - 2 - len(record.topic) - 1


@named("basic", "the length of a topic")
def _(path: Path, random: Random) -> None:
    file, place, record = a_record(path, random)
    flip(file, place + _tail(record), 1, random)


@named("demo", "a topic's letter")
def _(path: Path, random: Random) -> None:
    file, place, record = a_record(path, random)
    change(file, place + _tail(record) + 1, b"q" if record.topic[:1] != b"q" else b"z")


@named("basic", "the length of properties")
def _(path: Path, random: Random) -> None:
    file, place, record = a_record(path, random)
    flip(file, place + record.total_size - len(record.properties) - 2, 2, random)


@named("demo", "a separator of properties")
def _(path: Path, random: Random) -> None:
    file, place, record = a_record(path, random)
    begin = place + record.total_size - len(record.properties)
    change(file, begin + record.properties.index(b"\x01"), b"x")


@named("demo", "the value of a tag")
def _(path: Path, random: Random) -> None:
    file, place, record = random.choice([one for one in records(path) if b"\x02TAGS\x01" in one[2].properties])
    begin = place + record.total_size - len(record.properties)
    change(file, begin + record.properties.index(b"\x02TAGS\x01") + 6, b"Q")


@named("demo", "the value of a key")
def _(path: Path, random: Random) -> None:
    file, place, record = random.choice([one for one in records(path) if b"\x02KEYS\x01" in one[2].properties])
    begin = place + record.total_size - len(record.properties)
    change(file, begin + record.properties.index(b"\x02KEYS\x01") + 6, b"Q")


@named("propcrc", "any byte of a record with a CRC of its own")
def _(path: Path, random: Random) -> None:
    file, place, record = a_record(path, random)
    flip(file, place + 12, record.total_size - 12, random)


@named("propcrc", "a flag of a record with a CRC of its own")
def _(path: Path, random: Random) -> None:
    file, place, _ = a_record(path, random)
    position, size = at(RECORD_HEAD, "flag")
    flip(file, place + position, size, random)


@named("demo", "bits of sysFlag that mean nothing")
def _(path: Path, random: Random) -> None:
    file, place, _ = a_record(path, random)
    flip(file, place + at(RECORD_HEAD, "sys_flag")[0], 2, random)


@named("demo", "a store time")
def _(path: Path, random: Random) -> None:
    file, place, _ = a_record(path, random)
    change(file, place + at(RECORD_HEAD, "store_timestamp")[0] + 3, bytes([random.randrange(256)]))


@named("basic", "a filler's magic")
def _(path: Path, random: Random) -> None:
    _filler(path, random, 4)


@named("basic", "a filler's length")
def _(path: Path, random: Random) -> None:
    _filler(path, random, 0)


def _filler(path: Path, random: Random, step: int) -> None:
    file = random.choice(segments(path)[:-1])
    data, place = file.read_bytes(), 0
    while isinstance(record := decode_record(data[place:]), Record):
        place += record.total_size
    assert isinstance(record, Blank)
    flip(file, place + step, 4, random)


@named("basic", "a sector zeroed")
def _(path: Path, random: Random) -> None:
    file, place, _ = random.choice([one for one in records(path) if len(one[2].body) > 600])
    change(file, (place + 600) // 512 * 512, bytes(512))


@named("demo", "a page zeroed")
def _(path: Path, random: Random) -> None:
    change(segments(path)[0], 4096 * random.randrange(1, 60), bytes(4096))


@named("demo", "noise in the log")
def _(path: Path, random: Random) -> None:
    change(segments(path)[1], random.randrange(200_000), random.randbytes(700))


@named("basic", "a record copied over another")
def _(path: Path, random: Random) -> None:
    found = [one for one in records(path) if one[2].topic == b"TopicR"]
    (file, place, _), (other, source, record) = random.sample(found, 2)
    change(file, place, other.read_bytes()[source : source + record.total_size])


@named("basic", "the last record's magic")
def _(path: Path, random: Random) -> None:
    file, place, _ = records(path)[-1]
    flip(file, place + 4, 4, random)


@named("basic", "the last record zeroed")
def _(path: Path, random: Random) -> None:
    file, place, record = records(path)[-1]
    change(file, place, bytes(record.total_size))


@named("basic", "a segment missing in the middle")
def _(path: Path, random: Random) -> None:
    random.choice(segments(path)[1:-1]).unlink()


@named("basic", "the last segment missing")
def _(path: Path, random: Random) -> None:
    segments(path)[-1].unlink()


@named("basic", "two segments swapped")
def _(path: Path, random: Random) -> None:
    one, other = random.sample(segments(path), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


@named("basic", "a segment cut")
def _(path: Path, random: Random) -> None:
    file = random.choice(segments(path))
    file.write_bytes(file.read_bytes()[: random.randrange(1, 16000)])


@named("demo", "a foreign file beside segments")
def _(path: Path, random: Random) -> None:
    (path / "commitlog" / "core").write_bytes(b"x")


@named("basic", "a unit zeroed")
def _(path: Path, random: Random) -> None:
    change(path / "consumequeue/TopicR/0/00000000000000000000", 20 * random.randrange(50), bytes(20))


@named("demo", "the last units zeroed")
def _(path: Path, random: Random) -> None:
    file = path / "consumequeue/orders/0/00000000000000000000"
    written = len(file.read_bytes().rstrip(b"\0")) // 20
    change(file, 20 * (written - random.randrange(3)), bytes(60))


@named("basic", "two units swapped")
def _(path: Path, random: Random) -> None:
    file = path / "consumequeue/TopicR/0/00000000000000000000"
    one, other = random.sample(range(50), 2)
    data = file.read_bytes()
    change(file, 20 * one, data[20 * other :][:20])
    change(file, 20 * other, data[20 * one :][:20])


@named("basic", "a unit after the end that refers to a record")
def _(path: Path, random: Random) -> None:
    file = path / "consumequeue/TopicA/0/00000000000000000000"
    change(file, 60, file.read_bytes()[20 * random.randrange(3) :][:20])


@named("preblank", "fill before a queue's first message")
def _(path: Path, random: Random) -> None:
    flip(path / "consumequeue/TopicR/0/00000000000000000000", 20 * random.randrange(17), 12, random)


@named("demo", "a queue's file cut")
def _(path: Path, random: Random) -> None:
    file = random.choice(queue_files(path))
    file.write_bytes(file.read_bytes()[: 20 * random.randrange(1, 100) + random.randrange(20)])


@named("demo", "a queue's folder missing")
def _(path: Path, random: Random) -> None:
    shutil.rmtree(random.choice(queue_files(path)).parent)


@named("basic", "a queue's first file missing")
def _(path: Path, random: Random) -> None:
    (path / "consumequeue/TopicR/0/00000000000000000000").unlink()


@named("demo", "a foreign file beside units")
def _(path: Path, random: Random) -> None:
    (random.choice(queue_files(path)).parent / "MANIFEST").write_bytes(b"x")


@named("batchcq-cqext", "the extension's file missing")
def _(path: Path, random: Random) -> None:
    queue_files(path, "consumequeue_ext")[0].unlink()


@named("batchcq-cqext", "a batch unit zeroed")
def _(path: Path, random: Random) -> None:
    change(queue_files(path, "batchconsumequeue")[0], 46 * random.randrange(3), bytes(46))


@named("demo", "a due time")
def _(path: Path, random: Random) -> None:
    (file,) = [one for one in queue_files(path) if "SCHEDULE_TOPIC_XXXX/0" in str(one)][:1] or [
        next(one for one in queue_files(path) if "SCHEDULE" in str(one))
    ]
    flip(file, 12, 4, random)


for _name in ("physic_msg_timestamp", "logics_msg_timestamp"):

    def _checkpoint(path: Path, random: Random, name: str = _name) -> None:
        position, _ = at(CHECKPOINT_FIELDS, name)
        change(path / "checkpoint", position + 2, bytes([random.randrange(2, 127)]))

    ALL[f"demo: checkpoint {_name}"] = "demo", _checkpoint


@named("demo", "the checkpoint missing")
def _(path: Path, random: Random) -> None:
    (path / "checkpoint").unlink()


@named("demo", "the checkpoint cut")
def _(path: Path, random: Random) -> None:
    (path / "checkpoint").write_bytes((path / "checkpoint").read_bytes()[: random.randrange(1, 4000)])


for _name in ("topics.json", "consumerOffset.json", "subscriptionGroup.json", "delayOffset.json"):

    def _cut_json(path: Path, random: Random, name: str = _name) -> None:
        file = path / "config" / name
        file.write_bytes(file.read_bytes()[: random.randrange(1, len(file.read_bytes().rstrip()) - 1)])

    ALL[f"demo: {_name} cut"] = "demo", _cut_json


@named("demo", "the file of offsets and its copy cut")
def _(path: Path, random: Random) -> None:
    for name in ("consumerOffset.json", "consumerOffset.json.bak"):
        (path / "config" / name).write_bytes(b'{"offsetTable":{')


@named("demo", "a group beyond the end of a queue")
def _(path: Path, random: Random) -> None:
    offsets = {"offsetTable": {"orders@billing": {"0": 10**6 + random.randrange(1000)}}}
    (path / "config" / "consumerOffset.json").write_text(json.dumps(offsets))


@named("demo", "an offset below 0")
def _(path: Path, random: Random) -> None:
    (path / "config" / "delayOffset.json").write_text('{"offsetTable":{3:-7}}')


@named("demo", "the number of a topic's queues")
def _(path: Path, random: Random) -> None:
    file = path / "config" / "topics.json"
    file.write_bytes(file.read_bytes().replace(b'"readQueueNums":4', b'"readQueueNums":-4'))


for _name in ("unit_size", "previous_position", "physical_offset", "record_size", "delay"):

    def _timer_unit(path: Path, random: Random, name: str = _name) -> None:
        position, _ = at(TIMER_UNIT, name)
        change(path / "timerlog/00000000000000000000", 52 * random.randrange(1, 7) + position, b"\x7f")

    if _name != "delay":  # needs the wheel, which this store does not have
        ALL[f"timer: timer log {_name}"] = "timer", _timer_unit
for _name in ("read_time", "log_position", "queue_offset"):

    def _timer_check(path: Path, random: Random, name: str = _name) -> None:
        position, _ = at(TIMER_CHECK, name)
        change(path / "config/timercheck", position, b"\x81" if name == "read_time" else b"\x01")

    ALL[f"timer: timercheck {_name}"] = "timer", _timer_check


@named("timer", "the timer's check missing")
def _(path: Path, random: Random) -> None:
    (path / "config/timercheck").unlink()


@named("ours", "our settings")
def _(path: Path, random: Random) -> None:
    (path / "rmq/settings.json").write_bytes(b"{")


@named("ours", "our note of how far the store was written")
def _(path: Path, random: Random) -> None:
    data = (path / "rmq/watermark").read_bytes()
    slots = [at for at in range(4) if data[at * 8192 :][:8192].strip(b"\0")]
    flip(path / "rmq/watermark", random.choice(slots) * 8192, 200, random)


@named("ours", "a ledger")
def _(path: Path, random: Random) -> None:
    file = next((path / "rmq/ledger").glob("*.json"))
    file.write_bytes(file.read_bytes()[:20])


@named("ours", "the note of the lock's holder")
def _(path: Path, random: Random) -> None:
    (path / "rmq/holder.json").write_bytes(b"{}")


@named("ours", "a unit of ours")
def _(path: Path, random: Random) -> None:
    flip(path / "consumequeue/orders/0/00000000000000000000", 20 * random.randrange(100), 20, random)


@named("ours", "a key of ours")
def _(path: Path, random: Random) -> None:
    (file,) = (path / "index").iterdir()
    with file.open("r+b") as opened:
        opened.seek(40 + 4 * 5_000_000 + 20 * random.randrange(1, 100))
        opened.write(b"\x11\x22\x33")


@named("ours", "the whole key index missing")
def _(path: Path, random: Random) -> None:
    shutil.rmtree(path / "index")


@named("timer", "a slot of the timer wheel")
def _(path: Path, random: Random) -> None:
    wheel = bytearray(gzip.decompress((path / "timerwheel.gz").read_bytes()))
    slots = [at for at in range(0, len(wheel), 32) if wheel[at : at + 8].strip(b"\0")]
    read_ms = int.from_bytes((path / "config/timercheck").read_bytes()[:8], "big")
    waiting = [at for at in slots if int.from_bytes(wheel[at : at + 8], "big") >= read_ms // 1000]
    wheel[random.choice(waiting) + 23] ^= 1 << random.randrange(8)
    (path / "timerwheel").write_bytes(wheel)


for _name in ("checkpoint", "lock", "config/topics.json", "config/delayOffset.json", "commitlog/00000000000000000000"):

    def _folder(path: Path, random: Random, name: str = _name) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    ALL[f"demo: a folder in the place of {_name}"] = "demo", _folder


@named("demo", "a queue's file shorter than those of other queues")
def _(path: Path, random: Random) -> None:
    file = path / "consumequeue/invoices/0/00000000000000000000"
    data = file.read_bytes()
    assert not data[2000:].strip(b"\0")
    file.write_bytes(data[:2000])


@named("demo", "how far compaction has come")
def _(path: Path, random: Random) -> None:
    file = path / "compaction/position-checkpoint"
    file.write_bytes(file.read_bytes()[: random.randrange(1, 37)])


for _file, _table in (
    ("topics.json", b"topicConfigTable"),
    ("consumerOffset.json", b"offsetTable"),
    ("subscriptionGroup.json", b"subscriptionGroupTable"),
    ("delayOffset.json", b"offsetTable"),
):

    def _table_gone(path: Path, random: Random, file: str = _file, table: bytes = _table) -> None:
        data = (path / "config" / file).read_bytes()
        assert data.count(table) == 1
        (path / "config" / file).write_bytes(data.replace(table, table[:3] + b"_" + table[4:]))

    ALL[f"demo: the name of the table in {_file}"] = "demo", _table_gone


def _renamed(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


@named("demo", "the key of a group")
def _(path: Path, random: Random) -> None:
    _renamed(path / "config/subscriptionGroup.json", b'"billing":{', b'"bilking":{')


@named("demo", "the key of a topic")
def _(path: Path, random: Random) -> None:
    _renamed(path / "config/topics.json", b'"orders":{', b'"orderz":{')


@named("demo", "a control character in the key of an offset")
def _(path: Path, random: Random) -> None:
    _renamed(path / "config/consumerOffset.json", b'"orders@', b'"or\x0eers@')


@named("demo", "topics.json missing, and an older one beside it")
def _(path: Path, random: Random) -> None:
    (path / "config/topics.json").unlink()


@named("demo", "topics.json missing, and the one before it")
def _(path: Path, random: Random) -> None:
    (path / "config/topics.json").unlink()
    (path / "config/topics.json.bak").unlink()


@named("demo", "a file of the index twice")
def _(path: Path, random: Random) -> None:
    (file,) = (path / "index").iterdir()
    shutil.copy(file, file.with_name(f"{int(file.name) + 1}"))


@named("demo", "the only file of the index missing")
def _(path: Path, random: Random) -> None:
    next((path / "index").iterdir()).unlink()


@named("demo", "the index's time in the checkpoint")
def _(path: Path, random: Random) -> None:
    change(path / "checkpoint", at(CHECKPOINT_FIELDS, "index_msg_timestamp")[0], b"\x00\x00\x7f")


@named("demo", "the text of a property")
def _(path: Path, random: Random) -> None:
    file, place, record = random.choice([one for one in records(path) if b"region\x01" in one[2].properties])
    begin = place + record.total_size - len(record.properties)
    change(file, begin + record.properties.index(b"region\x01") + 8, b"\xad")


@named("timer", "the timer's check all zeros")
def _(path: Path, random: Random) -> None:
    (path / "config/timercheck").write_bytes(bytes(4096))


@named("timer", "the first file of the timer log missing")
def _(path: Path, random: Random) -> None:
    (path / "timerlog/00000000000000000000").unlink()


@named("ours", "which rows were sent back")
def _(path: Path, random: Random) -> None:
    (path / "rmq/sentback").mkdir()
    (path / "rmq/sentback/query.json").write_bytes(b'{"v": 1, "commits": {"0": [4, "bm90IHpsaWI="]}}')
