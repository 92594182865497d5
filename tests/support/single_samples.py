"""Records of single messages, for tests of appends."""

from rmq_spark.store.format.body_codec import BodyRules
from rmq_spark.store.format.java import Host, encode_host
from rmq_spark.store.format.message_ids import UniqueIds
from rmq_spark.store.format.queue_router import QueueRouter
from rmq_spark.store.format.single_message import SingleEncoder, SingleMessage, SingleRecord

HOSTS = encode_host(Host("10.1.2.3", 0)), encode_host(Host("10.1.2.3", 10911))
BORN_MS = 1_700_000_000_000


def single_record(topic: str, number: int, queue_id: int, *, keys: int, padding: int = 0) -> SingleRecord:
    """Return a record with the body `number` and so many keys: `k<number>`, `k<number>-1`, ..."""
    encoder = SingleEncoder(*HOSTS, UniqueIds("10.1.2.3", 7, number), BodyRules(), 1 << 20)
    names = [f"k{number}", *(f"k{number}-{one}" for one in range(1, keys))][:keys]
    message = SingleMessage(topic, b"%05d" % number + b"b" * padding, "t", names, queue_id=queue_id)
    record = encoder.encode(message, QueueRouter(lambda _: 100, 0), BORN_MS)
    assert record is not None
    return record
