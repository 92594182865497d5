"""The long drill of the sink: two streams send to a real RocketMQ while tasks, executors, drivers and brokers die.

    python tests/compat/sink_drill.py [--version 4.9.7] [--seed 7] [--batches 200] [--deaths 100] [--exactly-once]

With --exactly-once processes that commit die too, second drivers run with the same checkpoints, and drivers are frozen
for longer than a broker keeps their connections. With --minutes 60 nothing dies after an hour, and the streams end.

It prints each death and the verdict of a judge, who reads both topics with a Java consumer. Exits with 1 for a fault.
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path
from random import Random

import pyspark
from compat_kit.build import VERSIONS
from compat_kit.clusters import FourServers
from compat_kit.network import Network
from compat_kit.rocketmq import Java
from compat_kit.sink_drill import (
    BROKER,
    COMMIT,
    DRIVER,
    EXECUTOR,
    FREEZE,
    JVM,
    NAME_SERVER,
    RIVAL,
    TASK,
    SinkDrill,
    prepare_cluster,
)

# Of a hundred deaths: a driver takes long to start again.
_SHARES = {TASK: 52, EXECUTOR: 28, DRIVER: 6, JVM: 4, BROKER: 10}
_EXACT_SHARES = {TASK: 29, EXECUTOR: 12, COMMIT: 30, DRIVER: 6, JVM: 4, BROKER: 10, NAME_SERVER: 2, RIVAL: 3, FREEZE: 4}


def main() -> int:
    """Run the drill and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", choices=VERSIONS, default=VERSIONS[0])
    parser.add_argument("--seed", type=int, default=Random().randrange(1_000_000))
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--deaths", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--exactly-once", action="store_true")
    chosen = parser.parse_args()
    random = Random(chosen.seed)
    shares = _EXACT_SHARES if chosen.exactly_once else _SHARES
    kills = [kind for kind, share in shares.items() for _ in range(round(share * chosen.deaths / 100))]
    random.shuffle(kills)
    folder = Path(tempfile.mkdtemp(prefix="rmq-sink-drill-"))
    print(f"RocketMQ {chosen.version}, seed {chosen.seed}, {len(kills)} deaths, in {folder}", flush=True)
    network = Network(chosen.version, folder)
    try:
        java = Java(chosen.version, network, folder)
        with FourServers(java, folder / "servers") as servers:
            drill = SinkDrill(
                servers,
                folder,
                random,
                "local-cluster[2,1,1024]",
                str(link_spark(folder / "spark")),
                lambda line: print(line, flush=True),
                {"delivery": "exactlyOnce" if chosen.exactly_once else "atLeastOnce"},
                kills_for_s=60 * chosen.minutes,
            )
            if chosen.exactly_once:
                prepare_cluster(servers)
            verdicts = drill.run(chosen.batches, kills, (0.2, 2.0))
            faults = [] if chosen.exactly_once else drill.copy_back([DRIVER] * 10, (0.2, 2.0))
    finally:
        network.close()
    for verdict in verdicts:
        print(verdict)
    print(f"seed {chosen.seed}, deaths {dict(drill.deaths)}, {drill.lives} lives of the driver")
    if not chosen.exactly_once:
        print(f"copied back into a directory: {faults or 'the same rows in the same order'}")
    return int(any(verdict.has_faults for verdict in verdicts) or bool(faults))


def link_spark(home: Path) -> Path:
    """Return a folder with links to Spark: executors write beside it, and not into an installed package."""
    home.mkdir()
    for entry in Path(pyspark.__file__).resolve().parent.iterdir():
        if entry.name != "work":
            (home / entry.name).symlink_to(entry)
    return home


if __name__ == "__main__":
    sys.exit(main())
