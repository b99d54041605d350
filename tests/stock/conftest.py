"""Stock verbs programs run on the device under test.

make test runs them on soft0. make test-roce leaves them out, as it does every test without
the ``device`` fixture: on Soft-RoCE they show that rdma-core runs on rdma_rxe, and take minutes
in the virtual machine. As a judge: see CONTRIBUTING.md
"""

from pathlib import Path

import conftest
import pytest
from stock.programs import CONNECTX_5, Programs, missing

PACKAGES = {"ibv": "ibverbs-utils", "ib": "perftest"}
WHY = Path(__file__).resolve().parents[2] / "build" / "setup.missing"  # tools/setup.sh


@pytest.fixture(scope="session")
def need():
    """``need(program, ...)`` skips the test where a stock program is not installed."""
    def check(*programs):
        for name in missing(*programs):
            why = WHY.read_text().strip() if WHY.exists() else "tools/setup.sh test installs it"
            pytest.skip(f"{name} is not installed (Debian: {PACKAGES[name.partition('_')[0]]}); {why}")
    return check


@pytest.fixture(scope="session")
def programs(need):
    """:class:`stock.programs.Programs` on the device under test."""
    need("ibv_devinfo", "ib_write_bw")
    return Programs(conftest.DEVICE, conftest.SLOW)


@pytest.fixture(scope="session")
def modern(need):
    """The same, with a part number at which perftest posts inline and through ibv_wr_*."""
    need("ib_write_bw")
    return Programs(conftest.DEVICE, conftest.SLOW, ROCECOMM_SOFT_PART_ID=CONNECTX_5)
