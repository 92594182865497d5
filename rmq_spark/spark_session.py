"""A Spark session that knows `format("rmq")`: a new one for one machine, or one that you have."""

import atexit
import logging
import os
import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

from rmq_spark.datasource.source import RmqDataSource
from rmq_spark.group_listeners import GroupOffsetListener
from rmq_spark.java import check_java

_LOG = logging.getLogger("rmq_spark")
_HAS_LISTENER = "_rmq_spark_listens"  # set on a session: it has no list of its listeners
_LISTENERS_HEAR_WITHIN_MS = 10_000
# Names by which Spark calls a cluster that is this machine.
_LOCAL_MASTERS = ("local", "local[", "local-cluster[")


def register(spark: SparkSession) -> None:
    """Make `format("rmq")` known to the session, for reading and streaming.

    Once per session is enough, and again does no harm. Nothing is registered where the session has the source
    already, because Spark found it among the packages of its Python workers; another source that is called rmq is
    replaced, and Spark says so.
    Python workers import `rmq_spark` by name, so it must be installed for the interpreter that
    `PYSPARK_PYTHON` names on every machine. On one machine, where nothing names any, they get this one.
    """
    context = spark.sparkContext
    named = "PYSPARK_PYTHON" in os.environ or context.getConf().contains("spark.pyspark.python")
    if (context.master or "").startswith(_LOCAL_MASTERS) and not named:
        context.pythonExec = sys.executable  # else "python3", whatever that finds
    if not _has_our_source(spark):
        spark.dataSource.register(RmqDataSource)


def _has_our_source(spark: SparkSession) -> bool:
    """Say whether `rmq` is ours in the session. To register it again would do no harm, but Spark warns of it."""
    try:
        manager = spark._jsparkSession.sessionState().dataSourceManager()
        if not manager.dataSourceExists(RmqDataSource.name()):
            return False
        # The pickled class, which names its module: the one that Spark looks for by itself, or the one behind it.
        numbers = manager.lookupDataSource(RmqDataSource.name()).dataSourceCls().command().mkString(" ")
    except Exception:  # a Spark whose inner parts have other names
        return False
    pickled = bytes(int(number) % 256 for number in numbers.split())
    return any(module.encode() in pickled for module in ("pyspark_rmq", RmqDataSource.__module__))


def session(
    app_name: str = "rmq-spark",
    *,
    master: str = "local[*]",
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a Spark session with the source registered: the one that runs already, or a new one.

    For scripts and notebooks on one machine. It works from a shell without an activated
    environment, because Python workers run this interpreter unless PYSPARK_PYTHON is set. A local
    master listens on the loopback address only, there is no web UI, and conditions of batch queries are pushed
    down to sources that are written in Python; `conf` (names and values as Spark takes them) overrides all three.
    Where something else starts Spark, take its session and call `register`. Queries of the session publish their
    group's offsets when they end (`GroupOffsetListener`); a process that ends just after it stopped one waits for
    that, up to 10 s.

    Raises OptionError when a new session would find no Java, or one older than 17.
    """
    if SparkSession.getActiveSession() is None:
        check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    settings = {"spark.ui.enabled": "false", "spark.sql.python.filterPushdown.enabled": "true"}
    if master.startswith(_LOCAL_MASTERS):
        # Without it Spark looks for an outside address first, and warns when it finds two.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings["spark.driver.bindAddress"] = "127.0.0.1"
        settings["spark.driver.host"] = "127.0.0.1"
    settings.update(conf or {})
    builder = SparkSession.builder.appName(app_name).master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    if not getattr(spark, _HAS_LISTENER, False):
        spark.streams.addListener(GroupOffsetListener())
        setattr(spark, _HAS_LISTENER, True)
        atexit.register(_let_listeners_hear, spark)
    return spark


def _let_listeners_hear(spark: SparkSession) -> None:
    """Wait until listeners have heard what has happened by now: Spark tells them later, and then nobody is there.

    Nothing is to be waited for where the session was stopped: that tells them too.
    """
    java = getattr(spark.sparkContext, "_jsc", None)
    if java is None:
        return
    try:
        java.sc().listenerBus().waitUntilEmpty(_LISTENERS_HEAR_WITHIN_MS)
    except Exception as error:  # Java is gone, a listener takes its time, or a Spark's inner parts have other names
        _LOG.debug("rmq: what listeners did not hear when the process ended is lost: %s", error)
