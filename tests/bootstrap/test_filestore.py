"""The file store: private, never confused by the past, cleaned by whoever comes next."""

import fcntl
import hashlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

from rocecomm.bootstrap import filestore
from rocecomm.bootstrap.filestore import FileStore
from rocecomm.errors import JoinError


@pytest.fixture
def base(tmp_path):
    return str(tmp_path / "base")


def test_values_and_claims(base):
    a, b = FileStore("job", 0, base), FileStore("job", 1, base)
    a.set("k/1", b"one")
    a.set("k/1", b"two")
    assert b.get("k/1", 0) == b"two"
    assert a.claim("c", b"mine") == b"mine" and b.claim("c", b"other") == b"mine"
    with pytest.raises(TimeoutError, match="nobody set 'absent'"):
        b.get("absent", 0.05)
    a.close()
    b.wait(["k/1", "c"], 0)
    b.close()
    assert os.listdir(base) == []


def test_private(base):
    store = FileStore("job", 0, base)
    store.set("k", b"v")
    for folder, folders, files in os.walk(base):
        for name in folders:
            assert stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) == 0o700
        for name in files:
            assert stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(base).st_mode) == 0o700
    store.close()


def test_a_folder_others_can_enter_is_refused(base):
    os.mkdir(base, 0o755)
    os.chmod(base, 0o755)
    with pytest.raises(JoinError, match="mode 0755"):
        FileStore("job", 0, base)


def test_a_link_is_refused(base, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    os.symlink(tmp_path / "elsewhere", base)
    with pytest.raises(JoinError, match="must be a folder"):
        FileStore("job", 0, base)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(base):
    os.mkdir(base, 0o700)
    os.chown(base, 12345, 12345)
    with pytest.raises(JoinError, match="uid 12345"):
        FileStore("job", 0, base)


def test_where_the_folder_is(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert filestore.base_directory() == str(tmp_path / "rocecomm")
    for unusable in ("", str(tmp_path / "absent"), "/dev/null"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert filestore.base_directory() == f"/tmp/rocecomm-{os.geteuid()}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_runtime_folder_is_not_used(tmp_path, monkeypatch):
    os.chown(tmp_path, 12345, 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert filestore.base_directory() == f"/tmp/rocecomm-{os.geteuid()}"


VICTIM = """
import sys, time
from rocecomm.bootstrap.filestore import FileStore
store = FileStore(sys.argv[2], 0, sys.argv[1])
store.set("old", b"from the last job")
store.claim("member/0", b"old")
print("ready", flush=True)
time.sleep(30)
"""


def killed_job(base, key):
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, base, key],
                              stdout=subprocess.PIPE)
    try:
        assert victim.stdout.readline() == b"ready\n"
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        victim.stdout.close()


def test_what_a_killed_job_left_is_never_seen_again(base):
    killed_job(base, "job")
    assert len(os.listdir(base)) == 1
    store = FileStore("job", 0, base)
    with pytest.raises(TimeoutError):
        store.get("old", 0)
    assert store.claim("member/0", b"new") == b"new"
    store.close()
    assert os.listdir(base) == []


def test_what_a_killed_job_left_is_removed_by_any_other(base):
    killed_job(base, "one")
    killed_job(base, "two")
    FileStore("three", 0, base).close()
    assert os.listdir(base) == []


def test_living_jobs_are_left_alone(base):
    alive = FileStore("alive", 0, base)
    alive.set("k", b"v")
    FileStore("other", 0, base).close()
    assert alive.get("k", 0) == b"v"
    alive.close()


def test_death_of_a_member_is_noticed(base):
    store = FileStore("job", 1, base)
    killed_job(base, "job")
    start = time.monotonic()
    with pytest.raises(filestore.trouble.Aborted) as caught:
        store.get("never", 10)
    error = filestore.trouble.unpack(caught.value.args[0])
    assert error.missing == (0,) and "ended while" in str(error)
    assert time.monotonic() - start < 2.0
    store.close()


def test_a_cleaner_that_is_stopped_is_an_error_not_a_hang(base, monkeypatch):
    monkeypatch.setattr(filestore, "_ENTER_SECONDS", 0.3)
    FileStore("job", 0, base).close()
    os.mkdir(os.path.join(base, name := hashlib.sha256(b"job").hexdigest()[:32]), 0o700)
    with open(os.path.join(base, name, "alive"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(JoinError, match="locked for 0.3 s"):
            FileStore("job", 0, base)
    FileStore("job", 0, base).close()
    assert os.listdir(base) == []


def test_many_come_and_go_at_once(base):
    """Every join of a generation sees one folder, though others remove theirs."""
    failures = []

    def member(rank, generations=15, members=4):
        try:
            for generation in range(generations):
                store = FileStore(f"job-{generation}", rank, base)
                store.set(f"here/{rank}", b"x")
                store.wait([f"here/{r}" for r in range(members)], 20)
                store.close()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert failures == [] and os.listdir(base) == []
