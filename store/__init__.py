"""The storage engine's public interface: open, create, read and write a store, and its tools.

`format/` converts between bytes and values. `disk/` is the only folder that touches files. `log/` uses both to
implement RocketMQ's commit log and consume queues. Programs and the command import from this module. The Spark side
imports the contract instead (`backend`).

Python imports this module before any other module of the engine, so importing this one must be cheap. Each public name
is therefore loaded from its own module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmq_spark.store.backend import GroupTerms, SearchAnswer, SendBackTerms
    from rmq_spark.store.client.create_store import create_store
    from rmq_spark.store.client.producer import Producer
    from rmq_spark.store.client.pull_consumer import PullConsumer
    from rmq_spark.store.cluster.broker_statistics import BrokerState, RouteEntry, TopicRate
    from rmq_spark.store.cluster.dead_letters import ClusterRepublished
    from rmq_spark.store.cluster.diagnosis import ClusterFinding
    from rmq_spark.store.cluster.topic_administration import ChangedTopic, DeletedTopic
    from rmq_spark.store.cluster_administration import (
        cluster_brokers,
        cluster_rates,
        cluster_routes,
        create_cluster_topic,
        delete_cluster_topic,
    )
    from rmq_spark.store.consumer_groups import (
        group_lag,
        group_members,
        group_offsets,
        groups,
        lag_at,
        lags_at,
        reset_offsets,
    )
    from rmq_spark.store.delivery.dead_letters import Republished, pending_transactions
    from rmq_spark.store.delivery.scheduler import DeliveryScheduler
    from rmq_spark.store.delivery.send_back_sink import SendBackSettings, SendBackTask, commit_copies
    from rmq_spark.store.delivery.serve import Served, serve_store
    from rmq_spark.store.exact_sinks import finish_intent, open_intents, prepare_sink, skip_intent
    from rmq_spark.store.filter.row_filter import SQL92, TAG, Expression
    from rmq_spark.store.format.columns import COLUMNS
    from rmq_spark.store.format.config_json import TopicConfig
    from rmq_spark.store.format.message_encoder import MESSAGE_COLUMNS
    from rmq_spark.store.group.final_commit import commit_final_offsets
    from rmq_spark.store.group.group_session import GroupSession
    from rmq_spark.store.group_tables import GroupLags, sum_lag
    from rmq_spark.store.log.store_reader import StoreReader
    from rmq_spark.store.model import CommitKey
    from rmq_spark.store.opening import close, examine_cluster, open_consumer, open_reader, open_store
    from rmq_spark.store.parquet_copies import export_parquet, import_parquet
    from rmq_spark.store.republishing import republish_dead_letters
    from rmq_spark.store.tools.check import check
    from rmq_spark.store.tools.dump import DUMP_KINDS, dump
    from rmq_spark.store.tools.repair import repair
    from rmq_spark.store.tools.repair_plan import plan_repair
    from rmq_spark.store.transaction.commit import CommitOptions
    from rmq_spark.store.transaction.intents import StagedFile
    from rmq_spark.store.transaction.sink import RecordBuilderSettings, SinkSettings, TaskStage, abort_sink, commit_sink
    from rmq_spark.store.view.explorer import StoreExplorer
    from rmq_spark.store.view.record_fields import RecordField, record_fields
    from rmq_spark.store.view.series import segment_layout, stored_delays, stored_over_time, tag_counts
    from rmq_spark.store.view.summary import GroupLag, TopicSummary
    from rmq_spark.store.view.summary_text import bytes_text, count_text, span_text

__all__ = [
    "COLUMNS",
    "DUMP_KINDS",
    "MESSAGE_COLUMNS",
    "SQL92",
    "TAG",
    "BrokerState",
    "ChangedTopic",
    "ClusterFinding",
    "ClusterRepublished",
    "CommitKey",
    "CommitOptions",
    "DeletedTopic",
    "DeliveryScheduler",
    "Expression",
    "GroupLag",
    "GroupLags",
    "GroupSession",
    "GroupTerms",
    "Producer",
    "PullConsumer",
    "RecordBuilderSettings",
    "RecordField",
    "Republished",
    "RouteEntry",
    "SearchAnswer",
    "SendBackSettings",
    "SendBackTask",
    "SendBackTerms",
    "SendResult",
    "SendStatus",
    "Served",
    "SinkSettings",
    "StagedFile",
    "StoreExplorer",
    "StoreReader",
    "TaskStage",
    "TopicConfig",
    "TopicRate",
    "TopicSummary",
    "abort_sink",
    "bytes_text",
    "check",
    "close",
    "cluster_brokers",
    "cluster_rates",
    "cluster_routes",
    "commit_copies",
    "commit_final_offsets",
    "commit_sink",
    "count_text",
    "create_cluster_topic",
    "create_store",
    "delete_cluster_topic",
    "dump",
    "examine_cluster",
    "export_parquet",
    "finish_intent",
    "group_lag",
    "group_members",
    "group_offsets",
    "groups",
    "import_parquet",
    "lag_at",
    "lags_at",
    "open_consumer",
    "open_intents",
    "open_reader",
    "open_store",
    "pending_transactions",
    "plan_repair",
    "prepare_sink",
    "record_fields",
    "repair",
    "republish_dead_letters",
    "reset_offsets",
    "segment_layout",
    "serve_store",
    "skip_intent",
    "span_text",
    "stored_delays",
    "stored_over_time",
    "sum_lag",
    "tag_counts",
]

# Module -> the names that are loaded from it.
_MODULES = {
    "backend": "GroupTerms SearchAnswer SendBackTerms",
    "model": "CommitKey",
    "opening": "close examine_cluster open_consumer open_reader open_store",
    "client.create_store": "create_store",
    "client.producer": "Producer",
    "send_result": "SendResult SendStatus",
    "client.pull_consumer": "PullConsumer",
    "cluster.diagnosis": "ClusterFinding",
    "cluster.dead_letters": "ClusterRepublished",
    "cluster.broker_statistics": "BrokerState RouteEntry TopicRate",
    "cluster.topic_administration": "ChangedTopic DeletedTopic",
    "cluster_administration": (
        "cluster_brokers cluster_rates cluster_routes create_cluster_topic delete_cluster_topic"
    ),
    "consumer_groups": "group_lag group_members group_offsets groups lag_at lags_at reset_offsets",
    "exact_sinks": "finish_intent open_intents prepare_sink skip_intent",
    "delivery.dead_letters": "pending_transactions Republished",
    "republishing": "republish_dead_letters",
    "delivery.scheduler": "DeliveryScheduler",
    "delivery.send_back_sink": "commit_copies SendBackSettings SendBackTask",
    "delivery.serve": "Served serve_store",
    "filter.row_filter": "Expression SQL92 TAG",
    "format.columns": "COLUMNS",
    "format.config_json": "TopicConfig",
    "format.message_encoder": "MESSAGE_COLUMNS",
    "group.final_commit": "commit_final_offsets",
    "group.group_session": "GroupSession",
    "group_tables": "GroupLags sum_lag",
    "log.store_reader": "StoreReader",
    "parquet_copies": "export_parquet import_parquet",
    "tools.check": "check",
    "tools.dump": "dump DUMP_KINDS",
    "tools.repair": "repair",
    "tools.repair_plan": "plan_repair",
    "transaction.commit": "CommitOptions",
    "transaction.intents": "StagedFile",
    "transaction.sink": "abort_sink commit_sink RecordBuilderSettings SinkSettings TaskStage",
    "view.explorer": "StoreExplorer",
    "view.record_fields": "RecordField record_fields",
    "view.series": "segment_layout stored_delays stored_over_time tag_counts",
    "view.summary": "GroupLag TopicSummary",
    "view.summary_text": "bytes_text count_text span_text",
}
_HOMES = {name: f"rmq_spark.store.{module}" for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'rmq_spark.store' has no attribute {name!r}; it has {__all__}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # so that the next look-up does not call this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
