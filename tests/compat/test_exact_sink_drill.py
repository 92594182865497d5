"""Two streams that write exactly once to a live cluster while processes of all kinds die: see `sink_drill.py`."""

from pathlib import Path
from random import Random

import pytest
from compat_kit.clusters import FourServers
from compat_kit.rocketmq import Java
from compat_kit.sink_drill import BROKER, COMMIT, DRIVER, JVM, RIVAL, TASK, SinkDrill, prepare_cluster

pytestmark = pytest.mark.compat
_BATCHES = 14


@pytest.mark.release("5.3.3")
def test_streams_to_a_cluster_store_each_row_once_and_in_order(java: Java, tmp_path: Path) -> None:
    kills = [TASK, COMMIT, BROKER, COMMIT, DRIVER, RIVAL, JVM, COMMIT]
    sink = {"delivery": "exactlyOnce", "settleTime": "1s"}
    with FourServers(java, tmp_path / "servers") as servers:
        prepare_cluster(servers)
        drill = SinkDrill(servers, tmp_path, Random(5), "local[2,100]", None, print, sink)
        verdicts = drill.run(_BATCHES, kills, (0.1, 1.0))
    assert not [verdict for verdict in verdicts if verdict.has_faults], verdicts
    assert all(verdict.rows == drill.bodies * 2 for verdict in verdicts)
    assert drill.deaths.total() == len(kills)
