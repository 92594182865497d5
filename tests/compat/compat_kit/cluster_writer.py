"""A program that writes to a live cluster through the product: `cluster_writer.py FUNCTION NAME_SERVERS TARGET`.

Its standard input is a pickle of the function's arguments by name. It writes a pickle of what the function returns.
Bodies of messages are distinct, so that they identify the messages.
"""

import pickle
import re
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

import rmq_spark
from rmq_spark.store.errors import RmqError

Row = dict[str, Any]
_CONF = {"spark.log.level": "ERROR", "spark.ui.enabled": "false"}


def send_messages(address: str, topic: str, rows: list[Row]) -> list[Row]:
    """Send each row, with arguments of `send`, and return what `send` returned."""
    with rmq_spark.open_store(name_server=address) as producer:
        places = [producer.send(topic, **row) for row in rows]
    return [
        {
            "broker": place.broker,
            "queueId": place.queue_id,
            "queueOffset": place.queue_offset,
            "commitLogOffset": place.commit_log_offset,
            "msgId": place.message_id,
        }
        for place in places
    ]


def send_table(address: str, topic: str, rows: list[Row], settings: dict[str, Any]) -> list[Row]:
    """Send rows together, and return what `send_many` returned. `settings` are arguments of `open_store`."""
    with rmq_spark.open_store(name_server=address, **settings) as producer:
        return producer.send_many(_table(rows), topic=topic).to_pylist()


def write_batch(address: str, topic: str, rows: list[Row], schema: str, options: dict[str, str]) -> None:
    """Write rows by df.write. `schema` is DDL."""
    frame = _spark().createDataFrame([tuple(row.values()) for row in rows], schema).coalesce(1)
    writer = frame.write.format("rmq").options(nameServer=address, topic=topic, delivery="atLeastOnce", **options)
    writer.mode("append").save()


def copy_stream(
    address: str, source: dict[str, str], target: dict[str, str], checkpoint: str, drops: list[str]
) -> None:
    """Copy a topic by a stream, from where `source` says to where `target` says; `drops` are columns to leave out.

    The value NAME_SERVER in options stands for the address.
    """
    source, target = ({k: address if v == "NAME_SERVER" else v for k, v in one.items()} for one in (source, target))
    reader = _spark().readStream.format("rmq").options(startingOffsets="earliest", maxOffsetsPerTrigger=500, **source)
    writer = reader.load().drop(*drops).writeStream.format("rmq").options(checkpointLocation=checkpoint, **target)
    writer.trigger(availableNow=True).start().awaitTermination()


def try_writes(address: str, cases: dict[str, tuple[dict[str, str], list[Row], str]]) -> dict[str, tuple[str, float]]:
    """Try writes that are mistakes: options, rows and schema by name. Return each error of ours, and seconds."""
    answers = {}
    for name, (options, rows, schema) in cases.items():
        began = time.monotonic()
        try:
            frame = _spark().createDataFrame([tuple(row.values()) for row in rows], schema).coalesce(1)
            given = {k: address if v == "NAME_SERVER" else v for k, v in options.items()}
            frame.write.format("rmq").options(**given).mode("append").save()
            answers[name] = ("no error", time.monotonic() - began)
        except Exception as error:
            answers[name] = (_own_error(str(error)), time.monotonic() - began)
    return answers


def try_sends(address: str, cases: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, tuple[str, float]]:
    """Try sends that are mistakes: arguments of `open_store` and of `send`, by name. Return errors and seconds."""
    answers = {}
    for name, (opening, sending) in cases.items():
        began = time.monotonic()
        try:
            with rmq_spark.open_store(**{"name_server": address, **opening}) as producer:
                producer.send(**sending)
            answers[name] = ("no error", time.monotonic() - began)
        except RmqError as error:
            answers[name] = (f"{type(error).__name__}: {error}", time.monotonic() - began)
    return answers


def follow_checkpoints(address: str, source: str, topic: str, steps: list[tuple[str, list[str]]]) -> list[str]:
    """Run streams from the store `source` to a topic, exactly once, one after the other. Return each error of ours.

    Each step is a checkpoint, and the bodies of messages that come into the store before its stream.
    """
    answers = []
    for checkpoint, bodies in steps:
        with rmq_spark.open_store(source) as store:
            for body in bodies:
                store.send("orders", body)
        rows = _spark().readStream.format("rmq").options(subscribe="orders", startingOffsets="earliest").load(source)
        writer = rows.select("body").writeStream.format("rmq").options(nameServer=address, topic=topic)
        writer = writer.options(checkpointLocation=checkpoint, settleTime="1s", requestTimeout="10s")
        try:
            writer.trigger(availableNow=True).start().awaitTermination()
            answers.append("no error")
        except Exception as error:
            answers.append(_own_error(str(error)))
    return answers


def _table(rows: list[Row]) -> pa.Table:
    """Return rows as a table. Properties are mappings, which pyarrow would take for structs."""
    types = {"properties": pa.map_(pa.string(), pa.string())}
    return pa.table({name: pa.array([row[name] for row in rows], types.get(name)) for name in rows[0]})


def _own_error(text: str) -> str:
    """Return the line of an error of Spark that has our error, else its first line."""
    found = re.findall(r"rmq_spark\.\S*Error: .*", text)
    return found[-1] if found else text.splitlines()[0]


def _spark() -> SparkSession:
    return rmq_spark.session(master="local[2]", conf=_CONF)


if __name__ == "__main__":
    function, name_servers, target = sys.argv[1:]
    found = globals()[function](name_servers, **pickle.load(sys.stdin.buffer))
    Path(target).write_bytes(pickle.dumps(found))
