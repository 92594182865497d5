"""rmq-spark's own files in `rmq/`, which a broker ignores: holder, settings, watermark and rebuild.

`rmq/holder.json` names the process that holds the store's lock. Processes that wait for the lock show this name in
their messages, because the kernel does not report the owner (fcntl's F_GETLK returns -1). The file itself does not lock
the store. After a crash it names a dead process.

`rmq/settings.json` contains the version of these files, the store's id, retention limits, file sizes and delays.

`rmq/watermark` records up to which physical offset the store was written. A broker scans the log to find its end, and
to find messages that have no entries yet. With the watermark, rmq-spark does not need this scan. It trusts a watermark
only if the last record is still at its position, no record follows it, and the checkpoint is unchanged.
The file has four slots. Each slot contains a CRC and a line of JSON:
- Every write session writes one of the first two slots, alternately and without fsync. They survive the death of a
  process. After a power cut they may be lost, or they may be newer than the other files. So they are not trusted if the
  field `boot` shows that the machine was restarted since then.
- A session that ends with a clean shutdown flushes the store and marks it as settled. It writes one of the other two
  slots, alternately, and fsyncs this slot. These slots survive a power cut.
- A torn write damages only one slot of a pair.
- Before each fsync of the store's files, the writer writes a watermark with the mark `is_syncing`, and after the fsync
  it writes a watermark that does not have this mark. If the fsync fails, Linux reports the failure only once and to one
  process, and the next fsync of the same file succeeds although the data is not on disk. The mark remains after the
  process that got the error has ended. Writing it needs no free space on the disk. After the next boot the mark has no
  meaning, because all data that can then be read is on disk.

`rmq/rebuild` lists the files that a repair rebuilds from the log. The repair creates it before it removes the first of
these files, and removes it when all of them are complete. Its content is one line: a CRC-32 (8 hex digits) and a JSON
object.

| field | meaning |
| --- | --- |
| `v` | version of the format |
| `queues` | queues whose entries are rebuilt: queue ids by topic |
| `index` | whether the key index is rebuilt |
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.index_file import IndexState
from rmq_spark.store.format.side_file import parse_json
from rmq_spark.store.model import QueueKey

VERSION = 1


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that acquired the store's lock at `since_ms` (ms since the epoch).

    `progress` is the number of steps that the process has made since it acquired the lock.
    """

    host: str
    boot_id: str
    pid_space: str
    pid: int
    start_ticks: int
    application: str  # a name for users: the Spark application's name
    since_ms: int
    progress: int = 0


_TYPES = {field.name: field.type for field in fields(Holder)}


def encode_holder(holder: Holder) -> bytes:
    """Return the content of `rmq/holder.json`."""
    return json.dumps({"v": VERSION, **asdict(holder)}).encode()


def decode_holder(data: bytes) -> Holder | None:
    """Decode the content of `rmq/holder.json`. Returns None if it is damaged or has another version. Never raises."""
    try:
        value = parse_json(data)
        if value.pop("v") != VERSION or any(type(value[name]) is not kind for name, kind in _TYPES.items()):
            return None
        return Holder(**value)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


BROKER_VERSIONS = ("4.9", "5")
TIMER_MAX_DELAY_S = 259_200  # MessageStoreConfig#timerMaxDelaySec (5.3)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A store's id, its retention limits, file sizes and delays. None means that a setting is not set.

    `retention_ms` limits the age of messages and `retention_bytes` the size of the log; None means no limit.
    `file_sizes` maps names of sizes to bytes. A writer needs these sizes to create the store's first files. They are {}
    if a broker created the store. `delay_levels` is the `messageDelayLevel`. `timer_max_delay_s` is the maximum delay
    of a timed message (s). `broker_version` is the version of the brokers that will open the store, one of
    BROKER_VERSIONS.
    """

    store_id: str
    retention_ms: int | None = None
    retention_bytes: int | None = None
    file_sizes: Mapping[str, int] = field(default_factory=dict)
    delay_levels: str | None = None
    timer_max_delay_s: int | None = None
    broker_version: str | None = None

    @property
    def levels(self) -> DelayLevels:
        """The store's table of delay levels. If `delay_levels` is not set, RocketMQ's default table."""
        return DEFAULT_DELAY_LEVELS if self.delay_levels is None else DelayLevels.parse(self.delay_levels)

    @property
    def timer_max_delay_ms(self) -> int:
        """The maximum delay of a timed message (ms). If `timer_max_delay_s` is not set, RocketMQ's default."""
        return 1000 * (TIMER_MAX_DELAY_S if self.timer_max_delay_s is None else self.timer_max_delay_s)


@dataclass(frozen=True, slots=True)
class DelayTerms:
    """The delay settings that a caller gives when it opens a store. None keeps the setting of the store."""

    levels: DelayLevels | None = None
    timer_max_delay_s: int | None = None
    broker_version: str | None = None  # one of BROKER_VERSIONS

    def applied_to(self, settings: StoreSettings) -> StoreSettings:
        """Return `settings` with these delay settings. Returns the same object if nothing changes."""
        changed = settings
        if self.levels not in (None, settings.levels):
            changed = replace(changed, delay_levels=None if self.levels is None else self.levels.text)
        if self.timer_max_delay_s is not None and 1000 * self.timer_max_delay_s != settings.timer_max_delay_ms:
            changed = replace(changed, timer_max_delay_s=self.timer_max_delay_s)
        if self.broker_version not in (None, settings.broker_version):
            changed = replace(changed, broker_version=self.broker_version)
        return changed


@dataclass(frozen=True, slots=True)
class OtherVersion:
    """The settings file has the format version `version`, which this release cannot read."""

    version: object


def encode_settings(settings: StoreSettings) -> bytes:
    """Return the content of `rmq/settings.json`."""
    value = {
        "v": VERSION,
        "storeId": settings.store_id,
        "retentionMs": settings.retention_ms,
        "retentionBytes": settings.retention_bytes,
        "fileSizes": dict(settings.file_sizes),
        "messageDelayLevel": settings.delay_levels,
        "timerMaxDelaySec": settings.timer_max_delay_s,
        "brokerVersion": settings.broker_version,
    }
    return json.dumps(value, indent=2).encode() + b"\n"


def decode_settings(data: bytes) -> StoreSettings | OtherVersion:
    """Decode the content of `rmq/settings.json`.

    Returns OtherVersion if the format has another version. Raises ValueError if the settings are invalid.
    """
    value = parse_json(data)
    try:
        if value["v"] != VERSION:
            return OtherVersion(value["v"])
        sizes = dict(value.get("fileSizes", {}))
        settings = StoreSettings(
            value["storeId"],
            value.get("retentionMs"),
            value.get("retentionBytes"),
            sizes,
            value.get("messageDelayLevel"),
            value.get("timerMaxDelaySec"),
            value.get("brokerVersion"),
        )
        _check_types(settings)
        _check_delays(settings)
    except (AttributeError, KeyError, TypeError, OptionError) as error:
        raise ValueError(f"invalid settings of a store: {error}") from error
    return settings


def _check_types(settings: StoreSettings) -> None:
    if type(settings.store_id) is not str:
        raise TypeError(f"storeId is {settings.store_id!r}")
    limits: dict[str, Any] = {"retentionMs": settings.retention_ms, "retentionBytes": settings.retention_bytes}
    numbers = {**{name: limit for name, limit in limits.items() if limit is not None}, **settings.file_sizes}
    for name, number in numbers.items():
        if type(number) is not int or number < 0:
            raise TypeError(f"{name} is {number!r}")


def _check_delays(settings: StoreSettings) -> None:
    if settings.delay_levels is not None:
        DelayLevels.parse(settings.delay_levels)
    longest: Any = settings.timer_max_delay_s
    if longest is not None and (type(longest) is not int or longest < 0):
        raise TypeError(f"timerMaxDelaySec is {longest!r}")
    if settings.broker_version not in (None, *BROKER_VERSIONS):
        raise TypeError(f"brokerVersion is {settings.broker_version!r}")


SLOT_BYTES = 8 << 10
SLOT_COUNT = 4
_CRC_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Watermark:
    """The state of a store at the end of a write session. Offsets are bytes in the commit log, times are ms.

    All messages before `end` have their consume-queue and index entries. All data before `settled_end` is durable.
    `dirty` lists the files that were changed and not yet fsynced; it is None if these files are too many to list. A
    store is settled if everything was fsynced and the store was marked as cleanly shut down.
    """

    end: int
    last_ms: int  # store time of the last message, -1 if the store has no message
    last_place: int  # physical offset of the last record, -1 if the log has no record
    last_head: bytes  # the first bytes of that record
    boot: str  # the kernel's boot id and the name of the machine
    checkpoint_crc: int  # CRC-32 of the content of the file `checkpoint` after the session
    settled_end: int
    is_open: bool = False  # a write session has begun at `end` and not ended: its writer is still active, or it died
    logged_end: int = 0  # while `is_open`: `end`, or the end of the session's records after all of them were written
    dirty: tuple[str, ...] | None = ()
    index: IndexState = field(default_factory=IndexState)
    number: int = 0  # each watermark has the next number, so the newest one has the highest
    settled_number: int = 0  # the number of settled watermarks so far
    is_syncing: bool = False  # an fsync of the files in `dirty` has begun; if no writer is active, it may have failed

    @property
    def is_settled(self) -> bool:
        """Return whether the store is settled: it was flushed and marked clean, and nothing was written since."""
        return not self.is_open and not self.is_syncing and self.end == self.settled_end and self.dirty == ()


# Not `asdict`, which takes longer than all the rest of writing a watermark.
_FIELDS = tuple(field.name for field in fields(Watermark))
_INDEX_FIELDS = tuple(field.name for field in fields(IndexState))


def encode_slot(watermark: Watermark) -> tuple[int, bytes]:
    """Return the slot of a watermark: its position in the file (bytes) and its content."""
    value: dict[str, Any] = {"v": VERSION, **{name: getattr(watermark, name) for name in _FIELDS}}
    index = {name: getattr(watermark.index, name) for name in _INDEX_FIELDS}
    value |= {"last_head": watermark.last_head.hex(), "index": index}
    text = json.dumps(value).encode()
    if len(text) > SLOT_BYTES - _CRC_DIGITS - 1:
        text = json.dumps({**value, "dirty": None}).encode()  # too many files
    slot = _with_crc(text)
    assert len(slot) <= SLOT_BYTES, len(slot)
    number = 2 + watermark.settled_number % 2 if watermark.is_settled else watermark.number % 2
    return number * SLOT_BYTES, slot.ljust(SLOT_BYTES, b"\0")


class OpenSlots:
    """Encodes watermarks of an open session faster than `encode_slot`. Most of their fields are those of `begin`."""

    def __init__(self, begin: Watermark) -> None:
        assert begin.is_open, begin
        first, last = {"boot": begin.boot, "checkpoint_crc": begin.checkpoint_crc}, {"dirty": begin.dirty}
        first |= {"settled_end": begin.settled_end, "is_open": True}
        _, slot = encode_slot(begin)
        text = slot.rstrip(b"\0")[_CRC_DIGITS:-1]
        if json.loads(text)["dirty"] is None:
            last = {"dirty": None}  # they may be too many
        self._first, self._last = json.dumps(first)[1:-1], json.dumps(last)[1:-1]
        index = asdict(begin.index)
        self._index = json.dumps({name: index.pop(name) for name in ("name", "slot_count", "unit_count")})[:-1]
        self._end = f'"settled_number": {begin.settled_number}, "is_syncing": {json.dumps(begin.is_syncing)}}}'

    def encode(self, watermark: Watermark) -> tuple[int, bytes]:
        """Return what `encode_slot` returns.

        `watermark` differs from `begin` only in its end, last message, logged end, number, and the header of the index.
        """
        index = watermark.index
        text = (
            f'{{"v": {VERSION}, "end": {watermark.end}, "last_ms": {watermark.last_ms}, '
            f'"last_place": {watermark.last_place}, "last_head": "{watermark.last_head.hex()}", {self._first}, '
            f'"logged_end": {watermark.logged_end}, {self._last}, "index": {self._index}, '
            f'"begin_timestamp": {index.begin_timestamp}, "end_timestamp": {index.end_timestamp}, '
            f'"begin_physical_offset": {index.begin_physical_offset}, '
            f'"end_physical_offset": {index.end_physical_offset}, "used_slot_count": {index.used_slot_count}, '
            f'"next_unit": {index.next_unit}}}, "number": {watermark.number}, {self._end}'
        ).encode()
        return watermark.number % 2 * SLOT_BYTES, _with_crc(text).ljust(SLOT_BYTES, b"\0")


def decode_slots(data: bytes) -> tuple[Watermark | None, Watermark | None]:
    """Return the newest watermark in the file, and the newest settled watermark. Never raises.

    Either one is None if no slot contains a readable watermark of this kind.
    """
    found = [_decode_slot(data[at * SLOT_BYTES : (at + 1) * SLOT_BYTES]) for at in range(SLOT_COUNT)]
    return _newest(found), _newest(found[2:])


def _newest(found: Sequence[Watermark | None]) -> Watermark | None:
    return max((one for one in found if one is not None), key=lambda one: one.number, default=None)


def _with_crc(text: bytes) -> bytes:
    """Return a line of the text's CRC-32 (8 hex digits) and then the text."""
    return b"%0*x" % (_CRC_DIGITS, zlib.crc32(text)) + text + b"\n"


def _decode_slot(slot: bytes) -> Watermark | None:
    line = slot.partition(b"\n")[0]
    text = line[_CRC_DIGITS:]
    if line[:_CRC_DIGITS] != b"%0*x" % (_CRC_DIGITS, zlib.crc32(text)):
        return None
    try:
        value = parse_json(text)
        if value.pop("v") != VERSION:
            return None
        dirty, index = value.pop("dirty"), value.pop("index")
        head = bytes.fromhex(value.pop("last_head"))
        return Watermark(
            last_head=head, dirty=None if dirty is None else tuple(dirty), index=IndexState(**index), **value
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


@dataclass(frozen=True, slots=True)
class Rebuild:
    """The files that a repair rebuilds from the log: the entries of `queues`, and if `has_index`, the key index."""

    queues: frozenset[QueueKey] = frozenset()
    has_index: bool = False


def encode_rebuild(rebuild: Rebuild) -> bytes:
    """Return the content of `rmq/rebuild`."""
    by_topic: dict[str, list[int]] = {}
    for key in sorted(rebuild.queues):
        by_topic.setdefault(key.topic, []).append(key.queue_id)
    value = {"v": VERSION, "queues": by_topic, "index": rebuild.has_index}
    return _with_crc(json.dumps(value, separators=(",", ":")).encode())


def decode_rebuild(data: bytes) -> Rebuild | None:
    """Decode the content of `rmq/rebuild`. Returns None if it is damaged or has another version. Never raises."""
    text = data[_CRC_DIGITS:-1]
    if data[:_CRC_DIGITS] != b"%0*x" % (_CRC_DIGITS, zlib.crc32(text)):
        return None
    try:
        value = parse_json(text)
        if value["v"] != VERSION:
            return None
        queues = frozenset(QueueKey(str(topic), int(one)) for topic, ids in value["queues"].items() for one in ids)
        return Rebuild(queues, bool(value["index"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
