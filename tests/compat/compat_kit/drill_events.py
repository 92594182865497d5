"""The events of servers in a drill (`drill`). Each function is one event, with its name as its description.

An event ends when the streams have caught up and were judged. `DISTURBANCES` lose nothing. `LOSSES` come after them, in
their order, because they change what is true.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from compat_kit.clusters import NAMES
from compat_kit.drill import LARGE, STREAMS, Drill
from compat_kit.drill_judge import Place, Sent, Truth
from compat_kit.rocketmq import Broker, NameServer

SKEW_MS = 60_000 + 5_000  # this much earlier a query at `latest` may begin in a queue whose broker was away
EXPIRING = {"fileReservedTime": 0, "deleteWhen": ";".join(f"{hour:02d}" for hour in range(24))}
VICTIM, OTHER = "broker-b", "broker-a"  # of the losses


def _any_broker(drill: Drill) -> Broker:
    return drill.servers.brokers[drill.random.choice(NAMES)]


def _name_of(server: Broker | NameServer) -> str:
    return str(server.conf["brokerName"]) if isinstance(server, Broker) else f"the name server at port {server.port}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000  # noqa: TID251 - the clock of the producer and of the brokers


def broker_killed(drill: Drill) -> None:
    """kill -9 of a broker while streams read."""
    broker = _any_broker(drill)
    with drill.event(f"kill -9 of {_name_of(broker)}, back after {drill.away_s:g} s"):
        broker.kill()
        drill.pause(drill.away_s)
        drill.servers.start(broker)


def broker_killed_before_reading(drill: Drill) -> None:
    """kill -9 of a broker between planning and reading."""
    broker = _any_broker(drill)
    with drill.event(f"kill -9 of {_name_of(broker)} between planning and reading, back after {drill.away_s:g} s"):
        with drill.planned(*STREAMS):
            broker.kill()
        drill.pause(drill.away_s)
        drill.servers.start(broker)


def broker_restarted_before_reading(drill: Drill) -> None:
    """Stop and start of a broker between planning and reading of one stream, while the other reads."""
    broker, stream = _any_broker(drill), drill.random.choice(list(STREAMS))
    what = f"restart of {_name_of(broker)} between planning and reading of {stream}"
    with drill.event(what), drill.planned(stream):
        broker.stop()
        drill.pause(5)
        drill.servers.start(broker)


def broker_frozen_before_reading(drill: Drill) -> None:
    """Freeze of a broker between planning and reading of one stream, while the other reads."""
    broker, stream = _any_broker(drill), drill.random.choice(list(STREAMS))
    with drill.event(
        f"freeze of {_name_of(broker)} for {drill.freeze_s:g} s, between planning and reading of {stream}"
    ):
        with drill.planned(stream):
            drill.servers.freeze(broker)
        drill.pause(drill.freeze_s)
        drill.servers.thaw(broker)


def name_server_killed(drill: Drill) -> None:
    """kill -9 of a name server."""
    server = drill.random.choice(drill.servers.name_servers)
    with drill.event(f"kill -9 of {_name_of(server)}, back after {drill.away_s:g} s"):
        server.kill()
        drill.pause(drill.away_s)
        drill.servers.start(server)


def name_server_frozen(drill: Drill) -> None:
    """Freeze of a name server, with kill -9 of a broker meanwhile."""
    server, broker = drill.random.choice(drill.servers.name_servers), _any_broker(drill)
    with drill.event(
        f"freeze of {_name_of(server)} for {drill.freeze_s:g} s, and restart of {_name_of(broker)} meanwhile"
    ):
        drill.servers.freeze(server)
        drill.pause(drill.freeze_s / 2)
        broker.kill()
        drill.servers.start(broker)
        drill.pause(drill.freeze_s / 2)
        drill.servers.thaw(server)


def name_servers_killed(drill: Drill) -> None:
    """kill -9 of both name servers."""
    with drill.event("kill -9 of both name servers, back after 40 s"):
        for server in drill.servers.name_servers:
            server.kill()
        drill.pause(40)
        for server in drill.servers.name_servers:
            drill.servers.start(server)


def everything_frozen(drill: Drill) -> None:
    """Freeze of all brokers and name servers."""
    everything = (*drill.servers.name_servers, *drill.servers.brokers.values())
    with drill.event("freeze of all servers for 20 s"):
        drill.servers.freeze(*everything)
        drill.pause(20)
        drill.servers.thaw(*everything)


def topic_grown(drill: Drill) -> None:
    """More queues for the topic, while streams read."""
    with drill.event(f"the topic gets {drill.queues + 2} queues on each broker instead of {drill.queues}"):
        drill.create_queues(drill.queues + 2)
        drill.produce()
        drill.pause(5)


def queries_killed(drill: Drill) -> None:
    """kill -9 of the queries after a batch was recorded and before it was committed, and a restart without a broker."""
    broker = _any_broker(drill)
    with drill.event(f"kill -9 of the queries before a commit; {_name_of(broker)} is killed when they start again"):
        drill.hold_recorded(*STREAMS)
        drill.kill_queries()
        broker.kill()
        drill.start_queries()
        for name in STREAMS:
            drill.start(name)
        drill.pause(drill.away_s)
        drill.servers.start(broker)
    for name in STREAMS:
        assert drill.streams[name].batches.repeated, f"no batch of {name} was repeated"


def first_start_without_a_killed_broker(drill: Drill) -> None:
    """First start of streams after kill -9 of a broker, which no name server lists then."""
    _first_start(drill, "killed")


def first_start_without_a_frozen_broker(drill: Drill) -> None:
    """First start of streams while a broker is frozen that the name servers list."""
    _first_start(drill, "frozen")


def _first_start(drill: Drill, how: str) -> None:
    broker = _any_broker(drill)
    names = {start: f"{start}-{how}" for start in ("earliest", "latest")}
    with drill.event(f"first start with earliest and latest while {_name_of(broker)} is {how}"):
        if how == "killed":
            broker.kill()
        else:
            drill.servers.freeze(broker)
        time.sleep(5)
        began_ms = _now_ms()
        for start, name in names.items():
            stream = drill.start(name, startingOffsets=start, maxOffsetsPerTrigger=LARGE)
            stream.begins = {} if start == "earliest" else None
        drill.pause(drill.away_s)
        read_ms = _now_ms()
        if how == "killed":
            drill.servers.start(broker)
        else:
            drill.servers.thaw(broker)
        drill.pause(10)
    faults = drill.results[-1].verdicts[names["latest"]].faults
    faults += _late_start_faults(drill, names["latest"], began_ms, read_ms)
    for name in names.values():
        drill.stop(name)
        del drill.streams[name]


def _late_start_faults(drill: Drill, name: str, began_ms: int, read_ms: int) -> list[str]:
    """Return what is wrong with where a stream began with `latest`. It had read its first batch at `read_ms`."""
    firsts: dict[Place, int] = {}
    for row in drill.streams[name].batches.rows_after(-1):
        firsts.setdefault(row.place, row.offset)
    faults = []
    for place, held in drill.truth().stored.items():
        first = firsts.get(place)
        replayed = [one for offset, one in held.items() if first is not None and offset >= first]
        if any(one.sent_ms < began_ms - SKEW_MS for one in replayed):
            faults.append(f"REPLAYED {place}: {name} began at {first}, before the query")
        missed = [offset for offset, one in held.items() if one.sent_ms > read_ms and (first is None or offset < first)]
        if missed:
            faults.append(f"MISSING {place}: {name} began at {first}, without {len(missed)} later messages")
    return faults


def expired_behind_the_readers(drill: Drill) -> None:
    """Expiry of what the streams have read."""
    broker = drill.servers.brokers[VICTIM]
    with drill.event(f"expiry at {VICTIM} of messages that were read"):
        time.sleep(30)  # so that there is more than one segment
        drill.rest()
        drill.settle()
        _expire(drill, broker)
        drill.produce()
        drill.pause(5)


def _expire(drill: Drill, broker: Broker) -> None:
    """Restart a broker, let it delete all but the last segment, and restart it again."""
    broker.stop()
    usual, broker.conf = broker.conf, {**broker.conf, **EXPIRING}
    drill.servers.start(broker)
    begin = 0
    while (reached := broker.expire()) > begin:  # a broker deletes ten files at a time
        begin = reached
    assert begin > 0, "nothing has expired"
    drill.tell(f"   {VICTIM} deletes all before the physical offset {begin}")
    broker.stop()
    broker.conf = usual
    drill.servers.start(broker)


def expired_unread(drill: Drill) -> None:
    """Expiry of messages that the streams have not read, because they are stopped. They fail; then they skip."""
    broker = drill.servers.brokers[VICTIM]
    with drill.event(f"expiry at {VICTIM} of messages that were not read"):
        drill.stop(*STREAMS)
        time.sleep(30)
        _expire(drill, broker)
        for name in STREAMS:
            drill.start(name)
            drill.await_error(name)
            drill.stop(name)
            drill.listen()
            drill.start(name, failOnDataLoss="false")
            drill.rest()
            drill.settle(name)
            drill.note_losses(name, drill.listen())


def shorter_store(drill: Drill) -> None:
    """A broker comes back with an older copy of its store. One stream fails; both skip."""
    broker = drill.servers.brokers[VICTIM]
    with drill.event(f"{VICTIM} gets an older copy of its store"):
        drill.stop("waiting")
        drill.start("waiting", failOnDataLoss="true")
        drill.rest()
        drill.settle()
        older = drill.truth()
        broker.stop()
        shutil.copytree(broker.store, copy := broker.store.with_name("copy"))
        drill.servers.start(broker)
        drill.produce()
        time.sleep(10)
        drill.rest()
        drill.settle()
        truth = drill.truth()
        broker.kill()
        _replace(broker, copy)
        kept = {place: held for place, held in truth.stored.items() if place[0] == OTHER}
        kept |= {place: held for place, held in older.stored.items() if place[0] == VICTIM}
        drill.servers.start(broker)
        drill.await_error("waiting")
        drill.stop("waiting")
        drill.start("waiting", failOnDataLoss="false")
        drill.pause(drill.away_s)
        drill.begin_phase(Truth(kept).ends(), Truth(kept, truth.unknown))
        drill.produce()
        drill.pause(5)


def replaced_store(drill: Drill) -> None:
    """A broker comes back with the store of another one, whose queues are longer. The streams begin to read it."""
    victim, other = drill.servers.brokers[VICTIM], drill.servers.brokers[OTHER]
    with drill.event(f"{VICTIM} gets the store of {OTHER}, with longer queues"):
        for name in STREAMS:
            drill.stop(name)
            drill.start(name, maxOffsetsPerTrigger=LARGE)
        while not _is_longer(drill.truth()):  # it is after `shorter_store`
            time.sleep(1)
        drill.rest()
        drill.settle()
        victim.kill()
        other.stop()
        shutil.copytree(other.store, copy := other.store.with_name("copy"))
        _replace(victim, copy)
        truth = drill.truth()
        kept: dict[Place, dict[int, Sent]] = {}
        begins: dict[Place, int] = {}
        for (broker, queue), held in truth.stored.items():
            if broker == OTHER:
                kept[OTHER, queue] = kept[VICTIM, queue] = held
                begins[OTHER, queue], begins[VICTIM, queue] = max(held) + 1, 0
        unknown = {
            (name, queue): bodies
            for (broker, queue), bodies in truth.unknown.items()
            for name in NAMES
            if broker == OTHER
        }
        drill.begin_phase(begins, Truth(kept, unknown))
        drill.servers.start(other)
        drill.servers.start(victim)
        drill.pause(2 * drill.away_s)
        drill.produce()
        drill.pause(5)


def _is_longer(truth: Truth) -> bool:
    """Return whether each queue of OTHER is longer than that of VICTIM by some messages."""
    ends = truth.ends()
    return all(ends.get((OTHER, queue), 0) >= end + 10 for (broker, queue), end in ends.items() if broker == VICTIM)


def _replace(broker: Broker, copy: Path) -> None:
    shutil.rmtree(broker.store)
    copy.rename(broker.store)


Event = Callable[[Drill], None]
DISTURBANCES: tuple[Event, ...] = (
    broker_killed,
    broker_killed_before_reading,
    broker_restarted_before_reading,
    broker_frozen_before_reading,
    name_server_killed,
    name_server_frozen,
    name_servers_killed,
    everything_frozen,
    topic_grown,
    queries_killed,
    first_start_without_a_killed_broker,
    first_start_without_a_frozen_broker,
)
LOSSES: tuple[Event, ...] = (expired_behind_the_readers, expired_unread, shorter_store, replaced_store)
