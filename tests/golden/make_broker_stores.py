"""How demo, broker497 and livekill533 were made: a real broker, told what to do message by message.

    python tests/golden/make_broker_stores.py --harness FOLDER --out FOLDER demo

The harness is the folder that drives a real RocketMQ. Bodies, tags and keys are the same in every
run; times, unique keys and ports are not, so a run does not give the committed bytes again. demo.md
says how it was called.
"""

import argparse
import json
import os
import random
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

SMALL = {
    "timerWheelEnable": "false",  # its file takes 38 MB
    "mappedFileSizeConsumeQueue": 4000,  # 200 units
    "mapperFileSizeBatchConsumeQueue": 460,  # 10 units
}
CUSTOMERS = [f"c-{n:03d}" for n in range(1, 41)]
REGIONS = ["eu-west", "eu-north", "us-east", "ap-south"]
SKUS = [f"SKU-{n}" for n in range(100, 160)]


def order_messages(numbers: range, rng: random.Random) -> list[dict[str, Any]]:
    """Events of a small shop's orders, interleaved; each order's events in their order."""
    waiting, sent = [], []
    for number in numbers:
        fate = rng.random()
        last = ["cancelled"] if fate < 0.12 else ["paid", "cancelled"] if fate < 0.16 else None
        region = rng.choice(REGIONS)
        order = {
            "orderId": f"O-{number}",
            "customer": rng.choice(CUSTOMERS),
            "sku": rng.choice(SKUS),
            "quantity": rng.randint(1, 5),
            "total": round(rng.uniform(5, 400), 2),
            "currency": "USD" if region == "us-east" else "EUR",
        }
        waiting.append((order, region, ["created", *(last or ["paid", "shipped"])]))
        while len(waiting) > 12:
            sent.append(next_event(waiting, rng))
    while waiting:
        sent.append(next_event(waiting, rng))
    return sent


def next_event(waiting: list[Any], rng: random.Random) -> dict[str, Any]:
    at = rng.randrange(len(waiting))
    order, region, states = waiting[at]
    state = states.pop(0)
    if not states:
        del waiting[at]
    return {
        "topic": "orders",
        "text": json.dumps({**order, "status": state}, separators=(",", ":")),
        "tags": state,
        "keys": order["orderId"],
        "shardingKey": order["orderId"],
        "properties": {"customer": order["customer"], "region": region},
    }


def payment(number: int, rng: random.Random, tag: str = "card") -> dict[str, Any]:
    body = {
        "paymentId": f"P-{number}",
        "orderId": f"O-{rng.randint(1000, 1399)}",
        "amount": round(rng.uniform(5, 400), 2),
        "method": tag,
    }
    return {
        "topic": "payments",
        "text": json.dumps(body, separators=(",", ":")),
        "tags": tag,
        "keys": [body["paymentId"], body["orderId"]],
    }


def invoice(number: int, lines: int, rng: random.Random) -> dict[str, Any]:
    items = [
        {
            "line": n + 1,
            "sku": rng.choice(SKUS),
            "text": "Küchenwaage, grün",
            "price": rng.randint(1, 99),
        }
        for n in range(lines)
    ]
    body = {"invoice": f"I-{number}", "items": items}
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return {"topic": "invoices", "text": text, "tags": "invoice", "keys": f"I-{number}"}


def click(session: int, step: int) -> dict[str, Any]:
    text = json.dumps({"session": f"s-{session}", "page": f"/item/{step}"}, separators=(",", ":"))
    return {"topic": "clicks", "text": text, "tags": "view", "keys": f"s-{session}"}


def fill_demo(client: Any) -> None:
    rng = random.Random(20)
    client("create-topic", topic="orders", queues=4)
    client("create-topic", topic="payments", queues=2)
    client("create-topic", topic="invoices", queues=1)
    client("create-topic", topic="clicks", queues=2, attributes={"+queue.type": "BatchCQ"})
    orders = order_messages(range(1000, 1410), rng)
    for message in orders[:900]:
        client("produce", **message)
    client("pull", topic="orders", group="reporting", commit=True)  # what follows is its lag
    for message in orders[900:]:
        client("produce", **message)
    send_payments(client, rng)
    send_invoices_and_clicks(client, rng)
    consume_payments(client, rng)
    client("sleep", ms=4000)  # operation messages of transactions are written up to 3 s later


def send_payments(client: Any, rng: random.Random) -> None:
    """Single, in batches, in transactions, delayed."""
    for number in range(5000, 5270):
        client("produce", **payment(number, rng, rng.choice(["card", "invoice", "voucher"])))
    for queue_id, first, count in ((0, 5300, 3), (1, 5310, 6), (0, 5320, 9)):
        batch = [payment(first + n, rng, "batch") for n in range(count)]
        client("produce", queueId=queue_id, batch=batch)
    for number, outcome in ((5400, "commit"), (5401, "rollback"), (5402, "commit")):
        client("produce", tx=outcome, group="checkout", **payment(number, rng, "transfer"))
    for number, level in ((5500, 1), (5501, 1), (5502, 2), (5503, 18)):  # 1 s, 1 s, 5 s, 2 h
        client("produce", delayLevel=level, **payment(number, rng, "reminder"))


def send_invoices_and_clicks(client: Any, rng: random.Random) -> None:
    """Bodies compressed in every way; inner batches."""
    for n, codec in enumerate(("ZLIB", "LZ4", "ZSTD", "ZLIB", "LZ4", "ZSTD")):
        client("produce", compress=codec, **invoice(7000 + n, 75 + 7 * n, rng))
    client("produce", **invoice(7010, 3, rng))  # too small to be compressed
    client("produce", compressOver=1 << 20, **invoice(7011, 70, rng))  # large, and left as it is
    for session, (queue_id, count) in enumerate(((0, 3), (1, 2), (0, 5), (0, 1), (1, 4))):
        batch = [click(session, step) for step in range(count)]
        client("produce", queueId=queue_id, batch=batch)
    client("produce", queueId=1, **click(9, 0))  # no batch: a unit of one message


def consume_payments(client: Any, rng: random.Random) -> None:
    """Messages that fail and come back, and two that become dead letters."""
    for number in range(5600, 5604):
        client("produce", **payment(number, rng, "bounced"))
    # Four fail once: back after 10 s (level 3) as messages of %RETRY%billing.
    fail = {"topic": "payments", "group": "billing", "expr": "bounced", "failTimes": 1}
    client("push", count=4, timeoutMs=60000, **fail)
    for number in range(5610, 5612):
        client("produce", **payment(number, rng, "disputed"))
    # Two fail twice, once more than allowed: dead letters of the group audit.
    fail = {"topic": "payments", "group": "audit", "expr": "disputed", "failTimes": 9}
    client("push", count=1, timeoutMs=25000, maxReconsumeTimes=1, **fail)


def fill_broker497(client: Any) -> None:
    rng = random.Random(49)
    client("create-topic", topic="orders", queues=2)
    for n in range(33):
        text = json.dumps({"order": n, "note": "n" * rng.randint(0, 4000)})
        message = {"topic": "orders", "text": text, "queueId": n % 2}
        if n % 3:
            message["tags"] = ("created", "paid", "grün")[n % 5 % 3]
        if n % 4:
            message["keys"] = [f"k{n}", "all"]
        if n % 5 == 0:
            message["properties"] = {"region": "eu"}
        client("produce", compressOver=1 << 20, **message)
    batch = [{"topic": "orders", "text": f"b{n}", "tags": "b", "keys": f"b{n}"} for n in range(6)]
    client("produce", queueId=1, batch=batch)
    client("produce", compress="ZLIB", topic="orders", queueId=0, text="compressed " * 600)
    client("pull", topic="orders", group="reporting", commit=True)


def kill_while_producing(broker: Any, clients: list[Any]) -> None:
    """Three producers at full speed, kill -9 of the broker in the middle."""
    clients[0]("create-topic", topic="orders", queues=3)
    orders = order_messages(range(1000, 2000), random.Random(533))
    stop = threading.Event()

    def produce(client: Any, messages: list[dict[str, Any]]) -> None:
        for at in range(0, len(messages), 60):
            if stop.is_set():
                return
            batch = messages[at : at + 60]  # a batch goes where queueId says
            try:
                client("produce", queueId=at // 60 % 3, batch=batch)
            except RuntimeError:  # the broker is gone
                return

    threads = [
        threading.Thread(target=produce, args=(client, orders[n :: len(clients)])) for n, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    # At the first bytes of the third segment: the queues have no units yet for what was just
    # appended.
    third = Path(broker.store) / "commitlog" / f"{2 * 65536:020d}"
    while not third.exists():
        time.sleep(0.001)
    with third.open("rb", buffering=0) as file:
        while not any(os.pread(file.fileno(), 4, 0)):
            pass
    broker.kill()
    stop.set()
    for client in clients:
        client.process.kill()
    for thread in threads:
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--harness", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("store", choices=("demo", "broker497", "livekill533"))
    options = parser.parse_args()
    sys.path.insert(0, str(options.harness.resolve()))
    import rmq  # type: ignore[import-not-found, unused-ignore]

    store = options.out.resolve() / options.store
    shutil.rmtree(store, ignore_errors=True)
    large = {"maxHashSlotNum": 1000, "maxIndexNum": 4000}
    small = {"maxHashSlotNum": 100, "maxIndexNum": 400}
    if options.store == "demo":
        conf = {**SMALL, **large, "mappedFileSizeCommitLog": 262144}
        with rmq.Broker(str(store), 21911, "5.3.3", **conf) as broker, rmq.Client(broker) as client:
            fill_demo(client)
    elif options.store == "broker497":
        conf = {**SMALL, **small, "mappedFileSizeCommitLog": 65536}
        with rmq.Broker(str(store), 21911, "4.9.7", **conf) as broker, rmq.Client(broker) as client:
            fill_broker497(client)
    else:
        conf = {**SMALL, **small, "mappedFileSizeCommitLog": 65536}
        broker = rmq.Broker(str(store), 21911, "5.3.3", **conf)
        broker.store = str(store)
        kill_while_producing(broker, [rmq.Client(broker) for _ in range(3)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
