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
    from rmq_spark.plots import (
        plot_delay,
        plot_lag,
        plot_over_time,
        plot_queue_skew,
        plot_segment,
        plot_tag_shares,
    )
    from rmq_spark.spark_session import register, session
    from rmq_spark.stop import stop_at_end
    from rmq_spark.store import (
        COLUMNS,
        DUMP_KINDS,
        check,
        close,
        create_store,
        dump,
        export_parquet,
        group_lag,
        group_members,
        group_offsets,
        groups,
        import_parquet,
        open_consumer,
        open_reader,
        open_store,
        pending_transactions,
        plan_repair,
        repair,
        republish_dead_letters,
        reset_offsets,
        serve_store,
    )
    from rmq_spark.store.errors import (
        BatchConflictError,
        DamageError,
        DataLossError,
        DiskFullError,
        GroupConflictError,
        LockTimeoutError,
        NoPermissionError,
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
    "DUMP_KINDS",
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
    "NoPermissionError",
    "NotFoundError",
    "OffsetRangeError",
    "OptionError",
    "RmqError",
    "StoreChangedError",
    "StoreError",
    "StorePathError",
    "check",
    "close",
    "consume",
    "create_store",
    "dump",
    "export_parquet",
    "group_lag",
    "group_members",
    "group_offsets",
    "groups",
    "import_parquet",
    "open_consumer",
    "open_reader",
    "open_store",
    "parse",
    "pending_transactions",
    "plan_repair",
    "plot_delay",
    "plot_lag",
    "plot_over_time",
    "plot_queue_skew",
    "plot_segment",
    "plot_tag_shares",
    "register",
    "repair",
    "republish_dead_letters",
    "reset_offsets",
    "serve_store",
    "session",
    "stop_at_end",
]

# Where a name that is no error lives. No function has the name of its module: the import system
# binds a module to its name here, and would hide the function.
_HOMES = {
    "DUMP_KINDS": "rmq_spark.store",
    "check": "rmq_spark.store",
    "create_store": "rmq_spark.store",
    "dump": "rmq_spark.store",
    "export_parquet": "rmq_spark.store",
    "import_parquet": "rmq_spark.store",
    "plan_repair": "rmq_spark.store",
    "repair": "rmq_spark.store",
    "COLUMNS": "rmq_spark.store",
    "ConsumeConcurrentlyStatus": "rmq_spark.datasource.listening",
    "ConsumeContext": "rmq_spark.datasource.listening",
    "ConsumeOrderlyStatus": "rmq_spark.datasource.listening",
    "GroupLagListener": "rmq_spark.group_listeners",
    "GroupOffsetListener": "rmq_spark.group_listeners",
    "close": "rmq_spark.store",
    "consume": "rmq_spark.consuming",
    "group_lag": "rmq_spark.store",
    "group_members": "rmq_spark.store",
    "group_offsets": "rmq_spark.store",
    "groups": "rmq_spark.store",
    "open_consumer": "rmq_spark.store",
    "open_store": "rmq_spark.store",
    "open_reader": "rmq_spark.store",
    "parse": "rmq_spark.parsing",
    "pending_transactions": "rmq_spark.store",
    "plot_delay": "rmq_spark.plots",
    "plot_lag": "rmq_spark.plots",
    "plot_over_time": "rmq_spark.plots",
    "plot_queue_skew": "rmq_spark.plots",
    "plot_segment": "rmq_spark.plots",
    "plot_tag_shares": "rmq_spark.plots",
    "republish_dead_letters": "rmq_spark.store",
    "reset_offsets": "rmq_spark.store",
    "register": "rmq_spark.spark_session",
    "serve_store": "rmq_spark.store",
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
