"""benchmarks/softnic measures what it says: the tables it reads, and one row from end to end."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "benchmarks/softnic"
LATENCY = """\
 local address: LID 0000 QPN 0x2002 PSN 0xe5c3e5
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]   99% percentile[usec]
 8       20000          0.39           299.47       0.51     \t       0.53        \t0.72
"""
BANDWIDTH = """\
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1048576    1000             12755.69            12442.24\t\t   0.012442
"""


@pytest.fixture(scope="module")
def modules():
    sys.path.insert(0, str(BENCH))
    try:
        import perftest
        import rows
    finally:
        sys.path.remove(str(BENCH))
    return perftest, rows


def test_tables(modules):
    perftest, _ = modules
    assert perftest.table(LATENCY) == {
        "#bytes": 8, "#iterations": 20000, "t_min[usec]": 0.39, "t_max[usec]": 299.47,
        "t_typical[usec]": 0.51, "t_avg[usec]": 0.53, "99% percentile[usec]": 0.72}
    assert perftest.table(BANDWIDTH) == {
        "#bytes": 1048576, "#iterations": 1000, "BW peak[MB/sec]": 12755.69, "BW average[MB/sec]": 12442.24,
        "MsgRate[Mpps]": 0.012442}
    with pytest.raises(perftest.Failed):
        perftest.table("Couldn't connect to 127.0.0.1:18515\n")


def test_targets_point_the_right_way(modules):
    _, rows = modules
    assert len({row.name for row in rows.ROWS}) == len(rows.ROWS)
    for row in rows.ROWS:
        better = row.target * (0.5 if row.unit == "usec" else 2)
        assert row.passes(better) and row.passes(row.target) and not row.passes(row.target ** 2 / better)


def test_a_row(tmp_path):
    if not shutil.which("ib_send_lat"):
        pytest.skip("perftest is not installed")
    command = [sys.executable, BENCH / "run.py", "--rounds", "2", "--rows", "^write_bw 64KiB$",
               "--json", tmp_path / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "out.json").read_text())
    for side in ("raw", "device"):
        assert len(row[side]["all"]) == 2 and min(row[side]["all"]) > 0
    assert row["ratio"] > 0 and row["target"] == 0.9
