"""Fixtures that every test may use. One Spark for the whole run: starting it takes seconds."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GOLDEN = Path(__file__).resolve().parent / "golden"

settings.register_profile("usual", deadline=None)  # a busy machine is no bug
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of stores that a real RocketMQ wrote. Read them where they are; copy to change."""
    return GOLDEN


@pytest.fixture
def tmp_store(tmp_path: Path) -> Callable[[str], Path]:
    """A function that copies the golden store of that name and returns the copy's path."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copy


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """Spark with the source registered, for tests marked `spark`. Do not stop it."""
    import rmq_spark

    session = rmq_spark.session(
        "rmq-spark tests",
        master="local[2]",
        conf={
            "spark.sql.shuffle.partitions": "2",
            "spark.default.parallelism": "2",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
            "spark.sql.session.timeZone": "UTC",
        },
    )
    yield session
    session.stop()
