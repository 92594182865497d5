"""The long drill: streams over a cluster of a real RocketMQ, while all events of `compat_kit.drill_events` happen.

    python tests/compat/drill.py [--version 4.9.7] [--seed 7] [--freeze 150] [--without-spark]
                                 [--events broker_killed,topic_grown]

It takes about 25 minutes for each version. The order of the events is random, those that lose messages come last. It
prints what the queries say, what a judge finds after each event, and a table. Exits with 1 if the judge finds a fault.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from random import Random

from compat_kit.build import VERSIONS
from compat_kit.drill import Drill, describe
from compat_kit.drill_events import DISTURBANCES, LOSSES
from compat_kit.network import Network
from compat_kit.rocketmq import Java

EVENTS = {event.__name__: event for event in (*DISTURBANCES, *LOSSES)}


def main() -> int:
    """Run the drill and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", choices=VERSIONS, default=VERSIONS[0])
    parser.add_argument("--seed", type=int, default=Random().randrange(1_000_000))
    parser.add_argument("--freeze", type=float, default=150.0, help="seconds for which a server is frozen")
    parser.add_argument("--without-spark", action="store_true", help="the streams call the source as Spark does")
    parser.add_argument("--events", default="", help=f"some of: {','.join(EVENTS)}")
    chosen = parser.parse_args()
    events = [EVENTS[name] for name in chosen.events.split(",") if name]
    if not events:
        order = list(DISTURBANCES)
        Random(chosen.seed).shuffle(order)
        events = [*order, *LOSSES]
    folder = Path(tempfile.mkdtemp(prefix="rmq-drill-"))
    print(f"RocketMQ {chosen.version}, seed {chosen.seed}, freezes of {chosen.freeze:g} s, in {folder}", flush=True)
    network = Network(chosen.version, folder)
    try:
        java = Java(chosen.version, network, folder)
        with Drill(
            java, folder / "drill", chosen.seed, freeze_s=chosen.freeze, has_spark=not chosen.without_spark, say=_say
        ) as drill:
            try:
                for event in events:
                    event(drill)
            finally:
                drill.listen()
                has_faults = _print_table(drill)
    finally:
        network.close()
    return 1 if has_faults else 0


def _say(line: str) -> None:
    print(line, flush=True)


def _print_table(drill: Drill) -> bool:
    """Print the events and what the judge found. Return whether there are faults."""
    print("\nevents; rows and faults of each stream are counted from the start, or from the last change of a store")
    has_faults = False
    for result in drill.results:
        print(f"- {result.event}: {result.seconds:.0f} s")
        for name, verdict in result.verdicts.items():
            has_faults = has_faults or bool(verdict.faults)
            print(f"    {name}: {describe(verdict)}")
    return has_faults


if __name__ == "__main__":
    sys.exit(main())
