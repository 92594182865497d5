"""A process that runs delivery rounds until a line on stdin ends it: `python scheduler_worker.py STORE`.

Prints how many messages it delivered.
"""

import sys
import threading
import time

from rmq_spark.store import DeliveryScheduler
from rmq_spark.store.disk.clock import wall_clock_ms

is_over = threading.Event()


def wait_for_the_end() -> None:
    sys.stdin.readline()
    is_over.set()


threading.Thread(target=wait_for_the_end, daemon=True).start()
delivered = 0
with DeliveryScheduler(sys.argv[1]) as ticker:
    while not is_over.is_set():
        tick = ticker.tick(wall_clock_ms())
        delivered += tick.delivered
        if not tick.delivered:
            time.sleep(0.002)
print(delivered)
