"""The names of topics and groups: which are valid, which are RocketMQ's own, and which belong to a group.

Source: TopicValidator, MixAll, Validators (4.9, 5.3).
"""

import difflib
import re
from collections.abc import Collection

from rmq_spark.store.errors import OptionError

RETRY_TOPIC_PREFIX = "%RETRY%"
DLQ_TOPIC_PREFIX = "%DLQ%"
LIGHT_QUEUE_PREFIX = "%LMQ%"
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"  # holds messages with a delay level until they are due, one queue per level
TIMER_TOPIC = "rmq_sys_wheel_timer"  # holds messages with a delivery time until they are due (5.x)
WAITING_TOPICS = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC})
AUTO_CREATE_TOPIC = "TBW102"
# Topics of the sink that writes to a cluster exactly once.
STAGE_TOPIC = "RMQ_SPARK_STAGE"  # rows that tasks have stored and no commit has published yet
LEDGER_TOPIC = "RMQ_SPARK_LEDGER"  # what the commits of all queries have promised and done
SINK_TOPICS = frozenset({STAGE_TOPIC, LEDGER_TOPIC})
# A request has at most 16 MiB (NettyRemotingServer), with properties and names.
MAX_SENT_BODY_BYTES = 15 << 20
MAX_QUEUES = 1 << 16  # per topic: a damaged digit must not create billions of queues

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


ACCEPTED_TOPICS = (
    "accepted are the characters % | a-z A-Z 0-9 _ -, at most "
    f"{MAX_TOPIC_CHARS} of them ({MAX_DERIVED_TOPIC_CHARS} for {RETRY_TOPIC_PREFIX} and {DLQ_TOPIC_PREFIX} topics)"
)


_SHOWN_COUNT = 12  # of groups in an error

# MixAll.DEFAULT_CONSUMER_GROUP: the group of clients that configure no group. Unrelated clients would share this group.
DEFAULT_GROUP = "DEFAULT_CONSUMER"
# MixAll.CID_RMQ_SYS_PREFIX: names with this prefix are a broker's own groups. Their offsets are the broker's progress,
# mainly with transactions.
BROKER_GROUP_PREFIX = "CID_RMQ_SYS_"


def check_topic_name(name: str) -> str:
    """Return `name` unchanged. Raises OptionError if no broker accepts a topic with this name.

    Source: TopicValidator#validateTopic (5.3).
    """
    if not isinstance(name, str):
        raise OptionError(f"a topic's name is a text, found {name!r}; expected a name such as 'orders'")
    derived = name.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))
    limit = MAX_DERIVED_TOPIC_CHARS if derived else MAX_TOPIC_CHARS
    if not _NAME.fullmatch(name) or len(name) > limit:
        raise OptionError(f"topic {_shown(name)} is not a topic's name: {ACCEPTED_TOPICS}")
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
    """Return whether a topic is an internal topic of brokers or consumer groups, or of the sink.

    A user's topic pattern must not match such topics by accident. Brokers also have internal topics that are named
    after the broker or its cluster. Those names have no common form, so the function cannot recognize them.
    """
    is_internal = name in _SYSTEM_TOPICS or name.startswith(_SYSTEM_PREFIXES) or name.endswith(_SYSTEM_SUFFIX)
    return is_internal or name.rpartition("%")[2] in SINK_TOPICS  # in any namespace


def retry_topic(group: str) -> str:
    """Return the topic for messages that a group will retry (MixAll#getRetryTopic)."""
    return RETRY_TOPIC_PREFIX + check_group_name(group)


def dlq_topic(group: str) -> str:
    """Return the topic for a group's dead letters (MixAll#getDLQTopic)."""
    return DLQ_TOPIC_PREFIX + check_group_name(group)


def check_consumer_group(name: str) -> str:
    """Return `name` if a query or a program may consume as a group with this name.

    Raises OptionError for a name that RocketMQ's consumers refuse: one with invalid characters or length
    (Validators#checkGroup, the same in 4.9 and 5.3), or the default name (DefaultMQPushConsumerImpl#checkConfig). Also
    raises OptionError for a broker's own group. RocketMQ accepts such a name, but committing offsets for such a group
    would change the broker's own progress.
    """
    if isinstance(name, str) and not name.strip():
        raise OptionError(f"the consumer group's name is blank ({name!r}); expected a name such as 'billing'")
    check_group_name(name)
    if name == DEFAULT_GROUP:
        raise OptionError(
            f"consumer group {name!r} is the default name of clients without a group, which RocketMQ refuses. Choose "
            "another name"
        )
    if name.startswith(BROKER_GROUP_PREFIX):
        raise OptionError(
            f"consumer group {name!r} is a broker's own: names with the prefix {BROKER_GROUP_PREFIX} contain the "
            "progress of the broker, such as that of transactions. Choose another name"
        )
    return name


def check_retrying_group(name: str) -> str:
    """Return `name` if it is the name of a group whose messages can be sent back. Otherwise raises OptionError.

    The name must be a valid group name, must not be the name of a retry topic or of a topic of dead letters, and must
    be short enough for the names of these two topics of the group.
    """
    check_consumer_group(name)
    for prefix in (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX):
        if name.startswith(prefix):
            raise OptionError(
                f"consumer group {name!r} is the name of a topic of the group {name.removeprefix(prefix)!r}; expected "
                "a group. Use the name of that group: a message that was retried goes back to its first topic."
            )
    for topic in (retry_topic(name), dlq_topic(name)):
        check_topic_name(topic)
    return name


def list_other_groups(group: str, known: Collection[str], place: str = "The store") -> str:
    """Return a text for an error: the known groups, after a question with those whose names are similar to `group`.

    `place` is the beginning of the sentence that it has no groups.
    """
    shown = sorted(known)[:_SHOWN_COUNT]
    there = (
        f"Groups there: {', '.join(shown)}{' …' if len(known) > len(shown) else ''}."
        if shown
        else f"{place} has no groups."
    )
    near = difflib.get_close_matches(group, known, 3)
    return f"Did you mean {' or '.join(near)}? {there}" if near else there
