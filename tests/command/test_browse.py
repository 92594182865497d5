"""`rmq browse`, driven by textual's test kit: what screens show of a store and a cluster, and what keys do."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark.command.browse_pages import HEX, JSON, TEXT, Pages, QueueRow, TopicRow, best_form, body_lines
from rmq_spark.command.place import Place
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster

pytest.importorskip("textual")
from textual.pilot import Pilot
from textual.widgets import Input, Static

from rmq_spark.command.browse_app import BrowseApp
from rmq_spark.command.browse_lists import HelpScreen, Listing, Question
from rmq_spark.command.browse_messages import FoundScreen, MessageScreen, MessagesScreen
from rmq_spark.command.browse_screens import GroupsScreen, LagScreen, QueuesScreen, TopicsScreen

Rmq = Callable[..., Any]
Act = Callable[[Pilot[None]], Awaitable[None]]


@contextmanager
def pages_of(place: Place) -> Iterator[Pages]:
    with place.open() as reader:
        reader.refresh()
        yield Pages(place, reader)


def drive(place: Place, act: Act, size: tuple[int, int] = (100, 30)) -> None:
    """Run the application for a place, and act on it."""

    async def run(pages: Pages, reading: Executor) -> None:
        app = BrowseApp(pages, reading)
        async with app.run_test(size=size) as pilot:
            await settle(pilot)
            await act(pilot)

    with pages_of(place) as pages, ThreadPoolExecutor(max_workers=1) as reading:
        asyncio.run(run(pages, reading))


async def settle(pilot: Pilot[None]) -> None:
    """Wait until nothing is read any more."""
    await pilot.pause()
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


async def press(pilot: Pilot[None], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await settle(pilot)


async def answer(pilot: Pilot[None], key: str, text: str) -> None:
    """Press a key that asks a question, and answer it."""
    await press(pilot, key)
    assert isinstance(pilot.app.screen, Question)
    pilot.app.screen.query_one(Input).value = text
    await press(pilot, "enter")


def rows(pilot: Pilot[None]) -> list[list[str]]:
    """Return the rows of the list that is shown."""
    screen = pilot.app.screen
    assert isinstance(screen, Listing), screen
    return [[str(one) for one in screen.table.get_row_at(number)] for number in range(screen.table.row_count)]


def shown(pilot: Pilot[None], name: str) -> str:
    """Return the text of a part of the screen."""
    return str(pilot.app.screen.query_one(f"#{name}", Static).render())


def assert_fits(pilot: Pilot[None]) -> None:
    """Check that the list needs no scrolling to the right."""
    screen = pilot.app.screen
    assert isinstance(screen, Listing)
    assert screen.table.virtual_size.width <= pilot.app.size.width


def on_disk(path: Path) -> dict[str, tuple[int, int]]:
    return {str(one): (one.stat().st_size, one.stat().st_mtime_ns) for one in path.rglob("*")}


@pytest.fixture
def place(demo: Path) -> Place:
    return Place(str(demo), None, {})


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 90])
def test_long_names_are_cut_where_it_is_seen(tmp_path: Path, columns: int) -> None:
    names = [f"a-topic-{'with-a-name-that-is-longer-than-any-terminal-' * 2}{one}" for one in "ab"]
    with rmq_spark.open_store(tmp_path / "s") as store:
        for name in names:
            store.create_topic(name, 1)
        store.send(names[0], "x", tags="a-tag-of-many-letters", keys="order-999 customer-49")

    async def act(pilot: Pilot[None]) -> None:
        first, second = (row[0] for row in rows(pilot))
        assert (first[:7], first[-1], second[-1]) == ("a-topic", "a", "b")
        assert "…" in first
        await press(pilot, "down", "r")
        screen = pilot.app.screen
        assert isinstance(screen, Listing)
        assert screen.table.cursor_row == 1
        await press(pilot, "up", "enter", "enter")
        (row,) = rows(pilot)
        assert row[2] == "a-tag-of-ma…"
        if columns > 60:
            assert row[3] == "order-999 custo…"

    drive(Place(str(tmp_path / "s"), None, {}), act, (columns, 24))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(60, 24), (120, 40)])
def test_topics_to_queues_to_messages_to_one_message_and_back(place: Place, demo: Path, size: tuple[int, int]) -> None:
    async def act(pilot: Pilot[None]) -> None:
        assert ["orders", "4", "1,170"] in rows(pilot)
        assert all(not row[0].startswith("%RETRY%") for row in rows(pilot))
        await press(pilot, "s")
        assert any(row[0].startswith("%RETRY%") for row in rows(pilot))
        await press(pilot, "s")
        names = [row[0] for row in rows(pilot)]
        await pilot.press(*["down"] * names.index("orders"))
        assert_fits(pilot)
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, QueuesScreen)
        assert [row[0] for row in rows(pilot)] == ["0", "1", "2", "3"]
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, MessagesScreen)
        assert len(rows(pilot)) == 50
        assert_fits(pilot)
        assert shown(pilot, "note") == "offsets 239 to 288 of [0, 289)"
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, MessageScreen)
        assert shown(pilot, "path") == "orders/0 @ 288"
        assert "UNIQ_KEY" in shown(pilot, "fields")
        assert "body as JSON" in shown(pilot, "fields")
        await press(pilot, "b")
        assert "body as hex" in shown(pilot, "fields")
        await press(pilot, "p")
        assert shown(pilot, "path") == "orders/0 @ 287"
        await press(pilot, "escape", "escape", "escape", "escape", "escape")
        assert isinstance(pilot.app.screen, TopicsScreen)

    before = on_disk(demo)
    drive(place, act, size)
    assert on_disk(demo) == before


def messages_screen(act: Act) -> Act:
    """Return an act that opens the messages of orders/0 first."""

    async def begin(pilot: Pilot[None]) -> None:
        pilot.app.push_screen(MessagesScreen(QueueKey("orders", 0)))
        await settle(pilot)
        await act(pilot)

    return begin


@pytest.mark.slow
def test_pages_follow_the_cursor_and_the_keys(place: Place) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "home")
        assert rows(pilot)[0][0] == "0"
        await press(pilot, "up")
        assert rows(pilot)[0][0] == "0"
        await press(pilot, "n")
        assert rows(pilot)[0][0] == "50"
        await press(pilot, "up")
        assert rows(pilot)[0][0] == "0"
        screen = pilot.app.screen
        assert isinstance(screen, MessagesScreen)
        assert screen.table.cursor_row == 49
        await press(pilot, "down")
        assert (rows(pilot)[0][0], screen.table.cursor_row) == ("50", 0)
        await press(pilot, "end")
        assert rows(pilot)[-1][0] == "288"

    drive(place, messages_screen(act))


@pytest.mark.slow
def test_messages_are_found_by_offset_time_and_text(place: Place) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen = pilot.app.screen
        assert isinstance(screen, MessagesScreen)
        await answer(pilot, "o", "100")
        assert rows(pilot)[screen.table.cursor_row][0] == "100"
        await answer(pilot, "o", "x1")
        assert "is not a queue offset" in shown(pilot, "note")
        await answer(pilot, "t", "1")
        assert "1970" in shown(pilot, "note") or rows(pilot)[screen.table.cursor_row][0] == "0"
        await press(pilot, "home")
        third = rows(pilot)[2][3].split()[0]
        await answer(pilot, "f", third)
        assert third in rows(pilot)[screen.table.cursor_row][3]
        await answer(pilot, "f", "nothinghasthis")
        assert "was not found" in shown(pilot, "note")

    drive(place, messages_screen(act))


@pytest.mark.slow
def test_a_search_that_continues_skips_no_message(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq_spark.command.browse_pages.SEARCHED_MESSAGES", 10)

    async def act(pilot: Pilot[None]) -> None:
        screen = pilot.app.screen
        assert isinstance(screen, MessagesScreen)
        await press(pilot, "home")
        await answer(pilot, "f", "O-1014")  # first in the message 10
        assert shown(pilot, "note") == "'O-1014' was not found from offset 0 to offset 10; F continues."
        await press(pilot, "F")
        assert rows(pilot)[screen.table.cursor_row][0] == "10"
        await press(pilot, "F")
        at = rows(pilot)[screen.table.cursor_row]
        assert (int(at[0]) > 10, at[3]) == (True, "O-1014")

    drive(place, messages_screen(act))


@pytest.mark.slow
def test_the_cursor_stays_where_it_is_when_a_list_is_read_again(place: Place) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen = pilot.app.screen
        assert isinstance(screen, MessagesScreen)
        await press(pilot, "down")
        assert rows(pilot)[screen.table.cursor_row][0] == "288"
        await press(pilot, "up", "up", "r")
        assert rows(pilot)[screen.table.cursor_row][0] == "286"
        pilot.app.pages.topics = lambda: found  # type: ignore[attr-defined]
        found = [TopicRow(name, 1, 0, False, None) for name in ("b", "c", "d")]
        pilot.app.push_screen(TopicsScreen())
        await settle(pilot)
        await press(pilot, "down")
        found.insert(0, TopicRow("a", 1, 0, False, None))
        await press(pilot, "r")
        screen = pilot.app.screen
        assert isinstance(screen, TopicsScreen)
        assert rows(pilot)[screen.table.cursor_row][0] == "c"
        del found[2]
        await press(pilot, "r")
        assert rows(pilot)[screen.table.cursor_row][0] == "d"

    drive(place, messages_screen(act))


@pytest.mark.slow
def test_messages_are_found_by_key_and_id(place: Place) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "home")
        key = rows(pilot)[0][3].split()[0]
        await answer(pilot, "k", key)
        assert isinstance(pilot.app.screen, MessageScreen | FoundScreen)
        if isinstance(pilot.app.screen, FoundScreen):
            await press(pilot, "enter")
        assert key in shown(pilot, "fields")
        await press(pilot, "escape")
        pilot.app.push_screen(MessagesScreen(QueueKey("orders", 0)))
        await settle(pilot)
        await answer(pilot, "k", "nokey")
        assert "No message has the key nokey." in shown(pilot, "note")

    drive(place, messages_screen(act))


@pytest.mark.slow
def test_a_search_that_finds_too_many_tells_their_number(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await answer(pilot, "k", "O-1010")
        assert isinstance(pilot.app.screen, FoundScreen)
        assert shown(pilot, "note") == "3 messages"
        await press(pilot, "escape")
        monkeypatch.setattr("rmq_spark.command.browse_pages.FOUND_MESSAGES", 2)
        await answer(pilot, "k", "O-1010")
        assert shown(pilot, "note") == "the first 2 of 3 messages; `rmq get --key` shows all"
        assert [row[0] for row in rows(pilot)] == ["orders/0"] * 2

    drive(place, messages_screen(act))


@pytest.mark.slow
def test_a_search_from_the_topics_finds_retried_and_dead_messages(place: Place) -> None:
    async def act(pilot: Pilot[None]) -> None:
        topics = [row.name for row in pilot.app.pages.topics()]  # type: ignore[attr-defined]
        dead = pilot.app.pages.messages(QueueKey("%DLQ%audit", 0), 0, 1)[0]  # type: ignore[attr-defined]
        assert "%DLQ%audit" in topics
        for key, text in (("k", dead.keys.split()[0]), ("i", pilot.app.pages.message(dead.queue, 0).message_id)):
            await answer(pilot, key, text)
            assert isinstance(pilot.app.screen, FoundScreen)
            assert "%DLQ%audit/0" in [row[0] for row in rows(pilot)]
            await press(pilot, "escape")

    drive(place, act)


@pytest.mark.slow
def test_groups_with_their_lag(place: Place) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "g")
        assert isinstance(pilot.app.screen, GroupsScreen)
        names = [row[0] for row in rows(pilot)]
        assert "reporting" in names
        await press(pilot, *["down"] * names.index("reporting"), "enter")
        assert isinstance(pilot.app.screen, LagScreen)
        assert [row[0] for row in rows(pilot)][:2] == ["orders/0", "orders/1"]
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, MessagesScreen)

    drive(place, act)


@pytest.mark.parametrize("size", [(60, 24), (120, 40)])
def test_help_is_a_screen_of_its_own(place: Place, size: tuple[int, int]) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "question_mark")
        assert isinstance(pilot.app.screen, HelpScreen)
        await press(pilot, "q")
        assert isinstance(pilot.app.screen, TopicsScreen)
        await press(pilot, "q")
        assert not pilot.app.is_running

    drive(place, act, size)


@pytest.mark.slow
@pytest.mark.parametrize("release", ["4.9", "5.3"])
def test_a_cluster_is_browsed_while_a_broker_goes_away(
    run_cluster: Callable[..., RunningCluster], release: str
) -> None:
    cluster = run_cluster(release=release, brokers=2)
    cluster.create_topic("orders", queues=1)
    cluster.send("orders", *[f"[bold]body {number}" for number in range(60)], broker="broker-a", keys="same")
    cluster.send("orders", *"abcd", broker="broker-b")
    for broker in cluster.brokers.values():
        broker.offsets.commit("billing", QueueKey("orders", 0), 0)
    place = Place(None, None, {"name_server": cluster.address, "request_timeout_ms": 5000, "broker_down_timeout_ms": 1})

    async def act(pilot: Pilot[None]) -> None:
        assert ["orders", "2", "64"] in rows(pilot)
        await press(pilot, "enter")
        assert [row[0] for row in rows(pilot)] == ["broker-a:0", "broker-b:0"]
        await press(pilot, "enter")
        assert rows(pilot)[-1][4] == "[bold]body 59"
        await answer(pilot, "k", "same")
        assert isinstance(pilot.app.screen, FoundScreen)
        await press(pilot, "enter")
        assert "broker     broker-a" in shown(pilot, "fields")
        await press(pilot, "escape", "escape")
        cluster.brokers["broker-a"].kill()
        await press(pilot, "home")
        assert "broker-a" in shown(pilot, "note")
        await press(pilot, "escape", "r")
        assert "broker-a:0: away" in shown(pilot, "note")
        await press(pilot, "g")
        assert [row[3] for row in rows(pilot)] == ["≥ 4"]
        await press(pilot, "enter")
        assert shown(pilot, "note") == "at least 4 unread messages in 2 queues; the lag in 1 queue is not known"

    drive(place, act)


def test_pages_never_read_more_than_a_page(place: Place) -> None:
    with pages_of(place) as pages:
        queue = QueueKey("orders", 0)
        found = pages.messages(queue, 0, 289)
        assert [row.offset for row in found] == list(range(50))
        text = pages.find_text(queue, "nothinghasthis", 0)
        assert (text.found, text.next_offset, text.is_end) == (None, 289, True)


@pytest.mark.parametrize(
    ("body", "form"),
    [(b'{"a": 1}', JSON), (b"[1]", JSON), (b"{broken", TEXT), (b"text", TEXT), (b"\xff\x00", HEX), (b"", TEXT)],
)
def test_the_best_form_of_a_body(body: bytes, form: str) -> None:
    assert best_form(body) == form


def test_a_body_is_shown_without_control_characters_and_not_without_end() -> None:
    assert body_lines(b"a\x1b[31mb\tc", TEXT, 8) == ["a\\x1b[31mb    c"]
    assert body_lines(b'{"a": [1]}', JSON, 8) == ["{", '  "a": [', "    1", "  ]", "}"]
    assert body_lines(bytes(range(60, 70)), HEX, 8) == [
        "000000  3c 3d 3e 3f 40 41 42 43  <=>?@ABC",
        "000008  44 45                    DE",
    ]
    long = body_lines(b"x" * 30_000, TEXT, 8)
    assert long[-1] == "… 10,000 more characters; `rmq get --json` prints all"
    assert body_lines(b"\x00" * 30_000, HEX, 8)[-1].startswith("… 25,000 more bytes")


def test_json_is_shown_as_it_was_written() -> None:
    body = b'{"a": 1.00000000000000000001, "a": [1e400, {}, [], "\\u00e9: [,]"], "n": 12345678901234567890.50}'
    assert body_lines(body, JSON, 8) == [
        "{",
        '  "a": 1.00000000000000000001,',
        '  "a": [',
        "    1e400,",
        "    {},",
        "    [],",
        '    "\u00e9: [,]"',
        "  ],",
        '  "n": 12345678901234567890.50',
        "}",
    ]
    digits = b"[" + b"9" * 5000 + b"]"
    assert best_form(digits) == JSON
    assert body_lines(digits, JSON, 8)[1] == "  " + "9" * 5000
    assert body_lines(b"[" + b"1," * 30_000 + b"1]", JSON, 8)[-1].startswith("… 52,00")
    assert body_lines(b'["\\ud800"]', JSON, 8) == ["[", '  "\\ud800"', "]"]


def test_json_that_nests_too_deeply_is_text() -> None:
    body = b"[" * 500_000 + b"]" * 500_000
    assert best_form(body) == TEXT
    assert body_lines(body, JSON, 8)[0] == "[" * 20_000


@pytest.mark.slow
def test_any_time_of_a_producer_and_any_name_of_a_broker_is_shown(place: Place) -> None:
    born_ms = 4_611_686_018_427_387

    async def act(pilot: Pilot[None]) -> None:
        pages = pilot.app.pages  # type: ignore[attr-defined]
        queue = QueueKey("orders", 0)
        real = pages.message(queue, 0)
        at = real.table.schema.get_field_index("bornTimestamp")
        field = real.table.schema.field(at)
        table = real.table.set_column(at, field, pa.array([born_ms * 1000]).cast(field.type))
        pages.message = lambda *_: replace(real, table=table)
        pilot.app.push_screen(MessageScreen(queue, 0))
        await settle(pilot)
        assert f"{born_ms} ms at " in shown(pilot, "fields")
        pages.queues = lambda topic: [QueueRow(QueueKey("odd", 0, "a\x1b[31m"), None, "away")]
        pilot.app.push_screen(QueuesScreen("odd"))
        await settle(pilot)
        assert rows(pilot) == [["a\\x1b[31m:0", "", "", ""]]

    drive(place, act)


def test_a_read_that_nobody_waits_for_ends_before_the_next_one(place: Place) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        assert go_on.wait(60)
        threads.append(threading.get_ident())

    threads: list[int] = []

    async def run(pages: Pages, reading: Executor) -> None:
        app = BrowseApp(pages, reading)
        first = asyncio.create_task(app.read(block))
        await asyncio.to_thread(begun.wait, 60)
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        second = asyncio.create_task(app.read(threading.get_ident))
        await asyncio.sleep(0)  # the second read is handed to a thread
        go_on.set()
        assert [await second] == threads

    with pages_of(place) as pages, ThreadPoolExecutor(max_workers=1) as reading:
        asyncio.run(run(pages, reading))


def test_without_a_terminal_or_textual_it_says_what_to_do(
    rmq: Rmq, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = rmq("browse", demo)
    assert (ran.status, "is not a terminal" in ran.err) == (2, True)
    monkeypatch.setattr("rmq_spark.command.parameters.find_spec", lambda name: None)
    ran = rmq("browse", demo)
    assert ran.status == 2
    assert 'the package textual is not installed; expected rmq-spark\'s extra "browse"' in ran.err
    assert 'pip install "rmq-spark[browse]"' in ran.err


@pytest.mark.slow
def test_it_opens_and_ends_on_a_terminal(terminal: Callable[..., Any], demo: Path) -> None:
    opened = terminal("browse", demo, columns=60)
    opened.wait_for("orders")
    opened.type("q")
    assert opened.end() == 0
    assert "Traceback" not in opened.raw
