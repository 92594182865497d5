"""Whose each queue of a group is: `claims.json`, and how claims change when members come and go.

    {"v": 1, "change": 12, "by": "<member id>", "owners": ["", "<member id>", …],
     "queues": {"<topic>": {"<queue id>": [<number of the owner in `owners`>, <epoch>], …}, …}}

A queue's epoch counts up with each claim, for ever: also when its owner lets it go, and then the owner is "". So a
member that was thought dead learns from its epoch alone that a queue is not its own any more. `change` counts the
writes of the file; it and `by` come first, so that a look at the file's head says whether anything changed.

The file is changed only by who has the group's turn, and replaced as a whole, synced: an epoch never runs back.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rmq_spark.store.commit.side_file import encode_side_file, number_of, read_side_file, text_of
from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import StoreChangedError
from rmq_spark.store.units import QueueKey

NOBODY = ""

# Holds `change` and `by`: a host's name has at most 253 characters, and a process's number and a uuid follow.
_HEAD_BYTES = 512
_WHAT = "the claims of a consumer group, which say whose each queue is"
_NEXT_STEP = (
    "Stop the group's queries, remove the file and start them again: they claim their queues anew. The group's offsets "
    "in config/consumerOffset.json stay; what was read and not published there may be delivered twice."
)


class Claim(NamedTuple):
    """Whose a queue is; NOBODY's if its last owner let it go."""

    owner: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Claims:
    """What the file holds: all claims ever made, and by which member it was written, as its how manieth write."""

    change: int
    by: str
    queues: Mapping[QueueKey, Claim]


NO_CLAIMS = Claims(0, NOBODY, {})


class ClaimPlan(NamedTuple):
    """How claims change. Sorted queues: those newly mine, those that I let go, those I want and another still has."""

    claims: dict[QueueKey, Claim]
    gained: tuple[QueueKey, ...]
    lost: tuple[QueueKey, ...]
    waiting: tuple[QueueKey, ...]


def plan_claims(
    claims: Mapping[QueueKey, Claim], me: str, live: Collection[str], wanted: Collection[QueueKey]
) -> ClaimPlan:
    """Return the claims after the member `me` lets go what it does not want, and takes what it wants and is free.

    A queue is free without a claim, if nobody owns it, and if its owner is not in `live`. Nobody takes a queue from a
    living member: that one lets it go. Claims of others stay as they are. Pure.
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
    """Write claims as JSON, `change` and `by` first."""
    owners = sorted({claim.owner for claim in claims.queues.values()})
    numbers = {owner: number for number, owner in enumerate(owners)}
    topics: dict[str, dict[str, list[int]]] = {}
    for queue, claim in sorted(claims.queues.items()):
        topics.setdefault(queue.topic, {})[str(queue.queue_id)] = [numbers[claim.owner], claim.epoch]
    return encode_side_file({"change": claims.change, "by": claims.by, "owners": owners, "queues": topics})


def read_claims(path: str) -> Claims:
    """Return what the file holds, NO_CLAIMS without a file. Takes no lock: it is replaced as a whole.

    Raises DamageError, or StoreError for a newer version.
    """
    return read_side_file(path, _WHAT, _NEXT_STEP, _build) or NO_CLAIMS


def read_claims_head(path: str) -> bytes:
    """Return bytes that differ whenever the claims do, b"" without a file. Far cheaper than to read them all."""
    try:
        with files.OpenFile(path) as file:
            return file.read(0, _HEAD_BYTES)
    except StoreChangedError:  # no such file
        return b""


def write_claims(path: str, disk: Disk, claims: Claims) -> None:
    """Make these the group's claims, for good. For who has the group's turn.

    A crash leaves the old claims or the new ones. With the old ones, what was gained is not gained, and what was let
    go belongs to a member that is dead: free either way.
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
