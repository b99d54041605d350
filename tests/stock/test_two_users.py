"""Two users of one host (case G10): each is alone with its own processes; no root needed.

The programs run as root and as nobody, so the test needs root itself."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

import conftest
import pytest
from stock.programs import Programs, Started, free_port, missing
from stock.test_perftest import check
from stock.test_pingpong import check_rates

from rocecomm import soft_command

NOBODY = 65534
PINGPONG = ["ibv_rc_pingpong", "-g", 1, "-e", "-c"]
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


@pytest.fixture(scope="module")
def meeting(programs):
    """Programs whose folder in shared memory and whose library both users can reach."""
    if not programs.soft:
        pytest.skip(f"{programs.device} is not a device of softnic")
    if os.geteuid() != 0 or missing("setpriv"):
        pytest.skip("changing the user needs root and setpriv")
    with tempfile.TemporaryDirectory(prefix="rocecomm-users-", dir=conftest.SHM_ROOT) as name:
        folder = Path(name)
        folder.chmod(0o1777)                     # as /dev/shm
        library = shutil.copy(soft_command.library(), folder / "libsoftnic.so")
        os.chmod(library, 0o755)
        runs = Programs(conftest.DEVICE, conftest.SLOW)
        preload = programs.env["LD_PRELOAD"].replace(soft_command.library(), str(library))
        runs.env = dict(programs.env, LD_PRELOAD=preload, ROCECOMM_SOFT_DIR=name)
        runs.folder = folder
        yield runs


def as_nobody(meeting, program, *options):
    return meeting.pair(program, *options, before=(AS_NOBODY, AS_NOBODY))


def test_a_user_without_rights(meeting):
    check_rates(as_nobody(meeting, "ibv_rc_pingpong", "-g", 1, "-c", "-e"))
    check_rates(as_nobody(meeting, "ibv_ud_pingpong", "-g", 1, "-c"))
    check(*as_nobody(meeting, "ib_write_lat", "-n", 100))
    check(*as_nobody(meeting, "ib_send_bw", "-n", 100, "-e", "--use-srq"))
    check(*as_nobody(meeting, "ib_atomic_bw", "-n", 100))


def server(meeting, before, port):
    return Started([*PINGPONG, "-d", meeting.device, "-p", port], meeting.env, before)


def client(meeting, before, port):
    return Started([*PINGPONG, "-d", meeting.device, "-p", port, "127.0.0.1"], meeting.env, before)


def test_both_at_the_same_time_and_their_files_are_private(meeting):
    ports = free_port(), free_port()
    with server(meeting, (), ports[0]) as roots, server(meeting, AS_NOBODY, ports[1]) as nobodys:
        roots.until_it_listens(ports[0], meeting.seconds)
        nobodys.until_it_listens(ports[1], meeting.seconds)
        for user in (0, NOBODY):
            folder = meeting.folder / f"rocecomm-{user}"
            found = [folder, *folder.iterdir()]
            kinds = {stat.S_IFMT(path.lstat().st_mode) for path in found}
            assert kinds == {stat.S_IFDIR, stat.S_IFREG, stat.S_IFIFO}
            for path in found:
                status = path.lstat()
                assert status.st_uid == user and not status.st_mode & 0o077, path
        for before, end, port in (((), roots, ports[0]), (AS_NOBODY, nobodys, ports[1])):
            with client(meeting, before, port) as other:
                check_rates([other.end(meeting.seconds).output, end.end(meeting.seconds).output])
    assert not list(meeting.folder.glob("rocecomm-*"))


@pytest.mark.parametrize("first, second", [((), AS_NOBODY), (AS_NOBODY, ())], ids=["root", "nobody"])
def test_a_connection_between_users_is_an_error(meeting, first, second):
    """Not a hang, and no byte goes to a queue pair that happens to have the same number."""
    port = free_port()
    with server(meeting, first, port) as one:
        one.until_it_listens(port, meeting.seconds)
        with client(meeting, second, port) as two:
            ended = two.end(meeting.seconds)
            assert ended.status == 1 and "(12)" in ended.output, f"{ended}"  # IBV_WC_RETRY_EXC_ERR
        # the server waits for a message that nobody sends, on any device


def test_a_folder_of_somebody_else_is_not_used(meeting):
    folder = meeting.folder / f"rocecomm-{NOBODY}"
    shutil.rmtree(folder, ignore_errors=True)    # of a program that was killed
    folder.mkdir(mode=0o777)
    try:
        with Started(["ibv_devinfo", "-d", meeting.device], meeting.env, AS_NOBODY) as program:
            assert program.end(meeting.seconds).status != 0
        assert not list(folder.iterdir())
    finally:
        folder.rmdir()
