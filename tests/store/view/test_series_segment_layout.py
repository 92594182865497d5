"""segment_layout: every byte of a segment is counted once, under the right name."""

from pathlib import Path

import numpy as np
import pytest

import rmq_spark
from rmq_spark.store import segment_layout
from rmq_spark.store.errors import NotFoundError, OptionError
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store
from rmq_spark.store.view.series import BLANK_FILLER, NO_ENTRY, OTHER_TOPICS, STALE, UNWRITTEN

STORES = ["basic", "crashed", "preblank", "truncated-stale", "batchcq-cqext", "demo", "livekill533", "broker497"]


@pytest.mark.parametrize(("name", "cell_count"), [*((name, 37) for name in STORES), ("basic", 1), ("basic", 4096)])
def test_segment_layout_sizes_add_up(golden: Path, name: str, cell_count: int) -> None:
    with rmq_spark.open_reader(golden / name) as reader:
        for segment in reader.log.segments.segments:
            layout = segment_layout(reader, segment.begin, cell_count)
            assert sum(layout.sizes) == segment.size
            assert len(layout.cells) == cell_count
            assert (np.diff(layout.record_begins) > 0).all()
            assert len(layout.names) == len(layout.sizes) > int(layout.cells.max())


def test_segment_layout_finds_the_filler(golden: Path) -> None:
    with rmq_spark.open_reader(golden / "demo") as reader:
        layout = segment_layout(reader, 0, 256)
    assert dict(zip(layout.names, layout.sizes, strict=True)) == {"orders": 261821, BLANK_FILLER: 323}
    assert layout.cells.tolist() == [0] * 256
    assert layout.begin + sum(layout.sizes) == layout.end


def test_segment_layout_counts_records_without_an_entry(golden: Path) -> None:
    with rmq_spark.open_reader(golden / "livekill533") as reader:
        layout = segment_layout(reader, 131072, 64)
    sizes = dict(zip(layout.names, layout.sizes, strict=True))
    assert len(layout.record_begins) == 18
    assert sizes[NO_ENTRY] == 156708 - 131072 - sizes["orders"]  # the log's end is in tests/golden/README.md
    assert sizes[UNWRITTEN] == 196608 - 156708


def test_segment_layout_counts_stale_bytes_after_the_end(golden: Path) -> None:
    with rmq_spark.open_reader(golden / "truncated-stale") as reader:
        assert reader.log_end == 0  # before the first look
        layout = segment_layout(reader, None, 64)
        assert reader.log_end == 51006
    sizes = dict(zip(layout.names, layout.sizes, strict=True))
    assert layout.begin == 49152
    assert sizes["TopicR"] == 51006 - 49152
    assert 53512 - 51765 <= sizes[STALE] <= 53512 - 51006  # from inside an old body on
    assert NO_ENTRY not in sizes


def test_segment_layout_merges_topics_beyond_MAX_TOPICS(tmp_path: Path) -> None:
    build_store(tmp_path / "store", [SampleMessage(f"T{at}", body=bytes(1 + 10 * at)) for at in range(9)])
    with rmq_spark.open_reader(tmp_path / "store") as reader:
        layout = segment_layout(reader, None, 512)
    assert layout.names == ("T8", "T7", "T6", "T5", "T4", "T3", OTHER_TOPICS, UNWRITTEN)
    begins = {layout.names[cell] for cell in layout.cells.tolist()}
    assert begins == set(layout.names)


def test_segment_layout_shows_the_begin_of_an_almost_empty_segment(tmp_path: Path) -> None:
    messages = [SampleMessage("orders", body=bytes(1000)) for _ in range(9)]
    build_store(tmp_path / "store", messages, segment_bytes=1 << 30)
    with rmq_spark.open_reader(tmp_path / "store") as reader:
        layout = segment_layout(reader, None, 64)
        used = reader.log_end
    assert (layout.end, layout.shown_end) == (1 << 30, 32 << 10)
    assert sum(layout.sizes) == 1 << 30
    assert layout.names == ("orders", UNWRITTEN)
    assert abs((layout.cells == 0).sum() * layout.shown_end / 64 - used) < 512


def test_segment_layout_raises_without_records_and_for_a_wrong_offset(golden: Path, tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "store") as store:
        store.create_topic("orders")
    with rmq_spark.open_reader(tmp_path / "store") as reader, pytest.raises(NotFoundError, match="It has none"):
        segment_layout(reader, None, 8)
    with rmq_spark.open_reader(golden / "demo") as reader:
        with pytest.raises(NotFoundError, match=r"\[0, 786432\)"):
            segment_layout(reader, 786432, 8)
        with pytest.raises(OptionError, match="must be an integer"):
            segment_layout(reader, "0", 8)  # type: ignore[arg-type]
