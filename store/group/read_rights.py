"""What a store's configuration lets a consumer group read, asked as a broker asks it before it answers a pull.

| what | where | RocketMQ |
| --- | --- | --- |
| `consumeEnable: false` | subscriptionGroup.json, the group | NO_PERMISSION |
| `consumeBroadcastEnable: false` | the same, for a broadcasting consumer | NO_PERMISSION |
| no read (4) in `perm` | topics.json, the topic | NO_PERMISSION; clients are given no queues of it |
| queue id from `readQueueNums` on | topics.json, the topic | SYSTEM_ERROR; clients are not given the queue |

A topic or group that the files do not name is not refused. A reader without a group is none of RocketMQ's consumers: it
reads everything, for what it looks at may be a copy, or what an administrator closed to consumers.
Source: PullMessageProcessor#processRequest, MQClientInstance#topicRouteData2TopicSubscribeInfo (4.9, 5.3).
"""

import time
from collections.abc import Callable, Mapping

from rmq_spark.store.disk import files
from rmq_spark.store.errors import NoPermissionError, NotFoundError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.config_json import PERM_READ, GroupConfig, TopicConfig
from rmq_spark.store.group.group_config import group_config_path, read_group_config
from rmq_spark.store.units import QueueKey

TopicConfigs = Mapping[str, TopicConfig]

_WITHOUT = "or read without a group, which is not refused"


class GroupRights:
    """Whether one group of the store at `root` may consume. For one thread.

    The file is read again only when it has changed: a check costs one look at its size and time.
    """

    def __init__(
        self, root: str, group: str, *, is_broadcasting: bool = False, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._root, self._group, self._is_broadcasting, self._sleep = root, group, is_broadcasting, sleep
        self._path = group_config_path(root)
        self._stamp: tuple[int, int, int] | None = None
        self._config = GroupConfig(group)

    def check(self) -> None:
        """Raise NoPermissionError if the group may not consume now, DamageError for a file that cannot be read."""
        stamp = files.stamp(self._path)
        if stamp != self._stamp:
            self._config = read_group_config(self._root, self._group, self._sleep) or GroupConfig(self._group)
            self._stamp = stamp
        if not self._config.consume_enable:
            raise self._refusal("consumeEnable", "-s true")
        if self._is_broadcasting and not self._config.consume_broadcast_enable:
            raise self._refusal("consumeBroadcastEnable", "-d true")

    def _refusal(self, name: str, switch: str) -> NoPermissionError:
        return NoPermissionError(
            f'consumer group "{self._group}" may not consume: {self._path} gives it {name}=false; expected true. Have '
            f"an administrator set it (mqadmin updateSubGroup -g {self._group} {switch}), give another group, "
            f"{_WITHOUT}. RocketMQ answers NO_PERMISSION."
        )


def is_closed(configs: TopicConfigs, topic: str) -> bool:
    """Say whether consumers may read nothing of a topic."""
    config = configs.get(topic)
    return config is not None and not config.perm & PERM_READ


def is_beyond(configs: TopicConfigs, queue: QueueKey) -> bool:
    """Say whether a queue is none of those that consumers are given."""
    config = configs.get(queue.topic)
    return config is not None and queue.queue_id >= config.read_queue_count


def describe_closed(configs: TopicConfigs, topic: str) -> str:
    """Return what is said of a topic that `is_closed`."""
    return f'topic "{topic}" has perm={configs[topic].perm} in topics.json, without {PERM_READ} (read)'


def describe_beyond(configs: TopicConfigs, queue: QueueKey) -> str:
    """Return what is said of a queue that `is_beyond`."""
    return f"queue {queue} is beyond readQueueNums={configs[queue.topic].read_queue_count} of its topic in topics.json"


def refuse_topic(configs: TopicConfigs, topic: str, group: str) -> None:
    """Raise NoPermissionError for a topic that `is_closed`."""
    if is_closed(configs, topic):
        retry = "; failed messages do not come again" if topic == filenames.retry_topic(group) else ""
        raise NoPermissionError(
            f'consumer group "{group}" may not read: {describe_closed(configs, topic)}{retry}; expected 6 or 4. Have '
            f"an administrator set it (mqadmin updateTopicPerm -t {topic} -p 6), leave the topic out, {_WITHOUT}. "
            "RocketMQ answers NO_PERMISSION."
        )


def refuse_queue(configs: TopicConfigs, queue: QueueKey, group: str) -> None:
    """Raise NoPermissionError for a queue of a closed topic, NotFoundError for one that `is_beyond`."""
    refuse_topic(configs, queue.topic, group)
    if is_beyond(configs, queue):
        raise NotFoundError(
            f'consumer group "{group}" has no queue {queue}: {describe_beyond(configs, queue)}; expected a smaller '
            f"id. Have an administrator raise readQueueNums (mqadmin updateTopic -t {queue.topic} -r "
            f"{queue.queue_id + 1}), {_WITHOUT}. RocketMQ answers SYSTEM_ERROR."
        )
