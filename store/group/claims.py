"""Claims: which member owns which queue of a group, stored in `claims.json`.

    {"v": 1, "change": 12, "by": "<member id>", "owners": ["", "<member id>", …],
     "queues": {"<topic>": {"<queue id>": [<index of the owner in `owners`>, <epoch>], …}, …}}

Each claim of a queue increments the queue's epoch, and the epoch never decreases. A released queue keeps its entry,
with the owner "". So if a member was presumed dead, it can see from the epoch alone whether it has lost a queue.
`change` counts how often the file was written, and `by` is the member that wrote it last. These two fields come first,
so that any change of the file changes its first bytes.

The file is changed only under the group's lock. It is replaced atomically and durably, so that no epoch decreases after
a crash.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rmq_spark.store.disk import files
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import StoreChangedError
from rmq_spark.store.format.side_file import encode_side_file, number_of, text_of
from rmq_spark.store.log.store_state import read_side_file
from rmq_spark.store.model import QueueKey

NOBODY = ""

# The first bytes of the file that contain `change` and `by`. `by` has a host name of at most 253 characters, a process
# id and a uuid.
_HEAD_BYTES = 512
_WHAT = "the claims of a consumer group, which record the owner of each queue"
_NEXT_STEP = (
    "Stop the group's queries, remove the file and start them again: they then claim their queues again. The committed "
    "offsets in config/consumerOffset.json stay. Messages that were read but not committed may be delivered twice."
)


class Claim(NamedTuple):
    """The claim of one queue: its owner, which is NOBODY if the queue was released, and its epoch."""

    owner: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Claims:
    """The content of the file.

    `change` counts the writes of the file. `by` is the member that wrote it last. `queues` has a claim for each queue
    that was ever claimed.
    """

    change: int
    by: str
    queues: Mapping[QueueKey, Claim]


NO_CLAIMS = Claims(0, NOBODY, {})


class ClaimPlan(NamedTuple):
    """The changes that a member makes to the claims.

    `claims` are the new claims of all queues. The member claims the queues in `gained`, and releases those in `lost`.
    It also wants the queues in `waiting`, but another member still owns them. These three are sorted.
    """

    claims: dict[QueueKey, Claim]
    gained: tuple[QueueKey, ...]
    lost: tuple[QueueKey, ...]
    waiting: tuple[QueueKey, ...]


def plan_claims(
    claims: Mapping[QueueKey, Claim], me: str, live: Collection[str], wanted: Collection[QueueKey]
) -> ClaimPlan:
    """Return how the member `me` must change the claims, so that it owns the `wanted` queues that are free. Pure.

    The member releases its queues that are not in `wanted`. A queue is free if it has no claim, if it was released, or
    if its owner is not in `live`, the living members. Queues of other living members are not changed, because only
    their owner releases them.
    """
    assert me in live, (me, live)
    changed = dict(claims)
    lost = sorted(queue for queue, claim in claims.items() if claim.owner == me and queue not in wanted)
    for queue in lost:
        changed[queue] = Claim(NOBODY, claims[queue].epoch)
    gained, waiting = [], []
    for queue in sorted(wanted):
        owner, epoch = claims.get(queue, Claim(NOBODY, 0))
        if owner == me:
            continue
        if owner == NOBODY or owner not in live:
            changed[queue] = Claim(me, epoch + 1)
            gained.append(queue)
        else:
            waiting.append(queue)
    return ClaimPlan(changed, tuple(gained), tuple(lost), tuple(waiting))


def encode_claims(claims: Claims) -> bytes:
    """Encode claims as JSON, with the fields `change` and `by` first."""
    owners = sorted({claim.owner for claim in claims.queues.values()})
    numbers = {owner: number for number, owner in enumerate(owners)}
    topics: dict[str, dict[str, list[int]]] = {}
    for queue, claim in sorted(claims.queues.items()):
        topics.setdefault(queue.topic, {})[str(queue.queue_id)] = [numbers[claim.owner], claim.epoch]
    return encode_side_file({"change": claims.change, "by": claims.by, "owners": owners, "queues": topics})


def read_claims(path: str) -> Claims:
    """Return the content of the file at `path`, or NO_CLAIMS if the file does not exist.

    Takes no lock, because writers replace the file atomically. Raises DamageError if the file is damaged, and
    StoreError if a newer version of rmq-spark wrote it.
    """
    return read_side_file(path, _WHAT, _NEXT_STEP, _build) or NO_CLAIMS


def read_claims_head(path: str) -> bytes:
    """Return the first bytes of the file, or b"" if the file does not exist.

    Each write of the file changes these bytes. This is much cheaper than `read_claims`.
    """
    try:
        with files.OpenFile(path) as file:
            return file.read(0, _HEAD_BYTES)
    except StoreChangedError:  # no such file
        return b""


def write_claims(path: str, disk: Disk, claims: Claims) -> None:
    """Replace the group's claims durably. The caller must hold the group's lock.

    A crash leaves either the old claims or the new ones. After a crash with the old claims, all queues that the caller
    wanted to change are free: it had not claimed the new ones yet, and it is dead, so that its own are free too.
    """
    disk.replace(path, encode_claims(claims))


def _build(fields: dict[str, Any]) -> Claims:
    owners, queues = fields["owners"], {}
    if not isinstance(owners, list) or not all(isinstance(owner, str) for owner in owners):
        raise TypeError(f"owners: expected texts, found {owners!r}")
    for topic, claims in fields["queues"].items():
        for queue_id, (number, epoch) in claims.items():
            if type(number) is not int or type(epoch) is not int or not 0 <= number < len(owners) or epoch < 1:
                raise ValueError(f"{topic}/{queue_id}: expected owner and epoch, found {number!r} and {epoch!r}")
            queues[QueueKey(topic, int(queue_id))] = Claim(owners[number], epoch)
    return Claims(number_of(fields, "change", least=1), text_of(fields, "by"), queues)
