"""The file `checkpoint`: up to which times (and, in 5.x, offsets) a broker had flushed what it wrote.

One page of 4096 bytes: five longs, then zeros. 4.9 writes the first three and leaves the rest zero. The page is
overwritten in place while a broker runs. Source: StoreCheckpoint (4.9, 5.3).
"""

from dataclasses import dataclass, field

import numpy as np

CHECKPOINT_FIELDS = np.dtype(
    [
        ("physic_msg_timestamp", ">i8"),  # ms: store time of the last message in a flush of the log
        ("logics_msg_timestamp", ">i8"),  # ms: store time of the last message with a unit in a queue
        ("index_msg_timestamp", ">i8"),  # ms: end of the last index file that was full and flushed
        ("master_flushed_offset", ">i8"),  # 5.x, physical offset, replication; 0 without it
        ("confirm_phy_offset", ">i8"),  # 5.x, physical offset up to which readers may go; may lag
    ]
)
assert CHECKPOINT_FIELDS.itemsize == 40

CHECKPOINT_FILE_BYTES = 4096
# Units are flushed after the log, and clocks tick in between: recovery goes back this much further.
_MARGIN_MS = 3000
# A time that is further ahead than this was never a clock's: two machines that write a store may differ, not by a day.
CLOCKS_DIFFER_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the page says: times in ms, offsets in bytes of the commit log; 0 is "not yet".

    `path` is the file from which it was read, for errors; "" if it was not.
    """

    physic_msg_timestamp: int = 0
    logics_msg_timestamp: int = 0
    index_msg_timestamp: int = 0
    master_flushed_offset: int = 0
    confirm_phy_offset: int = 0
    path: str = field(default="", compare=False)

    @property
    def min_timestamp(self) -> int:
        """Return the time (ms) up to which log and queues are safely on disk (StoreCheckpoint#getMinTimestamp)."""
        return max(min(self.physic_msg_timestamp, self.logics_msg_timestamp) - _MARGIN_MS, 0)

    @property
    def min_timestamp_with_index(self) -> int:
        """Return the same for the key index too (StoreCheckpoint#getMinTimestampIndex)."""
        return min(self.min_timestamp, self.index_msg_timestamp)


def decode_checkpoint(page: bytes, path: str = "") -> Checkpoint:
    """Read the page of the file at `path`. Never raises.

    What a shorter file lacks reads as 0, as for a broker, which lengthens it.
    """
    whole = page[: CHECKPOINT_FIELDS.itemsize].ljust(CHECKPOINT_FIELDS.itemsize, b"\0")
    fields = np.frombuffer(whole, CHECKPOINT_FIELDS)[0]
    numbers: list[int] = [int(fields[name]) for name in CHECKPOINT_FIELDS.names or ()]
    physic, logics, index, flushed, confirm = numbers
    return Checkpoint(physic, logics, index, flushed, confirm, path)


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Write the whole page."""
    fields = np.zeros(1, CHECKPOINT_FIELDS)
    for name in CHECKPOINT_FIELDS.names or ():
        fields[name] = getattr(checkpoint, name)
    return fields.tobytes().ljust(CHECKPOINT_FILE_BYTES, b"\0")
