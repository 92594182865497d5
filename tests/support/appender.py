"""A writer that appends to a store as a broker does, in small steps, and dies now and then: for tests of readers.

    python -m support.appender STORE --seed 7 --seconds 30 --history FILE

It takes the byte-range lock, writes `abort`, appends records and then their entries, piece by piece with waits in
between, rolls to new segments and queue files, adds topics, deletes its oldest segment, and sometimes dies in the
middle of any of these. Its next life recovers as a broker would, or treats the undispatched tail as broken and moves
the log's end back without erasing the bytes. The history (`appender_log`) records its steps. The same seed repeats
them, up to the moment at which time is up. It keeps its own clock, which is two seconds later in each next life.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from support.appender_files import (
    FileRun,
    blank_for,
    recover_log,
    truncate_log,
    unit_pieces,
)
from support.appender_log import AppenderLog
from support.appender_messages import MessageMaker, batch_topic, messages_of, queue_of
from support.appender_settings import AppenderSettings, WriterDeathError

from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.checkpoint import Checkpoint, encode_abort, encode_checkpoint
from rmq_spark.store.format.config_json import QUEUE_TYPE, TopicConfig, TopicsFile, encode_topics_file
from rmq_spark.store.format.consume_queue_entry import (
    BATCH_UNIT,
    QUEUE_UNIT,
    decode_batch_entries,
    decode_entries,
    encode_batch_entries,
    encode_entries,
)
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.properties import TAGS, parse
from rmq_spark.store.format.record import BLANK_BYTES, Record, decode_record, encode_record
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import FIRST_STORE_MS

_RESTART_MS = 2000
# The bytes by which a broker and readers know an entry: without the hash of the tag, or up to the number of messages.
_TOLD_BYTES = sum(QUEUE_UNIT[name].itemsize for name in (QUEUE_UNIT.names or ())[:2])
_TOLD_BATCH_BYTES = sum(BATCH_UNIT[name].itemsize for name in (BATCH_UNIT.names or ())[:6])


class Appender:
    """One life of a writer: opening recovers, `act` does one random step, `close` shuts down cleanly like a broker.

    A WriterDeathError out of any method ends the life: call `drop`, then open the next. One process at a time.
    """

    def __init__(
        self,
        path: str | Path,
        history: AppenderLog,
        random: Random,
        settings: AppenderSettings | None = None,
        pause: Callable[[float], None] = time.sleep,
        lock: Callable[[int], None] = lambda descriptor: os.lockf(descriptor, os.F_TLOCK, 1),
    ) -> None:
        self._root, self._history, self._random = Path(path), history, random
        self._pause, self._take_lock = pause, lock
        self._settings = settings or AppenderSettings()
        self._log = FileRun(self._root / filenames.COMMIT_LOG, self._settings.segment_bytes, self._step)
        self._queues: dict[QueueKey, FileRun] = {}
        self._next: dict[QueueKey, int] = {}  # next queue offset
        self._units: dict[QueueKey, int] = {}  # next unit number: differs from it in batch consume queues
        self._lock = -1
        self._now_ms = FIRST_STORE_MS
        self._logged_ms = self._dispatched_ms = 0  # store times of the last record, and of the last with a unit
        self._end = 0
        self._topics: set[str] = set()
        largest = self._settings.segment_bytes // 4
        self._maker = MessageMaker(random, self._settings.topics, self._settings.queues, largest)
        (self._root / filenames.COMMIT_LOG).mkdir(parents=True, exist_ok=True)

    def open(self) -> None:
        """Recover the store of the previous life, then take the lock and write `abort`."""
        self._recover()
        self._maker.skip_to(len(self._topics))
        self._lock = os.open(self._root / filenames.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.pwrite(self._lock, b"lock", 0)
        self._take_lock(self._lock)  # byte 0, as DefaultMessageStore#start does
        (self._root / filenames.ABORT).write_bytes(encode_abort(os.getpid()))

    def act(self) -> None:
        """Append one message or a few, or do other work of a broker."""
        dice = self._random.random()
        if dice < 0.02:
            self._expire()
        elif dice < 0.03:
            self._write_checkpoint()
        elif dice < 0.03 + self._settings.batch_chance:
            self.append([self._maker.make() for _ in range(self._random.randint(2, 12))])
        else:
            self.append([self._maker.make()])

    def append(self, messages: Sequence[SampleMessage]) -> None:
        """Append messages as one batch: all records first, then their units in order."""
        records: list[Record] = []
        coming = dict(self._next)
        for message in messages:
            self._know_topic(message.topic)
            offset = coming.get(message.queue, 0)
            records.append(self._log_record(message, offset))
            coming[message.queue] = offset + max(message.message_count, 1)
            self._step()
        for record in records:
            self._dispatch(record)

    def close(self) -> None:
        """Shut down cleanly: dispatch everything, remove the spare segment and `abort`, release the lock."""
        for begin in self._log.begins():
            if begin > self._end:
                self._log.delete(begin)
        self._write_checkpoint()
        (self._root / filenames.ABORT).unlink()
        self.drop()

    def drop(self) -> None:
        """Close every file and release the lock, like the end of a process."""
        for run in (self._log, *self._queues.values()):
            run.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _step(self) -> None:
        """Between two pieces: continue at once, wait, or die."""
        dice = self._random.random()
        if dice < self._settings.death_chance:
            raise WriterDeathError
        if dice < self._settings.pause_chance:
            self._pause(self._random.random() * self._settings.pause_seconds)

    def _log_record(self, message: SampleMessage, offset: int) -> Record:
        size = message.as_record(offset, 0, 0).total_size
        blank = blank_for(self._log, self._end, size)
        if blank is not None:
            self._log.write(self._end, [(0, blank[:4]), (4, blank[4:])])
            self._end = (self._end // self._log.file_bytes + 1) * self._log.file_bytes
        self._log.make(self._end // self._log.file_bytes * self._log.file_bytes)
        if self._random.random() < 0.3:  # the allocator makes the segment after this one in advance
            self._log.make((self._end // self._log.file_bytes + 1) * self._log.file_bytes)
        self._now_ms += self._random.choice((0, 0, 0, 1, 1, 3))
        record = message.as_record(offset, self._end, self._now_ms)
        for written in messages_of(record):
            self._history.written(written)
        self._log.write(self._end, self._cut(encode_record(record)))
        self._end += record.total_size
        self._logged_ms = record.store_timestamp
        return record

    def _cut(self, data: bytes) -> list[tuple[int, bytes]]:
        """Cut a record into pieces, mostly in the order of memcpy; otherwise the first one, with the magic, is last."""
        cuts = {0, len(data), *(self._random.randrange(len(data)) for _ in range(self._random.randrange(4)))}
        pieces = [(begin, data[begin:end]) for begin, end in pairwise(sorted(cuts))]
        if self._random.random() < 0.2:
            self._random.shuffle(pieces)
            pieces.sort(key=lambda piece: piece[0] == 0)
        return pieces

    def _dispatch(self, record: Record) -> None:
        """Write the record's unit, field by field, and acknowledge its messages."""
        key = queue_of(record)
        messages = messages_of(record)
        unit = self._unit_of(record)
        number = self._units.get(key, 0)
        self._queue(key).write(number * len(unit), unit_pieces(unit))
        self._units[key] = number + 1
        self._next[key] = messages[-1].offset + 1
        self._dispatched_ms = record.store_timestamp
        for message in messages:
            self._history.acknowledged(message)

    def _unit_of(self, record: Record) -> bytes:
        tags = parse(record.properties).get(TAGS)
        code = string_hash(tags) if tags else 0
        place, size = [record.physical_offset], [record.total_size]
        if not self._is_batch(queue_of(record)):
            return encode_entries(place, size, [code])
        count = len(messages_of(record))
        return encode_batch_entries(place, size, [code], [record.store_timestamp], [record.queue_offset], [count])

    def _is_batch(self, key: QueueKey) -> bool:
        return key.topic == batch_topic(self._settings.topics)

    def _queue(self, key: QueueKey) -> FileRun:
        if key not in self._queues:
            batch = self._is_batch(key)
            tree = filenames.BATCH_CONSUME_QUEUE if batch else filenames.CONSUME_QUEUE
            folder = self._root / filenames.queue_folder(key.topic, key.queue_id, tree)
            size = self._settings.batch_queue_file_bytes if batch else self._settings.queue_file_bytes
            self._queues[key] = FileRun(folder, size, self._step)
        return self._queues[key]

    def _know_topic(self, topic: str) -> None:
        """Rewrite topics.json for a new topic like 5.x: a copy to .bak, then in place, in pieces."""
        if topic in self._topics:
            return
        topics = {}
        for name in sorted({*self._topics, topic}):
            attributes = {QUEUE_TYPE: "BatchCQ"} if self._is_batch(QueueKey(name, 0)) else {}
            topics[name] = TopicConfig(name, self._settings.queues, self._settings.queues, attributes=attributes)
        text = encode_topics_file(TopicsFile(topics))
        path = self._root / filenames.config_file(filenames.TOPICS_JSON)
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            path.with_name(path.name + filenames.BACKUP_SUFFIX).write_bytes(path.read_bytes())
            with open(path, "wb", buffering=0) as file:
                self._step()
                file.write(text[: len(text) // 2])
                self._step()
                file.write(text[len(text) // 2 :])
        else:
            path.write_bytes(text)
        self._topics.add(topic)

    def _write_checkpoint(self) -> None:
        page = encode_checkpoint(Checkpoint(self._logged_ms, self._dispatched_ms, 0, 0, self._end))
        descriptor = os.open(self._root / filenames.CHECKPOINT, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            for at, data in ((8, page[8:]), (0, page[:8])):
                os.pwrite(descriptor, data, at)
                self._step()
        finally:
            os.close(descriptor)

    def _expire(self) -> None:
        """Delete the oldest segment, then the queue files whose entries all point below the log's begin."""
        begins = self._log.begins()
        if len(begins) <= self._settings.segments_kept:
            return
        self._history.expired(begins[1])
        self._log.delete(begins[0])
        self._step()
        for key, run in self._queues.items():
            unit_bytes = BATCH_UNIT.itemsize if self._is_batch(key) else QUEUE_UNIT.itemsize
            for begin in run.begins()[:-1]:
                last = (run.folder / filenames.segment_name(begin)).read_bytes()[-unit_bytes:]
                if int.from_bytes(last[:8], "big") >= begins[1]:
                    break
                run.delete(begin)
                self._step()

    def _recover(self) -> None:
        """Find the ends; then dispatch records without an entry, or move the log's end back to the first of them."""
        self._find_queues()
        for run in (self._log, *self._queues.values()):
            run.drop_empty()
        recovered = recover_log(self._log)
        self._end = recovered.end
        log_begin = (self._log.begins() or [0])[0]
        for key, run in self._queues.items():
            self._next[key], self._units[key] = _expired_end(run, log_begin, batch=self._is_batch(key))
        if recovered.records:
            self._now_ms = recovered.records[-1].store_timestamp
        self._now_ms += _RESTART_MS
        written = 0
        for record in recovered.records:
            if not self._has_unit(record):
                break
            written += 1
        rest = recovered.records[written:]
        if rest and self._random.random() < 0.5:
            self._end = rest[0].physical_offset
            self._break(rest[0])
            rest = []
        if recovered.records[:written]:
            self._logged_ms = self._dispatched_ms = recovered.records[written - 1].store_timestamp
        # A partly written message does not count, however recovery treats the rest.
        self._history.truncated(self._end)
        truncate_log(self._log, self._end)
        for record in rest:
            self._logged_ms = record.store_timestamp
            self._dispatch(record)

    def _break(self, record: Record) -> None:
        """Zero a part of a record, as if that page had not reached the disk before the power went."""
        begin = self._random.randrange(record.total_size)
        count = self._random.randint(1, record.total_size - begin)
        data = bytearray(encode_record(record))
        data[begin : begin + count] = bytes(count)
        left = decode_record(bytes(data))
        if isinstance(left, Record) and left.crc_matches:
            begin, count = 0, BLANK_BYTES  # it would still do: then its beginning is gone
        self._log.write(record.physical_offset, [(begin, bytes(count))])

    def _find_queues(self) -> None:
        for tree in (filenames.CONSUME_QUEUE, filenames.BATCH_CONSUME_QUEUE):
            for folder in sorted((self._root / tree).glob("*/*")):
                self._queue(QueueKey(folder.parent.name, int(folder.name)))
        path = self._root / filenames.config_file(filenames.TOPICS_JSON)
        known = {key.topic for key in self._queues}
        self._topics = known if path.exists() and path.stat().st_size else set()

    def _has_unit(self, record: Record) -> bool:
        """Return whether the queue ends with the record's entry; if so, advance the end of the queue.

        The fields that are written last do not matter: readers have seen the messages by then, and a broker treats such
        an entry as complete (ConsumeQueue#recover, BatchConsumeQueue#recover, 5.3).
        """
        key = queue_of(record)
        unit, number = self._unit_of(record), self._units.get(key, 0)
        begin, data = self._queue(key).read_all()
        at = number * len(unit) - begin
        told = _TOLD_BATCH_BYTES if self._is_batch(key) else _TOLD_BYTES
        if at < 0 or data[at : at + told] != unit[:told]:
            return False
        self._units[key] = number + 1
        self._next[key] = messages_of(record)[-1].offset + 1
        return True


def _expired_end(run: FileRun, log_begin: int, *, batch: bool) -> tuple[int, int]:
    """Return next offset and next unit number after the units that point before the log's begin."""
    begin, data = run.read_all()
    units = decode_batch_entries(data) if batch else decode_entries(data)
    count = 0
    while count < len(units) and units[count]["record_size"] > 0 and units[count]["physical_offset"] < log_begin:
        count += 1
    number = begin // units.dtype.itemsize + count
    if not batch:
        return number, number
    last = units[count - 1] if count else None
    return (0 if last is None else int(last["base_offset"]) + int(last["message_count"])), number


def run_appender(
    path: str | Path,
    history: AppenderLog,
    seed: int,
    until: Callable[[int], bool],
    settings: AppenderSettings | None = None,
    *,
    close: bool = True,
    **given: Any,
) -> tuple[int, int]:
    """Append until `until(number of acts)` is true, in as many lives as necessary; return acts and lives.

    With `close` the last life shuts down cleanly, otherwise it just ends. `given` goes to every Appender.
    """
    random = Random(seed)
    acts = lives = 0
    while True:
        appender = Appender(path, history, random, settings, **given)
        lives += 1
        try:
            appender.open()
            while not until(acts):
                appender.act()
                acts += 1
            if close:
                appender.close()
        except WriterDeathError:
            continue
        finally:
            appender.drop()
        return acts, lives


def main(arguments: Sequence[str] | None = None) -> int:
    """Append from the command line; prints seed, acts and lives."""
    usual = AppenderSettings()
    parser = argparse.ArgumentParser(prog="appender", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="the store; made if missing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to append")
    parser.add_argument("--history", type=Path, required=True, help="file for what was written")
    parser.add_argument("--segment-bytes", type=int, default=usual.segment_bytes)
    parser.add_argument("--death-chance", type=float, default=usual.death_chance)
    parser.add_argument("--pause-chance", type=float, default=usual.pause_chance)
    parser.add_argument("--crash", action="store_true", help="end without stopping in order")
    options = parser.parse_args(arguments)
    settings = AppenderSettings(
        segment_bytes=options.segment_bytes,
        death_chance=options.death_chance,
        pause_chance=options.pause_chance,
    )
    stop = time.monotonic() + options.seconds
    history = AppenderLog(options.history)
    acts, lives = run_appender(
        options.path,
        history,
        options.seed,
        lambda _: time.monotonic() >= stop,
        settings,
        close=not options.crash,
    )
    history.close()
    sys.stdout.write(f"seed {options.seed}: {acts} acts in {lives} lives\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
