"""Apache RocketMQ's on-disk store as a PySpark data source.

    import rmq_spark

    spark = rmq_spark.session()        # or rmq_spark.register(a_session_of_yours)
    messages = spark.read.format("rmq").option("path", "store").option("subscribe", "orders").load()

    query = spark.readStream.format("rmq")...start()
    rmq_spark.stop_at_end(query)       # with endingOffsets: deliver all of it, then stop

Without Spark, `open_reader` gives the same messages as Arrow batches, and `open_store` appends.

Nothing is computed here, and importing this loads neither Spark nor numpy: each name is fetched
from its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmq_spark.consuming import consume
    from rmq_spark.datasource.listening import ConsumeConcurrentlyStatus, ConsumeContext, ConsumeOrderlyStatus
    from rmq_spark.group_listeners import GroupLagListener, GroupOffsetListener
    from rmq_spark.parsing import parse
    from rmq_spark.spark_session import register, session
    from rmq_spark.stop import stop_at_end
    from rmq_spark.store import (
        COLUMNS,
        close,
        group_lag,
        group_offsets,
        groups,
        open_consumer,
        open_reader,
        open_store,
        pending_transactions,
        republish_dead_letters,
        reset_offsets,
    )
    from rmq_spark.store.errors import (
        BatchConflictError,
        DamageError,
        DataLossError,
        DiskFullError,
        GroupConflictError,
        LockTimeoutError,
        NotFoundError,
        OffsetRangeError,
        OptionError,
        RmqError,
        StoreChangedError,
        StoreError,
        StorePathError,
    )

__version__ = "0.1.0.dev0"

__all__ = [
    "COLUMNS",
    "BatchConflictError",
    "ConsumeConcurrentlyStatus",
    "ConsumeContext",
    "ConsumeOrderlyStatus",
    "DamageError",
    "DataLossError",
    "DiskFullError",
    "GroupConflictError",
    "GroupLagListener",
    "GroupOffsetListener",
    "LockTimeoutError",
    "NotFoundError",
    "OffsetRangeError",
    "OptionError",
    "RmqError",
    "StoreChangedError",
    "StoreError",
    "StorePathError",
    "close",
    "consume",
    "group_lag",
    "group_offsets",
    "groups",
    "open_consumer",
    "open_reader",
    "open_store",
    "parse",
    "pending_transactions",
    "register",
    "republish_dead_letters",
    "reset_offsets",
    "session",
    "stop_at_end",
]

# Where a name that is no error lives. No function has the name of its module: the import system
# binds a module to its name here, and would hide the function.
_HOMES = {
    "COLUMNS": "rmq_spark.store",
    "ConsumeConcurrentlyStatus": "rmq_spark.datasource.listening",
    "ConsumeContext": "rmq_spark.datasource.listening",
    "ConsumeOrderlyStatus": "rmq_spark.datasource.listening",
    "GroupLagListener": "rmq_spark.group_listeners",
    "GroupOffsetListener": "rmq_spark.group_listeners",
    "close": "rmq_spark.store",
    "consume": "rmq_spark.consuming",
    "group_lag": "rmq_spark.store",
    "group_offsets": "rmq_spark.store",
    "groups": "rmq_spark.store",
    "open_consumer": "rmq_spark.store",
    "open_store": "rmq_spark.store",
    "open_reader": "rmq_spark.store",
    "parse": "rmq_spark.parsing",
    "pending_transactions": "rmq_spark.store",
    "republish_dead_letters": "rmq_spark.store",
    "reset_offsets": "rmq_spark.store",
    "register": "rmq_spark.spark_session",
    "session": "rmq_spark.spark_session",
    "stop_at_end": "rmq_spark.stop",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'rmq_spark' has no attribute {name!r}; it has {__dir__()}")
    value: object = getattr(import_module(_HOMES.get(name, "rmq_spark.store.errors")), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
