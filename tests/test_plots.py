"""Plots: they show the contents of the store, and each has a title, units, and room for its labels."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support.broken_packages import GONE, break_package

import rmq_spark
from rmq_spark.store import GroupLag
from rmq_spark.store.errors import NotFoundError, OptionError
from rmq_spark.store.group_tables import LAG
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import BORN_MS, SampleMessage
from rmq_spark.store.testing.sample_store import build_store, build_uniform_store
from rmq_spark.store.view.message import SampleSize

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


def inside(ax: Any) -> None:
    """Assert that no text leaves the figure, and that the plot keeps nearly half of its width."""
    ax.figure.canvas.draw()
    legend = ax.get_legend()
    texts = [ax.title, ax.xaxis.label, *ax.get_yticklabels(), *(legend.get_texts() if legend else ())]
    for text in texts:
        box = text.get_window_extent()
        assert ax.figure.bbox.x0 - 1 <= box.x0, text.get_text()
        assert box.x1 <= ax.figure.bbox.x1 + 1, text.get_text()
    assert ax.get_window_extent().width > ax.figure.bbox.width * 0.45


def test_names_of_any_length_and_kind_are_named_and_fit(tmp_path: Path) -> None:
    names = [f"a-topic-of-a-team-that-likes-words-{'x' * 40}-{number}-{'y' * 40}" for number in range(3)]
    tags = ["$\\frac{a}$", "two\nlines", f"{'t' * 60}-1-{'t' * 60}", f"{'t' * 60}-2-{'t' * 60}"]
    messages = [SampleMessage(name, tags=tag) for name in (*names, "_orders") for tag in tags]
    build_store(tmp_path / "store", messages)
    for plot in (rmq_spark.plot_over_time, rmq_spark.plot_delay, rmq_spark.plot_segment):
        ax = plot(tmp_path / "store")
        inside(ax)
        named = [text.get_text() for text in ax.get_legend().get_texts()]
        assert sum("_orders" in name for name in named) == 1
        assert sum(any(f"-{number}" in name for number in range(3)) for name in named) == 3
        assert len({name.split(":")[0] for name in named if name.startswith("a-")}) == 3
    ax = rmq_spark.plot_tag_shares(tmp_path / "store", names[0])
    inside(ax)
    assert [round(bar.get_y() + bar.get_height() / 2) for bar in ax.containers[0]] == [0, 1, 2, 3]
    assert {"$\\frac{a}$", "two\\nlines"} < {label.get_text() for label in ax.get_yticklabels()}
    inside(rmq_spark.plot_queue_skew(tmp_path / "store", names[0]))


def test_every_picture_is_drawn_where_it_is_told_from_a_path_or_a_reader_and_writes_nothing(golden: Path) -> None:
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (golden / "demo").rglob("*")}
    _, grid = plt.subplots(2, 4)
    with rmq_spark.open_reader(golden / "demo") as reader:
        for ax, (name, plot) in zip(grid.flat, PLOTS.items(), strict=False):
            store = golden / "demo" if name == "lag" else reader
            assert plot(store, ax=ax) is ax
        assert reader.topics()  # the caller's reader stays open
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (golden / "demo").rglob("*")} == before
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


def test_tags_that_are_too_many_are_one_bar_at_the_end(tmp_path: Path) -> None:
    messages = [SampleMessage("orders", tags=f"T{at:02}") for at in range(90)]
    build_store(tmp_path / "store", [*messages, SampleMessage("orders", tags="T00")])
    ax = rmq_spark.plot_tag_shares(tmp_path / "store", "orders")
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert len(names) == 12
    assert (names[0], names[-1]) == ("79 others", "T00")
    assert sum(bar.get_width() for bar in ax.containers[0]) == pytest.approx(100)


def test_delays_begin_at_no_message_and_end_at_all(tmp_path: Path) -> None:
    build_store(tmp_path / "store", [SampleMessage("orders", born_timestamp=BORN_MS, store_timestamp=BORN_MS + 51)])
    ax = rmq_spark.plot_delay(tmp_path / "store")
    assert ax.lines[0].get_xdata().tolist() == [0, 51, 51, 100]
    assert ax.lines[0].get_ydata().tolist() == [0, 0, 100, 100]
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1 ms", "10 ms", "100 ms"]


def test_delays_of_clocks_that_differ_and_of_decades_have_labels_with_room(tmp_path: Path) -> None:
    times = [(BORN_MS + 5000, BORN_MS), (0, BORN_MS)]
    messages = [SampleMessage("orders", born_timestamp=born, store_timestamp=stored) for born, stored in times]
    build_store(tmp_path / "store", messages)
    ax = rmq_spark.plot_delay(tmp_path / "store")
    ax.figure.canvas.draw()
    assert not overlapping(ax.get_xticklabels())
    least, most = ax.get_xlim()
    assert least <= -5000 < BORN_MS <= most
    assert "50 % within -5,000 ms" in ax.get_legend().get_texts()[0].get_text()


def test_what_a_picture_leaves_out_or_estimates_is_in_its_title(
    tmp_path: Path, tmp_store: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_store(tmp_path / "store", [SampleMessage(f"T{number}") for number in range(9)])
    ax = rmq_spark.plot_delay(tmp_path / "store")
    assert len(ax.get_legend().get_texts()) == 7
    assert "the largest 7 of 9 topics" in ax.get_title()
    damaged = tmp_store("demo")
    units = next((damaged / "consumequeue" / "orders" / "1").iterdir())
    units.write_bytes(units.read_bytes()[:-3])
    ax = rmq_spark.plot_queue_skew(damaged, "orders")
    assert len(ax.containers[0]) == 3
    assert "1 queue cannot be read" in ax.get_title()
    build_uniform_store(tmp_path / "many", topic="orders", queue_count=1, message_count=2_000, body_bytes=10)
    monkeypatch.setattr("rmq_spark.store.view.series._HEADERS", 100)
    monkeypatch.setattr("rmq_spark.store.view.series._TAG_SIZE", SampleSize(100, 10, 10))
    assert "estimated" in rmq_spark.plot_over_time(tmp_path / "many").get_title()
    assert "estimated" in rmq_spark.plot_delay(tmp_path / "many").get_title()
    assert "estimated" in rmq_spark.plot_tag_shares(tmp_path / "many", "orders").get_title()


def test_of_a_segment_that_is_nearly_empty_the_beginning_is_drawn(tmp_path: Path) -> None:
    build_store(tmp_path / "store", [SampleMessage("orders")], segment_bytes=1 << 30)
    ax = rmq_spark.plot_segment(tmp_path / "store")
    assert "1 record" in ax.get_title()
    assert "its first 16 KiB: zeros follow" in ax.get_title()


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


def lag_at(golden: Path, at_ms: int, group: str, messages: int | None, state: str = "ok") -> GroupLag:
    """Return the lag of a group in one queue."""
    (row, *_) = lag_rows(golden)
    row |= {"group": group, "lagMessages": messages, "state": state}
    return GroupLag("store", group, at_ms, pa.Table.from_pylist([row], LAG))


def lag_rows(golden: Path) -> list[dict[str, Any]]:
    with rmq_spark.open_reader(golden / "demo") as reader:
        rows: list[dict[str, Any]] = reader.lag("reporting").to_arrow().to_pylist()
    return rows


def test_a_line_of_lag_has_points_where_it_was_sampled_and_each_once(golden: Path) -> None:
    taken = [("a", 1000, 5), ("a", 1000, 6), ("b", 1001, 7), ("a", 2000, 8)]
    ax = rmq_spark.plot_lag([lag_at(golden, at_ms, group, messages) for group, at_ms, messages in taken])
    assert {line.get_label(): list(line.get_ydata()) for line in ax.lines} == {"a": [6, 8], "b": [7]}
    ax = rmq_spark.plot_lag(lag_at(golden, 1000, "a", 5))  # one moment, as reader.lag() gives it
    assert ax.lines[0].get_ydata().tolist() == [5]


def test_a_queue_that_is_gone_is_no_lag_and_is_in_the_title(golden: Path) -> None:
    ax = rmq_spark.plot_lag([lag_at(golden, 1000, "a", 9), lag_at(golden, 2000, "a", None, "gone")])
    assert ax.lines[0].get_ydata().tolist() == [9, 0]
    assert "1 queue gone" in ax.get_title()
    assert "gone" not in rmq_spark.plot_lag(lag_at(golden, 1000, "a", 9)).get_title()


def test_lines_of_lag_in_a_cluster_have_the_names_of_brokers_and_gaps(run_cluster: Callable[..., Any]) -> None:
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", queues=1)
    for broker in cluster.brokers.values():
        broker.offsets.commit("billing", QueueKey("orders", 0), 0)
    cluster.send("orders", *[b"x"] * 3, broker="broker-a")
    taken = []
    with rmq_spark.open_reader(name_server=cluster.address, request_timeout_ms=20_000) as reader:
        taken.append(reader.lag("billing"))
        cluster.send("orders", b"x", broker="broker-b")
        taken.append(reader.lag("billing"))
    away = {"name_server": cluster.address, "broker_addresses": "broker-b=127.0.0.1:1"}
    with rmq_spark.open_reader(**away) as reader:
        taken.append(reader.lag("billing"))
    for at, sample in enumerate(taken):
        taken[at] = replace(sample, at_ms=1_800_000_000_000 + at)
    ax = rmq_spark.plot_lag(taken)
    lines = {line.get_label(): list(line.get_ydata()) for line in ax.lines}
    assert lines == {"orders/broker-a:0": [3, 3, 3], "orders/broker-b:0": [0, 1]}
    assert "1 queue away" in ax.get_title()
    assert {line.get_label() for line in rmq_spark.plot_lag(taken, what="seconds").lines} == lines.keys()
    with rmq_spark.open_reader(**{**away, "broker_addresses": "broker-a=127.0.0.1:1"}) as reader:
        only = reader.lag("billing")
    only = replace(only, table=only.table.filter(pc.field("state") == "away"))
    assert rmq_spark.plot_lag(only).texts[0].get_text() == "the lag is not known"


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "store") as store:
        store.create_topic("orders")
    for plot in (rmq_spark.plot_over_time, rmq_spark.plot_delay, rmq_spark.plot_segment):
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
        "import sys; sys.modules['matplotlib'] = None\n"
        f"import rmq_spark; print(rmq_spark.open_reader({str(golden / 'demo')!r}).topic('orders').messages)\n"
        f"rmq_spark.plot_over_time({str(golden / 'demo')!r})"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.stdout == "1170\n"
    assert f"ModuleNotFoundError: drawing needs matplotlib: it is not installed for {sys.executable}; " in run.stderr
    assert 'Install it: pip install "rmq-spark[plot]".' in run.stderr


def test_an_import_that_fails_inside_matplotlib_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_package(patch, tmp_path, "matplotlib")
        with pytest.raises(ModuleNotFoundError) as caught:
            rmq_spark.plot_bytes(b"a", [])
    assert str(caught.value) == GONE


@pytest.mark.parametrize(
    ("draw", "accepted"),
    [
        (lambda store: rmq_spark.plot_tag_shares(store, ["orders", "payments"]), "name of one topic"),
        (lambda store: rmq_spark.plot_queue_skew(store, None), "name of one topic"),
        (lambda store: rmq_spark.plot_over_time(store, 7), "a list of names, or None"),
        (lambda store: rmq_spark.plot_delay(store, ["orders", 7]), "a list of names, or None"),
        (lambda store: rmq_spark.plot_lag("billing"), "result of reader.lag"),
        (lambda store: rmq_spark.plot_lag(None), "result of reader.lag"),
    ],
)
def test_an_argument_of_another_kind_is_told_what_is_accepted(
    golden: Path, draw: Callable[[Path], Any], accepted: str
) -> None:
    with pytest.raises(OptionError, match=accepted):
        draw(golden / "demo")
