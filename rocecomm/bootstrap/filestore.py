"""The store of ranks on one host: a folder of small files, private to the user.

Layout, below ``$XDG_RUNTIME_DIR/rocecomm`` or ``/tmp/rocecomm-<uid>`` (mode 0700):

    <hash of the job's key>/alive        every live member holds a shared lock on it
                            member-*     one per member, which holds a lock on it
                            v-<key>      a value
                            abort        why joining failed

Locks say who lives; they end with the process, however it ends. A folder on which nobody
holds the shared lock belongs to a job that is over, so a later job with the same key
never meets old files: it is renamed away and removed by whoever finds it.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import time

from ..errors import ClosedError, JoinError
from . import trouble
from .deadline import Deadline, backoff
from .limits import check_key, check_value

_LIVENESS_INTERVAL = 0.25
_HALF_MADE_AGE = 60.0
_ENTER_SECONDS = 10.0


def base_directory():
    """The user's own folder for all jobs; made if missing. JoinError if it is not safe."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and _is_own_folder(runtime):
        path = os.path.join(runtime, "rocecomm")
    else:
        path = f"/tmp/rocecomm-{os.geteuid()}"
    return private_directory(path)


def _is_own_folder(path):
    # After su or sudo the variable may still name the other user's.
    try:
        info = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() \
        and os.access(path, os.W_OK)


def private_directory(path):
    """Make ``path`` with mode 0700, or check that it is a folder only we can enter."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise JoinError(f"cannot make the folder {path} through which the ranks of this "
                        f"host meet: {error.strerror}; make it yourself with mode 0700, "
                        "or set ROCECOMM_STORE and ROCECOMM_SECRET") from error
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() \
            or info.st_mode & 0o077:
        raise JoinError(
            f"{path} is not safe to meet in: it must be a folder of uid {os.geteuid()} "
            f"with mode 0700, but it belongs to uid {info.st_uid} with mode "
            f"{stat.S_IMODE(info.st_mode):04o}; remove it, or set XDG_RUNTIME_DIR to a "
            "private folder")
    return path


class FileStore:
    """``set``, ``claim``, ``get``, ``wait``, ``abort``, ``close`` over files.

    ``key`` names the job, ``rank`` is how the others call this process if it dies.
    Every member keeps the folder alive until it closes.
    """

    trusted = True        # only this user can read or write it

    def __init__(self, key, rank, base=None):
        self._base = base_directory() if base is None else private_directory(base)
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        self._path = os.path.join(self._base, name)
        self._rank = rank
        self._next_check = 0.0
        _sweep(self._base, name)
        self._alive = _enter(self._path)
        self._member, self._member_path = self._make_member()

    @property
    def where(self):
        return f"the folder {self._path}"

    def set(self, key, value):
        self._publish(self._file(key), check_value(key, value), replace=True)

    def claim(self, key, value):
        """Set ``key`` unless it is set; returns the value that holds."""
        path = self._file(key)
        self._publish(path, check_value(key, value), replace=False)
        return _read(path)

    def get(self, key, timeout):
        """The value of ``key``; waits up to ``timeout`` seconds, then TimeoutError."""
        path, deadline = self._file(key), Deadline(timeout)
        for pause in backoff():
            value = _read(path)
            if value is not None:
                return value
            self._check_abort()
            if deadline.expired():
                raise trouble.late(key, deadline, self.where)
            time.sleep(deadline.slice(pause))

    def wait(self, keys, timeout):
        deadline = Deadline(timeout)
        for key in keys:
            self.get(key, None if deadline.timeout is None else deadline.remaining())

    def abort(self, reason):
        """Make every waiting and later call of every member raise ``reason`` (bytes)."""
        if self._alive is not None:
            self._publish(os.path.join(self._path, "abort"), reason, replace=False)

    def close(self, timeout=0.0, linger=0.0):
        """Leave, ``linger`` seconds from now; the last one to leave removes the folder."""
        if self._alive is None:
            return
        time.sleep(linger)
        alive, self._alive = self._alive, None
        _unlink(self._member_path)
        os.close(self._member)
        _remove_if_dead(self._path, alive)
        os.close(alive)

    # --- files

    def _file(self, key):
        if self._alive is None:
            raise ClosedError(f"the store was closed, so {key!r} cannot be used")
        return os.path.join(self._path, "v-" + check_key(key).hex())

    def _publish(self, path, data, replace):
        # Complete under a name of its own first: readers never see half a value.
        temporary = os.path.join(self._path, "t-" + secrets.token_hex(8))
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            if replace:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)
        except FileExistsError:
            pass
        finally:
            _unlink(temporary)

    # --- who lives

    def _make_member(self):
        path = os.path.join(self._path, "member-" + secrets.token_hex(8))
        fd = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                     0o600)
        os.write(fd, f"{self._rank} {os.getpid()}".encode())
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.rename(path + ".new", path)           # locked before anyone can see it
        return fd, path

    def _check_abort(self):
        reason = _read(os.path.join(self._path, "abort"))
        if reason is not None:
            raise trouble.Aborted(reason)
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _LIVENESS_INTERVAL
        for name in os.listdir(self._path):
            path = os.path.join(self._path, name)
            if name.startswith("member-") and not name.endswith(".new") \
                    and path != self._member_path and _is_free(path):
                who = _read(path)
                if who is not None:              # else it left in good order just now
                    self.abort(trouble.died(*map(int, who.split())))
                    raise trouble.Aborted(_read(os.path.join(self._path, "abort")))


def _enter(path):
    """Open and share-lock the folder's ``alive`` file; a dead job's folder is replaced."""
    alive, end = os.path.join(path, "alive"), time.monotonic() + _ENTER_SECONDS
    while True:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        try:
            fd = os.open(alive, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                         0o600)
        except FileNotFoundError:
            continue                              # renamed away between the two calls
        if _lock(fd, fcntl.LOCK_EX) and _same(fd, alive) and len(os.listdir(path)) > 1:
            _discard(path)
            os.close(fd)
            continue
        # Turning an exclusive lock into a shared one is not atomic, so look again.
        if _lock(fd, fcntl.LOCK_SH) and _same(fd, alive):
            return fd
        os.close(fd)
        if time.monotonic() > end:
            raise JoinError(f"{alive} has been locked for {_ENTER_SECONDS:g} s: a process that "
                            "cleans up after an earlier job must be stopped; end it, or choose "
                            "another ROCECOMM_JOB_ID")
        time.sleep(0.002)                         # somebody looks whether the job is dead


def _lock(fd, kind):
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same(fd, path):
    """Whether ``path`` still names the open file ``fd``."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _is_free(path):
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _remove_if_dead(path, fd):
    # Our own shared lock becomes exclusive only if nobody else holds it.
    if _lock(fd, fcntl.LOCK_EX) and _same(fd, os.path.join(path, "alive")):
        _discard(path)


def _discard(path):
    """Rename first: a process that opens the old path meanwhile sees that it is gone."""
    trash = os.path.join(os.path.dirname(path), "trash-" + secrets.token_hex(8))
    try:
        os.rename(path, trash)
    except OSError:
        return
    shutil.rmtree(trash, ignore_errors=True)


def _sweep(base, keep):
    """Remove what jobs left that were killed while joining."""
    for name in os.listdir(base)[:256]:
        path = os.path.join(base, name)
        if name == keep or not os.path.isdir(path):
            continue
        try:
            fd = os.open(os.path.join(path, "alive"), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            _remove_if_old(path)
            continue
        _remove_if_dead(path, fd)
        os.close(fd)


def _remove_if_old(path):
    try:
        if time.time() - os.stat(path).st_mtime > _HALF_MADE_AGE:
            shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass                                      # somebody else removed it


def _read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _unlink(path):
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
