"""Which names a consumer group may have: those that RocketMQ's own consumers start with."""

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.filenames import check_group_name

# MixAll.DEFAULT_CONSUMER_GROUP: what a client is called that was given no name, so that strangers would share it.
DEFAULT_GROUP = "DEFAULT_CONSUMER"
# MixAll.CID_RMQ_SYS_PREFIX: groups by which a broker keeps its own progress, that of transactions above all.
BROKER_GROUP_PREFIX = "CID_RMQ_SYS_"


def check_consumer_group(name: str) -> str:
    """Return `name`, which a query or a program may consume as.

    Raises OptionError for a name that no RocketMQ consumer starts with (Validators#checkGroup: characters and length,
    equal in 4.9 and 5.3; DefaultMQPushConsumerImpl#checkConfig: the default name), and for a broker's own groups:
    RocketMQ lets them pass, but who publishes offsets as one of them moves the broker's own progress.
    """
    if isinstance(name, str) and not name.strip():
        raise OptionError(f"the consumer group's name is blank ({name!r}): give the group one, such as 'billing'")
    check_group_name(name)
    if name == DEFAULT_GROUP:
        raise OptionError(
            f"consumer group {name!r} is the name of clients that were given none, which RocketMQ refuses: "
            "choose one of your own"
        )
    if name.startswith(BROKER_GROUP_PREFIX):
        raise OptionError(
            f"consumer group {name!r} is a broker's own: under names that begin with {BROKER_GROUP_PREFIX} it keeps "
            "the progress of transactions and the like. Choose another name"
        )
    return name
