"""Apache RocketMQ's on-disk store as a PySpark data source.

    import rmq_spark

    spark = rmq_spark.session()        # or rmq_spark.register(an_existing_session)
    messages = spark.read.format("rmq").option("path", "store").option("subscribe", "orders").load()

    query = spark.readStream.format("rmq")...start()
    rmq_spark.stop_at_end(query)       # for a stream with endingOffsets: wait for the last batch, then stop

Spark is not required: `open_reader` reads the same messages as Arrow batches, and `open_store` appends messages.

Importing this module loads neither Spark nor numpy, because each name is imported from its module on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmq_spark.consuming import consume, listener_progress
    from rmq_spark.datasource.spark.listener import ConsumeConcurrentlyStatus, ConsumeContext, ConsumeOrderlyStatus
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
        examine_cluster,
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
        BackendUnavailableError,
        BatchConflictError,
        BrokerError,
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
        UnknownOutcomeError,
    )

__version__ = "0.1.0.dev0"

__all__ = [
    "COLUMNS",
    "DUMP_KINDS",
    "BackendUnavailableError",
    "BatchConflictError",
    "BrokerError",
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
    "UnknownOutcomeError",
    "check",
    "close",
    "consume",
    "create_store",
    "dump",
    "examine_cluster",
    "export_parquet",
    "group_lag",
    "group_members",
    "group_offsets",
    "groups",
    "import_parquet",
    "listener_progress",
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

# The module of each public name; names that are not listed are errors, in rmq_spark.store.errors. A function must not
# have the name of its module, because importing the module would bind that name here and hide the function.
_HOMES = {
    "DUMP_KINDS": "rmq_spark.store",
    "check": "rmq_spark.store",
    "create_store": "rmq_spark.store",
    "dump": "rmq_spark.store",
    "examine_cluster": "rmq_spark.store",
    "export_parquet": "rmq_spark.store",
    "import_parquet": "rmq_spark.store",
    "plan_repair": "rmq_spark.store",
    "repair": "rmq_spark.store",
    "COLUMNS": "rmq_spark.store",
    "ConsumeConcurrentlyStatus": "rmq_spark.datasource.spark.listener",
    "ConsumeContext": "rmq_spark.datasource.spark.listener",
    "ConsumeOrderlyStatus": "rmq_spark.datasource.spark.listener",
    "GroupLagListener": "rmq_spark.group_listeners",
    "GroupOffsetListener": "rmq_spark.group_listeners",
    "close": "rmq_spark.store",
    "consume": "rmq_spark.consuming",
    "listener_progress": "rmq_spark.consuming",
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
    globals()[name] = value  # later accesses do not call __getattr__
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
