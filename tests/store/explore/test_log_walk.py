"""The walk through the log, block by block."""

from pathlib import Path

import pyarrow as pa

import rmq_spark


def test_a_record_that_begins_in_one_block_and_ends_in_the_next_is_known_to_the_index(tmp_path: Path) -> None:
    count = 60_000  # 9 MB of log; a block is 8 MiB
    table = pa.table({"body": ["x"] * count, "keys": [f"k{number:09d}" for number in range(count)]})
    with rmq_spark.open_store(tmp_path / "store", segment_bytes=16 << 20) as messages:
        messages.send_many(table, topic="orders")
    report = rmq_spark.check(tmp_path / "store")
    assert report.log_end > 8 << 20
    assert report.log_end % (8 << 20)
    assert report.findings == ()
