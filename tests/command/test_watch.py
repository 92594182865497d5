"""`rmq watch`: rates between two looks, trends of groups, and what is printed on a terminal, in a pipe and as JSON."""

import functools
import io
import json
import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import rmq_spark
from rmq_spark.command.place import Place
from rmq_spark.command.queue_views import StoreView, expand_topics, open_view
from rmq_spark.command.rates import GroupLook, GroupTrend, Look, TopicTrend, group_trends, new_ranges, topic_trends
from rmq_spark.command.watch import Groups, Lines, Screen, Update, Watch, draw_update
from rmq_spark.new_lines import NewLines
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.brokers import RunningCluster

Rmq = Callable[..., Any]
A, B = QueueKey("orders", 0), QueueKey("orders", 1)


def test_rates_are_the_difference_of_two_looks_over_the_time_between_them() -> None:
    before = Look(10.0, {A: QueueBounds(0, 100), B: QueueBounds(0, 50)})
    now = Look(14.0, {A: QueueBounds(20, 140), B: QueueBounds(0, 50)})
    assert new_ranges(before, now) == {A: (100, 140)}
    assert topic_trends(before, now, {"orders": 4000}) == [TopicTrend("orders", 170, 10.0, 1000.0)]
    assert topic_trends(now, now, {}) == [TopicTrend("orders", 170, 0.0, 0.0)]


def test_a_new_topic_counts_from_its_beginning_and_a_broker_that_comes_back_counts_nothing() -> None:
    new, other = QueueKey("new", 0), QueueKey("orders", 0, "broker-b")
    before = Look(0.0, {A: QueueBounds(0, 5)})
    now = Look(1.0, {A: QueueBounds(0, 5), new: QueueBounds(0, 3), other: QueueBounds(0, 900)})
    assert new_ranges(before, now) == {new: (0, 3)}


def test_a_topic_whose_brokers_were_all_away_counts_nothing_when_they_are_back() -> None:
    before = Look(0.0, {}, listed={"orders"})
    now = Look(1.0, {A: QueueBounds(0, 900), QueueKey("new", 0): QueueBounds(0, 3)}, listed={"orders", "new"})
    assert new_ranges(before, now) == {QueueKey("new", 0): (0, 3)}


def test_a_queue_that_was_trimmed_below_the_last_look_counts_what_is_left() -> None:
    assert new_ranges(Look(0.0, {A: QueueBounds(0, 5)}), Look(1.0, {A: QueueBounds(8, 9)})) == {A: (8, 9)}
    assert new_ranges(Look(0.0, {A: QueueBounds(0, 5)}), Look(1.0, {A: QueueBounds(0, 2)})) == {}


def test_a_lag_that_is_not_known_of_all_queues_has_no_trend() -> None:
    for before, now in ((0, 1), (1, 0), (1, 1)):
        looks = [Look(at, {}, {"billing": GroupLook(9, 1.0, unknown)}) for at, unknown in ((0.0, before), (1.0, now))]
        assert group_trends(*looks) == [GroupTrend("billing", 9, None, None, 1.0, now)]


@pytest.mark.parametrize(("lag", "trend", "rate"), [(20, "growing", 5.0), (10, "steady", 0.0), (4, "shrinking", -3.0)])
def test_the_trend_of_a_group(lag: int, trend: str, rate: float) -> None:
    before = Look(0.0, {}, {"billing": GroupLook(10, 3.0), "gone": GroupLook(1, 1.0)})
    now = Look(2.0, {}, {"billing": GroupLook(lag, 4.0), "new": GroupLook(7, None)})
    found = {one.group: one for one in group_trends(before, now)}
    assert found["billing"] == GroupTrend("billing", lag, rate, trend, 4.0)
    assert found["new"] == GroupTrend("new", 7, None, None, None)
    assert "gone" not in found


def test_a_store_is_watched_while_it_grows(store: Path) -> None:
    clock = iter([100.0, 102.0, 104.0])
    sent = iter([[b"x" * 10] * 6, []])

    def wait() -> None:
        with rmq_spark.open_store(str(store)) as writer:
            for body in next(sent):
                writer.send("orders", body)

    with rmq_spark.open_reader(str(store)) as reader:
        watch = Watch(StoreView(reader), dict, lambda: ["orders"], wait, lambda: next(clock))
        first, second = watch.updates(2)
    (rate,) = first.topics
    assert (first.seconds, rate.messages_per_s) == (2.0, 3.0)
    assert rate.bytes_per_s is not None
    assert 3 * 100 < rate.bytes_per_s < 3 * 400
    assert (second.topics[0].messages_per_s, second.topics[0].bytes_per_s) == (0.0, 0.0)


@pytest.mark.parametrize("release", ["4.9", "5.3"])
def test_a_cluster_is_watched_while_it_grows(run_cluster: Callable[..., RunningCluster], release: str) -> None:
    cluster = run_cluster(release=release, brokers=2)
    cluster.create_topic("orders", queues=1)
    clock = iter([0.0, 2.0])

    def wait() -> None:
        for broker in cluster.brokers:
            cluster.send("orders", *([b"x" * 100] * 4), broker=broker, queue_id=0)

    place = Place(None, None, {"name_server": cluster.address})
    with place.open() as reader:
        watch = Watch(open_view(place, reader), dict, None, wait, lambda: next(clock))
        (update,) = watch.updates(1)
    (rate,) = update.topics
    assert (rate.topic, rate.messages, rate.messages_per_s) == ("orders", 8, 4.0)
    assert rate.bytes_per_s is not None
    assert 4 * 150 < rate.bytes_per_s < 4 * 500


def watch_of(cluster: RunningCluster, reader: Any, *steps: Callable[[], None]) -> Watch:
    """Return a watch of a cluster. Before each further look one step is done."""
    actions, seconds = iter(steps), count()
    view = open_view(Place(None, None, {"name_server": cluster.address}), reader)
    groups = Groups(reader, (), NewLines())
    return Watch(view, groups.look, None, lambda: next(actions)(), lambda: float(next(seconds)))


def open_cluster(cluster: RunningCluster) -> Any:
    return rmq_spark.open_reader(name_server=cluster.address, request_timeout_ms=5000, broker_down_timeout_ms=1)


def test_an_outage_is_shown_and_no_stored_message_counts_as_new_after_it(
    run_cluster: Callable[..., RunningCluster], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = run_cluster(release="5.3")
    cluster.create_topic("orders", queues=1)
    cluster.send("orders", *([b"x"] * 50))
    with open_cluster(cluster) as reader:
        steps = cluster.broker.kill, lambda: None, cluster.broker.restart, lambda: cluster.send("orders", b"x", b"x")
        away, still_away, back, sent = watch_of(cluster, reader, *steps).updates(4)
    assert (away.topics, still_away.topics) == ([], [])
    assert capsys.readouterr().err.count("away since") <= 1
    assert [(one.topic, one.messages, one.messages_per_s) for one in back.topics] == [("orders", 50, 0.0)]
    assert [(one.messages, one.messages_per_s) for one in sent.topics] == [(52, 2.0)]


def test_a_topic_that_is_not_listed_for_some_time_counts_nothing_when_it_is_back(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = count()
    with rmq_spark.open_reader(str(demo)) as reader:
        view = StoreView(reader)
        lists = iter([view.topics(), [], view.topics()])
        monkeypatch.setattr(view, "topics", lambda: next(lists))
        away, back = Watch(view, dict, None, lambda: None, lambda: float(next(seconds))).updates(2)
    assert away.topics == []
    assert [one.messages_per_s for one in back.topics if one.topic == "orders"] == [0.0]


class FailingView(StoreView):
    """A store whose looks fail as told, and which lists a topic that was deleted meanwhile."""

    def __init__(self, reader: Any, *outcomes: Exception | None) -> None:
        super().__init__(reader)
        self._outcomes = iter(outcomes)

    def refresh(self) -> None:
        error = next(self._outcomes)
        if error is not None:
            raise error
        super().refresh()

    def topics(self) -> list[str]:
        return [*super().topics(), "deleted"]


@pytest.mark.parametrize("kind", [rmq_spark.BackendUnavailableError, rmq_spark.NotFoundError])
def test_a_look_that_fails_is_shown_and_the_next_rates_are_those_since_the_last_answer(
    demo: Path, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    seconds = count()
    with rmq_spark.open_reader(str(demo)) as reader:
        view = FailingView(reader, None, kind("the place is away\x1b"), None)
        failed, back = Watch(view, dict, None, lambda: None, lambda: float(next(seconds))).updates(2)
        with pytest.raises(kind, match="the place is away"):
            next(Watch(FailingView(reader, kind("the place is away")), dict, None, lambda: None).updates(2))
    assert (failed.topics, failed.problem) == ([], "the place is away\\x1b")
    assert (back.seconds, back.problem) == (2.0, None)
    assert "orders" in {one.topic for one in back.topics}
    with Lines(as_json=False) as lines, Lines(as_json=True) as objects:
        lines.show(failed)
        objects.show(failed)
    line, printed = capsys.readouterr().out.splitlines()
    assert line.endswith(f"  problem {failed.problem}")
    assert json.loads(printed)["problem"] == failed.problem


def test_a_log_line_appears_again_only_after_a_look_without_it(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("rmq_spark")
    with NewLines() as lines:
        for texts in (["a", "a", "b"], ["a"], ["b", "a"]):
            lines.begin_look()
            for text in texts:
                log.warning("rmq: %s", text)
    log.warning("rmq: a")
    assert caplog.messages == ["rmq: a", "rmq: b", "rmq: b", "rmq: a"]


def test_a_topic_that_cannot_be_read_is_named_once(
    run_cluster: Callable[..., RunningCluster], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = run_cluster(release="5.3")
    cluster.create_topic("orders", queues=1)
    cluster.create_topic("compacted", queues=1, attributes={"cleanup.policy": "COMPACTION"})
    with open_cluster(cluster) as reader:
        list(watch_of(cluster, reader, *[lambda: None] * 3).updates(3))
    assert capsys.readouterr().err.count("compacted: ") == 1


def test_watch_shows_the_topics_that_a_pattern_matches(rmq: Rmq, demo: Path) -> None:
    ran = rmq("watch", demo, "order*,payments", "--json", "--interval", 0.01, "--count", 1)
    assert (ran.status, ran.err) == (0, "")
    assert {one["topic"] for one in json.loads(ran.out)["topics"]} == {"orders", "payments"}
    ran = rmq("watch", demo, "absent*", "--count", 1)
    assert (ran.status, "pattern 'absent*': no topic matches it" in ran.err) == (1, True)


def test_a_topic_that_a_pattern_matches_later_is_watched(store: Path) -> None:
    def wait() -> None:
        with rmq_spark.open_store(str(store)) as writer:
            writer.send("orders-later", "x")
            writer.send("later", "x")

    seconds = count()
    with rmq_spark.open_reader(str(store)) as reader:
        list_topics = functools.partial(expand_topics, ["order*"], reader.topics)
        (update,) = Watch(StoreView(reader), dict, list_topics, wait, lambda: float(next(seconds))).updates(1)
    assert {one.topic: one.messages_per_s for one in update.topics} == {"orders": 0.0, "orders-later": 1.0}


def test_watch_asks_only_for_the_topics_of_a_cluster_that_match(
    run_cluster: Callable[..., RunningCluster], rmq: Rmq
) -> None:
    cluster = run_cluster(release="5.3")
    cluster.create_topic("orders", queues=1)
    for name in ("orders-compacted", "compacted"):
        cluster.create_topic(name, queues=1, attributes={"cleanup.policy": "COMPACTION"})
    ran = rmq("watch", "-n", cluster.address, "order*", "--json", "--interval", 0.01, "--count", 2)
    assert [[one["topic"] for one in json.loads(line)["topics"]] for line in ran.out.splitlines()] == [["orders"]] * 2
    assert ran.err.startswith("orders-compacted: ")
    assert ran.err.count("\n") == 1


def test_a_path_is_never_markup_on_a_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("sys.stdout", shown)
    with Screen(Place("/data/[/x]\x1b[31m", None, {}), 2.0):
        pass
    assert "/data/[/x]\\x1b[31m: the first rates in 2 s" in shown.getvalue()


def test_a_screen_keeps_the_last_rates_below_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("sys.stdout", shown)
    with Screen(Place("store", None, {}), 2.0) as screen:
        screen.show(Update(0, 2.0, [TopicTrend("orders", 1, 2.5, 10.0)], []))
        screen.show(Update(0, 2.0, [], [], "the broker is away"))
    text = shown.getvalue().rpartition("the broker is away")[2]
    assert "orders" in text


def test_json_has_one_object_per_interval(rmq: Rmq, demo: Path) -> None:
    ran = rmq("watch", demo, "--json", "--interval", "0.01", "--count", 2)
    assert (ran.status, ran.err) == (0, "")
    first, second = map(json.loads, ran.out.splitlines())
    assert first["time"] <= second["time"]
    assert {one["topic"] for one in first["topics"]} >= {"orders", "payments"}
    reporting = next(one for one in first["groups"] if one["group"] == "reporting")
    assert (reporting["trend"], reporting["lagPerSecond"]) == ("steady", 0.0)
    assert reporting["lagMessages"] > 0


def test_a_pipe_gets_a_line_for_each_topic_and_group(rmq: Rmq, demo: Path) -> None:
    ran = rmq("watch", demo, "orders", "--group", "reporting", "--interval", "0.01", "--count", 1)
    topic, group = ran.out.splitlines()
    assert topic[21:].startswith("topic orders  0.0 messages/s  0 B/s  ")
    assert group[21:].startswith("group reporting  lag ")
    assert group.endswith("= +0.0/s")
    assert 'no topic "no-such"' in rmq("watch", demo, "no-such", "--count", 1).err


@pytest.mark.parametrize("problem", [None, "a problem with a long text " * 9])
@pytest.mark.parametrize(("width", "lines"), [(60, 24), (120, 40), (60, 11)])
def test_a_screen_fits_its_terminal(width: int, lines: int, problem: str | None) -> None:
    topics = [TopicTrend(f"a-topic-with-a-long-name-{n}" * 2, 10**9, 123456.7, 9.9e9) for n in range(30)]
    groups = [GroupTrend(f"a-group-with-a-long-name-{n}" * 2, 10**7, -1234.5, "shrinking", 93600.0) for n in range(30)]
    console = Console(width=width, record=True, file=io.StringIO())
    update = Update(0, 2.0, topics, groups, problem)
    console.print(draw_update(update, "/a/path/of/some/length/" * 4, 2.0, width, lines))
    text = console.export_text().splitlines()
    assert len(text) <= lines
    assert max(map(len, text)) <= width
    assert any("123,456.7" in line for line in text)
    assert any("↓ -1,234.5/s" in line for line in text)
    assert any(line.rstrip().endswith("1,000,000,000") for line in text)
    assert any("1 d 2 h" in line for line in text)
    assert "topics and" in text[-1]


@pytest.mark.slow
def test_a_terminal_without_cursor_gets_lines(terminal: Callable[..., Any], demo: Path) -> None:
    shown = terminal("watch", demo, "orders", "--interval", "0.01", "--count", "1", kind="dumb")
    assert shown.end() == 0
    assert "topic orders  0.0 messages/s" in shown.text


@pytest.mark.slow
def test_ctrl_c_ends_a_screen_without_a_trace(terminal: Callable[..., Any], demo: Path) -> None:
    shown = terminal("watch", demo, "--interval", "0.2", columns=60)
    shown.wait_for("messages/s")
    shown.type("\x03")
    assert shown.end() == 130
    assert "Traceback" not in shown.text
    assert "Nothing was left" not in shown.text


@pytest.mark.parametrize("command", ["watch", "serve"])
def test_metrics_without_their_extra_say_what_to_install(
    rmq: Rmq, store: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("rmq_spark.command.parameters.find_spec", lambda name: None)
    ran = rmq(command, store, "--metrics", "127.0.0.1:0")
    assert ran.status == 2
    assert 'the package prometheus_client is not installed; expected rmq-spark\'s extra "metrics"' in ran.err
    assert 'pip install "rmq-spark[metrics]"' in ran.err


def test_watch_serves_metrics(store: Path, rmq: Rmq, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="the extra metrics is not installed")
    from support.metric_pages import scrape, value

    found: list[float] = []

    def look(served: Any, update: Update) -> None:
        found.append(value(scrape(pages[0].url), "rmq_up"))

    pages: list[Any] = []
    serve = rmq_spark.serve_metrics

    def keep(*arguments: Any, **named: Any) -> Any:
        pages.append(serve(*arguments, **named))
        return pages[0]

    monkeypatch.setattr(rmq_spark, "serve_metrics", keep)
    monkeypatch.setattr("rmq_spark.command.watch.Lines.show", look)
    ran = rmq("watch", str(store), "--interval", "0.01", "--count", "1", "--metrics", "127.0.0.1:0")
    assert ran.status == 0, ran.err
    assert found == [1]
    assert f"Metrics are at {pages[0].url}" in ran.err
