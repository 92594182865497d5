"""Java consumers and queries of ours in one group while members join, leave, die and freeze: see `group_drill.py`.

A freeze is shorter than any limit of a broker: only the long drill shows a member that was dropped while it was frozen.

Beside 5.x the queries are Spark's, beside 4.9 they do without.
"""

from pathlib import Path
from random import Random

import pytest
from compat_kit.group_drill import DrillPlan, GroupDrill, describe_group, report_on_failure
from compat_kit.rocketmq import Java

pytestmark = pytest.mark.compat


@pytest.mark.parametrize(
    "is_orderly",
    [
        pytest.param(False, marks=pytest.mark.release("5.3.3"), id="concurrent"),
        pytest.param(True, marks=pytest.mark.release("4.9.7"), id="orderly"),
    ],
)
def test_members_of_a_group_consume_each_message_whatever_happens_to_them(
    java: Java, tmp_path: Path, *, is_orderly: bool
) -> None:
    seed = Random().randrange(1_000_000)
    print(f"seed {seed}")
    plan = DrillPlan(
        changes=6, messages=10_000, pause_s=(2.0, 6.0), freeze_s=8.0, is_orderly=is_orderly, has_spark=java.is_5
    )
    with GroupDrill(java, tmp_path, Random(seed), plan, print) as drill, report_on_failure(drill, print):
        verdict = drill.run()
    print("\n".join(describe_group(verdict, drill.changes, drill.longest_batch_ms)))
    assert verdict.stored >= plan.messages
    assert verdict.faults == []
