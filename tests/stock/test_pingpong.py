"""rdma-core's example programs: what the device says of itself, and the pingpongs.

Each prints one rate line at the end. On RoCE a connection needs a GID (``-g``), as everywhere.
"""

import re

import pytest


def test_ibv_devices(programs):
    rows = [line.split() for line in programs.alone("ibv_devices").splitlines()[2:]]
    guid = dict(rows)[programs.device]
    assert re.fullmatch("[0-9a-f]{16}", guid) and int(guid, 16)


@pytest.fixture(scope="module")
def about(programs):
    """What ibv_devinfo says of the device."""
    return programs.alone("ibv_devinfo", "-v", "-d", programs.device)


def test_ibv_devinfo(programs, about):
    text = about
    fields = dict(re.findall(r"^\s*(\w+):\s+(\S.*)$", text, re.M))
    assert fields["hca_id"] == programs.device
    assert fields["state"] == "PORT_ACTIVE (4)" and fields["link_layer"] == "Ethernet"
    assert int(fields["max_qp"]) > 100 and int(fields["max_srq"]) > 10
    gids = re.findall(r"GID\[\s*(\d+)\]:\s+(\S+), (.*)", text)
    assert [g for g in gids if g[2] == "RoCE v2"] and len({g[1] for g in gids}) == len(gids)


def test_ibv_devinfo_of_a_device_that_is_not_there(programs):
    text = programs.alone("ibv_devinfo", "-d", "nope0", expect=255)
    assert "nope0" in text


# Not -t with -e: that program takes an event without a completion for a failure, which any device
# hands out where two completions come close together.
OPTIONS = {
    "ibv_rc_pingpong": [
        "", "-e", "-c", "-c -e", "-s 1", "-s 1000000 -n 50 -c", "-r 1 -c -e", "-m 256 -s 5000 -c",
        "-N", "-N -c -e", "-t", "-t -N -c", "-o -P -c", "-O -P -c -N", "-j -c", "-j -t -N -c"],
    "ibv_uc_pingpong": ["", "-e", "-c", "-c -e", "-s 1", "-s 100000 -n 50 -c"],
    "ibv_ud_pingpong": ["", "-e", "-c", "-c -e", "-s 1", "-r 2 -c"],
    "ibv_srq_pingpong": ["", "-e", "-c", "-c -e", "-s 1", "-q 1 -c", "-q 31 -r 100 -c -e"],
}


@pytest.mark.parametrize("program, options", [(p, o) for p in OPTIONS for o in OPTIONS[p]],
                         ids=lambda text: text or "plain")
def test_pingpong(programs, about, program, options):
    if "-t" in options.split() and "completion_timestamp_mask not supported" in about:
        pytest.skip(f"{programs.device} has no timestamps")
    check_rates(programs.pair(program, "-g", 1, *options.split()))


def check_rates(outputs):
    for output in outputs:
        rate = re.search(r"(\d+) bytes in ([\d.]+) seconds = ([\d.]+) Mbit/sec", output)
        assert rate and int(rate[1]) and float(rate[3]) > 0, output
        assert "invalid data" not in output and "ailed" not in output, output


@pytest.mark.parametrize("program", OPTIONS)
@pytest.mark.parametrize("index", [0, 2])
def test_other_gids(programs, about, program, index):
    if not re.search(rf"GID\[\s*{index}\]", about):
        pytest.skip(f"{programs.device} has no GID {index}")
    # one message in each direction suffices
    server, client = programs.pair(program, "-g", index, "-n", 1)
    check_rates((server, client))
    theirs = set(re.findall(r"remote address:.*GID (\S+)", client))
    assert theirs and theirs == set(re.findall(r"local address:.*GID (\S+)", server))
