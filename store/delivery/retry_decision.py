"""Where a message goes that a consumer group failed to consume: back to its retry topic, or to its dead letters. Pure.

| reconsumeTimes, level asked for | goes to |
| --- | --- |
| reconsumeTimes at the limit or above, or a level below 0 | %DLQ%group, at once |
| level 0 | %RETRY%group, at level 3 + reconsumeTimes |
| any other level | %RETRY%group, at that level |

A level beyond the table's last one is the last one; a count below 0, which no RocketMQ writes, counts as 0. The copy
has one reconsumeTimes more, in both topics.

A client that cannot have the broker do this sends the message anew, with RECONSUME_TIME one higher
(DefaultMQPushConsumerImpl#sendMessageBack); 5.x decides the same then (SendMessageProcessor#handleRetryAndDLQ: more
than the limit), 4.9 gives up one failure earlier.
Source: AbstractSendMessageProcessor#consumerSendMsgBack, ScheduleMessageService (4.9, 5.3).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# What a consumer gets that names no limit (DefaultMQPushConsumerImpl#getMaxReconsumeTimes, SubscriptionGroupConfig).
MAX_RECONSUME_TIMES = 16
_MOST_TIMES = (1 << 31) - 1
FIRST_LEVEL = 3  # of a message that fails for the first time


@dataclass(frozen=True, slots=True)
class Decisions:
    """For each message: whether it is a dead letter, and at which delay level it waits; 0 for a dead letter."""

    are_dead: NDArray[np.bool_]
    levels: NDArray[np.int64]


def next_times(reconsume_times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often copies were consumed anew: one more, as far as Java's int goes."""
    return np.minimum(reconsume_times + 1, _MOST_TIMES)


def decide(
    reconsume_times: NDArray[np.int64], asked_levels: NDArray[np.int64], max_reconsume_times: int, level_count: int
) -> Decisions:
    """Return where messages go that failed, having been consumed anew `reconsume_times` before.

    `asked_levels` has 0 where the number of failures decides; the store has `level_count` delay levels, at least one.
    """
    assert level_count > 0, level_count
    are_dead = (reconsume_times >= max_reconsume_times) | (asked_levels < 0)
    levels = np.where(asked_levels == 0, FIRST_LEVEL + np.maximum(reconsume_times, 0), asked_levels)
    return Decisions(are_dead, np.where(are_dead, 0, np.clip(levels, 1, level_count)))
