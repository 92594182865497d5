"""A Kafka node to compare with: one process that is broker and controller, and Spark's options for its sink.

The jars come from Maven at first use: `kafka/pom.xml` names them. The node has the settings of a default installation
and the heap that its scripts give it.
"""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from compat_kit.build import java_program, maven_jars
from compat_kit.rocketmq import free_port
from processor_time import cpu_seconds
from real_broker import UnavailableError

_POM = Path(__file__).parent / "kafka" / "pom.xml"
_FLAGS = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")
_CLUSTER_ID = "cm1xLXNwYXJrLWJlbmNoMQ"  # any 16 bytes in base64
_SETTINGS = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={data}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""
# On a busy machine the first large write outlasts the default of two minutes.
_PATIENCE = {
    "kafka.delivery.timeout.ms": "600000",
    "kafka.request.timeout.ms": "300000",
    "kafka.max.block.ms": "300000",
}
_START_SECONDS = 120


def spark_jars() -> list[str]:
    """Return the jars that Spark needs for its Kafka source and sink. Raises UnavailableError if there are none."""
    folder = maven_jars("kafka-spark", _POM, ["-Pspark"], "the jars of Spark's Kafka source")
    return [str(path) for path in sorted(folder.glob("*.jar"))]


class KafkaNode:
    """A Kafka node with its data in a folder. Entered: it serves. Left: it was killed.

    Raises UnavailableError if it does not start; the text has the end of its output.
    """

    def __init__(self, folder: Path, prefix: Sequence[str] = ()) -> None:
        self._folder, self._prefix = folder, prefix
        self._jars = maven_jars("kafka-node", _POM, ["-Pnode"], "the jars of a Kafka node")
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._conf = folder / "server.properties"
        self._output = folder / "output"
        self._conf.write_text(_SETTINGS.format(port=port, controller=port + 1, data=folder / "data"))

    def __enter__(self) -> Self:
        done = self._run("kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", str(self._conf))
        if done.returncode:
            raise UnavailableError(f"the storage of a Kafka node: {done.stdout[-1000:]}")
        with self._output.open("w") as output:
            command = self._command(_FLAGS, "kafka.Kafka", str(self._conf))
            self._process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            self._await_ready()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def create_topic(self, topic: str, partitions: int) -> None:
        """Create a topic. Raises UnavailableError if the node refuses it."""
        done = self._tool("--create", "--topic", topic, "--partitions", str(partitions))
        if done.returncode:
            raise UnavailableError(f"a topic of a Kafka node: {done.stdout[-1000:]}")

    def cpu_seconds(self) -> float:
        """Return the processor time of the node since its start."""
        return cpu_seconds(self._process.pid)

    def sink_options(self, topic: str) -> dict[str, str]:
        """Return the options of Spark's sink for a topic: the defaults of the producer, with patience."""
        return {"kafka.bootstrap.servers": self.address, "topic": topic, **_PATIENCE}

    def _await_ready(self) -> None:
        give_up = time.monotonic() + _START_SECONDS
        while self._tool("--list").returncode:
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise UnavailableError(f"a Kafka node does not start: {self._output.read_text()[-1000:]}")

    def _tool(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self._run("org.apache.kafka.tools.TopicCommand", "--bootstrap-server", self.address, *words)

    def _run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = self._command(("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"), program, *words)
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, check=False
        )

    def _command(self, flags: Sequence[str], program: str, *words: str) -> list[str]:
        return [*self._prefix, java_program("java"), *flags, "-cp", f"{self._jars}/*", program, *words]

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
