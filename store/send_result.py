"""The result of sending one message, for every place that programs send to."""

from dataclasses import dataclass
from enum import StrEnum


class SendStatus(StrEnum):
    """How a broker has stored a message (SendStatus). A message is stored with each of them: do not send it again."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"  # the broker flushes each message to its disk, and this was late
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"  # the broker waits for a slave, and this was late
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"  # the broker waits for a slave, and has none


@dataclass(frozen=True, slots=True)
class SendResult:
    """The position and the id of a sent message, as in SendResult of a RocketMQ client.

    A message can be looked up by its position or by its id (UNIQ_KEY). `commit_log_offset` is in bytes. `broker` is the
    name of the broker, "" in a store directory.
    """

    topic: str
    queue_id: int
    queue_offset: int
    commit_log_offset: int
    message_id: str
    broker: str = ""
    status: SendStatus = SendStatus.SEND_OK
