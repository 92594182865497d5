"""A program that reads a live cluster through the product: `cluster_reader.py FUNCTION NAME_SERVERS TARGET`.

Its standard input is a pickle of the function's arguments by name. It writes a pickle of what the function returns.
"""

import itertools
import json
import os
import pickle
import signal
import socket
import ssl
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema

import rmq_spark
from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store import GroupLag
from rmq_spark.store.backend import COLUMNS, CommitTerms, DecodeLimits, RepeatedBatch, SendBackTerms
from rmq_spark.store.cluster import send_back_sink
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.broker_calls import BrokerCalls
from rmq_spark.store.cluster.client import borrowed_client
from rmq_spark.store.cluster.frame import Command, FrameReader, encode_command
from rmq_spark.store.cluster.group_requests import AllGroupOffsetsRequest, CommitOffsetRequest, CreateGroupRequest
from rmq_spark.store.cluster.send_back import RowCheck
from rmq_spark.store.cluster.signing import sign_command
from rmq_spark.store.errors import RmqError
from rmq_spark.store.format.config_json import GroupConfig
from rmq_spark.store.format.failed_rows import failed_rows_of
from rmq_spark.store.model import CommitKey, QueueBounds, QueueKey, QueueRange
from rmq_spark.store.places import locate

Row = dict[str, Any]
_TIMEOUT_MS = 20_000  # the machine may be busy
Place = tuple[str, int, int]


def read_backend(address: str, topics: list[str]) -> list[Row]:
    """Return every message of topics, read through the backend without Spark."""
    location = locate({"nameServer": address})
    assert location is not None
    backend = location.open()
    try:
        backend.refresh()
        queues = [queue for found in backend.queues(topics).values() for queue in found]
        rows: list[Row] = []
        for queue, bounds in backend.bounds(queues).items():
            assert isinstance(bounds, QueueBounds), (queue, bounds)
            part = QueueRange(queue, bounds.min_offset, bounds.max_offset)
            for found in backend.read(part, list(COLUMNS), DecodeLimits(check_crc=True), None):
                rows += found.batch.to_pylist()
        return rows
    finally:
        backend.close()


def read_batch(address: str, topics: list[str], options: dict[str, str]) -> list[Row]:
    """Return every message of topics, read by a batch query."""
    spark = rmq_spark.session(master="local[2]", conf={"spark.log.level": "ERROR", "spark.ui.enabled": "false"})
    reader = spark.read.format("rmq").options(nameServer=address, subscribe=",".join(topics))
    reader = reader.options(columns="*", checkCrc="true")
    return _rows(reader.options(**options).load())


def read_stream(address: str, topics: list[str], options: dict[str, str], checkpoint: str) -> list[Row]:
    """Return the messages that a streaming query delivers, from its checkpoint to the ends of the queues."""
    spark = rmq_spark.session(master="local[2]", conf={"spark.log.level": "ERROR", "spark.ui.enabled": "false"})
    reader = spark.readStream.format("rmq").options(nameServer=address, subscribe=",".join(topics), columns="*")
    rows: list[Row] = []
    frame = reader.options(startingOffsets="earliest", **options).load()
    writer = frame.writeStream.foreachBatch(lambda batch, _: rows.extend(_rows(batch)))
    writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
    return rows


def find_messages(address: str, topic: str, keys: list[str], ids: list[str]) -> dict[str, list[Place]]:
    """Return broker, queue id and queue offset of the messages with each of the keys and ids."""
    with rmq_spark.open_reader(name_server=address) as reader:
        found = {key: reader.find_key(topic, key) for key in keys}
        found |= {one: reader.find_message_id(one, [topic]) for one in ids}
    return {
        word: [(queue.broker, queue.queue_id, offset) for queue, offset in places] for word, places in found.items()
    }


def send_rows_back(address: str, topic: str, group: str) -> dict[str, Any]:
    """Send the six messages of a topic back in different ways, and republish the dead letters twice.

    Return the errors of wrong rows, and the rows of the retry topic, of the dead letters, and of those republished.
    """
    rows = sorted(read_backend(address, [topic]), key=lambda row: row["body"])
    errors = []
    with rmq_spark.open_store(name_server=address, request_timeout_ms=_TIMEOUT_MS) as producer:

        def back(row: Row, **terms: Any) -> None:
            properties = {"properties": dict(row["properties"])}
            producer.send_back([row | properties], group, **terms)

        for change in ({"commitLogOffset": 1}, {"commitLogOffset": 1 << 40}, {"queueOffset": 1}, {"queueId": 5}):
            wrong = {name: rows[0][name] + by for name, by in change.items()}
            try:
                back(rows[0] | wrong)
            except RmqError as error:
                errors.append((type(error).__name__, str(error)))
        back(rows[0])
        back(rows[1], delay_level=-1)
        back(rows[2], max_reconsume_times=0)
        find = RowCheck._find
        RowCheck._find = lambda self, places, chosen: ({}, list(chosen))  # type: ignore[method-assign] # as if expired
        back(rows[3], max_reconsume_times=1, expired_original="resend")
        back(rows[4], delay_level=-1, expired_original="resend")
        back(rows[5], max_reconsume_times=0, expired_original="resend")
        RowCheck._find = find  # type: ignore[method-assign]
    retry, dead = f"%RETRY%{group}", f"%DLQ%{group}"
    until_s = time.monotonic() + 60
    copies: list[Row] = []
    while len(copies) < 2 and time.monotonic() < until_s:
        time.sleep(0.5)
        copies = read_backend(address, [retry])
    letters = read_backend(address, [dead])
    done = [rmq_spark.republish_dead_letters(name_server=address, group=group) for _ in range(2)]
    again = [row for row in read_backend(address, [topic]) if "REPUBLISHED_FROM" in dict(row["properties"])]
    return {
        "rows": rows,
        "errors": errors,
        "retry": copies,
        "dead": letters,
        "sent": [one.sent for one in done],
        "again": again,
    }


def repeat_batch(address: str, group: str, rows: list[Row], planned_ms: int, deaths: int, seed: int) -> list[int]:
    """Commit rows that failed, as a batch that was planned at a time. Return for each attempt how many were sent back.

    The process of an attempt is killed as often as told, each time after another number of answers and while further
    requests are under way. The next attempt repeats the batch. Nothing is connected before a process is forked.
    """
    random, sent = Random(seed), []
    names = ("topic", "physicalTopic", "brokerName", "queueId", "queueOffset", "commitLogOffset", "reconsumeTimes")
    failed = failed_rows_of([{name: row[name] for name in (*names, "delayLevel")} for row in rows])
    for death in range(deaths + 1):
        lives_for = random.randint(1, 12) if death < deaths else -1
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                _commit_batch(address, group, failed, planned_ms, lives_for, writing)
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as counts:
            sent += [int(count) for count in counts]
        _, status = os.waitpid(child, 0)
        assert status == (signal.SIGKILL if lives_for > 0 else 0), status
        time.sleep(0.5)  # Spark takes longer to start
    return sent


def _commit_batch(
    address: str, group: str, failed: pa.RecordBatch, planned_ms: int, lives_for: int, counts: int
) -> None:
    """Commit a batch, and die after this many answers. Write how many rows are sent back."""
    location = locate({"nameServer": address})
    assert isinstance(location, ClusterAddress)
    answers, send, take = itertools.count(1), send_back_sink.send_checked, BrokerCalls._take

    def count_answers(self: BrokerCalls, *arguments: Any) -> None:
        take(self, *arguments)
        if next(answers) == lives_for:
            os.kill(os.getpid(), signal.SIGKILL)

    def send_checked(calls: Any, routes: Any, terms: Any, rows: Sequence[Any]) -> None:
        os.write(counts, f"{len(rows)}\n".encode())
        BrokerCalls._take = count_answers  # type: ignore[method-assign]
        send(calls, routes, terms, rows)
        if lives_for > 0:  # there were fewer requests than that
            os.kill(os.getpid(), signal.SIGKILL)

    send_back_sink.send_checked = send_checked
    key, terms = CommitKey("query", 0), SendBackTerms(group, repeated=RepeatedBatch(0, planned_ms))
    sink = replace(location, request_timeout_ms=_TIMEOUT_MS).send_back_sink(terms, CommitTerms())
    task = sink.open_task(None, key, "task", 0)
    task.write(failed)
    sink.commit(key, [task.finish()])


def begin_group(
    address: str, topic: str, group: str, commits: list[tuple[str, str, int, int]]
) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Commit offsets, each (broker, its address, queue id, offset), as the group.

    Return the group's committed offsets in the topic, where the group begins with the fallback latest, both by broker
    and queue id, and the entries of the brokers' tables of offsets.
    """
    location = locate({"nameServer": address})
    assert isinstance(location, ClusterAddress)
    backend = location.open()
    table: set[str] = set()
    with borrowed_client(location) as client:
        for _, to, _, _ in commits:
            client.call(to, CreateGroupRequest(GroupConfig(group)))
        for broker, to, queue_id, offset in commits:
            client.call(to, CommitOffsetRequest(group, QueueKey(topic, queue_id, broker), offset))
        backend.refresh()
        bounds = {queue: found for queue, found in backend.bounds(backend.queues([topic])[topic]).items()}
        committed = backend.committed_offsets(group, list(bounds))
        begins = backend.start_offsets(group, bounds, committed, "latest", {})
        for to in {backend.catalog.book.address(queue.broker) for queue in bounds}:
            table |= client.call(to, AllGroupOffsetsRequest("")).offsets.keys()
    backend.close()
    return _by_id(committed), _by_id(begins), sorted(table)


def _by_id(offsets: dict[QueueKey, int]) -> dict[str, int]:
    return {queue.id_text: offset for queue, offset in offsets.items()}


def administrate(address: str, calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Call functions of `rmq_spark` about groups, each with its arguments. Return tables as rows, and errors as texts.

    The call "await_lag" waits until a group has unread messages in no queue, at most a minute, and returns its lag.
    """
    found: list[Any] = []
    for name, arguments in calls:
        given = {"name_server": address, "request_timeout_ms": _TIMEOUT_MS, **arguments}
        try:
            result = _await_lag(given) if name == "await_lag" else getattr(rmq_spark, name)(**given)
        except RmqError as error:
            result = f"{type(error).__name__}: {error}"
        found.append(result.to_pylist() if isinstance(result, pa.Table | GroupLag) else result)
    return found


def _await_lag(given: dict[str, Any]) -> GroupLag:
    """Return the lag of a group when it has consumed everything, or after a minute."""
    until_s = time.monotonic() + 60
    while True:
        lag = rmq_spark.group_lag(**given)
        if time.monotonic() > until_s or (len(lag) and not lag.messages):
            return lag
        time.sleep(0.5)


def pull_messages(
    address: str, topic: str, group: str, tags: str | None = None, sql92: str | None = None
) -> list[tuple[str, int, bytes]]:
    """Return broker, queue id and body of every message of a topic that a pull consumer gets, and commit the ends."""
    pulled = []
    with rmq_spark.open_consumer(
        name_server=address, group=group, check_crc=True, request_timeout_ms=_TIMEOUT_MS
    ) as consumer:
        consumer.subscribe(topic, tags, sql92=sql92)
        for queue in consumer.queues(topic):
            offset = consumer.min_offset(queue)
            while (found := consumer.pull(queue, offset, 5)).pull_status != "NO_NEW_MSG":
                pulled += [(queue.broker, queue.queue_id, body) for body in found.messages.column("body").to_pylist()]
                offset = found.next_begin_offset
            assert offset == consumer.max_offset(queue)
            consumer.update_consume_offset(queue, offset)
    return pulled


def committed_offsets(address: str, topic: str, group: str) -> list[int | None]:
    """Return the committed offsets of a group, in the order of brokers and queue ids."""
    with rmq_spark.open_consumer(name_server=address, group=group, request_timeout_ms=_TIMEOUT_MS) as consumer:
        return [consumer.fetch_consume_offset(queue) for queue in consumer.queues(topic)]


def wait_for_message(address: str, topic: str, group: str) -> list[bytes]:
    """Let the brokers hold a pull at the end of each queue, from threads of one consumer. Return what comes first."""
    consumer = rmq_spark.open_consumer(name_server=address, group=group, request_timeout_ms=_TIMEOUT_MS)
    ends = {queue: consumer.max_offset(queue) for queue in consumer.queues(topic)}
    with ThreadPoolExecutor(len(ends)) as threads:
        waiting = [
            threads.submit(consumer.pull_block_if_not_found, queue, end, timeout_ms=120_000)
            for queue, end in ends.items()
        ]
        done, _ = wait(waiting, return_when=FIRST_COMPLETED)
        bodies: list[bytes] = done.pop().result().messages.column("body").to_pylist()
        consumer.close()
    return bodies


def try_reads(address: str, cases: dict[str, dict[str, str]]) -> dict[str, tuple[list[Row] | str, float]]:
    """Return for each case the rows that a batch query with its options reads, or the text of its error, and seconds.

    A case with a `consumerGroup` is a stream, of which one batch is read and committed. The queries are planned and
    read as by Spark, without a JVM.
    """
    outcomes: dict[str, tuple[list[Row] | str, float]] = {}
    schema = from_arrow_schema(pa.schema(list(COLUMNS.items())))
    for name, options in cases.items():
        begin_s = time.monotonic()
        source = RmqDataSource({"nameServer": address, "columns": "*"} | options)
        found: list[Row] | str = []
        try:
            if "consumerGroup" in options:
                found = _read_one_batch(source.streamReader(schema))
            else:
                reader = source.reader(schema)
                found = [row for part in reader.partitions() for one in reader.read(part) for row in one.to_pylist()]
        except RmqError as error:
            found = f"{type(error).__name__}: {error}"
        outcomes[name] = found, time.monotonic() - begin_s
    return outcomes


def _read_one_batch(reader: Any) -> list[Row]:
    """Return the rows of the first batch of a stream, and commit it."""
    try:
        start = reader.initialOffset()
        end = json.loads(json.dumps(reader.latestOffset(start, reader.getDefaultReadLimit())))
        rows = [row for part in reader.partitions(start, end) for one in reader.read(part) for row in one.to_pylist()]
        reader.commit(end)
    finally:
        reader.stop()
    return rows


def create_users(
    address: str, broker: str, keys: tuple[str, str], users: dict[str, str], policies: dict[str, dict[str, list[str]]]
) -> None:
    """Create users at a 5.3 broker: secrets by name, and for each name actions by resource. `keys` are an admin's."""
    host, port = broker.split(":")
    with socket.create_connection((host, int(port)), 10) as sock:
        for name, secret in users.items():
            user = {"username": name, "password": secret, "userType": "Normal", "userStatus": "enable"}
            _ask(sock, keys, 3001, {"username": name}, user)  # AUTH_CREATE_USER
            entries = [
                {"resource": resource, "actions": actions, "sourceIps": [], "decision": "Allow"}
                for resource, actions in policies.get(name, {}).items()
            ]
            acl = {"subject": f"User:{name}", "policies": [{"policyType": "Custom", "entries": entries}]}
            if entries:
                _ask(sock, keys, 3006, {"subject": f"User:{name}"}, acl)  # AUTH_CREATE_ACL


def _ask(sock: socket.socket, keys: tuple[str, str], code: int, fields: dict[str, str], body: object) -> None:
    sock.sendall(encode_command(sign_command(Command(code, 1, fields, json.dumps(body).encode()), *keys)))
    reader, answers = FrameReader(), list[Command]()
    while not answers:
        answers = reader.received(sock.recv_into(reader.get_buffer()))
    if answers[0].code:
        raise RuntimeError(f"{code}: {answers[0]}")


def await_certificates(address: str, servers: list[str], pem: str | None) -> None:
    """Wait until servers show the certificate in the text `pem`, or any. They may refuse the client afterwards."""
    expected = pem and ssl.PEM_cert_to_DER_cert(
        pem[pem.index("-----BEGIN CERTIFICATE") : pem.index("-----END CERT")] + _END
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for server in servers:
        host, port = server.split(":")
        found: bytes | None = None
        while found is None or (expected and found != expected):
            with socket.create_connection((host, int(port)), 10) as plain, context.wrap_socket(plain) as sock:
                found = sock.getpeercert(binary_form=True)
            time.sleep(0.1)


_END = "-----END CERTIFICATE-----\n"


def _rows(frame: DataFrame) -> list[Row]:
    return [dict(row) for row in frame.toArrow().to_pylist()]


if __name__ == "__main__":
    function, name_servers, target = sys.argv[1:]
    found = globals()[function](name_servers, **pickle.load(sys.stdin.buffer))
    Path(target).write_bytes(pickle.dumps(found))
