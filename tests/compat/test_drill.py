"""A short drill: streams read from two brokers and two name servers while these are killed, frozen and restarted.

`tests/compat/drill.py` is the long one. Beside 5.x the streams are Spark's, beside 4.9 they do without.
"""

from pathlib import Path
from random import Random

import pytest
from compat_kit.drill import Drill, describe
from compat_kit.drill_events import (
    broker_frozen_before_reading,
    broker_killed_before_reading,
    name_server_killed,
    topic_grown,
)
from compat_kit.rocketmq import Java

pytestmark = pytest.mark.compat
TIMES_S = {"freeze_s": 8.0, "away_s": 4.0}  # longer than two requests of the queries wait, and than one
EVENTS = (broker_killed_before_reading, broker_frozen_before_reading, topic_grown, name_server_killed)


def test_streams_deliver_each_message_once_whatever_happens_to_the_servers(java: Java, tmp_path: Path) -> None:
    seed = Random().randrange(1_000_000)
    print(f"seed {seed}")
    has_spark = java.is_5
    with Drill(
        java, tmp_path / "drill", seed, **TIMES_S, has_spark=has_spark, registerNameServerPeriod=10_000
    ) as drill:
        for event in EVENTS:
            event(drill)
        drill.rest()
        truth = drill.truth()
    assert truth.count() > 200
    assert [
        describe(verdict) for result in drill.results for verdict in result.verdicts.values() if verdict.faults
    ] == []
    said = [line for result in drill.results for line in result.said]
    assert any("reading from broker" in line and "waits" in line for line in said)
