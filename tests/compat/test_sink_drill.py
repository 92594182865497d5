"""Two streams that send to brokers of a live cluster while tasks, drivers and a broker die: see `sink_drill.py`."""

from pathlib import Path
from random import Random

import pytest
from compat_kit.clusters import FourServers
from compat_kit.rocketmq import Java
from compat_kit.sink_drill import BROKER, DRIVER, JVM, TASK, SinkDrill

pytestmark = pytest.mark.compat


def test_streams_to_a_cluster_lose_nothing_and_copies_have_the_ids_of_their_twins(java: Java, tmp_path: Path) -> None:
    kills = [TASK, BROKER, TASK, DRIVER, TASK, JVM, TASK]
    with FourServers(java, tmp_path / "servers") as servers:
        drill = SinkDrill(servers, tmp_path, Random(5), "local[2,100]", None, print)
        verdicts = drill.run(30, kills, (0.1, 1.0))
        faults = drill.copy_back([DRIVER], (0.1, 1.0))
    assert not [verdict for verdict in verdicts if verdict.has_faults], verdicts
    assert all(verdict.rows >= drill.bodies * 2 for verdict in verdicts)
    assert drill.deaths.total() >= len(kills)
    assert not faults
