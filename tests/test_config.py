"""Settings: parsing, refusal that says what is allowed, provenance, agreement."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rocecomm import config, errors
from rocecomm.config import Config, check_timeout

ROOT = Path(__file__).resolve().parent.parent


def test_defaults_and_provenance():
    cfg = Config.from_env({})
    assert cfg.timeout == 300.0 and cfg.device is None and cfg.sources == {}
    cfg = Config.from_env({"ROCECOMM_IB_TC": "0x68", "ROCECOMM_TIMEOUT": "7"}, timeout=2)
    assert cfg.traffic_class == 0x68 and cfg.timeout == 2.0
    rows = {name: (value, source) for name, value, source, _ in cfg.describe()}
    assert rows["ROCECOMM_IB_TC"] == ("104", "environment ROCECOMM_IB_TC")
    assert rows["ROCECOMM_TIMEOUT"] == ("2.0", "argument")
    assert rows["ROCECOMM_IB_SL"] == ("0", "default")


@pytest.mark.parametrize("name, value", [
    ("IB_TC", "256"), ("IB_TC", "high"), ("IB_SL", "-1"), ("IB_TIMEOUT", "0"),
    ("IB_TIMEOUT", "32"), ("IB_RETRY_CNT", "8"), ("IB_GID_INDEX", "-2"),
    ("IB_MTU", "1500"), ("TIMEOUT", "-1"), ("TIMEOUT", "nan"), ("TIMEOUT", "1e12"),
    ("TIMEOUT", "soon"), ("PROGRESS", "always"), ("EAGER_LIMIT", "8X"),
    ("SEGMENT", "1"), ("LOG_LEVEL", "loud"), ("DEAD_AFTER", "0"), ("RANK", "-1"),
    ("WORLD_SIZE", "0"),
])
def test_bad_values_name_variable_value_and_what_is_allowed(name, value):
    with pytest.raises(errors.ConfigError) as caught:
        Config.from_env({"ROCECOMM_" + name: value})
    text = str(caught.value)
    assert name.lower() in text.lower() and value in text and "must be" in text


def test_sizes_take_suffixes():
    assert Config.from_env({"ROCECOMM_EAGER_LIMIT": "16K"}).eager_limit == 16384
    assert Config.from_env({"ROCECOMM_SEGMENT": "1MiB"}).segment == 1 << 20
    assert Config.from_env({"ROCECOMM_REG_CACHE": "2g"}).reg_cache == 2 << 30


def test_empty_is_unset_and_unknown_option_is_refused():
    assert Config.from_env({"ROCECOMM_IB_HCA": " "}).device is None
    with pytest.raises(errors.ConfigError, match="did you mean 'timeout'"):
        Config.from_env({}, timeuot=3)


def test_secret_never_shows():
    cfg = Config.from_env({"ROCECOMM_SECRET": "hunter2"})
    assert cfg.secret == "hunter2"
    assert "hunter2" not in repr(cfg) + str(cfg.describe()) + str(cfg.wire_settings())


def test_wire_settings_differ_exactly_when_the_wire_does():
    base = Config.from_env({}).wire_settings()
    assert base["protocol version"] == str(config.WIRE_VERSION)
    assert Config.from_env({}, timeout=1, device="x").wire_settings() == base
    assert Config.from_env({}, eager_limit=1024).wire_settings() != base


def test_unknown_variables_with_a_guess():
    env = {"ROCECOMM_IB_HCAS": "x", "ROCECOMM_TEST_DEVICE": "y", "ROCECOMM_TIMEOUT": "1"}
    assert config.unknown_variables(env) == [("ROCECOMM_IB_HCAS", "ROCECOMM_IB_HCA")]


@pytest.mark.parametrize("dead_after", [0.1, 1, 5, 60])
def test_transport_retry_stays_below_the_deadline(dead_after):
    timeout, count = Config(dead_after=dead_after).transport_retry()
    total = 4.096e-6 * 2 ** timeout * (count + 1)
    assert dead_after / 2.001 < total <= dead_after
    assert Config(ib_timeout=14, ib_retry_cnt=3).transport_retry() == (14, 3)


def test_timeouts():
    assert check_timeout(None) is None and check_timeout(0) == 0.0
    assert check_timeout(0.5) == 0.5
    for bad in ("5", True, [1], b"1"):
        with pytest.raises(TypeError):
            check_timeout(bad)
    for bad in (-1, -0.001, 1e12, float("nan"), float("inf")):
        with pytest.raises(ValueError):
            check_timeout(bad)


def test_environment_is_only_read_by_from_env(monkeypatch):
    monkeypatch.setenv("ROCECOMM_IB_TC", "9")
    assert Config().traffic_class == 0
    assert Config.from_env().traffic_class == 9


def test_config_travels():
    cfg = Config.from_env({}, timeout=3)
    assert pickle.loads(pickle.dumps(cfg)) == cfg == copy.copy(cfg)
    assert cfg.replace(timeout=4).sources["timeout"] == "argument"


ERRORS = [
    errors.VerbsError("ibv_reg_mr failed", verb="ibv_reg_mr", errno=12, device="soft0"),
    errors.CompletionError("bad", status=10, opcode=1, wr_id=7, qp_num=3, vendor_err=0,
                           peer=2),
    errors.TimeoutError("late", peer=1, peer_state="stopped"),
    errors.JoinError("who", missing=[2, 3]), errors.PeerDeadError("gone", peer=1),
    errors.MessageTruncatedError("2000 came, 1000 fit", sent=2000, capacity=1000, peer=0),
    errors.MismatchError("sum or max", peer=1), errors.ClosedError("closed"),
    errors.DeviceNotFoundError("no mlx5_9", device="mlx5_9"),
    errors.ConfigError("bad", name="X", value="y"), errors.RocecommError("root"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_travel_between_processes(error):
    error.note = "kept"
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error) and str(twin) == str(error)
        assert twin.note == "kept"
        for name in error._fields:
            assert getattr(twin, name) == getattr(error, name)


def test_error_bases_follow_the_design():
    builtin = {"VerbsError": OSError, "DeviceNotFoundError": LookupError,
               "ClosedError": ValueError, "TimeoutError": TimeoutError,
               "PeerDeadError": ConnectionError, "JoinError": RuntimeError,
               "MessageTruncatedError": ValueError, "MismatchError": ValueError,
               "ConfigError": ValueError}
    for name, base in builtin.items():
        cls = getattr(errors, name)
        assert issubclass(cls, base) and issubclass(cls, errors.RocecommError)
    with pytest.raises(TypeError, match="no detail"):
        errors.PeerDeadError("x", pear=1)


LOGGING = """
import logging, sys
import rocecomm
if "configured" in sys.argv:
    logging.basicConfig(format="mine %(message)s", level="INFO")
rocecomm.init(rank=0, world_size=1, device="soft0", traffic_class=104).close()
print(len(logging.getLogger("rocecomm").handlers), len(logging.getLogger().handlers))
"""


@pytest.mark.parametrize("level, argument, handlers, stderr", [
    (None, "", "0 0", ""), ("warning", "", "1 0", ""),
    ("info", "", "1 0", "rocecomm INFO: rank 0 of 1 on soft0 port 1, GID "),
    ("info", "configured", "0 1", "mine rank 0 of 1 on soft0 port 1, GID ")])
def test_logging_is_left_alone_unless_asked_for(level, argument, handlers, stderr):
    env = {**os.environ, **({"ROCECOMM_LOG_LEVEL": level} if level else {})}
    done = subprocess.run([sys.executable, "-c", LOGGING, argument], env=env, text=True,
                          capture_output=True, timeout=30, cwd=ROOT)
    assert done.stdout.strip() == handlers and done.stderr.startswith(stderr)
    assert bool(done.stderr) == bool(stderr)
    if stderr:
        assert done.stderr.count("\n") == 1
        for part in ("MTU 4096", "traffic class 104", "service level 0", "progress calls"):
            assert part in done.stderr


def test_a_variable_that_nothing_reads_is_warned_of_once(monkeypatch, caplog):
    logger = Config.from_env({}).logger()
    for _ in range(2):
        config.warn_of_unknown_variables(logger, {"ROCECOMM_IB_HCAS": "x", "ROCECOMM_ZZZ": "1"})
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "ROCECOMM_IB_HCAS is set, but nothing reads it (is ROCECOMM_IB_HCA meant?)",
        "ROCECOMM_ZZZ is set, but nothing reads it"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_the_reference_page_has_every_setting():
    page = (ROOT / "docs/reference/configuration.md").read_text()
    page = page.partition("\n## ")[0]  # further down: what soft0 itself reads
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert list(rows) == [field.metadata["env"] for field in config.settings()]
    for field in config.settings():
        assert rows[field.metadata["env"]] == config_row(field)


def config_row(field):
    default = "unset" if field.default is None else str(field.default)
    cells = [f"`{field.metadata['env']}`", f"`{field.name}`", field.metadata["parse"].allowed,
             default, "yes" if field.metadata["wire"] else "", field.metadata["doc"]]
    return "| " + " | ".join(cells) + " |"
