"""The pictures: what they draw is what the store holds, and every one has a title, units, and room for its labels."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.errors import NotFoundError, OptionError

matplotlib = pytest.importorskip("matplotlib", reason="the extra plot is not installed")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")

PLOTS: dict[str, Callable[..., Any]] = {
    "over time": rmq_spark.plot_over_time,
    "over time, by queue, bytes": lambda store, **where: rmq_spark.plot_over_time(
        store, "orders", what="bytes", **where
    ),
    "skew": lambda store, **where: rmq_spark.plot_queue_skew(store, "payments", **where),
    "tags": lambda store, **where: rmq_spark.plot_tag_shares(store, "payments", **where),
    "delay": rmq_spark.plot_delay,
    "segment": rmq_spark.plot_segment,
    "lag": lambda store, **where: rmq_spark.plot_lag(samples(store), **where),
}


@pytest.fixture(autouse=True)
def _figures_are_closed() -> Iterator[None]:
    yield
    plt.close("all")


def samples(store: Path) -> list[Any]:
    with rmq_spark.open_reader(store) as reader:
        return [reader.lag("reporting") for _ in range(3)]


def overlapping(labels: list[Any]) -> list[tuple[str, str]]:
    """Return neighbouring labels that are drawn over each other."""
    boxes = [
        (label.get_text(), label.get_window_extent()) for label in labels if label.get_text() and label.get_visible()
    ]
    return [(one, other) for at, (one, box) in enumerate(boxes) for other, its in boxes[at + 1 :] if box.overlaps(its)]


@pytest.mark.parametrize("name", PLOTS)
def test_a_picture_has_a_title_units_and_room_for_its_labels(golden: Path, name: str) -> None:
    ax = PLOTS[name](golden / "demo")
    figure = ax.figure
    figure.canvas.draw()
    assert ax.get_title()
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    for axis in (ax.xaxis, ax.yaxis):
        assert not overlapping(axis.get_ticklabels())
    around = figure.bbox
    for text in (ax.title, ax.xaxis.label, ax.yaxis.label, *(ax.get_legend().get_texts() if ax.get_legend() else ())):
        box = text.get_window_extent()
        assert around.x0 - 1 <= box.x0, f"{text.get_text()} leaves the picture"
        assert box.x1 <= around.x1 + 1, f"{text.get_text()} leaves the picture"
        assert box.y1 <= around.y1 + 1, f"{text.get_text()} leaves the picture"


def test_every_picture_is_drawn_where_it_is_told_from_a_path_or_a_reader(golden: Path) -> None:
    _, grid = plt.subplots(2, 4)
    with rmq_spark.open_reader(golden / "demo") as reader:
        for ax, (name, plot) in zip(grid.flat, PLOTS.items(), strict=False):
            store = golden / "demo" if name == "lag" else reader
            assert plot(store, ax=ax) is ax
        assert reader.topics()  # the caller's reader stays open
    assert len(plt.get_fignums()) == 1


def test_bars_are_as_high_as_what_was_stored(golden: Path) -> None:
    ax = rmq_spark.plot_over_time(golden / "demo")
    heights = {bars.get_label(): round(sum(bar.get_height() for bar in bars)) for bars in ax.containers}
    assert heights == {"orders": 1170, "payments": 299, "clicks": 16, "invoices": 8}
    assert "estimated" not in ax.get_title()
    tops = [sum(bars[at].get_height() for bars in ax.containers) for at in range(len(ax.containers[0]))]
    assert ax.get_ylim()[1] > max(tops), "room above the highest stack"
    skew = rmq_spark.plot_queue_skew(golden / "demo", "orders")
    assert [bar.get_height() for bar in skew.containers[0]] == [289, 292, 293, 296]
    assert "1.01 times the mean" in skew.get_title()


def test_tags_have_their_share_and_their_count(golden: Path) -> None:
    ax = rmq_spark.plot_tag_shares(golden / "demo", "orders")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["cancelled", "shipped", "paid", "created"]
    assert "35.0 %  (410)" in [text.get_text() for text in ax.texts]


def test_more_series_than_colours_are_joined(tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "store") as store:
        for number in range(12):
            store.send(f"topic{number:02}", "x", tags=f"tag{number}")
    ax = rmq_spark.plot_over_time(tmp_path / "store")
    assert [bars.get_label() for bars in ax.containers][-1] == "6 others"
    assert len(ax.containers) == 7
    assert sum(bar.get_height() for bars in ax.containers for bar in bars) == 12


def test_lines_of_lag_have_what_the_samples_have(golden: Path) -> None:
    taken = samples(golden / "demo")
    ax = rmq_spark.plot_lag(reversed(taken))
    assert {line.get_label(): list(line.get_ydata()) for line in ax.lines} == {
        "orders/0": [67] * 3,
        "orders/1": [66] * 3,
        "orders/2": [67] * 3,
        "orders/3": [70] * 3,
    }
    with rmq_spark.open_reader(golden / "demo") as reader:
        groups = rmq_spark.plot_lag([reader.lag()], what="seconds")
    assert {line.get_label() for line in groups.lines} == {"CID_RMQ_SYS_TRANS", "audit", "billing", "reporting"}


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "store") as store:
        store.create_topic("orders")
    for plot in (rmq_spark.plot_over_time, rmq_spark.plot_delay):
        assert plot(tmp_path / "store").texts[0].get_text() == "no messages"
    assert "no messages" in rmq_spark.plot_tag_shares(tmp_path / "store", "orders").texts[0].get_text()
    assert rmq_spark.plot_lag([]).texts[0].get_text() == "no lag was sampled"
    assert rmq_spark.plot_queue_skew(tmp_path / "store", "orders").containers[0][0].get_height() == 0


def test_wrong_words_are_errors_that_list_the_right_ones(golden: Path) -> None:
    for plot in (rmq_spark.plot_over_time, rmq_spark.plot_queue_skew):
        with pytest.raises(OptionError, match="messages, bytes"):
            plot(golden / "demo", "orders", what="rows")
    with pytest.raises(OptionError, match="seconds"):
        rmq_spark.plot_lag([], what="minutes")
    with pytest.raises(OptionError, match="bins=0"):
        rmq_spark.plot_over_time(golden / "demo", bins=0)
    with pytest.raises(NotFoundError, match="orders"):
        rmq_spark.plot_tag_shares(golden / "demo", "order")


def test_without_matplotlib_there_is_the_pip_command_and_nothing_else_is_missing(golden: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; sys.modules['matplotlib.pyplot'] = None\n"
        f"import rmq_spark; print(rmq_spark.open_reader({str(golden / 'demo')!r}).topic('orders').messages)\n"
        f"rmq_spark.plot_over_time({str(golden / 'demo')!r})"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.stdout == "1170\n"
    assert 'ModuleNotFoundError: drawing needs matplotlib: pip install "rmq-spark[plot]"' in run.stderr
