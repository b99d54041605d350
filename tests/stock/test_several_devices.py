"""ROCECOMM_SOFT_DEVICES: soft0, soft1, ..., each with GIDs of its own, all on one network."""

import re
import time

import conftest
import pytest
from stock.programs import Programs, Started, free_port
from stock.test_perftest import check
from stock.test_pingpong import check_rates

NAMES = ["soft0", "soft1", "soft2"]


@pytest.fixture(scope="module")
def three(programs):
    if not programs.soft:
        pytest.skip(f"{programs.device} is not a device of softnic")
    return Programs(conftest.DEVICE, conftest.SLOW, ROCECOMM_SOFT_DEVICES="3")


def gids(three, name):
    text = three.alone("ibv_devinfo", "-v", "-d", name)
    return dict(re.findall(r"GID\[\s*(\d+)\]:\s+(\S+?),", text))


def test_they_are_listed_with_guids_and_gids_of_their_own(three):
    rows = [line.split() for line in three.alone("ibv_devices").splitlines()[2:]]
    assert [name for name, _ in rows] == NAMES and len({guid for _, guid in rows}) == 3
    tables = [gids(three, name) for name in NAMES]
    assert all(list(table) == ["0", "1", "2"] for table in tables)
    assert len({gid for table in tables for gid in table.values()}) == 9


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("ends", [("soft1", "soft1"), ("soft0", "soft1"), ("soft2", "soft0")])
def test_programs_choose_device_and_gid(three, ends, index):
    server, client = three.pair("ibv_rc_pingpong", "-n", 5, "-c", "-g", index, server=["-d", ends[0]],
                                client=["-d", ends[1]])
    check_rates((server, client))
    theirs = re.search(r"remote address:.*GID (\S+)", client)[1]
    assert theirs == gids(three, ends[0])[str(index)] == re.search(r"local address:.*GID (\S+)", server)[1]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_perftest_between_two_devices(three, index):
    check(*three.pair("ib_write_lat", "-n", 20, "-x", index, server=["-d", "soft1"], client=["-d", "soft2"]))


@pytest.mark.parametrize("program", ["ibv_rc_pingpong", "ibv_ud_pingpong"])
def test_another_folder_is_another_network(three, tmp_path, program):
    """Its queue pairs have the same numbers as ours; they are not reached, and we are not either."""
    port = free_port()
    command = [program, "-d", "soft0", "-g", 1, "-c", "-p", port]
    with Started(command, three.env, ["env", f"ROCECOMM_SOFT_DIR={tmp_path}"]) as server:
        server.until_it_listens(port, three.seconds)
        with Started([*command, "127.0.0.1"], three.env) as client:
            if program == "ibv_rc_pingpong":
                ended = client.end(three.seconds)
                assert ended.status == 1 and "(12)" in ended.output, f"{ended}"
            else:                                # datagrams are lost: both wait, as on any device
                time.sleep(1)
                assert client.process.poll() is None and server.process.poll() is None


def test_a_device_beyond_the_number(three):
    assert "soft3" in three.alone("ibv_devinfo", "-d", "soft3", expect=255)
