"""Apache RocketMQ as a PySpark data source: a store directory, or a live cluster.

    import rmq_spark

    spark = rmq_spark.session()        # or rmq_spark.register(an_existing_session)
    messages = spark.read.format("rmq").option("path", "store").option("subscribe", "orders").load()

    query = spark.readStream.format("rmq")...start()
    rmq_spark.stop_at_end(query)       # for a stream with endingOffsets: wait for the last batch, then stop

Spark is not required: `open_reader` reads the same messages as Arrow batches, and `open_store` appends messages. A name
that needs Spark raises ModuleNotFoundError where PySpark is not installed (extra `spark`).

Importing this module loads neither Spark nor numpy, because each name is imported from its module on first use.
"""

import sys
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmq_spark.consuming import consume, listener_progress
    from rmq_spark.datasource.spark.listener import ConsumeConcurrentlyStatus, ConsumeContext, ConsumeOrderlyStatus
    from rmq_spark.datasource.spark.log_lines import JsonFormatter, json_logging
    from rmq_spark.drawing import PLOT_STYLE
    from rmq_spark.error_texts import explain
    from rmq_spark.group_listeners import GroupLagListener, GroupOffsetListener
    from rmq_spark.metrics import serve_metrics
    from rmq_spark.metrics_listener import MetricsListener
    from rmq_spark.parsing import parse
    from rmq_spark.plots import (
        plot_bytes,
        plot_delay,
        plot_lag,
        plot_over_time,
        plot_queue_skew,
        plot_record,
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
        cluster_brokers,
        cluster_rates,
        cluster_routes,
        create_cluster_topic,
        create_store,
        delete_cluster_topic,
        dump,
        examine_cluster,
        export_parquet,
        finish_intent,
        group_lag,
        group_members,
        group_offsets,
        groups,
        import_parquet,
        open_consumer,
        open_intents,
        open_reader,
        open_store,
        pending_transactions,
        plan_repair,
        prepare_sink,
        repair,
        republish_dead_letters,
        reset_offsets,
        serve_store,
        skip_intent,
    )
    from rmq_spark.store.errors import (
        BackendUnavailableError,
        BatchConflictError,
        BrokerError,
        DamageError,
        DataLossError,
        DiskFullError,
        GroupConflictError,
        IntentStuckError,
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
    "PLOT_STYLE",
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
    "IntentStuckError",
    "JsonFormatter",
    "LockTimeoutError",
    "MetricsListener",
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
    "cluster_brokers",
    "cluster_rates",
    "cluster_routes",
    "consume",
    "create_cluster_topic",
    "create_store",
    "delete_cluster_topic",
    "dump",
    "examine_cluster",
    "explain",
    "export_parquet",
    "finish_intent",
    "group_lag",
    "group_members",
    "group_offsets",
    "groups",
    "import_parquet",
    "json_logging",
    "listener_progress",
    "open_consumer",
    "open_intents",
    "open_reader",
    "open_store",
    "parse",
    "pending_transactions",
    "plan_repair",
    "plot_bytes",
    "plot_delay",
    "plot_lag",
    "plot_over_time",
    "plot_queue_skew",
    "plot_record",
    "plot_segment",
    "plot_tag_shares",
    "prepare_sink",
    "register",
    "repair",
    "republish_dead_letters",
    "reset_offsets",
    "serve_metrics",
    "serve_store",
    "session",
    "skip_intent",
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
    "explain": "rmq_spark.error_texts",
    "export_parquet": "rmq_spark.store",
    "finish_intent": "rmq_spark.store",
    "import_parquet": "rmq_spark.store",
    "plan_repair": "rmq_spark.store",
    "repair": "rmq_spark.store",
    "COLUMNS": "rmq_spark.store",
    "ConsumeConcurrentlyStatus": "rmq_spark.datasource.spark.listener",
    "ConsumeContext": "rmq_spark.datasource.spark.listener",
    "ConsumeOrderlyStatus": "rmq_spark.datasource.spark.listener",
    "GroupLagListener": "rmq_spark.group_listeners",
    "GroupOffsetListener": "rmq_spark.group_listeners",
    "JsonFormatter": "rmq_spark.datasource.spark.log_lines",
    "json_logging": "rmq_spark.datasource.spark.log_lines",
    "MetricsListener": "rmq_spark.metrics_listener",
    "close": "rmq_spark.store",
    "cluster_brokers": "rmq_spark.store",
    "cluster_rates": "rmq_spark.store",
    "cluster_routes": "rmq_spark.store",
    "create_cluster_topic": "rmq_spark.store",
    "delete_cluster_topic": "rmq_spark.store",
    "consume": "rmq_spark.consuming",
    "listener_progress": "rmq_spark.consuming",
    "group_lag": "rmq_spark.store",
    "group_members": "rmq_spark.store",
    "group_offsets": "rmq_spark.store",
    "groups": "rmq_spark.store",
    "open_consumer": "rmq_spark.store",
    "open_intents": "rmq_spark.store",
    "open_store": "rmq_spark.store",
    "open_reader": "rmq_spark.store",
    "parse": "rmq_spark.parsing",
    "pending_transactions": "rmq_spark.store",
    "PLOT_STYLE": "rmq_spark.drawing",
    "plot_bytes": "rmq_spark.plots",
    "plot_delay": "rmq_spark.plots",
    "plot_lag": "rmq_spark.plots",
    "plot_over_time": "rmq_spark.plots",
    "plot_queue_skew": "rmq_spark.plots",
    "plot_record": "rmq_spark.plots",
    "plot_segment": "rmq_spark.plots",
    "plot_tag_shares": "rmq_spark.plots",
    "prepare_sink": "rmq_spark.store",
    "republish_dead_letters": "rmq_spark.store",
    "reset_offsets": "rmq_spark.store",
    "register": "rmq_spark.spark_session",
    "serve_metrics": "rmq_spark.metrics",
    "serve_store": "rmq_spark.store",
    "session": "rmq_spark.spark_session",
    "skip_intent": "rmq_spark.store",
    "stop_at_end": "rmq_spark.stop",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'rmq_spark' has no attribute {name!r}; it has {__dir__()}")
    try:
        home = import_module(_HOMES.get(name, "rmq_spark.store.errors"))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyspark":
            raise
        raise ModuleNotFoundError(
            f"rmq_spark.{name}: the package pyspark is not installed for {sys.executable}; expected PySpark 4.3 or "
            "newer. Install it: pip install 'rmq-spark[spark]'",
            name="pyspark",
        ) from None
    value: object = getattr(home, name)
    if isinstance(value, FunctionType):
        from rmq_spark.store.argument_checks import refuse_unknown_arguments

        value = refuse_unknown_arguments(value)
    globals()[name] = value  # later accesses do not call __getattr__
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
