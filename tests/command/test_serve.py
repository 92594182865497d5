"""The command `rmq`: without its extra, with wrong words, and with signals."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.backend_groups import eventually

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 180
LEVELS = "1s 2s 1h"

# Hides packages of an extra, as if they were not installed.
_WITHOUT = """
import sys, importlib.util as util
find = util.find_spec
util.find_spec = lambda name, *rest: None if name in {missing!r} else find(name, *rest)
sys.argv = ["rmq", *{words!r}]
from rmq_spark.command import main
main()
"""


def rmq(*words: str, missing: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, as if some packages were not installed."""
    code = _WITHOUT.format(missing=missing, words=words)
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=WITHIN_S)


@pytest.mark.parametrize("missing", [("click",), ("rich",), ("click", "rich")])
@pytest.mark.parametrize("words", [(), ("serve", "store"), ("--help",)])
def test_without_its_extra_it_prints_the_pip_command_and_no_trace(
    missing: tuple[str, ...], words: tuple[str, ...]
) -> None:
    run = rmq(*words, missing=missing)
    assert run.returncode == 2
    assert 'pip install "rmq-spark[cli]"' in run.stderr
    assert " and ".join(missing) in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


def test_setup_cfg_has_the_command_and_its_extra() -> None:
    text = (ROOT / "setup.cfg").read_text()
    assert "rmq = rmq_spark.command:main" in text
    assert re.search(r"\ncli =\n    click.*\n    rich.*\n", text)


class TestWithItsExtra:
    """Tests that need click and rich."""

    @pytest.fixture(autouse=True)
    def _needs_the_extra(self) -> None:
        pytest.importorskip("click", reason="the extra cli is not installed")
        pytest.importorskip("rich", reason="the extra cli is not installed")

    def test_help_names_the_commands(self) -> None:
        run = rmq("--help")
        assert run.returncode == 0
        assert "serve" in run.stdout
        assert "SIGTERM or SIGINT" in rmq("serve", "--help").stdout

    def test_wrong_words_are_answered_with_2(self) -> None:
        assert rmq("server").returncode == 2
        assert rmq("serve").returncode == 2

    def test_a_path_without_a_store_is_answered_with_1_and_a_sentence(self, tmp_path: Path) -> None:
        run = rmq("serve", str(tmp_path / "none"))
        assert run.returncode == 1
        assert "rmq serve: " in run.stderr
        assert "none" in run.stderr
        assert "Traceback" not in run.stderr


class Server:
    """A running `rmq serve`."""

    def __init__(self, path: Path, *options: str) -> None:
        code = "import sys; sys.argv[:1] = ['rmq', 'serve']; from rmq_spark.command import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(path), *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ},
        )
        assert self.process.stderr is not None
        self.first_line = self.process.stderr.readline()

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal; return the exit status and the rest of the log."""
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=WITHIN_S)
        return self.process.returncode, log


class Delayed:
    """A store of delayed messages, with a method for the delivered ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.servers: list[Server] = []
        with rmq_spark.open_store(path, segment_bytes=1 << 20, message_delay_level=LEVELS) as store:
            store.create_topic("orders", 1)

    def send(self, level: int, *bodies: str) -> None:
        with rmq_spark.open_store(self.path) as store:
            for body in bodies:
                store.send("orders", body, delay_level=level)

    def serve(self, *options: str) -> Server:
        self.servers.append(Server(self.path, *options))
        return self.servers[-1]

    def delivered(self) -> list[str]:
        queue = QueueKey("orders", 0)
        with rmq_spark.open_reader(self.path) as store:
            store.refresh()
            held = store.bounds(queue)
            batches = store.read(queue, held.min_offset, held.max_offset, ["body"])
            return [body.decode() for batch in batches for body in batch["body"].to_pylist()]

    def offset(self) -> int:
        """Return how many messages of level 1 were delivered, as the store says."""
        text = (self.path / "config" / "delayOffset.json").read_text()
        count: int = json.loads(re.sub(r"([{,])\s*(\d+)\s*:", r'\1"\2":', text))["offsetTable"]["1"]
        return count

    def wait_for(self, count: int) -> list[str]:
        until = time.monotonic() + WITHIN_S
        while len(found := self.delivered()) < count:
            assert time.monotonic() < until, f"{len(found)} of {count} were delivered"
            time.sleep(0.02)
        return found


@pytest.fixture
def delayed(tmp_path: Path) -> Iterator[Delayed]:
    pytest.importorskip("click", reason="the extra cli is not installed")
    pytest.importorskip("rich", reason="the extra cli is not installed")
    made = Delayed(tmp_path / "store")
    yield made
    for server in made.servers:
        server.process.kill()
        server.process.wait()
        server.process.stderr.close()  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_delivers_what_is_due_and_stops_at_a_signal(delayed: Delayed, number: signal.Signals) -> None:
    delayed.send(3, "in an hour")
    delayed.send(1, "a", "b")
    server = delayed.serve()
    assert "delivering what is due in" in server.first_line
    delayed.send(2, "c")
    assert delayed.wait_for(3) == ["a", "b", "c"]
    status, log = server.end(number)
    assert status == 0
    assert f"stopped by {number.name}; delivered 3 messages" in log
    assert "ms late" in log
    assert "Traceback" not in log


def test_serve_that_is_killed_goes_on_where_it_was_and_delivers_nothing_twice(delayed: Delayed) -> None:
    bodies = [f"{number}" for number in range(20)]
    for round_ in range(4):
        delayed.send(1, *bodies[round_ * 5 : round_ * 5 + 5])
        server = delayed.serve()
        if round_ % 2:
            delayed.wait_for(round_ * 5 + 1)
        server.end(signal.SIGKILL)
    delayed.serve()
    assert delayed.wait_for(20) == bodies
    # The rows may be those of a server that was killed before it wrote its offset.
    until = time.monotonic() + WITHIN_S
    while delayed.offset() < 20:
        assert time.monotonic() < until, delayed.offset()
        time.sleep(0.02)
    assert delayed.servers[-1].end(signal.SIGTERM)[0] == 0
    assert delayed.delivered() == bodies
    assert delayed.offset() == 20


def test_two_that_serve_one_store_deliver_once(delayed: Delayed) -> None:
    servers = [delayed.serve(), delayed.serve()]
    delayed.send(1, *"abcdef")
    assert delayed.wait_for(6) == list("abcdef")
    counts = [
        int(re.findall(r"delivered (\d+) messages$", server.end(signal.SIGTERM)[1], re.M)[-1]) for server in servers
    ]
    assert sum(counts) == 6
    assert delayed.delivered() == list("abcdef")


def test_serve_shows_metrics(delayed: Delayed) -> None:
    prometheus = pytest.importorskip("prometheus_client.parser", reason="the extra metrics is not installed")
    rmq_spark.reset_offsets(delayed.path, "billing", "earliest", "orders")
    delayed.send(1, "a", "b")
    server = delayed.serve("--metrics", "127.0.0.1:0")
    (url,) = re.findall(r"metrics are at (http://127\.0\.0\.1:\d+/metrics)", server.first_line)
    delayed.wait_for(2)
    samples: dict[str, Any] = {}

    def has_counted() -> bool:  # the round that delivered them counts them at its end
        with urllib.request.urlopen(url) as page:
            families = list(prometheus.text_string_to_metric_families(page.read().decode()))
        samples.update((sample.name, sample) for family in families for sample in family.samples)
        return bool(samples["rmq_delivered_messages_total"].value == 2)

    assert eventually(has_counted, within_s=WITHIN_S)
    assert samples["rmq_delivered_messages_total"].labels == {"place": str(delayed.path)}
    assert "rmq_group_lag_messages" in samples
    assert server.end(signal.SIGTERM)[0] == 0


def test_serve_logs_json(delayed: Delayed) -> None:
    server = delayed.serve("--log-format", "json")
    status, log = server.end(signal.SIGTERM)
    first, *others = map(json.loads, [server.first_line, *log.splitlines()])
    assert (status, first["level"], first["logger"], first["module"]) == (0, "INFO", "rmq_spark", "serve")
    assert first["message"] == f"rmq: delivering what is due in {delayed.path}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert others[-1]["message"] == "rmq: stopped by SIGTERM; delivered 0 messages"


def test_serve_refuses_an_address_of_metrics_that_is_none(delayed: Delayed) -> None:
    run = rmq("serve", str(delayed.path), "--metrics", "9464")
    assert (run.returncode, run.stdout) == (1, "")
    assert 'rmq serve: the address of metrics is "9464"; expected HOST:PORT' in run.stderr


def test_the_command_loads_no_spark() -> None:
    code = (
        "import sys, rmq_spark.command, rmq_spark.store; rmq_spark.store.serve_store; print('pyspark' in sys.modules)"
    )
    run: subprocess.CompletedProcess[str] = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True
    )
    assert run.stdout.strip() == "False", run.stderr
