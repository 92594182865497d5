"""Changed frames: whatever a peer sends, the reader gives commands or a FrameError, at once and in bounded memory.

Each case changes golden frames (`tests/support/frame_mutations.py`) and receives them in random pieces. A response is
read as the answer to the request that it answered. A case is good if

1. nothing but FrameError (AnswerError is one) is raised, and its text is clear;
2. it takes at most 5 seconds, and the process a bounded address space;
3. no body is larger than what was received.

`python tests/store/cluster/test_frame_mutations.py --seed 7 --count 1000000` tries a million cases, and ends after
`--seconds`. It prints its seed and its counts. `--case 5` shows one case.
"""

import argparse
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `support`, if this runs as a script

import pytest
from support.frame_mutations import mutate_frame
from support.remoting_frames import SAMPLE_OF, RecordedFrame, read_frames

from rmq_spark.store.cluster.answer_fields import AnswerError
from rmq_spark.store.cluster.answer_rules import find_rule, make_error
from rmq_spark.store.cluster.frame import MAX_FRAME_BYTES, Command, FrameError, FrameReader
from rmq_spark.store.errors import RmqError

CASE_SECONDS = 5  # of this process's time
ADDRESS_SPACE_BYTES = 256 << 20  # beyond what the process has after its first cases
ROOT = Path(__file__).resolve().parents[3]


class HangError(BaseException):
    """A case took too long. Not an Exception, so that nobody takes it for an answer."""


def alarm(number: int, frame: FrameType | None) -> None:
    raise HangError


class Cases:
    """Runs cases by seed and number, and counts what they gave."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        frames = read_frames()
        self._frames = frames
        self._answers = [frame for frame in frames if self._request_code(frame) in SAMPLE_OF]
        self.counts: Counter[str] = Counter()

    @staticmethod
    def _request_code(frame: RecordedFrame) -> int:
        is_answer = frame.line["kind"] == "response" and frame.request is not None
        code: int = frame.request["code"] if is_answer and frame.request else -1
        return code

    def run(self, number: int, show: Callable[[str], None] = lambda _: None) -> str | None:
        """Run one case. Return what is wrong, or None."""
        random = Random(self._seed * 1_000_000_007 + number)
        chosen = random.choices(
            self._answers if random.random() < 0.8 else self._frames, k=random.choice((1, 1, 1, 2, 3))
        )
        place = random.randrange(len(chosen))
        pieces = [mutate_frame(one, random) if at == place else one.data for at, one in enumerate(chosen)]
        data = b"".join(pieces)
        show(f"{', '.join(map(str, chosen))}: {data!r}")
        signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
        try:
            return self._receive(data, random, self._request_code(chosen[place]), show)
        except HangError:
            return f"still at it after {CASE_SECONDS} s"
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:900]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _receive(self, data: bytes, random: Random, code: int, show: Callable[[str], None]) -> str | None:
        reader, received, at = FrameReader(), 0, 0
        largest = random.choice((60, 2000, 100_000))
        try:
            while at < len(data):
                size = random.randint(1, largest)
                commands = reader.feed(data[at : at + size])
                at += size
                for command in commands:
                    self.counts["commands"] += 1
                    received += len(command.body)
                    if fault := self._read(command, code, show):
                        return fault
            if len(reader.get_buffer()) > MAX_FRAME_BYTES:
                return f"a buffer of {len(reader.get_buffer())} bytes"
            reader.at_end()
        except FrameError as error:
            show(f"  {type(error).__name__}: {error}")
            self.counts["errors"] += 1
            return judge_text(str(error))
        return None if received <= len(data) else f"{received} bytes of bodies in {len(data)} bytes"

    def _read(self, command: Command, code: int, show: Callable[[str], None]) -> str | None:
        """Read a response. Return what is wrong with the error, or None."""
        request = SAMPLE_OF.get(code)
        if request is None or not command.is_response:
            return None
        if not find_rule(request.code, command.code, command.remark).is_answer:
            error: RmqError = make_error(request, command, "b:1")
            show(f"  {error}")
            self.counts["refusals"] += 1
            return judge_text(str(error))
        try:
            response = request.read(command)
            str(response).encode()
        except AnswerError as error:
            show(f"  {error}")
            self.counts["wrong answers"] += 1
            return judge_text(str(error))
        self.counts["answers"] += 1
        return None


def judge_text(text: str) -> str | None:
    """Return what is wrong with the text of an error: it says what was found and expected, in one short line."""
    if "expected" not in text and "not JSON" not in text and "not a JSON object" not in text:
        return f"an error without what was expected: {text}"
    if len(text) > 800 or not text.isprintable():
        return f"an error with an unclear text: {text!r}"
    return None


def run_cases(seed: int, count: int, seconds: float) -> tuple[Mapping[str, int], list[str]]:
    """Run cases from number 0 until the count or the time is over. Return counts and faults."""
    cases, faults = Cases(seed), list[str]()
    signal.signal(signal.SIGPROF, alarm)
    until = time.monotonic() + seconds
    for number in range(count):
        if number == 200:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE_BYTES, -1))
        if number % 1000 == 0 and time.monotonic() > until:
            break
        cases.counts["cases"] += 1
        fault = cases.run(number)
        if fault is not None:
            faults.append(f"--seed {seed} --case {number}: {fault}")
    return cases.counts, faults


def run_script(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run this file in a process of its own, because it limits its address space."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    environment: dict[str, Any] = {"PYTHONPATH": ":".join(sys.path)}
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)


def check_run(seed: int, count: int) -> None:
    done = run_script("--seed", str(seed), "--count", str(count))
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    counts = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z ]+)", done.stdout.splitlines()[-1])}
    assert counts["cases"] == count
    assert counts["faults"] == 0
    for kind, share in {
        "errors": 0.3,
        "commands": 0.4,
        "answers": 0.2,
        "wrong answers": 0.02,
        "refusals": 0.02,
    }.items():
        assert counts[kind] > share * count, f"too few {kind} for a test: {counts}"


def test_changed_frames_give_commands_or_frame_errors() -> None:
    check_run(seed=0, count=1_000)


@pytest.mark.slow
def test_a_hundred_thousand_changed_frames_give_commands_or_frame_errors() -> None:
    check_run(seed=1, count=100_000)


def test_judge_text_refuses_unclear_errors() -> None:
    assert judge_text("found 1; expected 2") is None
    assert judge_text("found 1")
    assert judge_text("expected\n2")
    assert judge_text("expected" + "x" * 800)


def main() -> None:
    parser = argparse.ArgumentParser(description="Changed frames, case by case.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=10**9)
    parser.add_argument("--case", type=int, help="show one case")
    options = parser.parse_args()
    if options.case is not None:
        print(Cases(options.seed).run(options.case, print) or "no fault")
        return
    counts, faults = run_cases(options.seed, options.count, options.seconds)
    for fault in faults[:20]:
        print("FAULT", fault)
    words = ("commands", "answers", "wrong answers", "refusals", "errors")
    parts = [f"{counts['cases']} cases", f"{len(faults)} faults", *(f"{counts[word]} {word}" for word in words)]
    print(f"frames: seed {options.seed}, {', '.join(parts)}")
    sys.exit(int(bool(faults)))


if __name__ == "__main__":
    main()
