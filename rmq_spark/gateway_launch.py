"""The start of Spark's JVM for `rmq_spark.session`, without the line that Java itself prints first.

The line says that the JVM loads an incubator module, which Spark asks for. Nothing turns it off. So the standard error
of the JVM goes through a process that drops this line, if it is the first one, and passes everything else as it comes.
"""

import os
import subprocess
import sys
import threading

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway

_FIRST_LINE = b"WARNING: Using incubator modules: jdk.incubator.vector\n"
# It ends when the JVM has closed its standard error. A Ctrl-C on the terminal is for the program.
_FILTER = f"""
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
first, data = {_FIRST_LINE!r}, b""
while len(data) < len(first) and first.startswith(data) and (more := os.read(0, 65536)):
    data += more
data = data.removeprefix(first) or os.read(0, 65536)
while data:
    data = data[os.write(2, data):] or os.read(0, 65536)
"""
_lock = threading.Lock()
_filters: list["subprocess.Popen[bytes]"] = []  # a process without a reference would be reported as left behind


def launch_jvm(conf: SparkConf) -> None:
    """Start Spark's JVM with the settings in `conf`, unless it runs. Thread-safe: at most one is started.

    Java's line is shown if `sys.executable` is empty, as in some programs that embed Python.
    """
    with _lock:
        _launch(conf)


def _launch(conf: SparkConf) -> None:
    if not sys.executable or SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        SparkContext._ensure_initialized(conf=conf)
        return
    lines = subprocess.Popen([sys.executable, "-S", "-E", "-c", _FILTER], stdin=subprocess.PIPE)
    _filters.append(lines)
    assert lines.stdin is not None
    try:
        gateway = launch_gateway(conf, {"stderr": lines.stdin})  # type: ignore[no-untyped-call]
    finally:
        lines.stdin.close()  # the JVM has its own
    SparkContext._ensure_initialized(gateway=gateway, conf=conf)
