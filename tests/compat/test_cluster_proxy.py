"""A proxy of 5.3 in front of a real broker: we read through its remoting port, which is the option nameServer."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from compat_kit import kinds, secured
from compat_kit.clusters import pull_all, run_reader, with_broker
from compat_kit.rocketmq import Client, Java, free_port
from compat_kit.rows import Row, Rows, count, differences, table_rows
from compat_kit.secured import NAME, READ, SecuredBroker

pytestmark = pytest.mark.compat


@dataclass
class Behind:
    """A broker, and a proxy in front of it. `address` is the proxy's."""

    served: SecuredBroker
    address: str

    def read(self, how: str, **arguments: object) -> list[Row]:
        """Return the rows that a function of `cluster_reader.py` reads through the proxy, in its order."""
        rows: list[Row] = run_reader(self.served.java, self.address, self.served.folder, how, **arguments)
        return rows

    def try_read(self, **options: str) -> str:
        """Return the text of the error of a query through the proxy."""
        case = {"subscribe": READ, "requestTimeout": "5s", **options}
        cases = {"case": {name: value for name, value in case.items() if value}}
        found, _ = run_reader(self.served.java, self.address, self.served.folder, "try_reads", cases=cases)["case"]
        assert isinstance(found, str), "an error is expected"
        return found


def of_broker(rows: list[Row]) -> Rows:
    """Return rows by queue, with the name of the broker."""
    return with_broker(table_rows(rows), NAME)


@pytest.fixture(scope="module")
def behind(run_java: Callable[[str], Java], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    """A broker with messages in one topic, and a proxy in cluster mode."""
    java = run_java("5.3.3")
    # A proxy creates this topic, with a time-out of 3 s, and exits if that fails.
    served = secured.prepare(java, tmp_path_factory.mktemp("proxy"), empty_topics=["DefaultHeartBeatSyncerTopic"])
    port = free_port()
    with ExitStack() as stack:
        served.broker.start()
        stack.callback(served.broker.kill)
        conf = {
            "rocketMQClusterName": "compat",
            "namesrvAddr": served.broker.namesrv,
            "remotingAccessAddr": "127.0.0.1",
            "remotingListenPort": port,
            "grpcServerPort": port + 1,
        }
        proxy = replace(java, files={"conf/rmq-proxy.json": json.dumps(conf)}).start("proxy", [])
        stack.callback(proxy.kill)
        assert proxy.read()["event"] == "ready"
        yield Behind(served, f"127.0.0.1:{port}")


def test_batch_query_through_a_proxy_reads_every_row(behind: Behind) -> None:
    rows = of_broker(behind.read("read_batch", topics=[READ], options={"minPartitions": "2"}))
    assert differences(rows, behind.served.written) == []
    assert count(rows) == 60


def test_stream_through_a_proxy_continues_from_its_checkpoint(behind: Behind, tmp_path: Path) -> None:
    topic, checkpoint, rows = "streamed", tmp_path / "checkpoint", list[Row]()
    with Client(behind.served.broker) as client:
        client("create-topic", topic=topic, queues=2)
        for begin in (0, 20):  # the query runs twice, each time in a process of its own
            for queue_id in range(2):
                batch = [{"topic": topic, "text": f"{queue_id} {number}"} for number in range(begin, begin + 20)]
                kinds.produce(client, topic=topic, batch=batch, queueId=queue_id)
            options = {"maxOffsetsPerTrigger": "16"}
            rows += behind.read("read_stream", topics=[topic], options=options, checkpoint=str(checkpoint))
        pulled = pull_all(client, [topic])
    for queue_id in range(2):
        bodies = [row["body"].decode() for row in rows if row["queueId"] == queue_id]
        assert bodies == [f"{queue_id} {number}" for number in range(40)]
    assert differences(of_broker(rows), pulled) == []
    assert sum(path.name.isdigit() for path in (checkpoint / "commits").iterdir()) == 6


def test_pattern_through_a_proxy_is_refused_by_name(behind: Behind) -> None:
    text = behind.try_read(subscribe="", subscribePattern="ord.*")
    assert re.search(
        r"BrokerError: .*lists no topics, so it is a proxy or a broker.*or name the topics with subscribe", text
    )
