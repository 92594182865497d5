"""Retry policy: where the copy of a message that failed goes, and at which delay level it waits.

| reconsumeTimes, and the delay level asked for | where the copy goes |
| --- | --- |
| reconsumeTimes at the limit or above, or a level below 0 | %DLQ%group (dead letters), at once |
| level 0, so that the number of retries decides | %RETRY%group, after waiting at level 3 + reconsumeTimes |
| any other level | %RETRY%group, after waiting at that level |

A level above the store's last delay level becomes the last one. A reconsumeTimes below 0, which RocketMQ never writes,
is treated as 0. In both topics, reconsumeTimes of the copy is one higher.

If its broker cannot send a message back, a client of RocketMQ sends the message again, with RECONSUME_TIME one higher
(DefaultMQPushConsumerImpl#sendMessageBack). Then a broker of 5.x decides as in this table
(SendMessageProcessor#handleRetryAndDLQ: more than the limit), and a broker of 4.9 moves the message to the dead letters
one failure earlier.

| topic | queues | contains |
| --- | --- | --- |
| %RETRY%group | retryQueueNums, 1 by default | messages to consume again |
| %DLQ%group | 1 | dead letters, which no consumer reads by default |

Each topic is created, readable and writable, when the first message goes there. Source: AbstractSendMessageProcessor
#consumerSendMsgBack, ScheduleMessageService, SubscriptionGroupConfig (4.9, 5.3; %DLQ% readable since 4.9.2).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, OptionError
from rmq_spark.store.format.config_json import GroupConfig
from rmq_spark.store.group.read_rights import NEXT_STEP, group_config_path, read_group_config
from rmq_spark.store.log.topics import TopicWriter
from rmq_spark.store.log.write_session import WriteSession
from rmq_spark.store.names import MAX_QUEUES, SCHEDULE_TOPIC, check_retrying_group, dlq_topic, retry_topic

# The default limit (DefaultMQPushConsumerImpl#getMaxReconsumeTimes, SubscriptionGroupConfig).
MAX_RECONSUME_TIMES = 16
FIRST_LEVEL = 3  # the delay level of a message that fails for the first time
DEAD_LETTER_QUEUES = 1  # AbstractSendMessageProcessor#DLQ_NUMS_PER_GROUP


@dataclass(frozen=True, slots=True)
class Decisions:
    """For each message: whether it becomes a dead letter, and otherwise at which delay level its copy waits.

    The level of a dead letter is 0.
    """

    are_dead: NDArray[np.bool_]
    levels: NDArray[np.int64]


def decide(
    reconsume_times: NDArray[np.int64], asked_levels: NDArray[np.int64], max_reconsume_times: int, level_count: int
) -> Decisions:
    """Return where the copies of failed messages go, by the table of this module.

    All arrays have one value per message. `reconsume_times` are the retries so far. `asked_levels` are the delay levels
    asked for; 0 means that the number of retries determines the level. `level_count`, at least 1, is how many delay
    levels the store has.
    """
    assert level_count > 0, level_count
    are_dead = (reconsume_times >= max_reconsume_times) | (asked_levels < 0)
    levels = np.where(asked_levels == 0, FIRST_LEVEL + np.maximum(reconsume_times, 0), asked_levels)
    return Decisions(are_dead, np.where(are_dead, 0, np.clip(levels, 1, level_count)))


@dataclass(frozen=True, slots=True)
class RetryTopics:
    """The topics to which the failed messages of a group go, and the limits that apply to them.

    `retry_queues` is how many queues the retry topic has. After `max_reconsume_times` retries a message becomes a dead
    letter.
    """

    group: str
    retry_queues: int = 1
    max_reconsume_times: int = MAX_RECONSUME_TIMES

    @property
    def retry(self) -> str:
        """The name of the topic of messages that are consumed again."""
        return retry_topic(self.group)

    @property
    def dead(self) -> str:
        """The name of the topic of dead letters."""
        return dlq_topic(self.group)

    def ensure(self, section: WriteSession, *, retry: bool, dead: bool) -> None:
        """Create the needed topics if they are missing.

        With `retry` these are the retry topic and the topic in which retries wait, with `dead` the topic of dead
        letters. Raises StorePathError if a topic is not writable. A crash after this leaves topics without messages.
        """
        if retry:
            section.ensure_topic(self.retry, self.retry_queues)
            section.ensure_topic(SCHEDULE_TOPIC, 1)  # 1 is only a minimum: there is one queue per level
        if dead:
            section.ensure_topic(self.dead, DEAD_LETTER_QUEUES)


def read_retry_topics(root: str, group: str, max_reconsume_times: int | None = None) -> RetryTopics:
    """Return the topics and limits for a group's failed messages in the store at `root`.

    If `max_reconsume_times` is None, the limit of the group's own configuration applies. Raises OptionError if the name
    is invalid or the group has no retry queues, StorePathError if the retry topic is not writable, and DamageError if
    the group's configuration is damaged.
    """
    check_retrying_group(group)
    config = read_group_config(root, group) or GroupConfig(group)
    path = group_config_path(root)
    if config.retry_queue_count <= 0:
        raise OptionError(
            f'consumer group "{group}" has retryQueueNums={config.retry_queue_count} in {path}; expected at least 1. A '
            "broker would report success and drop the message. Nothing was sent back. Give the group a retry queue "
            "(mqadmin updateSubGroup -g … -q 1), or do not send its messages back."
        )
    if config.retry_queue_count > MAX_QUEUES:
        what, found = f"retryQueueNums of group {group}", config.retry_queue_count
        raise DamageError(what, path, 0, f"at most {MAX_QUEUES}", found, NEXT_STEP)
    limit = config.retry_max_times if max_reconsume_times is None else max_reconsume_times
    # An existing retry topic may have fewer queues than the configuration, which may have changed after its creation.
    existing = TopicWriter(Disk(), root).write_queues(retry_topic(group))
    return RetryTopics(group, min(config.retry_queue_count, existing or config.retry_queue_count), limit)
