"""Every path in a store, built and parsed, and the names from which paths are made.

Paths are relative to the store's folder and use `/`. A topic or group that a user typed goes through
`check_topic_name` or `check_group_name` before it becomes part of a path; the builders refuse what would leave
the folder in any case.

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

# In `config/`. Each has the version before it beside it, with BACKUP_SUFFIX.
TOPICS_JSON = "topics.json"
SUBSCRIPTION_GROUP_JSON = "subscriptionGroup.json"
CONSUMER_OFFSET_JSON = "consumerOffset.json"
DELAY_OFFSET_JSON = "delayOffset.json"
BACKUP_SUFFIX = ".bak"
COMPACTION, COMPACTION_POSITION = "compaction", "position-checkpoint"  # a folder, and the JSON in it (5.x)

SEGMENT_NAME_DIGITS = 20
INDEX_NAME_DIGITS = 17  # yyyyMMddHHmmssSSS, the broker's local time when it made the file
MAX_OFFSET = 2**63 - 1  # a broker reads a segment's name as a Java long

RETRY_TOPIC_PREFIX = "%RETRY%"
DLQ_TOPIC_PREFIX = "%DLQ%"
LIGHT_QUEUE_PREFIX = "%LMQ%"
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"  # where messages with a delay level wait, one queue a level
TIMER_TOPIC = "rmq_sys_wheel_timer"  # where messages wait that are to be delivered at a time (5.x)
WAITING_TOPICS = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC})
AUTO_CREATE_TOPIC = "TBW102"

MAX_TOPIC_CHARS = 127  # a record of version 1 keeps the length in one signed byte
MAX_DERIVED_TOPIC_CHARS = 255  # %RETRY% and %DLQ% topics: the longest name that a folder may have
MAX_GROUP_CHARS = MAX_DERIVED_TOPIC_CHARS - len(RETRY_TOPIC_PREFIX)

_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")
# TopicValidator (5.3): what brokers keep for themselves, and the retry and dead-letter topics of groups.
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
# What a broker reads from these it obeys, so it takes no message for them from a client (TopicValidator, 5.3).
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
    """Return the name of the file whose first byte has this offset (bytes): 20 digits."""
    assert 0 <= offset <= MAX_OFFSET, offset
    return f"{offset:0{SEGMENT_NAME_DIGITS}d}"


def parse_segment_name(name: str) -> int | None:
    """Return the offset (bytes) of a file's first byte, None for a name that no broker writes."""
    if len(name) != SEGMENT_NAME_DIGITS or not (name.isascii() and name.isdigit()):
        return None
    offset = int(name)
    return offset if offset <= MAX_OFFSET else None


def is_index_name(name: str) -> bool:
    """Say whether a file in `index/` is named as a broker names it. Names sort by age."""
    return len(name) == INDEX_NAME_DIGITS and name.isascii() and name.isdigit()


def index_name(digits: str) -> str:
    """Return `index/<digits>`; `digits` is the local time of making, yyyyMMddHHmmssSSS, from who has a clock."""
    assert is_index_name(digits), digits
    return f"{INDEX}/{digits}"


def commit_log_segment(offset: int) -> str:
    """Return the path of the commit log segment that starts at a physical offset."""
    return f"{COMMIT_LOG}/{segment_name(offset)}"


def queue_folder(topic: str, queue_id: int, tree: str = CONSUME_QUEUE) -> str:
    """Return the folder of one queue in `tree` (CONSUME_QUEUE, CONSUME_QUEUE_EXT or BATCH_CONSUME_QUEUE).

    Raises OptionError for a topic that is no single folder name; it does not ask for more (`check_topic_name`).
    """
    assert tree in (CONSUME_QUEUE, CONSUME_QUEUE_EXT, BATCH_CONSUME_QUEUE), tree
    assert queue_id >= 0, queue_id
    if topic in ("", ".", "..") or "/" in topic or "\0" in topic:
        raise OptionError(f"topic {topic!r} cannot be a folder's name: {_ACCEPTED}")
    return f"{tree}/{topic}/{queue_id}"


def parse_queue_folder(path: str) -> tuple[str, str, int] | None:
    """Return tree, topic and queue id of a path that `queue_folder` builds, None for any other."""
    parts = path.split("/")
    if len(parts) != 3 or parts[0] not in (CONSUME_QUEUE, CONSUME_QUEUE_EXT, BATCH_CONSUME_QUEUE):
        return None
    tree, topic, queue_id = parts
    if not topic or not queue_id.isascii() or not queue_id.isdigit():
        return None
    return tree, topic, int(queue_id)


def config_file(name: str) -> str:
    """Return the path of a config file, one of the *_JSON names."""
    return f"{CONFIG}/{name}"


_ACCEPTED = (
    "accepted are the characters % | a-z A-Z 0-9 _ -, at most "
    f"{MAX_TOPIC_CHARS} of them ({MAX_DERIVED_TOPIC_CHARS} for {RETRY_TOPIC_PREFIX} and {DLQ_TOPIC_PREFIX} topics)"
)


def check_topic_name(name: str) -> str:
    """Return `name`. Raises OptionError when no broker would take it (TopicValidator#validateTopic, 5.3)."""
    derived = name.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))
    limit = MAX_DERIVED_TOPIC_CHARS if derived else MAX_TOPIC_CHARS
    if not _NAME.fullmatch(name) or len(name) > limit:
        raise OptionError(f"topic {_shown(name)} is not a topic's name: {_ACCEPTED}")
    return name


def check_sent_topic(name: str) -> str:
    """Return `name`. Raises OptionError when a broker refuses it, also from a client, or for a light message queue.

    A light message queue (LMQ) has no messages of its own: its units refer to those of other topics.
    """
    if check_topic_name(name) in CLOSED_TOPICS:
        raise OptionError(
            f"topic {name} is RocketMQ's own: only brokers make it and write to it. Give a topic of yours."
        )
    if name.startswith(LIGHT_QUEUE_PREFIX):
        raise OptionError(
            f"topic {_shown(name)} has the prefix of a light message queue; expected an ordinary topic. Messages to "
            f"{LIGHT_QUEUE_PREFIX}… could not be read again: give the topic another name."
        )
    return name


def check_group_name(name: str) -> str:
    """Return `name`. Raises OptionError when it is no consumer group's name (Validators#checkGroup, 5.3).

    The limit leaves room for the group's retry topic, which RocketMQ itself only minds when it makes one.
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
    """Say whether a topic is the broker's or a group's own, which a pattern must not catch by accident.

    A broker also keeps topics named after itself and its cluster: nothing in those names tells.
    """
    return name in _SYSTEM_TOPICS or name.startswith(_SYSTEM_PREFIXES) or name.endswith(_SYSTEM_SUFFIX)


def retry_topic(group: str) -> str:
    """Return the topic of a group's messages that are to be consumed again (MixAll#getRetryTopic)."""
    return RETRY_TOPIC_PREFIX + check_group_name(group)


def dlq_topic(group: str) -> str:
    """Return the topic of a group's dead letters (MixAll#getDLQTopic)."""
    return DLQ_TOPIC_PREFIX + check_group_name(group)
