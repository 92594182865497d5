"""The commit of a query's offsets by its driver, after a batch and after the query's end.

The process of a query's reader commits the end of a batch at the next trigger. After the last one Spark does not call
it again, and the process ends, with its membership. So the driver commits the end, of any batch, from outside of the
group. It does so only where the group is at an offset that the query itself has set: another one belongs to the next
owner of the queue, or to an administrator.
"""

from rmq_spark.store.backend import FinalCommit
from rmq_spark.store.cluster.member_offsets import MemberOffsets
from rmq_spark.store.cluster.offset_commits import Brokers, Outcome
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.errors import RmqError


def commit_final_offsets(brokers: Brokers, namespace: str, final: FinalCommit) -> bool:
    """Commit the offsets of `final` where nobody else has set the group's offset. Return whether any is committed.

    An offset moves back only if the reader publishes a later one in the same moment. A queue without an offset of the
    group counts as one that nobody has set, if it is in `expected`. Raises the first error of a broker, after all
    others were asked.
    """
    offsets = MemberOffsets(brokers, PullTerms(final.group, namespace))
    told = offsets.read([queue for queue in final.offsets if queue in final.expected])
    errors = [one for one in told.values() if isinstance(one, RmqError)]
    reached = {queue for queue, one in told.items() if one == final.offsets[queue]}
    wanted = {
        queue: final.offsets[queue]
        for queue, one in told.items()
        if not isinstance(one, RmqError)
        and (one is None or (one in final.expected[queue] and one < final.offsets[queue]))
    }
    outcomes = offsets.commit(wanted)
    errors += [one for one in outcomes.values() if isinstance(one, RmqError)]
    if errors:
        raise errors[0]
    return bool(reached) or Outcome.COMMITTED in outcomes.values()
