"""Register `format("rmq")` in a Spark session, or create a session for one machine."""

import atexit
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession, is_remote

from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.gateway_launch import launch_jvm
from rmq_spark.group_listeners import GroupOffsetListener
from rmq_spark.java import check_java

_LOG = logging.getLogger("rmq_spark")
_HAS_LISTENER = "_rmq_spark_listens"  # attribute of a session, because Spark cannot list its listeners
_LISTENER_TIMEOUT_MS = 10_000
# Beginnings of Spark's master URLs whose tasks run on this machine.
_LOCAL_MASTERS = ("local", "local[", "local-cluster[")
_CHECKPOINT_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
_RENAMING_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
_DEFAULT_PYTHON = "python3"  # on PATH: what Spark runs if nobody names an interpreter
_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_DAEMON_SETTING = "spark.python.daemon.module"
_TIMEOUT_S = 30
_JVM_OPTIONS = "SPARK_SUBMIT_OPTS"  # environment variable: options of the JVM that spark-submit starts
_DAEMON = "rmq_spark.datasource.spark.worker_daemon"


def register(spark: SparkSession) -> None:
    """Register `format("rmq")` in the session, for batch and streaming reads and writes.

    Does nothing if the source is already registered, by an earlier call or because Spark found it among the installed
    packages. If another data source has the name rmq, it is replaced, and Spark logs a warning.

    Spark's Python workers import `rmq_spark`. So on every machine it must be installed for the Python interpreter that
    `PYSPARK_PYTHON` names. If `PYSPARK_PYTHON` is not set and the master is local, the workers use the interpreter of
    this process.

    In a session of Spark Connect the workers are those of the server: the environment of the server must have
    `PYSPARK_PYTHON`, and `rmq_spark` installed for it. The source is then registered in any case, because a client
    cannot ask which sources there are.
    """
    if _is_remote(spark):
        spark.dataSource.register(RmqDataSource)
        return
    context = spark.sparkContext
    # What the context has, not the environment: a program may set the variable after the context was created.
    is_unnamed = context.pythonExec == _DEFAULT_PYTHON and not context.getConf().contains("spark.pyspark.python")
    if (context.master or "").startswith(_LOCAL_MASTERS) and is_unnamed:
        # Spark has looked for sources with its default, which may be another interpreter without ours.
        context.pythonExec = sys.executable
        spark.dataSource.register(RmqDataSource)
    elif not _has_our_source(spark):
        spark.dataSource.register(RmqDataSource)


def _is_remote(spark: SparkSession) -> bool:
    """Return whether the session is one of Spark Connect, whose JVM is in another process."""
    return not hasattr(spark, "_jsparkSession")


def _has_our_source(spark: SparkSession) -> bool:
    """Return whether our source is registered in this session. Registering it again would only log Spark's warning."""
    try:
        manager = spark._jsparkSession.sessionState().dataSourceManager()
        if not manager.dataSourceExists(RmqDataSource.name()):
            return False
        # The pickled class contains the name of its module: pyspark_rmq, which Spark finds by itself, or our own.
        numbers = manager.lookupDataSource(RmqDataSource.name()).dataSourceCls().command().mkString(" ")
    except Exception:  # a version of Spark with other internals
        return False
    pickled = bytes(int(number) % 256 for number in numbers.split())
    return any(module.encode() in pickled for module in ("pyspark_rmq", RmqDataSource.__module__))


def session(
    app_name: str = "rmq-spark",
    *,
    master: str = "local[*]",
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the active Spark session, or a new one, with `format("rmq")` registered.

    Use it in scripts and notebooks on one machine; for a session that other code creates, call `register` instead.
    Spark's Python workers use the interpreter of this process unless `PYSPARK_PYTHON` is set, so the virtual
    environment need not be activated. `conf` contains Spark's settings.

    What is set neither in `conf` nor elsewhere, such as in spark-defaults.conf or in the active session, gets a value:
    filters of batch queries are pushed down to the source, and the web UI of a new session is off. A local master
    accepts connections from this machine only, writes checkpoints without a chmod process for each file, and forks
    Python workers from a process that has loaded the source. docs/LOW_LATENCY.md explains the last two. Spark prints
    warnings only, and nothing about its own logging, unless there is a configuration of log4j.

    When a query of the session ends, its last offsets are committed to its consumer group (`GroupOffsetListener`). At
    exit the process waits up to 10 s for these commits.

    If the session is one of Spark Connect (`SPARK_REMOTE` is set, or such a session is active), `master` is not used,
    only filter pushdown is set, and there is no listener: the thread in which Spark Connect calls listeners would keep
    the process alive until `spark.stop()`.

    Raises OptionError if a new session is needed and Spark would not find Java 17 or newer.
    """
    if is_remote() or "SPARK_REMOTE" in os.environ:
        return _remote_session(app_name, conf or {})
    if SparkSession.getActiveSession() is None:
        check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if master.startswith(_LOCAL_MASTERS):
        # Otherwise Spark searches for an external address, and warns if there are several.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = dict(conf or {})
    settings |= _missing_defaults({"spark.app.name": app_name, "spark.master": master, **settings})
    builder = SparkSession.builder.appName(app_name).master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    if not getattr(spark, _HAS_LISTENER, False):
        spark.streams.addListener(GroupOffsetListener())
        setattr(spark, _HAS_LISTENER, True)
        atexit.register(_wait_for_listeners, spark)
    return spark


def _remote_session(app_name: str, conf: Mapping[str, str]) -> SparkSession:
    """Return the session of Spark Connect that is active or that SPARK_REMOTE names, with our source."""
    builder = SparkSession.builder.appName(app_name)
    for name, value in conf.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    if _PUSHDOWN not in conf and _PUSHDOWN not in spark.conf.getAll:
        spark.conf.set(_PUSHDOWN, "true")
    register(spark)
    return spark


def _missing_defaults(conf: Mapping[str, str]) -> dict[str, str]:
    """Return our settings for the session that `session` is about to return, without those that somebody has set.

    Starts Spark's JVM, with `conf`, unless it runs: only the JVM knows what spark-defaults.conf and PYSPARK_SUBMIT_ARGS
    contain. If there is a Spark context already, returns only settings that can be changed in a session.
    """
    # Not only the active session: that is one of this thread, and getOrCreate returns the one of any thread.
    context, active = SparkContext._active_spark_context, SparkSession._instantiatedSession
    master = conf["spark.master"]
    if context is None:
        with _quiet_start():
            launch_jvm(SparkConf(loadDefaults=False).setAll(list(conf.items())))
        given = {*conf, *(name for name, _ in SparkConf().getAll())}
    else:
        master = context.master or ""
        given = {*conf, *(name for name, _ in context.getConf().getAll()), *(active.conf.getAll if active else ())}
    is_local = master.startswith(_LOCAL_MASTERS)
    defaults = {_PUSHDOWN: "true"}
    if is_local:
        defaults[_CHECKPOINT_MANAGER] = _RENAMING_MANAGER
    if context is None:
        defaults["spark.ui.enabled"] = "false"
        if is_local:
            defaults |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
            if _DAEMON_SETTING not in given and _do_workers_find(_DAEMON):
                defaults[_DAEMON_SETTING] = _DAEMON
    return {name: value for name, value in defaults.items() if name not in given}


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Let a JVM that starts in the block print warnings only, unless the user has a configuration of log4j.

    Spark otherwise prints five lines about its own logging. SPARK_SUBMIT_OPTS comes first on the JVM's command line, so
    options of the user's settings replace ours. `launch_jvm` drops the line that the JVM itself prints first.
    """
    before = os.environ.get(_JVM_OPTIONS)
    home, folder = os.environ.get("SPARK_HOME"), os.environ.get("SPARK_CONF_DIR")
    folders = [folder] if folder else [os.path.join(home, "conf")] if home else []
    if any(name.startswith("log4j2") and "template" not in name for one in folders for name in _list(one)):
        yield
        return
    ours = f'"-Dlog4j2.configurationFile={os.path.join(os.path.dirname(__file__), "log4j2.properties")}"'
    os.environ[_JVM_OPTIONS] = f"{ours} {before}" if before else ours
    try:
        yield
    finally:
        if before is None:
            del os.environ[_JVM_OPTIONS]
        else:
            os.environ[_JVM_OPTIONS] = before


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _do_workers_find(module: str) -> bool:
    """Return whether the interpreter of the workers can import the module. Otherwise no Python task at all could run.

    It may not, if PYSPARK_PYTHON names another interpreter, or if only this process has extended sys.path.
    """
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    command = [os.environ["PYSPARK_PYTHON"], "-c", code]
    try:
        found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0


def _wait_for_listeners(spark: SparkSession) -> None:
    """Wait until Spark, which calls its listeners asynchronously, has delivered all pending events to them.

    If the session was stopped, Spark has delivered them already.
    """
    java = getattr(spark.sparkContext, "_jsc", None)
    if java is None:
        return
    try:
        java.sc().listenerBus().waitUntilEmpty(_LISTENER_TIMEOUT_MS)
    except Exception as error:  # Java has exited, a listener is slow, or a version of Spark with other internals
        _LOG.debug("rmq: pending events of Spark's listeners were lost at exit: %s", error)
