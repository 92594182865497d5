"""We send messages of a live cluster of two brokers back to a group, and republish its dead letters."""

import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from compat_kit import kinds
from compat_kit.clusters import TwoBrokers
from compat_kit.rocketmq import Java
from compat_kit.their_lives import CONF

from rmq_spark.store.disk.clock import wall_clock_ms

pytestmark = pytest.mark.compat
MESSAGES, DEATHS = 300, 10
TOPIC, GROUP = "failures", "failing"
WRONG = "is not a message of this cluster"


def by_body(rows: list[dict[str, Any]]) -> dict[bytes, dict[str, Any]]:
    return {row["body"]: row | {"properties": dict(row["properties"])} for row in rows}


def test_messages_come_back_or_are_dead(java: Java, tmp_path: Path) -> None:
    with TwoBrokers(java, tmp_path, **CONF) as cluster:
        with cluster.client() as client:
            client("create-topic", topic=TOPIC, queues=1)
            for number in range(6):
                kinds.produce(client, topic=TOPIC, text=f"{number}", keys="k", tags="t")
        found = cluster.read("send_rows_back", topic=TOPIC, group=GROUP)
    first = by_body(found["rows"])
    assert sorted(first) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert [(kind, WRONG in text) for kind, text in found["errors"]] == [("OptionError", True)] * 4
    retry, dead = by_body(found["retry"]), by_body(found["dead"])
    assert (sorted(retry), len(found["retry"])) == ([b"0", b"3"], 2)
    assert (sorted(dead), len(found["dead"])) == ([b"1", b"2", b"4", b"5"], 4)
    for body, copy in {**retry, **dead}.items():
        assert (copy["reconsumeTimes"], copy["properties"]["RETRY_TOPIC"]) == (1, TOPIC)
        for name in ("msgId", "tags", "keys", "flag", "brokerName", "bornTimestamp"):
            assert copy[name] == first[body][name], (body, name)
        assert not {"RECONSUME_TIME", "MAX_RECONSUME_TIMES"} & copy["properties"].keys()
    assert {copy["topic"] for copy in retry.values()} == {TOPIC}
    again = by_body(found["again"])
    assert (found["sent"], sorted(again)) == ([4, 0], sorted(dead))
    for body, row in again.items():
        assert (row["reconsumeTimes"], row["tags"], row["keys"]) == (0, "t", "k")
        assert row["properties"]["ORIGIN_MESSAGE_ID"] == dead[body]["properties"]["ORIGIN_MESSAGE_ID"]


def test_batch_whose_commits_die_sends_each_row_back_once(java: Java, tmp_path: Path) -> None:
    group, seed = "dying", Random().randrange(1_000_000)
    print(f"seed {seed}")
    with TwoBrokers(java, tmp_path, messageDelayLevel=" ".join(["1s"] * 18)) as cluster:
        with cluster.client() as client:
            client("create-topic", topic=TOPIC, queues=2)
        rows = [{"body": f"{number}".encode(), "keys": "k"} for number in range(MESSAGES)]
        cluster.write("send_table", topic=TOPIC, rows=rows, settings={})

        def read(topic: str) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = cluster.read("read_backend", topics=[topic])
            return found

        def repeat(rows: list[dict[str, Any]], level: int, planned_ms: int) -> list[int]:
            """Return how many rows each attempt has sent back. All but the last one died."""
            given = {"group": group, "planned_ms": planned_ms, "deaths": DEATHS, "seed": seed}
            sent: list[int] = cluster.read("repeat_batch", rows=[row | {"delayLevel": level} for row in rows], **given)
            print(f"level {level}: {sent}")
            return sent

        everything = Counter(row["body"] for row in rows)
        first, planned_ms = read(TOPIC), wall_clock_ms()
        assert repeat(first, 0, planned_ms)[0] == MESSAGES
        retries: list[dict[str, Any]] = []
        give_up = time.monotonic() + 120
        while len(retries) < MESSAGES and time.monotonic() < give_up:
            time.sleep(1)
            retries = read(f"%RETRY%{group}")
        assert not any(repeat(first, 0, planned_ms))  # the copies are found after their delivery too
        retries = read(f"%RETRY%{group}")
        assert Counter(row["body"] for row in retries) == everything
        assert repeat(retries, -1, wall_clock_ms())[0] == MESSAGES
        assert Counter(row["body"] for row in read(f"%DLQ%{group}")) == everything
        assert len(read(f"%RETRY%{group}")) == MESSAGES
