"""The records in the store of a broker of this process."""

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.format.properties import parse
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.testing.brokers import Broker
from rmq_spark.store.testing.brokers.raw_client import RawClient


def records_of(server: Broker, topic: str = "orders", queue_id: int = 0) -> list[Record]:
    """Return the records of a queue, from pulls."""
    numbers = {"queueId": queue_id, "maxMsgNums": 32, "commitOffset": 0, "suspendTimeoutMillis": 0, "sysFlag": 4}
    fields = {"topic": topic, "consumerGroup": "readers", "queueOffset": 0, "subscription": "*", **numbers}
    found: list[Record] = []
    with RawClient(server.address) as client:
        while (answer := client.call(RequestCode.PULL_MESSAGE, fields)).code == ResponseCode.SUCCESS:
            data = bytes(answer.body)
            while data:
                record = decode_record(data)
                assert isinstance(record, Record), record
                found.append(record)
                data = data[record.total_size :]
            fields["queueOffset"] = int(answer.fields["nextBeginOffset"])
    return found


def properties_of(record: Record) -> dict[str, str]:
    """Return the properties of a record by name."""
    return parse(record.properties)
