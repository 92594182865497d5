"""Alters every field that the formats write and read, one at a time, and reports alterations that no test notices.

    python tests/mutation/run.py [--list] [word ...]

Words choose mutants by their module or name. Only a copy of the tree is altered. For each mutant the tests of
its module run until one fails. The test of FORMAT.md is not among them: tests of bytes must notice the mutant. Exits
with 1 if a mutant survives that `equivalents.py` does not list, or if a listed one is killed.
"""

import argparse
import ast
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Imported once here: each mutant's run is a fork of this process, which saves most of the start-up time.
import hypothesis
import numpy  # noqa: F401
import pyarrow.compute  # noqa: F401
import pytest
from equivalents import EQUIVALENT
from mutants import Mutant, MutantFinder, find_layouts
from wrong_values import NO_WRONG_VALUE

ROOT = Path(__file__).resolve().parent.parent.parent
COPIED = ["rmq_spark", "store", "datasource", "tests", "docs", "setup.cfg", "pyspark_rmq.py"]
TIME_LIMIT_S = 600  # of one mutant, on a busy machine; ends a hang
PYTEST = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-m", "not spark and not torture"]
# hypothesis is imported before pytest can rewrite its assertions, which does no harm.
PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
KINDS = ["byte order", "width", "place", "name", "constant", "write", "read"]

_RECORDS = [
    "store/format/test_record.py",
    "store/format/test_encoding.py",
    "store/test_golden_reader.py",
    "store/test_equal_records.py",
    "store/format/test_encoding_twin.py",
    "store/test_decoder_twin.py",
    "store/log/test_byte_limits.py",
]
_INDEX = [
    "store/format/test_index_file.py",
    "store/log/test_key_index.py",
    "store/log/test_lookup.py",
    "store/test_golden_reader.py",
    "store/log/test_key_index_crashes.py",
]
_PROPERTIES = [
    "store/format/test_outgoing_properties.py",
    "store/format/test_encoding.py",
    "store/test_golden_reader.py",
    "store/test_equal_records.py",
    "store/test_decoder_twin.py",
    "store/format/test_encoding_twin.py",
]
_QUEUES = [
    "store/format/test_queue_unit.py",
    "store/format/test_batch_unit.py",
    "store/test_golden_reader.py",
    "store/log/test_store_writer.py",
    "store/log/test_queues.py",
    "store/log/test_queue_faults.py",
    "store/log/test_recovery.py",
]
# Altered module -> tests that must notice, those first that usually notice soonest.
TARGETS = {
    "store/format/record.py": _RECORDS,
    "store/format/record_headers.py": _RECORDS,
    "store/format/rows.py": _RECORDS,
    "store/format/message_encoder.py": _RECORDS,
    "store/format/columns.py": _RECORDS[2:],
    "store/format/java.py": ["store/format/test_java_hashes.py", *_RECORDS],
    "store/log/write_session.py": [
        "store/log/test_store_writer.py",
        "store/test_written_store.py",
        "store/log/test_placement.py",
    ],
    "store/format/consume_queue_entry.py": [
        "store/format/test_batch_body.py",
        *_RECORDS,
        *_QUEUES,
        "store/format/test_unit_ext.py",
    ],
    "store/format/properties.py": _PROPERTIES,
    "store/format/property_encoder.py": _PROPERTIES,
    "store/log/consume_queue.py": _QUEUES,
    "store/format/index_file.py": _INDEX,
    "store/format/index_keys.py": _INDEX,
    "store/log/key_index_slots.py": _INDEX,
    "store/format/checkpoint.py": ["store/format/test_checkpoint_file.py"],
    "store/format/config_json.py": ["store/format/test_config_json.py", "store/format/test_fastjson.py"],
    "store/format/own_files.py": [
        "store/format/test_watermark.py",
        "store/log/test_recovery.py",
        "store/log/test_idle_reader.py",
        "store/log/test_store_writer.py",
    ],
}


class AlteredTree:
    """A copy of the project in a folder of its own, in which one module at a time is altered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "compat", "torture", "mutation", ".hypothesis")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
            else:
                shutil.copy2(ROOT / name, folder / name)
        shutil.copy2(ROOT / "tests" / "mutation" / "wrong_values.py", folder)

    def verdict(self, module: str, mutant: Mutant, tests: list[str]) -> str:
        """Return the verdict on a mutant: killed, timed out, survived, or no value."""
        path = self.folder / module
        original = path.read_bytes()
        # Python compares only size and seconds, so it could take a stale file for the mutant's.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
        path.write_text(mutant.source)
        try:
            status, output = self.run(tests, are_kept=False)
        finally:
            path.write_bytes(original)
        if status is None:
            return "timed out"
        if NO_WRONG_VALUE in output:
            return "no value"
        return "survived" if status == 0 else "killed"

    def run(self, tests: list[str], *, are_kept: bool) -> tuple[int | None, str]:
        """Run tests, with compiled modules kept or not: exit status (None: too slow) and output."""
        log = self.folder / "output"
        pid = os.fork()
        if not pid:
            self._be_pytest([f"tests/{name}" for name in tests], log, are_kept)
        until = time.monotonic() + (TIME_LIMIT_S if not are_kept else 20 * TIME_LIMIT_S)
        while not (done := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return None, ""
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(done[1]), log.read_text(errors="replace")

    def _be_pytest(self, tests: list[str], log: Path, are_kept: bool) -> None:
        os.setpgid(0, 0)
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.chdir(self.folder)
        sys.path.insert(0, str(self.folder))
        sys.dont_write_bytecode = not are_kept
        os.environ.update(PYTHONPATH=str(self.folder), PYTHONDONTWRITEBYTECODE="1")
        # The first failing example will do: nobody reads it.
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutation", phases=phases, database=None, deadline=None)
        os.environ["HYPOTHESIS_PROFILE"] = "mutation"  # tests/conftest.py loads it
        status: int = 70
        try:
            status = pytest.main([*PYTEST, *tests])
            taken = sys.modules.get("rmq_spark.store.format")
            if taken and not str(taken.__file__).startswith(str(self.folder)):
                print(f"{NO_WRONG_VALUE}: the tests took {taken.__file__}")
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def find_mutants(words: list[str]) -> Iterator[tuple[str, Mutant]]:
    """Yield module and mutant, of those that some word names (all without words)."""
    layouts = {}
    for module in TARGETS:
        layouts |= find_layouts(ast.parse((ROOT / module).read_text()))
    for module in TARGETS:
        for mutant in MutantFinder((ROOT / module).read_text(), layouts).mutants():
            if not words or any(word in f"{module} {mutant.kind} {mutant.name}" for word in words):
                yield module, mutant


def judge(found: list[tuple[str, Mutant]]) -> list[tuple[str, Mutant, str]]:
    """Try every mutant and return its verdict with it. Exits where the tests fail without any."""
    judged = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = AlteredTree(Path(folder))
        print("without a mutant ...", flush=True)
        status, output = tree.run(sorted({test for module, _ in found for test in TARGETS[module]}), are_kept=True)
        if status or NO_WRONG_VALUE in output:
            sys.exit(f"the tests fail without a mutant:\n{output}")
        for number, (module, mutant) in enumerate(found, start=1):
            began = time.monotonic()
            verdict = tree.verdict(module, mutant, TARGETS[module])
            if verdict == "survived" and (module, f"{mutant.kind}: {mutant.name}") in EQUIVALENT:
                verdict = "equivalent"
            seconds = time.monotonic() - began
            print(f"{number}/{len(found)} {seconds:5.1f} s  {verdict:10} {_shown(module, mutant)}", flush=True)
            judged.append((module, mutant, verdict))
    return judged


def _shown(module: str, mutant: Mutant) -> str:
    return f"{module}:{mutant.line} {mutant.kind}: {mutant.name}"


def report(judged: list[tuple[str, Mutant, str]]) -> int:
    """Print counts by module and kind, then what survived; return the exit status."""
    verdicts = ["killed", "timed out", "equivalent", "survived"]
    print(f"\n{'':40}{'mutants':>10}" + "".join(f"{name:>12}" for name in verdicts))
    rows = [(module, [one for one in judged if one[0] == module]) for module in TARGETS]
    rows += [(kind, [one for one in judged if one[1].kind == kind]) for kind in KINDS]
    for name, those in [*rows, ("all", judged)]:
        counts = Counter(verdict for *_, verdict in those if verdict != "no value")
        if counts:
            print(f"{name:40}{counts.total():10}" + "".join(f"{counts[verdict]:12}" for verdict in verdicts))
    bad = 0
    for module, mutant, verdict in judged:
        if verdict == "survived":
            bad += 1
            print(f"survived: {_shown(module, mutant)}")
        elif (reason := EQUIVALENT.get((module, f"{mutant.kind}: {mutant.name}"))) and verdict == "equivalent":
            print(f"equivalent: {_shown(module, mutant)}: {reason}")
        elif reason:
            bad += 1
            print(f"said to be equivalent, but {verdict}: {_shown(module, mutant)}")
    return 1 if bad else 0


def main() -> int:
    """Run what the command line asks for."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--list", action="store_true", help="only name the mutants")
    arguments.add_argument("words", nargs="*")
    asked = arguments.parse_args()
    found = list(find_mutants(asked.words))
    if asked.list:
        print("\n".join(_shown(module, mutant) for module, mutant in found))
        return 0
    return report(judge(found))


if __name__ == "__main__":
    sys.exit(main())
