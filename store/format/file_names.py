"""The paths of a store's files.

Paths are relative to the store's folder and use `/`. If a user gave the name of a topic or group, check the name with
`names.check_topic_name` or `names.check_group_name` before you build a path from it. As a second protection,
`queue_folder` refuses a topic whose path would leave the store's folder.

Source: StorePathConfigHelper, UtilAll#offset2FileName, BrokerPathConfigHelper (4.9, 5.3).
"""

from rmq_spark.store.errors import OptionError
from rmq_spark.store.names import ACCEPTED_TOPICS

COMMIT_LOG = "commitlog"
CONSUME_QUEUE = "consumequeue"
CONSUME_QUEUE_EXT = "consumequeue_ext"
BATCH_CONSUME_QUEUE = "batchconsumequeue"
INDEX = "index"
CONFIG = "config"
CHECKPOINT = "checkpoint"
ABORT = "abort"
LOCK = "lock"

# In `config/`. The previous version of each file has the suffix BACKUP_SUFFIX.
TOPICS_JSON = "topics.json"
SUBSCRIPTION_GROUP_JSON = "subscriptionGroup.json"
CONSUMER_OFFSET_JSON = "consumerOffset.json"
DELAY_OFFSET_JSON = "delayOffset.json"
BACKUP_SUFFIX = ".bak"
COMPACTION, COMPACTION_POSITION = "compaction", "position-checkpoint"  # a folder, and a JSON file in this folder (5.x)

SEGMENT_NAME_DIGITS = 20
INDEX_NAME_DIGITS = 17  # yyyyMMddHHmmssSSS, the broker's local time when it created the file
MAX_OFFSET = 2**63 - 1  # a broker parses the name of a segment as a Java long


def segment_name(offset: int) -> str:
    """Return the name of the file that begins at `offset` (bytes): the offset in 20 digits."""
    assert 0 <= offset <= MAX_OFFSET, offset
    return f"{offset:0{SEGMENT_NAME_DIGITS}d}"


def parse_segment_name(name: str) -> int | None:
    """Return the offset (bytes) at which the file of this name begins. Returns None if the name is invalid."""
    if len(name) != SEGMENT_NAME_DIGITS or not (name.isascii() and name.isdigit()):
        return None
    offset = int(name)
    return offset if offset <= MAX_OFFSET else None


def is_index_name(name: str) -> bool:
    """Return whether `name` is a valid name of an index file. Sorted by name, index files are in order of creation."""
    return len(name) == INDEX_NAME_DIGITS and name.isascii() and name.isdigit()


def commit_log_segment(offset: int) -> str:
    """Return the path of the commit-log segment that begins at a physical offset."""
    return f"{COMMIT_LOG}/{segment_name(offset)}"


def queue_folder(topic: str, queue_id: int, tree: str = CONSUME_QUEUE) -> str:
    """Return the path of a queue's folder in `tree`, one of CONSUME_QUEUE, CONSUME_QUEUE_EXT, BATCH_CONSUME_QUEUE.

    Raises OptionError if the topic cannot be the name of one folder, for example if it contains `/`. The function does
    not check whether RocketMQ accepts the topic.
    """
    assert tree in (CONSUME_QUEUE, CONSUME_QUEUE_EXT, BATCH_CONSUME_QUEUE), tree
    assert queue_id >= 0, queue_id
    if topic in ("", ".", "..") or "/" in topic or "\0" in topic:
        raise OptionError(f"topic {topic!r} cannot be a folder's name: {ACCEPTED_TOPICS}")
    return f"{tree}/{topic}/{queue_id}"


def config_file(name: str) -> str:
    """Return the path of a config file. `name` is one of the constants *_JSON above."""
    return f"{CONFIG}/{name}"
