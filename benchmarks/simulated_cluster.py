"""A cluster of simulated brokers (`rmq_spark.store.testing.brokers`) in a process of its own.

So its work is not counted as ours.

Run as a program: `simulated_cluster.py BROKERS TOPICS QUEUES`, with the number of queues of each topic at each broker.
It prints its address, and then answers each line of JSON with one.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self


class SimulatedCluster:
    """A cluster with topics named topic-0, topic-1 and so on. Entered and left. `address` is the option nameServer."""

    def __init__(self, brokers: int, topics: int, queues: int) -> None:
        command = [sys.executable, __file__, *map(str, (brokers, topics, queues))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = str(self._read())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def advance(self, count: int) -> None:
        """Let `count` messages arrive in each queue."""
        self._ask({"op": "advance", "count": count})

    def clear_requests(self) -> dict[str, dict[str, int]]:
        """Return how many requests of each code came to each broker and to "name servers", and count from 0 again."""
        found: dict[str, dict[str, int]] = self._ask({"op": "requests"})
        return found

    def _ask(self, line: dict[str, Any]) -> Any:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())


def _serve(broker_count: int, topic_count: int, queue_count: int) -> None:
    from rmq_spark.store.testing.brokers import RunningCluster

    topics = [f"topic-{number}" for number in range(topic_count)]
    with (
        tempfile.TemporaryDirectory() as folder,
        RunningCluster(Path(folder), brokers=broker_count, is_light=True) as cluster,
    ):
        for topic in topics:
            cluster.create_topic(topic, queue_count)
        print(json.dumps(cluster.address), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            answer: Any = None
            if asked["op"] == "advance":
                for topic in topics:
                    for broker in cluster.brokers:
                        cluster.advance(topic, asked["count"], broker=broker)
            else:
                answer = cluster.clear_requests()
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
