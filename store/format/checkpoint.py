"""The files `checkpoint` and `abort` of a broker.

`checkpoint` contains the store times (and, in 5.x, offsets) up to which the broker has flushed its files. The file is
one page of 4096 bytes: five longs, then zeros. Brokers of 4.9 write only the first three longs. A running broker
overwrites the page in place. Source: StoreCheckpoint (4.9, 5.3).

`abort` exists while a broker runs, and a clean shutdown removes it. If it exists although no broker runs, the broker
crashed. Brokers of 5.x write their process id into the file in ASCII, and brokers of 4.9 leave the file empty.
Source: DefaultMessageStore#createTempFile.
"""

from dataclasses import dataclass, field

import numpy as np

_MAX_PID_DIGITS = 10  # a longer number is not a process id


def decode_abort(content: bytes) -> int | None:
    """Return the process id in the content of `abort`, that of the broker that wrote it.

    Returns None if the content is not a process id. Never raises.
    """
    digits = content.strip()
    if not digits.isdigit() or len(digits) > _MAX_PID_DIGITS:
        return None
    return int(digits)


def encode_abort(pid: int | None) -> bytes:
    """Return the content of `abort` for a process id. If `pid` is None, the content is empty, as in 4.9."""
    assert pid is None or pid > 0, pid
    return b"" if pid is None else str(pid).encode()


CHECKPOINT_FIELDS = np.dtype(
    [
        ("physic_msg_timestamp", ">i8"),  # ms: store time of the last message in a flush of the log
        ("logics_msg_timestamp", ">i8"),  # ms: store time of the last message with an entry in a queue
        ("index_msg_timestamp", ">i8"),  # ms: end of the last index file that was full and flushed
        ("master_flushed_offset", ">i8"),  # 5.x, physical offset; 0 if the broker is not replicated
        ("confirm_phy_offset", ">i8"),  # 5.x, physical offset up to which readers may read; may lag
    ]
)


assert CHECKPOINT_FIELDS.itemsize == 40
CHECKPOINT_FILE_BYTES = 4096
# A broker flushes queues some time after the log, so recovery begins this much before the checkpoint's times.
_MARGIN_MS = 3000
# The clocks of two machines that write a store may differ, but by less than a day. A time that is further ahead is
# damage, not the time of a clock.
CLOCKS_DIFFER_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The fields of the file `checkpoint`: times in ms, offsets in bytes of the commit log. An unset field is 0.

    `path` is used in error messages: the file from which the fields were read, or "" if they were not read.
    """

    physic_msg_timestamp: int = 0
    logics_msg_timestamp: int = 0
    index_msg_timestamp: int = 0
    master_flushed_offset: int = 0
    confirm_phy_offset: int = 0
    path: str = field(default="", compare=False)

    @property
    def min_timestamp(self) -> int:
        """Return the time (ms) up to which log and queues are durable (StoreCheckpoint#getMinTimestamp)."""
        return max(min(self.physic_msg_timestamp, self.logics_msg_timestamp) - _MARGIN_MS, 0)


def decode_checkpoint(page: bytes, path: str = "") -> Checkpoint:
    """Decode the content of the checkpoint file at `path`.

    Never raises. If the content is too short, the missing fields are 0, as a broker reads them.
    """
    padded = page[: CHECKPOINT_FIELDS.itemsize].ljust(CHECKPOINT_FIELDS.itemsize, b"\0")
    fields = np.frombuffer(padded, CHECKPOINT_FIELDS)[0]
    numbers: list[int] = [int(fields[name]) for name in CHECKPOINT_FIELDS.names or ()]
    physic, logics, index, flushed, confirm = numbers
    return Checkpoint(physic, logics, index, flushed, confirm, path)


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Return the content of the file `checkpoint`: one page of 4096 bytes."""
    fields = np.zeros(1, CHECKPOINT_FIELDS)
    for name in CHECKPOINT_FIELDS.names or ():
        fields[name] = getattr(checkpoint, name)
    return fields.tobytes().ljust(CHECKPOINT_FILE_BYTES, b"\0")
