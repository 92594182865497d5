"""Several processes deliver, one is killed, and a program sends meanwhile: each message once, in order."""

import subprocess
import sys
from pathlib import Path

import rmq_spark
from rmq_spark.store import DeliveryScheduler
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.model import QueueKey

WORKER = Path(__file__).with_name("scheduler_worker.py")
ROOT = Path(__file__).resolve().parents[3]
MESSAGES = 60


def start(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), str(path)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def bodies(path: Path, queue: QueueKey) -> list[str]:
    with rmq_spark.open_reader(path) as reader:
        reader.refresh()
        held = reader.bounds(queue)
        batches = reader.read(queue, 0, held.max_offset, ("body",))
        return [row["body"].decode() for batch in batches for row in batch.to_pylist()]


def test_tick_in_several_processes_delivers_each_message_once(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with rmq_spark.open_store(path, segment_bytes=1 << 20, queues=2, message_delay_level="0s 0s") as store:
        store.create_topic("T", 2)
        workers = [start(path) for _ in range(3)]
        for number in range(MESSAGES):
            store.send("T", f"{number:03d}", queue_id=number % 2, delay_level=1 + number % 2)
            if number == MESSAGES // 2:
                workers[0].kill()
    delivered = [int(worker.communicate("\n", timeout=180)[0]) for worker in workers[1:]]
    workers[0].communicate()
    last = DeliveryScheduler(str(path)).tick(wall_clock_ms())
    assert last.problem is None
    for queue_id in range(2):
        expected = [f"{number:03d}" for number in range(queue_id, MESSAGES, 2)]
        assert bodies(path, QueueKey("T", queue_id)) == expected
    assert sum(delivered) + last.delivered <= MESSAGES
    assert DeliveryScheduler(str(path)).tick(wall_clock_ms()).delivered == 0
