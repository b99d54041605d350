"""perftest's programs: every verb, transport, way of posting and of waiting that they permit.

Left out, since perftest refuses them on any device: ``-e`` with writes, ``--use-srq`` with
anything but sends, ``-q`` and ``-b`` with latency tests, ``-l`` in other than bandwidth tests,
``-c UC`` with reads and atomics, ``-c UD`` with anything but sends, ``-a`` with
atomics, ``-D`` with ``-a`` or ``-e``.

Which post API perftest takes (ibv_wr_* or ibv_post_send), and whether inline, it decides by the
device's part number: most tests name one that it takes for modern.

perftest measures the clock for 0.2 s before it prints a row, so ``-a`` with its 23 rows takes
5 s of both CPUs.
"""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

OPTIONS = {
    "ib_send_bw": ["-x 1", "-e -b -x 2", "-c UD -b -q 8", "-c UC -q 8 -l 16", "-c UD --use-srq -e",
                   "--use-srq -q 8 -b", "-l 16 -I 64 -s 32", "-s 1 -m 256", "--recv_post_list=16 -l 16",
                   "--use_old_post_send -q 8 -l 16 -b", "--use_old_post_send -c UD -e"],
    "ib_send_lat": ["-x 1", "-e -x 2", "-c UD", "-c UD -e", "-c UC", "-c UC -e", "--use-srq",
                    "--use-srq -c UD -e", "-I 64 -s 32", "-s 5000 -m 256", "--use_old_post_send",
                    "--use_old_post_send -c UD"],
    "ib_write_bw": ["-x 1 -b -q 8", "-c UC -l 16 -x 2", "-I 64 -s 32 -q 8 -l 16 -b",
                    "--use_old_post_send -q 8 -l 16"],
    "ib_write_lat": ["-x 1", "-x 2", "-c UC", "-I 64 -s 32", "-s 5000 -m 256", "--use_old_post_send"],
    "ib_read_bw": ["-x 1 -b", "-e -q 8", "-q 8 -l 16 -b", "-o 1 -x 2", "--use_old_post_send -q 8 -l 16"],
    "ib_read_lat": ["-x 1", "-e -x 2", "-s 5000 -m 256 -o 1", "--use_old_post_send"],
    "ib_atomic_bw": ["-x 1 -b", "-e -q 8", "-q 8 -l 16 -b", "-A CMP_AND_SWAP -q 8", "-o 1 -x 2",
                     "--use_old_post_send -q 8 -l 16"],
    "ib_atomic_lat": ["-x 1", "-e -x 2", "-A CMP_AND_SWAP", "--use_old_post_send"],
}
ITERATIONS = 160
ALL_SIZES = [2 << i for i in range(23)]


def figures(output):
    """The rows of a table: {bytes: (iterations, first figure)}."""
    table = output.rpartition("#bytes")[2].splitlines()[1:]
    rows = [line.split() for line in table if re.match(r"\s*\d+\s+\d+\s", line)]
    return {int(row[0]): (int(row[1]), float(row[3])) for row in rows}


def check(server, client):
    for output in (server, client):
        assert not re.search(r"error|failed|couldn't|unable|mismatch", output, re.I), output
    rows = figures(client)
    # the figure is the mean rate or a latency; a rate may round to 0.00 MB/s
    assert rows and all(count > 0 and figure >= 0 for count, figure in rows.values()), client
    return rows


def fact(output, name):
    """A line of the head of perftest's output."""
    return re.search(rf"{re.escape(name)}\s+: (\S+)", output)[1]


def value(options, name, otherwise):
    words = options.split()
    return int(words[words.index(name) + 1]) if name in words else otherwise


@pytest.mark.parametrize("program, options", [(p, o) for p in OPTIONS for o in OPTIONS[p]])
def test_options(modern, program, options):
    outputs = modern.pair(program, "-n", ITERATIONS, *options.split())
    ((size, (count, _)),) = check(*outputs).items()
    assert size == value(options, "-s", size)
    assert count == ITERATIONS * value(options, "-q", 1)
    if modern.soft:
        for output in outputs:
            assert fact(output, "ibv_wr* API") == ("OFF" if "--use_old_post_send" in options else "ON")
            assert "-I" not in options.split() or fact(output, "Max inline data") == "64[B]"


@pytest.mark.parametrize("program", ["ib_send_bw", "ib_write_bw", "ib_write_lat", "ib_read_bw",
                                     "ib_read_lat"])
def test_all_sizes(programs, program):
    rows = check(*programs.pair(program, "-a", "-n", 5))
    assert list(rows) == ALL_SIZES and {count for count, _ in rows.values()} == {5}


def test_all_sizes_of_a_datagram(programs):
    """Up to the MTU."""
    rows = check(*programs.pair("ib_send_lat", "-a", "-n", 5, "-c", "UD"))
    assert list(rows) == [n for n in ALL_SIZES if n <= max(rows)] and max(rows) in (1024, 2048, 4096)


@pytest.mark.parametrize("kind", ["bw", "lat"])
def test_for_three_seconds(programs, kind):
    """``-D 3`` with every verb, all at the same time: four times as many programs as CPUs."""
    names = [f"ib_{verb}_{kind}" for verb in ("send", "write", "read", "atomic")]
    with ThreadPoolExecutor(len(names)) as pool:
        for outputs in pool.map(lambda name: programs.pair(name, "-D", 3), names):
            check(*outputs)
