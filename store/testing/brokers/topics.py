"""The topics of one broker, as it knows and registers them, beside its store."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rmq_spark.store.format.config_json import PERM_INHERIT, PERM_READ, PERM_WRITE
from rmq_spark.store.testing.brokers.releases import Release

READ_WRITE = PERM_READ | PERM_WRITE


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic of a broker (TopicConfig)."""

    name: str
    read_queues: int = 4
    write_queues: int = 4
    perm: int = READ_WRITE
    order: bool = False
    filter_type: str = "SINGLE_TAG"
    sys_flag: int = 0
    attributes: Mapping[str, str] = field(default_factory=dict)

    @property
    def queue_count(self) -> int:
        """The number of queues that exist: those for reading and those for writing."""
        return max(self.read_queues, self.write_queues)


def system_topics(release: Release, cluster: str, broker: str) -> Iterable[Topic]:
    """Yield the topics that a broker creates when it starts for the first time (TopicConfigManager)."""
    yield Topic("SELF_TEST_TOPIC", 1, 1)
    yield Topic("TBW102", 8, 8, READ_WRITE | PERM_INHERIT)
    yield Topic("BenchmarkTest", 1024, 1024)
    yield Topic(cluster, 16, 16, READ_WRITE | PERM_INHERIT)
    yield Topic(broker, 1, 1, READ_WRITE | PERM_INHERIT)
    yield Topic("OFFSET_MOVED_EVENT", 1, 1)
    yield Topic("SCHEDULE_TOPIC_XXXX", 18, 18)
    yield Topic(f"{cluster}_REPLY_TOPIC", 1, 1)
    yield Topic("RMQ_SYS_TRANS_HALF_TOPIC", 1, 1)
    if release.is_5:
        yield Topic("RMQ_SYS_TRANS_OP_HALF_TOPIC", 1, 1)
        yield Topic("rmq_sys_wheel_timer", 1, 1)
        yield Topic(f"rmq_sys_REVIVE_LOG_{cluster}", 8, 8)
        yield Topic(f"rmq_sys_SYNC_BROKER_MEMBER_{broker}", 1, 1)
