"""What perftest transfers arrives: its buffers are files (``--mmap``) that are compared afterwards.

perftest itself checks no payload. A buffer is a half that is sent from and a half that is
received into, each with a part per queue pair; a datagram has a header of 40 bytes in front.
"""

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import conftest
import pytest
from stock.programs import CONNECTX_5, Programs

SIZE = 65536
MTU = 4096
PAGES = 1 << 20


@pytest.fixture(scope="module")
def seeded(need, tmp_path_factory):
    """Programs whose random numbers differ between the ends."""
    need("ib_write_bw")
    library = tmp_path_factory.mktemp("seed") / "libseed.so"
    compiler = shlex.split(os.environ.get("CC", "gcc"))
    source = Path(__file__).with_name("seed.c")
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    programs = Programs(conftest.DEVICE, conftest.SLOW, ROCECOMM_SOFT_PART_ID=CONNECTX_5)
    programs.env["LD_PRELOAD"] = f"{programs.env.get('LD_PRELOAD', '')} {library}".strip()
    return programs


@pytest.fixture
def files(request):
    """Two files that a program can map, of the server and of the client; on disk if so asked."""
    folder = None if getattr(request, "param", None) == "disk" else conftest.SHM_ROOT
    with tempfile.TemporaryDirectory(prefix="rocecomm-payload-", dir=folder) as name:
        pair = [Path(name, "server"), Path(name, "client")]
        for path in pair:
            with open(path, "wb") as file:
                file.truncate(PAGES)
        yield pair


def there(files, size, source, sent, received):
    """That ``size`` bytes at ``sent`` of one file lie at ``received`` of the other one."""
    content = [path.read_bytes() for path in files]
    data = content[source][sent:sent + size]
    assert len(set(data)) > 100                  # random bytes
    return content[1 - source][received:received + size] == data


SERVER, CLIENT = 0, 1
MOVES = [
    ("ib_send_bw", "-e", 1, [CLIENT]), ("ib_send_bw", "-c UC -l 5", 1, [CLIENT]),
    ("ib_send_bw", "-q 4 -b", 4, [CLIENT, SERVER]), ("ib_send_lat", "", 1, [CLIENT, SERVER]),
    ("ib_write_bw", "-q 4 -l 5 -b", 4, [CLIENT, SERVER]), ("ib_write_bw", "-c UC", 1, [CLIENT]),
    ("ib_read_bw", "-q 4 -b -e", 4, [CLIENT, SERVER]), ("ib_read_lat", "", 1, [CLIENT]),
]


@pytest.mark.parametrize("program, options, qps, senders", MOVES)
def test_payload(seeded, files, program, options, qps, senders):
    seeded.pair(program, "-n", 20, "-s", SIZE, *options.split(), server=[f"--mmap={files[0]}"],
                client=[f"--mmap={files[1]}"])
    for sender in senders:
        for i in range(qps):
            near, far = i * SIZE, (qps + i) * SIZE
            if "read" in program:                # the first half is read into from the second one
                assert there(files, SIZE, 1 - sender, far, near)
            else:
                assert there(files, SIZE, sender, near, far)


def test_payload_of_datagrams(seeded, files):
    seeded.pair("ib_send_bw", "-n", 20, "-s", MTU, "-c", "UD", "-m", MTU, server=[f"--mmap={files[0]}"],
                client=[f"--mmap={files[1]}"])
    assert there(files, MTU, CLIENT, 0, MTU + 40 + 24)


def test_both_ends_in_one_file(seeded, files):
    """Each in a part of its own, as programs do that share a buffer pool."""
    seeded.pair("ib_write_bw", "-n", 20, "-s", SIZE, f"--mmap={files[0]}",
                client=[f"--mmap-offset={4 * SIZE}"])
    content = files[0].read_bytes()
    assert content[4 * SIZE:5 * SIZE] == content[SIZE:2 * SIZE] != content[:SIZE]


@pytest.mark.parametrize("files", ["disk"], indirect=True)
def test_files_on_disk(seeded, files):
    seeded.pair("ib_write_bw", "-n", 20, "-s", SIZE, server=[f"--mmap={files[0]}"],
                client=[f"--mmap={files[1]}"])
    assert there(files, SIZE, CLIENT, 0, SIZE)
