"""The long drill of a group: two Java push consumers and two queries of ours share 16 queues of two real brokers.

    python tests/compat/group_drill.py [--version 4.9.7] [--seed 7] [--orderly] [--without-spark]
                                       [--changes 20] [--messages 200000] [--freeze 150] [--pause 5 25]
    python tests/compat/group_drill.py --judge FOLDER < WHAT_IT_PRINTED

Members join, leave, are killed, and are frozen for longer than brokers wait for heartbeats: all processes of a member,
because a query whose driver alone hangs stays a member. It prints each change, who consumed messages twice and after
which change, and for how long two members worked on a queue. Exits with 1 for a fault of its judge
(`compat_kit/group_judge.py`), such as a message that nobody consumed, or two members that worked on a queue for too
long. With --judge it judges the ledgers of an earlier drill again.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from random import Random

from compat_kit.build import VERSIONS
from compat_kit.group_drill import DrillPlan, GroupDrill, describe_group, judge_again, report_on_failure
from compat_kit.network import Network
from compat_kit.rocketmq import Java


def main() -> int:
    """Run the drill and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", choices=VERSIONS, default=VERSIONS[0])
    parser.add_argument("--seed", type=int, default=Random().randrange(1_000_000))
    parser.add_argument("--orderly", action="store_true", help="all members consume in order")
    parser.add_argument("--without-spark", action="store_true", help="the queries call the source as Spark does")
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--freeze", type=float, default=150.0, help="seconds for which a member is frozen")
    parser.add_argument("--pause", type=float, nargs=2, default=(5.0, 25.0), help="seconds between changes, at random")
    parser.add_argument("--judge", type=Path, help="the folder of an earlier drill; what it printed is the input")
    chosen = parser.parse_args()
    if chosen.judge is not None:
        verdict, lines = judge_again(chosen.judge, sys.stdin.read().splitlines())
        _say("\n".join(lines))
        return int(bool(verdict.faults))
    folder = Path(tempfile.mkdtemp(prefix="rmq-group-drill-"))
    print(f"RocketMQ {chosen.version}, seed {chosen.seed}, in {folder}", flush=True)
    plan = DrillPlan(
        changes=chosen.changes,
        messages=chosen.messages,
        pause_s=tuple(chosen.pause),
        freeze_s=chosen.freeze,
        is_orderly=chosen.orderly,
        has_spark=not chosen.without_spark,
    )
    network = Network(chosen.version, folder)
    try:
        java = Java(chosen.version, network, folder)
        with GroupDrill(java, folder, Random(chosen.seed), plan, _say) as drill, report_on_failure(drill, _say):
            verdict = drill.run()
    finally:
        network.close()
    for line in (*drill.said(), *describe_group(verdict, drill.changes, drill.longest_batch_ms)):
        _say(line)
    _say(f"seed {chosen.seed}, {'orderly' if plan.is_orderly else 'concurrent'}")
    return int(bool(verdict.faults))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
