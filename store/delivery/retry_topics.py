"""The topics of a consumer group's failed messages, and what a broker was told about the group.

| topic | queues | holds |
| --- | --- | --- |
| %RETRY%group | retryQueueNums, 1 without a word | what is to be consumed again |
| %DLQ%group | 1 | what was given up: nobody consumes it by itself |

Both are made when the first message goes there, readable and writable. Source: AbstractSendMessageProcessor
#consumerSendMsgBack, SubscriptionGroupConfig (4.9, 5.3; %DLQ% readable since 4.9.2).
"""

from dataclasses import dataclass

from rmq_spark.store.delivery.retry_decision import MAX_RECONSUME_TIMES
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError, OptionError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.config_json import GroupConfig
from rmq_spark.store.group.group_config import NEXT_STEP, group_config_path, read_group_config
from rmq_spark.store.group.group_name import check_consumer_group
from rmq_spark.store.log.section import Section
from rmq_spark.store.log.topic_writer import TopicWriter
from rmq_spark.store.log.topics import MAX_QUEUES

DEAD_LETTER_QUEUES = 1  # AbstractSendMessageProcessor#DLQ_NUMS_PER_GROUP


@dataclass(frozen=True, slots=True)
class RetryTopics:
    """Where a group's failed messages go: over how many queues those that come again are spread, and how often."""

    group: str
    retry_queues: int = 1
    max_reconsume_times: int = MAX_RECONSUME_TIMES

    @property
    def retry(self) -> str:
        """The topic of what is to be consumed again."""
        return filenames.retry_topic(self.group)

    @property
    def dead(self) -> str:
        """The topic of dead letters."""
        return filenames.dlq_topic(self.group)

    def ensure(self, section: Section, *, retry: bool, dead: bool) -> None:
        """Make those of the two topics that are needed and not there, and for the first the one in which messages wait.

        Raises StorePathError for one that may not be written to.

        A crash behind this leaves a topic without a message.
        """
        if retry:
            section.ensure_topic(self.retry, self.retry_queues)
            section.ensure_topic(filenames.SCHEDULE_TOPIC, 1)  # with as many queues as there are levels, in fact
        if dead:
            section.ensure_topic(self.dead, DEAD_LETTER_QUEUES)


def retry_topic_of(group: str) -> str:
    """Return the topic in which a group's failed messages come again. Raises OptionError for a name that is none."""
    return filenames.retry_topic(group)


def check_retrying_group(name: str) -> str:
    """Return the name of a group whose messages can be sent back. Raises OptionError, for a retry topic's name too."""
    check_consumer_group(name)
    for prefix in (filenames.RETRY_TOPIC_PREFIX, filenames.DLQ_TOPIC_PREFIX):
        if name.startswith(prefix):
            raise OptionError(
                f"consumer group {name!r} is the name of a topic of the group {name.removeprefix(prefix)!r}: give the "
                "group's own name. A message that was retried already goes back to the topic that it came from."
            )
    for topic in (filenames.retry_topic(name), filenames.dlq_topic(name)):
        filenames.check_topic_name(topic)
    return name


def read_retry_topics(root: str, group: str, max_reconsume_times: int | None = None) -> RetryTopics:
    """Return where the group's failed messages go in the store at `root`; None: as often as the group may retry.

    Raises OptionError for a group that has no retry queues, StorePathError for a retry topic that may not be written
    to, and DamageError.
    """
    check_retrying_group(group)
    config = read_group_config(root, group) or GroupConfig(group)
    path = group_config_path(root)
    if config.retry_queue_count <= 0:
        raise OptionError(
            f'consumer group "{group}" has retryQueueNums={config.retry_queue_count} in {path}: a broker would answer '
            "that all is well and drop the message. Nothing was sent back. Give the group a retry queue (mqadmin "
            "updateSubGroup -g … -q 1), or do not send its messages back."
        )
    if config.retry_queue_count > MAX_QUEUES:
        what, found = f"retryQueueNums of group {group}", config.retry_queue_count
        raise DamageError(what, path, 0, f"at most {MAX_QUEUES}", found, NEXT_STEP)
    limit = config.retry_max_times if max_reconsume_times is None else max_reconsume_times
    # A retry topic that is there may have fewer queues than the group was given since.
    there = TopicWriter(Disk(), root).write_queues(filenames.retry_topic(group))
    return RetryTopics(group, min(config.retry_queue_count, there or config.retry_queue_count), limit)
