"""Independent decoder of a RocketMQ store, without code of this project: the truth for its tests.

It imports only the standard library (pyarrow's codec only where a body is ZSTD, which Python 3.11
cannot decompress), decodes one message at a time and checks every field that has a redundancy. It is
slow on purpose: it must not share code with the engine that it judges.

    python tests/golden/decode_store.py --write         # rewrite the files in expected/
    python tests/golden/decode_store.py STORE           # print one store

Its rules:

- The log ends at the first position without a complete record, walking from the first segment:
  magic, recomputed length, PHYSICALOFFSET and body CRC must all be right; a BLANK leads to the next
  segment. Stale records after the end do not count (RocketMQ truncates by moving a number).
- A unit is a message only if it refers to a record below the log's end that has the unit's size and
  the queue's topic, queue id and queue offset. The first other unit ends its queue.
- A queue begins at its first unit that points into the log (ConsumeQueue#correctMinOffset, 5.3);
  the fill before a queue that was created in the middle (0, 0x7FFFFFFF, 0) does not count.
- Rows are those of a 5.3 pull consumer (MessageDecoder#decode and #decodeMessage, PullAPIWrapper
  #processPullResult), without MIN_OFFSET and MAX_OFFSET, which depend on the moment of the pull.
  README.md lists, for the rows of an inner batch, which field comes from where.
"""

import argparse
import base64
import hashlib
import ipaddress
import json
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
STORES = ("basic", "propcrc", "crashed", "preblank", "truncated-stale", "batchcq-cqext", "timer")
STORES_OF_BROKERS = ("broker497", "livekill533")  # whole brokers wrote these
DIGESTED = ("demo",)  # too many rows to commit: count, bounds and a digest of each queue instead

MAGIC_V1, MAGIC_V2, MAGIC_BLANK = 0xDAA320A7, 0xDAA320AB, 0xCBD43194
COMPRESSED, BORN_V6, STORE_V6, INNER_BATCH = 0x1, 0x10, 0x20, 0xC0
FILL_SIZE = 0x7FFFFFFF  # the size in the units that fill the space before a queue's first message
LONG_MIN = -(1 << 63)  # consume queue extension: address = position + LONG_MIN
EXT_ADDRESS_MAX = -(1 << 31) - 1


@dataclass(frozen=True)
class Record:
    """One record of the commit log, field by field as stored; hosts as text."""

    physical_offset: int
    size: int
    queue_id: int
    flag: int
    queue_offset: int
    sys_flag: int
    born_ms: int
    born_host: str
    store_ms: int
    store_host: str
    store_host_bytes: bytes
    reconsume_times: int
    prepared_transaction_offset: int
    body: bytes
    topic: str
    properties: bytes


@dataclass(frozen=True)
class Log:
    """The records before the log's end, by physical offset, and why the walk stopped there."""

    begin: int
    end: int
    records: dict[int, Record]
    stopped: str


@dataclass(frozen=True)
class Unit:
    """One unit of a queue: of a consume queue (count 1) or of a batch consume queue."""

    position: int  # bytes from the queue's first unit ever
    physical_offset: int
    size: int
    tags_code: int
    base: int  # queue offset of the first message
    count: int
    store_ms: int | None = None  # batch consume queue only


# --- commit log -----------------------------------------------------------------------------------


class NoRecordError(Exception):
    """No whole record starts here; says why."""


def host(raw: bytes) -> str:
    """`ip:port`, or `[ip]:port` for IPv6. The port takes four bytes."""
    address = ipaddress.ip_address(raw[:-4])
    (port,) = struct.unpack(">i", raw[-4:])
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


def parse_record(segment: bytes, at: int, base: int) -> Record:
    """The record at a position of a segment, or NoRecordError."""
    if len(segment) - at < 91:
        raise NoRecordError("too little space")
    head = struct.unpack_from(">iIiiiqqiq", segment, at)
    size, magic, crc, queue_id, flag, queue_offset, physical, sys_flag, born_ms = head
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise NoRecordError("zeros" if size == magic == 0 else f"magic {magic:#010x}")
    if size < 91 or at + size > len(segment):
        raise NoRecordError(f"size {size}")
    record, p = segment[at : at + size], 48

    def take(count: int) -> bytes:
        nonlocal p
        if count < 0 or p + count > size:
            raise NoRecordError(f"a field of {count} bytes at {p} of {size}")
        p += count
        return record[p - count : p]

    born = take(20 if sys_flag & BORN_V6 else 8)
    (store_ms,) = struct.unpack(">q", take(8))
    stored = take(20 if sys_flag & STORE_V6 else 8)
    reconsume, prepared, body_size = struct.unpack(">iqi", take(16))
    body = take(body_size)
    topic_form = ">b" if magic == MAGIC_V1 else ">h"
    (topic_size,) = struct.unpack(topic_form, take(struct.calcsize(topic_form)))
    topic = take(topic_size)
    (properties_size,) = struct.unpack(">h", take(2))
    properties = take(properties_size)
    if p != size:
        raise NoRecordError(f"fields take {p} bytes of {size}")
    if physical != base + at:
        raise NoRecordError(f"says it is at {physical}")
    if body and zlib.crc32(body) & 0x7FFFFFFF != crc:
        raise NoRecordError("body CRC")
    return Record(
        physical, size, queue_id, flag, queue_offset, sys_flag, born_ms, host(born), store_ms,
        host(stored), stored, reconsume, prepared, body, topic.decode(), properties,
    )  # fmt: skip


def walk_log(store: Path) -> Log:
    """Every record from the first segment to the log's end."""
    segments = {int(f.name): f.read_bytes() for f in sorted((store / "commitlog").iterdir())}
    base = begin = min(segments)
    records: dict[int, Record] = {}
    at = 0
    while True:
        segment = segments[base]
        if at + 8 <= len(segment):
            blank_size, magic = struct.unpack_from(">iI", segment, at)
            if magic == MAGIC_BLANK and base + len(segment) in segments:
                assert blank_size == len(segment) - at, (store, base, at, blank_size)
                base, at = base + len(segment), 0
                continue
        try:
            record = parse_record(segment, at, base)
        except NoRecordError as why:
            return Log(begin, base + at, records, str(why))
        records[base + at] = record
        at += record.size


# --- queues ---------------------------------------------------------------------------------------


def queue_dirs(store: Path, tree: str) -> Iterator[tuple[str, int, Path]]:
    """Topic, queue id and folder of each queue below `consumequeue` or `batchconsumequeue`."""
    root = store / tree
    for topic in sorted(root.iterdir()) if root.is_dir() else ():
        for queue in sorted(topic.iterdir(), key=lambda d: int(d.name)):
            if any(queue.iterdir()):  # git keeps no empty folder, so none may count
                yield topic.name, int(queue.name), queue


def joined(folder: Path) -> tuple[int, bytes]:
    """The files of a queue as one run of bytes, and where in the queue it starts."""
    files = sorted((f for f in folder.iterdir() if f.is_file()), key=lambda f: int(f.name))
    begin = end = int(files[0].name)
    parts = []
    for file in files:
        assert int(file.name) == end, (file, end)
        parts.append(file.read_bytes())
        end += len(parts[-1])
    return begin, b"".join(parts)


def plain_units(folder: Path) -> Iterator[Unit]:
    """The 20-byte units of a consume queue, up to the first that nobody wrote."""
    begin, run = joined(folder)
    for i in range(0, len(run) // 20 * 20, 20):
        physical, size, tags_code = struct.unpack_from(">qiq", run, i)
        if physical < 0 or size <= 0:
            return
        yield Unit(begin + i, physical, size, tags_code, (begin + i) // 20, 1)


def batch_units(folder: Path) -> Iterator[Unit]:
    """The 46-byte units of a batch consume queue, up to the first that nobody wrote."""
    begin, run = joined(folder)
    for i in range(0, len(run) // 46 * 46, 46):
        physical, size, tags_code, store_ms, base, count, compacted, reserved = struct.unpack_from(">qiqqqhii", run, i)
        if physical < 0 or size <= 0 or base < 0 or count <= 0:
            return
        assert (compacted, reserved) == (-1, 0), (folder, i, compacted, reserved)
        yield Unit(begin + i, physical, size, tags_code, base, count, store_ms)


def ext_units(folder: Path) -> dict[int, tuple[int, int, bytes]]:
    """Position -> (tags code, store time, bitmap) of a consume queue extension."""
    found: dict[int, tuple[int, int, bytes]] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        run, at = file.read_bytes(), 0
        while at + 2 <= len(run):
            (size,) = struct.unpack_from(">h", run, at)
            if size < 20:  # -1: the next unit did not fit; 0: nobody wrote here yet
                break
            tags_code, store_ms, bits = struct.unpack_from(">qqh", run, at + 2)
            assert size == 20 + bits, (file, at, size, bits)
            found[int(file.name) + at] = (tags_code, store_ms, run[at + 20 : at + size])
            at += size
    return found


def is_fill(unit: Unit) -> bool:
    return unit.physical_offset == 0 and unit.size == FILL_SIZE


def believed(unit: Unit, log: Log, topic: str, queue_id: int) -> Record | None:
    """The record that a unit points to, if its size, topic and queue agree with the unit."""
    record = log.records.get(unit.physical_offset)
    if record is None or (record.topic, record.queue_id) != (topic, queue_id):
        return None
    if (record.size, record.queue_offset) != (unit.size, unit.base):
        return None
    if unit.store_ms is not None and unit.store_ms != record.store_ms:
        return None
    return record


# --- rows -----------------------------------------------------------------------------------------


def parse_properties(raw: bytes) -> dict[str, str]:
    """MessageDecoder#string2messageProperties: what is empty is lost, the last of equals wins."""
    properties: dict[str, str] = {}
    for pair in raw.decode("utf-8", "replace").split("\x02"):
        name, separator, value = pair.partition("\x01")
        if name and separator and value:
            properties[name] = value
    return properties


def unpack(body: bytes, sys_flag: int) -> bytes:
    """The body as it was before its producer compressed it."""
    kind = sys_flag & 0x700
    if kind in (0, 0x300):
        return zlib.decompress(body)
    if kind == 0x100:
        return unpack_lz4(body)
    assert kind == 0x200, hex(sys_flag)
    import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]

    with pa.input_stream(pa.py_buffer(body), compression="zstd") as stream:
        return bytes(stream.read())


def unpack_lz4(frame: bytes) -> bytes:
    """An LZ4 frame, without looking at its checksums."""
    magic, flags = struct.unpack_from("<IB", frame)
    assert magic == 0x184D2204, hex(magic)
    at = 7 + (8 if flags & 0x08 else 0) + (4 if flags & 0x01 else 0)
    out = bytearray()
    while (size := struct.unpack_from("<I", frame, at)[0]) != 0:
        block = frame[at + 4 : at + 4 + (size & 0x7FFFFFFF)]
        if size >> 31:
            out += block
        else:
            unpack_lz4_block(block, out)
        at += 4 + len(block) + (4 if flags & 0x10 else 0)
    return bytes(out)


def unpack_lz4_block(block: bytes, out: bytearray) -> None:
    """Literals, then a copy from what is already out; again and again, the last without a copy."""

    def more(nibble: int) -> int:
        nonlocal at
        length = nibble
        while nibble == 15:  # 15 says: a byte follows, 255 says: and another one
            length += block[at]
            nibble = 15 if block[at] == 255 else 0
            at += 1
        return length

    at = 0
    while at < len(block):
        token = block[at]
        at += 1
        literals = more(token >> 4)
        out += block[at : at + literals]
        at += literals
        if at < len(block):
            distance = block[at] | block[at + 1] << 8
            at += 2
            for _ in range(more(token & 15) + 4):
                out.append(out[-distance])


def inner_messages(record: Record, properties: dict[str, str]) -> list[Record]:
    """The messages of an inner batch as records of their own (MessageDecoder#decodeMessage, 5.3).

    The item gives flag, body and properties, the outer record all else; reconsumeTimes is 0 again.
    """
    # Message#setWaitStoreMsgOK, called with the outer record's, writes a property into each.
    wait = properties.get("WAIT", "true").lower() == "true"
    found: list[Record] = []
    body, at = record.body, 0
    while at < len(body):
        size, _magic, _crc, flag, body_size = struct.unpack_from(">iiiii", body, at)
        (properties_size,) = struct.unpack_from(">h", body, at + 20 + body_size)
        assert size == 22 + body_size + properties_size, (record.physical_offset, at, size)
        end = at + size
        found.append(
            replace(
                record,
                flag=flag,
                queue_offset=record.queue_offset + len(found),
                reconsume_times=0,
                body=body[at + 20 : at + 20 + body_size],
                properties=body[end - properties_size : end] + f"\x02WAIT\x01{str(wait).lower()}\x02".encode(),
            )
        )
        at = end
    assert len(found) == int(properties["INNER_NUM"]), record.physical_offset
    assert record.queue_offset == int(properties["INNER_BASE"]), record.physical_offset
    return found


def row_of(record: Record) -> dict[str, object]:
    """All columns of one message. Times in ms, the body in base64."""
    properties = parse_properties(record.properties)
    body = record.body
    if body and record.sys_flag & COMPRESSED:
        body = unpack(body, record.sys_flag)
    offset_id = (record.store_host_bytes + struct.pack(">q", record.physical_offset)).hex().upper()
    topic = record.topic
    if topic.startswith("%RETRY%"):
        topic = properties.get("RETRY_TOPIC", topic)
    return {
        "topic": topic,
        "queueId": record.queue_id,
        "queueOffset": record.queue_offset,
        "commitLogOffset": record.physical_offset,
        "tags": properties.get("TAGS"),
        "keys": properties.get("KEYS"),
        "body": base64.b64encode(body).decode(),
        "bornTimestamp": record.born_ms,
        "storeTimestamp": record.store_ms,
        "reconsumeTimes": record.reconsume_times,
        "properties": dict(sorted(properties.items())),
        "msgId": properties.get("UNIQ_KEY", offset_id),
        "offsetMsgId": offset_id,
        "bornHost": record.born_host,
        "storeHost": record.store_host,
        "flag": record.flag,
        "sysFlag": record.sys_flag,
        "physicalTopic": record.topic,
    }


def rows_of(record: Record, count: int) -> list[dict[str, object]]:
    """The rows of one record: one, or those of its inner batch."""
    if record.sys_flag & INNER_BATCH != INNER_BATCH:
        assert count == 1, record.physical_offset
        return [row_of(record)]
    messages = inner_messages(record, parse_properties(record.properties))
    assert count == len(messages), record.physical_offset
    return [row_of(message) for message in messages]


# --- a store --------------------------------------------------------------------------------------


def decode_queue(store: Path, tree: str, topic: str, queue_id: int, log: Log) -> dict[str, object]:
    """Bounds, rows, the tags code of each row; how many units were fill, expired, not believed."""
    folder = store / tree / topic / str(queue_id)
    units = list((plain_units if tree == "consumequeue" else batch_units)(folder))
    extension = ext_units(store / "consumequeue_ext" / topic / str(queue_id))
    fill = sum(is_fill(u) for u in units)
    alive = [u for u in units if not is_fill(u) and u.physical_offset >= log.begin]
    expired = len(units) - fill - len(alive)
    rows: list[dict[str, object]] = []
    codes: list[int] = []
    believed_units = 0
    first = units[-len(alive)].base if alive else units[-1].base + units[-1].count if units else 0
    for unit in alive:
        record = believed(unit, log, topic, queue_id)
        if record is None:
            break
        believed_units += 1
        rows += rows_of(record, unit.count)
        code = unit.tags_code
        if code <= EXT_ADDRESS_MAX and extension:
            code, store_ms, _bitmap = extension[code - LONG_MIN]
            assert store_ms == record.store_ms, (topic, unit)
        codes += [code] * unit.count
    offsets = [row["queueOffset"] for row in rows]
    assert offsets == list(range(first, first + len(rows))), (topic, queue_id, offsets)
    return {
        "tree": tree,
        "min": first,
        "max": first + len(rows),
        "units": {
            "fill": fill,
            "expired": expired,
            "believed": believed_units,
            "stale": len(alive) - believed_units,
        },
        "tagsCodes": codes,
        "rows": rows,
    }


def decode_store(store: Path) -> dict[str, object]:
    """The whole store: what its log holds, and topic -> queue id -> bounds and rows."""
    log = walk_log(store)
    topics: dict[str, dict[str, object]] = {}
    for tree in ("consumequeue", "batchconsumequeue"):
        for topic, queue_id, _folder in queue_dirs(store, tree):
            queue = decode_queue(store, tree, topic, queue_id, log)
            topics.setdefault(topic, {})[str(queue_id)] = queue
    return {
        "log": {
            "begin": log.begin,
            "end": log.end,
            "records": len(log.records),
            "stopped": log.stopped,
        },
        "topics": dict(sorted(topics.items())),
    }


# --- expected/ ------------------------------------------------------------------------------------


def line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def digest(decoded: dict) -> dict[str, object]:
    """The same with the rows of a queue replaced by their count and the SHA-256 of their lines."""
    topics = {}
    for topic, queues in decoded["topics"].items():
        topics[topic] = {}
        for queue_id, queue in queues.items():
            lines = "".join(line(row) + "\n" for row in queue["rows"])
            kept = {k: v for k, v in queue.items() if k not in ("rows", "tagsCodes")}
            kept["count"] = len(queue["rows"])
            kept["sha256"] = hashlib.sha256(lines.encode()).hexdigest()
            topics[topic][queue_id] = kept
    return {"log": decoded["log"], "topics": topics}


def render(decoded: dict) -> str:
    """JSON with one line a row, so that a changed row is a changed line."""
    out = ['{"log": ' + line(decoded["log"]) + ',\n"topics": {']
    for t, (topic, queues) in enumerate(decoded["topics"].items()):
        out.append((",\n" if t else "\n") + line(topic) + ": {")
        for q, (queue_id, queue) in enumerate(queues.items()):
            small = line({k: v for k, v in queue.items() if k != "rows"})[:-1]
            out.append((",\n " if q else "\n ") + line(queue_id) + ": " + small)
            if "rows" in queue:
                rows = ",\n  ".join(line(row) for row in queue["rows"])
                out.append(', "rows": [' + ("\n  " + rows + "\n " if rows else "") + "]")
            out.append("}")
        out.append("}")
    return "".join(out) + "\n}}\n"


def expected_of(name: str) -> dict:
    """The contents of expected/<name>.json, computed from the store."""
    decoded = decode_store(HERE / name)
    return digest(decoded) if name in DIGESTED else decoded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", nargs="?", type=Path, help="a store to print, as JSON")
    parser.add_argument("--write", action="store_true", help="rewrite expected/")
    options = parser.parse_args()
    if options.write:
        for name in (*STORES, *STORES_OF_BROKERS, *DIGESTED):
            if (HERE / name).is_dir():
                target = HERE / "expected" / f"{name}.json"
                target.write_text(render(expected_of(name)), encoding="utf-8")
    elif options.store:
        sys.stdout.write(render(decode_store(options.store)))
    else:
        parser.error("a store or --write")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
