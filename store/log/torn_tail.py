"""Where a power cut, or a failed sync, tore the log: records followed by their lengths and looked at one by one."""

from collections.abc import Callable
from itertools import pairwise

from rmq_spark.store.format.record import Blank, Record
from rmq_spark.store.log.commit_log import CommitLog

_SECTOR_BYTES = 512  # the least that a disk writes whole


def whole_end(log: CommitLog, begin: int, note_progress: Callable[[], None] = lambda: None) -> int:
    """Return where the first record from `begin` on begins that a power cut left in part.

    It may leave the head and the body of a record and zeros for its properties, which no CRC covers; and of a filler
    that lies across a sector's edge the magic without the length, or something older before the magic. It is whole
    only if its length reaches just to the end of its segment.
    """
    place, doubtful = walk_whole(log, begin, None, note_progress)
    return doubtful[0] if doubtful else place


def walk_whole(log: CommitLog, begin: int, end: int | None, note_progress: Callable[[], None]) -> tuple[int, list[int]]:
    """Return where the first record in [begin, end) begins that is torn, and which whole ones before it lack a sector.

    Without `end` the walk goes on to where the log ends, or a sector is missing.
    """
    place, doubtful = begin, list[int]()
    while end is None or place < end:
        note_progress()
        record = log.record_at(place)
        if isinstance(record, Blank):
            segment = log.segments.holding(place)
            is_whole = segment is not None and place + record.remaining_size == segment.end
            if segment is None or not is_whole or log.segments.after(segment) is None:
                break
            place = segment.end
        elif not isinstance(record, Record) or not record.crc_matches:
            break
        else:
            if _lacks_a_sector(log, record):
                doubtful.append(place)
                if end is None:
                    break
            place += record.total_size
    return place, doubtful


def _lacks_a_sector(log: CommitLog, record: Record) -> bool:
    """Say whether a sector of a record's topic and properties, or its share of one, is nothing but zeros.

    A power cut leaves that. So does a property of hundreds of NUL characters, which is not told apart from it.
    """
    segment = log.segments.holding(record.physical_offset)
    assert segment is not None, record.physical_offset
    end = record.physical_offset - segment.begin + record.total_size
    tail = log.bytes_at(record.physical_offset, record.total_size)[-(len(record.topic) + len(record.properties)) :]
    begin = end - len(tail)
    edges = [begin, *range(begin // _SECTOR_BYTES * _SECTOR_BYTES + _SECTOR_BYTES, end, _SECTOR_BYTES), end]
    return any(not tail[one - begin : other - begin].strip(b"\0") for one, other in pairwise(edges))
