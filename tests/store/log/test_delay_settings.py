"""Tests of a store's delay settings: which process sets them, where they are, and the detected broker version."""

import shutil
import time
from pathlib import Path

import pytest

from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.own_files import DelayTerms, StoreSettings
from rmq_spark.store.log.store_state import check_settings, found_broker_version
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings

GOLDEN = Path(__file__).parents[2] / "golden"
TABLE = DelayLevels.parse("3s 1h")


def visit(root: Path, terms: DelayTerms | None = None) -> StoreSettings:
    """Take and release the store's lock. Return the settings after that."""
    settings = WriterSettings(delays=terms or DelayTerms())
    with StoreWriter(str(root), Disk(), settings, lambda: 1_774_000_000_000, time.sleep) as writer, writer.section():
        pass
    found = check_settings(str(root))
    assert found is not None
    return found


def conf(root: Path) -> dict[str, str]:
    lines = (root / "rmq" / "broker.conf").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_delays_of_a_new_store_are_those_of_5(tmp_path: Path) -> None:
    found = visit(tmp_path)
    assert (found.delay_levels, found.timer_max_delay_s, found.broker_version) == (None, None, "5")
    assert found.levels is DEFAULT_DELAY_LEVELS
    assert conf(tmp_path)["messageDelayLevel"] == DEFAULT_DELAY_LEVELS.text
    assert conf(tmp_path)["timerMaxDelaySec"] == "259200"


def test_delays_are_set_by_the_writer_that_creates_the_store(tmp_path: Path) -> None:
    found = visit(tmp_path, DelayTerms(TABLE, 60, "4.9"))
    assert (found.delay_levels, found.timer_max_delay_s, found.broker_version) == ("3s 1h", 60, "4.9")
    assert conf(tmp_path)["messageDelayLevel"] == "3s 1h"
    assert conf(tmp_path)["timerMaxDelaySec"] == "60"
    assert visit(tmp_path) == found


def test_delays_of_a_later_writer_replace_the_earlier_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = visit(tmp_path, DelayTerms(TABLE))
    caplog.set_level("INFO", "rmq_spark")
    assert visit(tmp_path, DelayTerms(TABLE)) == before
    assert not caplog.records
    after = visit(tmp_path, DelayTerms(DelayLevels.parse("3s 2h")))
    assert (after.delay_levels, after.store_id, after.file_sizes) == ("3s 2h", before.store_id, before.file_sizes)
    assert conf(tmp_path)["messageDelayLevel"] == "3s 2h"
    assert conf(tmp_path)["mappedFileSizeCommitLog"] == str(before.file_sizes["segmentBytes"])
    (record,) = caplog.records
    assert "changed delays to [3s 2h]" in record.getMessage()
    assert "they were [3s 1h]" in record.getMessage()


@pytest.mark.parametrize(
    ("name", "version"),
    [("demo", "5"), ("livekill533", "5"), ("timer", "5"), ("basic", "5"), ("broker497", "4.9")],
)
def test_found_broker_version_uses_the_files_of_a_broker(tmp_path: Path, name: str, version: str) -> None:
    root = tmp_path / "store"
    shutil.copytree(GOLDEN / name, root)
    assert found_broker_version(str(root), has_log=True) == version
    # We write its topics.json as 5.x does: the version that was found stays.
    assert visit(root).broker_version == version
    assert visit(root).broker_version == version
    assert not (root / "rmq" / "broker.conf").exists()
    assert visit(root, DelayTerms(broker_version="5")).broker_version == "5"
    assert not (root / "rmq" / "broker.conf").exists()


@pytest.mark.parametrize("sign", ["timerwheel", "config/timercheck", "config/consumerOrderInfo.json", "abort.bak"])
def test_found_broker_version_needs_one_file_of_5(tmp_path: Path, sign: str) -> None:
    shutil.copytree(GOLDEN / "broker497" / "config", tmp_path / "config")
    assert found_broker_version(str(tmp_path), has_log=True) == "4.9"
    (tmp_path / sign).touch()
    assert found_broker_version(str(tmp_path), has_log=True) == "5"


@pytest.mark.parametrize("field", ["stateVersion", "attributes"])
def test_found_broker_version_needs_one_field_of_topics_json(tmp_path: Path, field: str) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "topics.json").write_text(f'{{"topicConfigTable":{{}},"x":{{"{field}":{{}}}}}}')
    assert found_broker_version(str(tmp_path), has_log=True) == "5"


def test_found_broker_version_of_a_log_without_a_sign_is_4_9(tmp_path: Path) -> None:
    assert found_broker_version(str(tmp_path), has_log=True) == "4.9"
    assert found_broker_version(str(tmp_path), has_log=False) == "5"


def test_check_settings_refuses_an_invalid_table(tmp_path: Path) -> None:
    visit(tmp_path, DelayTerms(TABLE))
    path = tmp_path / "rmq" / "settings.json"
    path.write_text(path.read_text().replace("3s 1h", "3s 1x"))
    with pytest.raises(DamageError, match=r"settings of a store.*'1x' is not a delay"):
        visit(tmp_path)
