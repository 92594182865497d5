"""`rmq/delivery/timer.json`: what we last wrote into `config/timercheck`, so that we see that a broker wrote it since.

A broker says up to a second late how far it delivered, and killed in a second's messages it says nothing of those that
it delivered already. So after one was here everything that it may have delivered is in doubt, and looked for in its
queue before it is delivered (`timer_doubt.py`). What is in doubt lies before the log's end as we found it.

A crash between check and mark looks like a broker: that costs the look, and nothing else.
"""

from dataclasses import asdict, dataclass

from rmq_spark.store.commit.side_file import encode_side_file, number_of, read_side_file
from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.timer_check import TimerCheck
from rmq_spark.store.log.watermark_file import SIDE_FOLDER

_NAME = "timer.json"
_NEXT_STEP = "Remove the file: it is written again when the timer is."


@dataclass(frozen=True, slots=True)
class Doubt:
    """What a broker may have delivered without saying so: messages due before `until_ms`.

    Their copies lie before the physical offset `end`.
    """

    end: int = 0
    until_ms: int = 0

    def covers(self, slot_ms: int) -> bool:
        """Say whether messages of this second may have been delivered."""
        return slot_ms < self.until_ms


@dataclass(frozen=True, slots=True)
class TimerMark:
    """What we wrote: the check's fields but for one that is written alone; what no check says; in which boot."""

    read_time: int
    log_position: int
    queue_offset: int
    version_counter: int
    version_timestamp: int
    part: int  # of the second `read_time` the units up to this position were delivered
    boot: str
    doubt: Doubt

    @classmethod
    def of(cls, check: TimerCheck, part: int, boot: str, doubt: Doubt) -> "TimerMark":
        """Return the mark for a check."""
        return cls(
            check.read_time,
            check.log_position,
            check.queue_offset,
            check.version_counter,
            check.version_timestamp,
            part,
            boot,
            doubt,
        )

    def is_of(self, check: TimerCheck | None) -> bool:
        """Say whether this check is what we wrote last."""
        return check is not None and self == TimerMark.of(check, self.part, self.boot, self.doubt)


class TimerMarkFile:
    """The mark on disk."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._folder, self._disk = files.join(root, SIDE_FOLDER, "delivery"), disk
        self._path = files.join(self._folder, _NAME)

    def read(self) -> TimerMark | None:
        """Return the mark; None without one that can be read, which a power cut may leave."""
        try:
            return read_side_file(self._path, "says how far the timer was taken", _NEXT_STEP, _build)
        except DamageError:
            return None

    def write(self, mark: TimerMark) -> None:
        """Have it say this, not for good: behind a power cut it may be gone, or an older one."""
        self._disk.make_folder(self._folder)
        self._disk.replace_unsynced(self._path, encode_side_file(asdict(mark)))


def _build(fields: dict[str, object]) -> TimerMark:
    doubt = fields["doubt"]
    if not isinstance(doubt, dict) or not isinstance(fields["boot"], str):
        raise TypeError("doubt or boot")
    return TimerMark(
        number_of(fields, "read_time"),
        number_of(fields, "log_position"),
        number_of(fields, "queue_offset"),
        number_of(fields, "version_counter"),
        number_of(fields, "version_timestamp"),
        number_of(fields, "part", least=-1),
        fields["boot"],
        Doubt(number_of(doubt, "end"), number_of(doubt, "until_ms")),
    )
