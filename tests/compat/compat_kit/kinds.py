"""All kinds of records that a broker and its Java client write, each in its own topics, and the kind of a row.

A kind's topic is `kind-` and its name; derived messages of a broker (half, delayed, retried, dead) have that topic in
their properties. Hosts, the property CRC and extended units depend on the broker's life instead.
"""

import base64
import time
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from compat_kit.rocketmq import Client, Line

PREFIX = "kind-"
QUEUES = 2
MAX_BODY_BYTES = 4 << 20
LEVELS = "1s 1s 1s 1s 1s 1s"  # of delays; the shipped ones, which begin at a retry's 10 s, would take the tests' time
PATIENT, STRICT = "patient", "strict"  # groups of consumers: one takes all at the third time, one never does
_ODD = "naïve 中文 \U0001f680 \t\n\r \x00\x03\x7f '\"\\{}=;,#|&"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of record: what it is called and, for a version that cannot write it, why."""

    name: str
    not_on: Mapping[str, str]

    def why_not(self, version: str) -> str | None:
        """Return why this version cannot write it, None if it can."""
        return next((why for line, why in self.not_on.items() if version.startswith(line)), None)


_NAMES = (
    *("plain", "tags and keys", "odd properties", "empty body", "4 MiB body", "zlib", "lz4", "zstd"),
    *("message batch", "inner batch", "ordered", "delayed by level", "delayed by time"),
    *("committed", "rolled back", "pending", "checked back", "retried twice", "dead-lettered"),
    *("IPv6 hosts", "property CRC", "extended units"),
)
_NOT_ON_4 = {
    "lz4": "the producer knows zlib only",
    "zstd": "the producer knows zlib only",
    "inner batch": "batch consume queues came with 5.0",
    "delayed by time": "the timer wheel came with 5.0",
    "property CRC": "it came with 5.2",
}
KINDS = {name: Kind(name, {"4.": _NOT_ON_4[name]} if name in _NOT_ON_4 else {}) for name in _NAMES}


def topic_of(kind: str) -> str:
    """Return the topic of a kind."""
    return PREFIX + kind.replace(" ", "-")


_BY_TOPIC = {topic_of(name): name for name in _NAMES}


def kinds_of(row: Mapping[str, Any], extended: bool) -> list[str]:
    """Return the kinds of a row, none for internal messages of RocketMQ. `extended`: its entry is extended."""
    properties = row["properties"]
    candidates = (properties.get("RETRY_TOPIC"), properties.get("REAL_TOPIC"), row["physicalTopic"])
    found = [_BY_TOPIC[topic] for topic in candidates if topic in _BY_TOPIC][:1]
    found += ["IPv6 hosts"] if row["sysFlag"] & 0x30 == 0x30 else []
    found += ["property CRC"] if "__CRC32#" in properties else []
    return found + (["extended units"] if extended else [])


def create_topics(client: Client, version: str) -> None:
    """Make the topics of all kinds that this version can write."""
    for kind in KINDS.values():
        if kind.why_not(version) is None:
            batch = {"attributes": {"+queue.type": "BatchCQ"}} if kind.name == "inner batch" else {}
            client("create-topic", topic=topic_of(kind.name), queues=QUEUES, **batch)
    for group in (PATIENT, STRICT):  # otherwise a consumer notices them half a minute later
        client("create-topic", topic=f"%RETRY%{group}", queues=1)


def produce(client: Client, **fields: object) -> list[Line]:
    """Send messages, again if the client does not know the topic's queues yet.

    A broker that has just started serves before the name server knows its topics. Until then the client takes the
    queues of TBW102, and the broker refuses those that the topic does not have; it stores nothing then.
    """
    for _ in range(60):
        try:
            return client("produce", **fields)
        except RuntimeError as error:
            if "is illegal, TopicConfig" not in str(error):
                raise
        time.sleep(0.5)
    return client("produce", **fields)


def write_round(client: Client, version: str, seed: int) -> list[Line]:
    """Write messages of every kind except those that a consumer must send back; delayed ones arrive a second later."""
    random, sent = Random(seed), []

    def send(kind: str, **fields: object) -> None:
        if KINDS[kind].why_not(version) is None:
            sent.extend(produce(client, **({"topic": topic_of(kind)} | fields)))

    for number in range(40):
        send("plain", text=f"{seed} {number} " + "x" * random.choice((0, 5, 900)), flag=random.choice((0, 7, -1)))
        send("ordered", text=f"{number}", shardingKey=f"s{number % 5}", keys=f"{seed}-{number}")
    for tags in ("a", "paid || created", "标签", "T" * 300):
        for keys in ("one", ["k1", "键2", f"{seed}"], "  spaced  out "):
            send("tags and keys", text="t", tags=tags, keys=keys)
    for properties in ({"a": _ODD, "b c": "d", "键": "值"}, {"long": "v" * 9000}, {f"p{n}": f"{n}" for n in range(60)}):
        send("odd properties", text="p", properties=properties)
        send("odd properties", text="p", properties={_ODD: "v"}, tags="o", queueId=1)
    write_bodies(send, version, random)
    for size in (1, 2, 9):
        for kind in ("message batch", "inner batch"):
            batch = [{"topic": topic_of(kind), "text": f"{n}", "keys": f"b{seed}", "tags": "b"} for n in range(size)]
            send(kind, batch=batch, queueId=size % QUEUES)
    send("inner batch", text="alone", queueId=0)
    write_later(send)
    return sent


def write_bodies(send: Any, version: str, random: Random) -> None:
    """Write empty bodies, the longest ones, compressed ones."""
    topic = topic_of("empty body")
    if version.startswith("4."):
        send("empty body", text="-", emptyBody=True, tags="empty")
    send("empty body", emptyBody=True, batch=[{"topic": topic, "text": "-", "keys": "e"} for _ in range(3)], queueId=1)
    body = base64.b64encode(random.randbytes(1 << 20) * 4).decode()
    send("4 MiB body", body=body, compressOver=2 * MAX_BODY_BYTES)
    for kind in ("zlib", "lz4", "zstd"):
        for words in (600, 9000):
            text = " ".join(f"{random.randrange(1000)}" for _ in range(words))
            send(kind, text=text, compress=kind.upper(), tags=kind)
            send(kind, text=text, compress=kind.upper(), delayLevel=1)  # stored twice as it came


def write_later(send: Any) -> None:
    """Write messages that the broker first stores under another topic."""
    for number in range(4):
        send("delayed by level", text=f"{number}", delayLevel=1 + number, keys=f"d{number}")
        send("delayed by time", text=f"{number}", delayTimeMs=1500, keys=f"d{number}")
    for kind, outcome in (("committed", "commit"), ("rolled back", "rollback"), ("pending", "unknown")):
        immune = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "9999"} if kind == "pending" else {}
        for number in range(3):
            text = f"{number}"
            send(kind, text=text, tx=outcome, group="kinds", keys=f"x{number}", properties={"a": "b", **immune})
    for answer in ("commit", "rollback"):
        fields = {"tx": "unknown", "group": "kinds", "properties": {"whenChecked": answer}}
        send("checked back", text=answer, **fields)


def write_returned(client: Client) -> None:
    """Have messages fail: twice, and then they are consumed; too often, and they are dead."""
    for kind in ("retried twice", "dead-lettered"):
        for number in range(2):
            client("produce", topic=topic_of(kind), text=f"{number}", tags="t", keys=f"r{number}")
    retried = {"topic": topic_of("retried twice"), "group": PATIENT, "failTimes": 2}
    client("push", count=2, timeoutMs=30_000, **retried)
    dead = {"topic": topic_of("dead-lettered"), "group": STRICT, "failTimes": 99, "maxReconsumeTimes": 1}
    client("push", count=1, timeoutMs=4000, **dead)
