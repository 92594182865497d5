"""Pictures of bytes: each byte has a cell in the colour of its field, and each field is named with its value."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark import byte_cells, drawing
from rmq_spark.byte_cells import shown_value
from rmq_spark.store.errors import NotFoundError, OffsetRangeError, OptionError
from rmq_spark.store.model import QueueKey

matplotlib = pytest.importorskip("matplotlib", reason="the extra plot is not installed")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")
to_rgba = pytest.importorskip("matplotlib.colors").to_rgba


@pytest.fixture(autouse=True)
def _figures_are_closed() -> Iterator[None]:
    yield
    plt.close("all")


def texts(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.texts]


def cells(ax: Any) -> list[tuple[int, tuple[float, ...]]]:
    """Return the number of cells of each field, and their colour."""
    return [(len(part.get_paths()), tuple(part.get_facecolor()[0])) for part in ax.collections]


def test_every_byte_has_a_cell_in_the_colour_of_its_field() -> None:
    fields = [(0, 2, "size", 258), (2, 3, "name", "a$b"), (5, 0, "nothing", "")]
    ax = rmq_spark.plot_bytes(b"\x01\x02a$b", fields, title="three fields", text=["name"], bytes_per_line=4)
    assert ax.get_title() == "three fields"
    assert texts(ax)[:7] == ["01", "02", "0", "a", "$", "b", "1"]
    assert cells(ax)[:2] == [(2, to_rgba(drawing.CELL_COLOURS[0])), (3, to_rgba(drawing.CELL_COLOURS[1]))]
    assert texts(ax)[7:] == ["0", "size  258", "1", "name  a$b", "2", "nothing  "]


def test_bytes_are_hex_unless_their_field_is_text_and_they_are_printable() -> None:
    ax = rmq_spark.plot_bytes(b"A\x01", [(0, 2, "body", "")], text=["body"])
    assert texts(ax)[:2] == ["A", "01"]
    ax = rmq_spark.plot_bytes(b"A\x01", [(0, 2, "body", "")])
    assert texts(ax)[:2] == ["41", "01"]


def test_plot_record_shows_all_bytes_of_the_record_and_all_fields(golden: Path) -> None:
    with rmq_spark.open_reader(golden / "demo") as reader:
        (queue, offset), *_ = reader.find_key("orders", "O-1000")
        ax = rmq_spark.plot_record(reader, queue, offset)
    shown = texts(ax)
    assert "total_size  378" in shown
    assert "topic  orders" in shown
    assert "magic  0xdaa320a7" in shown
    assert "store_host  127.0.0.1:21911" in shown
    assert sum(count for count, _ in cells(ax)) == 378
    assert "378 bytes" in ax.get_title()
    ax.figure.canvas.draw()
    listed = [text for text in ax.texts if "  " in text.get_text()]
    assert all(text.get_window_extent().x1 <= ax.figure.bbox.x1 + 1 for text in listed)
    assert len(drawing.svg_text(ax)) > 10_000


def test_plot_record_draws_into_axes_of_the_caller(golden: Path) -> None:
    _, ax = plt.subplots()
    assert rmq_spark.plot_record(golden / "demo", QueueKey("orders", 3), 8, ax=ax) is ax


def test_plot_record_names_the_offsets_that_exist(golden: Path) -> None:
    with pytest.raises(OffsetRangeError, match=r"\[0, 289\)"):
        rmq_spark.plot_record(golden / "demo", QueueKey("orders", 0), 5_000)
    with pytest.raises(NotFoundError):
        rmq_spark.plot_record(golden / "demo", QueueKey("orders", 77), 0)
    with pytest.raises(OptionError, match="bytes_per_line=0"):
        rmq_spark.plot_bytes(b"a", [], bytes_per_line=0)


def test_a_long_or_odd_value_is_one_printable_line() -> None:
    assert shown_value("a\nb") == "a b"
    assert shown_value("x" * 100) == "x" * 29 + "…"


@pytest.fixture
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw at most 256 bytes, which is faster."""
    monkeypatch.setattr(byte_cells, "MAX_BYTES", 256)


@pytest.mark.usefixtures("small_pictures")
def test_plot_record_draws_the_first_bytes_of_a_large_record(tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "store") as producer:
        producer.send("orders", bytes(1 << 20), keys="large", queue_id=0)
    ax = rmq_spark.plot_record(tmp_path / "store", QueueKey("orders", 0), 0)
    assert sum(count for count, _ in cells(ax)) == 256
    size = int(ax.get_title().rpartition(": ")[2].removesuffix(" bytes").replace(",", ""))
    assert size > 1 << 20
    assert f"… {size - 256:,} more bytes" in texts(ax)
    assert "topic  orders" in texts(ax), "the list has the fields whose bytes are not drawn"
    assert len(ax.get_yticks()) == 8
    ax.figure.canvas.draw()
    shown = [text.get_window_extent() for text in ax.texts]
    assert max(extent.y1 for extent in shown) < ax.figure.bbox.y1
    assert min(extent.y0 for extent in shown) > 0


@pytest.mark.usefixtures("small_pictures")
def test_plot_bytes_counts_the_bytes_that_it_leaves_out() -> None:
    ax = rmq_spark.plot_bytes(bytes(257), [(0, 256, "a", 1), (256, 1, "b", 2)])
    assert cells(ax)[0][0] == 256
    assert "… 1 more byte" in texts(ax)
    assert texts(ax).count("1") == 1, "a field without a drawn byte has its number only in the list"
    ax = rmq_spark.plot_bytes(bytes(256), [(0, 256, "a", 1)])
    assert not [text for text in texts(ax) if text.startswith("…")]
