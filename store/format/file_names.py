"""The paths of a store's files, and the names of topics and groups.

Paths are relative to the store's folder and use `/`. If a user gave the name of a topic or group, check the name with
`check_topic_name` or `check_group_name` before you build a path from it. As a second protection, `queue_folder` refuses
a topic whose path would leave the store's folder.

Source: StorePathConfigHelper, UtilAll#offset2FileName, TopicValidator, MixAll, BrokerPathConfigHelper (4.9, 5.3).
"""

import re

from rmq_spark.store.errors import OptionError

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

RETRY_TOPIC_PREFIX = "%RETRY%"
DLQ_TOPIC_PREFIX = "%DLQ%"
LIGHT_QUEUE_PREFIX = "%LMQ%"
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"  # holds messages with a delay level until they are due, one queue per level
TIMER_TOPIC = "rmq_sys_wheel_timer"  # holds messages with a delivery time until they are due (5.x)
WAITING_TOPICS = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC})
AUTO_CREATE_TOPIC = "TBW102"

MAX_TOPIC_CHARS = 127  # a record of version 1 stores the length in one signed byte
MAX_DERIVED_TOPIC_CHARS = 255  # limit for %RETRY% and %DLQ% topics, because a folder's name cannot be longer
MAX_GROUP_CHARS = MAX_DERIVED_TOPIC_CHARS - len(RETRY_TOPIC_PREFIX)

_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")
# TopicValidator (5.3): internal topics of brokers, and the retry and dead-letter topics of groups.
_SYSTEM_TOPICS = {
    AUTO_CREATE_TOPIC,
    SCHEDULE_TOPIC,
    "TRANS_CHECK_MAX_TIME_TOPIC",
    "SELF_TEST_TOPIC",
    "OFFSET_MOVED_EVENT",
    "BenchmarkTest",
    "CHECKPOINT_TOPIC",
}
_SYSTEM_PREFIXES = (
    "RMQ_SYS_",
    "rmq_sys_",
    RETRY_TOPIC_PREFIX,
    DLQ_TOPIC_PREFIX,
    LIGHT_QUEUE_PREFIX,
    f"{SCHEDULE_TOPIC}_",
)
_SYSTEM_SUFFIX = "_REPLY_TOPIC"
# A broker obeys the messages in these topics, so it refuses them from clients (TopicValidator, 5.3).
CLOSED_TOPICS = frozenset(
    {
        SCHEDULE_TOPIC,
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        TIMER_TOPIC,
    }
)


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
        raise OptionError(f"topic {topic!r} cannot be a folder's name: {_ACCEPTED}")
    return f"{tree}/{topic}/{queue_id}"


def config_file(name: str) -> str:
    """Return the path of a config file. `name` is one of the constants *_JSON above."""
    return f"{CONFIG}/{name}"


_ACCEPTED = (
    "accepted are the characters % | a-z A-Z 0-9 _ -, at most "
    f"{MAX_TOPIC_CHARS} of them ({MAX_DERIVED_TOPIC_CHARS} for {RETRY_TOPIC_PREFIX} and {DLQ_TOPIC_PREFIX} topics)"
)


def check_topic_name(name: str) -> str:
    """Return `name` unchanged. Raises OptionError if no broker accepts a topic with this name.

    Source: TopicValidator#validateTopic (5.3).
    """
    derived = name.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))
    limit = MAX_DERIVED_TOPIC_CHARS if derived else MAX_TOPIC_CHARS
    if not _NAME.fullmatch(name) or len(name) > limit:
        raise OptionError(f"topic {_shown(name)} is not a topic's name: {_ACCEPTED}")
    return name


def check_sent_topic(name: str) -> str:
    """Return `name` unchanged. Raises OptionError if clients must not send messages to this topic.

    Clients must not send to a topic with an invalid name, an internal topic of brokers, or a light message queue (LMQ).
    A light message queue contains only entries that refer to messages of other topics.
    """
    if check_topic_name(name) in CLOSED_TOPICS:
        raise OptionError(
            f"topic {name} is an internal topic of RocketMQ, which only brokers write to. Use another topic."
        )
    if name.startswith(LIGHT_QUEUE_PREFIX):
        raise OptionError(
            f"topic {_shown(name)} has the prefix of a light message queue; expected an ordinary topic. Messages to "
            f"{LIGHT_QUEUE_PREFIX}… could not be read. Give the topic another name."
        )
    return name


def check_group_name(name: str) -> str:
    """Return `name` unchanged. Raises OptionError if it is not a valid name of a consumer group.

    The name of a group's retry topic is `%RETRY%` and the group's name, so the group's name must be short enough for
    this topic. RocketMQ checks this length only when it creates the retry topic.
    Source: Validators#checkGroup (5.3).
    """
    if not isinstance(name, str):
        raise OptionError(f"a consumer group's name is a text, found {name!r}")
    if not _NAME.fullmatch(name) or len(name) > MAX_GROUP_CHARS:
        raise OptionError(
            f"consumer group {_shown(name)} is not a group's name: accepted are the characters "
            f"% | a-z A-Z 0-9 _ -, at most {MAX_GROUP_CHARS} of them"
        )
    return name


def _shown(name: str) -> str:
    return repr(name) if len(name) <= 80 else f"{name[:80]!r}… of {len(name)} characters"


def is_system_topic(name: str) -> bool:
    """Return whether a topic is an internal topic of brokers or consumer groups.

    A user's topic pattern must not match such topics by accident. Brokers also have internal topics that are named
    after the broker or its cluster. Those names have no common form, so the function cannot recognize them.
    """
    return name in _SYSTEM_TOPICS or name.startswith(_SYSTEM_PREFIXES) or name.endswith(_SYSTEM_SUFFIX)


def retry_topic(group: str) -> str:
    """Return the topic for messages that a group will retry (MixAll#getRetryTopic)."""
    return RETRY_TOPIC_PREFIX + check_group_name(group)


def dlq_topic(group: str) -> str:
    """Return the topic for a group's dead letters (MixAll#getDLQTopic)."""
    return DLQ_TOPIC_PREFIX + check_group_name(group)
