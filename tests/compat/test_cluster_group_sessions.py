"""The group part of the backend suite at two real brokers: members, shares, offsets, fences and resets."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from compat_kit.clusters import TwoBrokers
from compat_kit.rocketmq import Java
from compat_kit.their_lives import CONF

pytestmark = pytest.mark.compat

_SUITE = Path(__file__).parent / "compat_kit" / "session_suite.py"
_LIMIT_S = 300
_LEAST = {True: 30, False: 25}  # how many tests pass: brokers of 5.x, and of 4.9, where those with resets are skipped


def test_queries_are_members_of_groups_as_the_contract_says(java: Java, tmp_path: Path) -> None:
    with TwoBrokers(java, tmp_path / "brokers", **CONF) as cluster:
        pytest_command = ["-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tmp_path]
        done = subprocess.run(
            [*java.network.prefix, sys.executable, *map(str, pytest_command), str(_SUITE)],
            env={**os.environ, "NAME_SERVERS": cluster.address, "RMQ_COMPAT": "suite"},  # it may skip tests
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= _LEAST[java.is_5], done.stdout
