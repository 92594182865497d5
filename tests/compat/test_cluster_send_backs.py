"""We send messages of a live cluster of two brokers back to a group, and republish its dead letters."""

from pathlib import Path
from typing import Any

import pytest
from compat_kit import kinds
from compat_kit.clusters import TwoBrokers
from compat_kit.rocketmq import Java
from compat_kit.their_lives import CONF

pytestmark = pytest.mark.compat
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
