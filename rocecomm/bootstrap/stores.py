"""Which store, and the small stores that need no file of their own."""

import builtins
import json
import os
import secrets
import stat

from ..errors import ConfigError, JoinError, TimeoutError, brief
from . import trouble
from .address import announced_addresses, parse_address
from .carrier import TorchCarrier
from .client import ClientStore
from .deadline import Deadline
from .filestore import FileStore
from .frames import digest
from .limits import check_key, check_value
from .server import ServerStore

MIN_SECRET = 16


def open_store(config, launch, store, generation, attempt, deadline):
    """``(store, shared secret or None)`` for this launch. See the package's docstring."""
    key = f"{launch.key}#{generation}"
    if store is not None and not isinstance(store, str):
        return PlainStore(store), None
    address = store if store is not None else config.store
    if address is not None and address.startswith("file:"):
        return FileStore(key, launch.rank, address[len("file:"):]), None
    if launch.world_size == 1:
        return LocalStore(), None
    if address is not None:
        return _network_store(config, launch, address, key, deadline)
    if launch.torch_store is not None:
        return _torchrun_store(config, launch, attempt, deadline)
    if launch.one_host is False:
        raise ConfigError(
            f"this job of {launch.world_size} ranks spans several hosts, and "
            f"{launch.launcher} does not tell them how to meet: set ROCECOMM_STORE to "
            "host:port, an address of rank 0's host and a free port there, and "
            "ROCECOMM_SECRET to a random text of at least 16 characters, on all ranks",
            name="ROCECOMM_STORE")
    return FileStore(key, launch.rank), None


def _network_store(config, launch, address, key, deadline):
    secret = _secret(config)
    host, port = parse_address(address)
    group = digest(secret, b"job", key.encode() if config.job_id else key.rpartition(
        "#")[2].encode())[:16]
    if port:
        if launch.rank == 0:
            return ServerStore(secret, group, host, port, deadline), secret
        return ClientStore(secret, group, [(host, port)], launch.rank, deadline), secret
    # Port 0: rank 0 takes a free one and leaves word in this host's files.
    notice = FileStore(key + "-port", launch.rank)
    try:
        if launch.rank == 0:
            server = ServerStore(secret, group, host, 0, deadline)
            notice.set("port", str(server.port).encode())
            return _Held(server, notice), secret
        port = int(notice.get("port", None if deadline.timeout is None
                              else deadline.remaining()))
        return _Held(ClientStore(secret, group, [(host, port)], launch.rank, deadline),
                     notice), secret
    except TimeoutError:
        notice.close()
        raise JoinError(f"rank 0 announced no port for {address} on this host within "
                        f"{deadline}: start it, or choose a fixed port if the ranks run on "
                        "several hosts", missing=[0]) from None
    except trouble.Aborted as aborted:
        notice.close()
        raise trouble.unpack(aborted.args[0]) from None
    except BaseException:
        notice.close()
        raise


def _torchrun_store(config, launch, attempt, deadline):
    carrier = TorchCarrier(launch.torch_store, f"rocecomm/{launch.key}/{attempt}", deadline)
    if launch.rank == 0:
        secret = secrets.token_bytes(32)
        word = {"secret": secret.hex()}
        if launch.one_host:
            store = FileStore("torchrun-" + secret.hex(), 0)
        else:
            addresses = announced_addresses(config.socket_ifname)
            store = ServerStore(secret, _torch_group(secret), None, 0, deadline)
            word["addresses"] = [[address, store.port] for address in addresses]
        try:
            carrier.set("where", json.dumps(word).encode())
        except BaseException:
            store.close()
            raise
    else:
        word = json.loads(carrier.get("where", deadline))
        secret = bytes.fromhex(word["secret"])
        if launch.one_host:
            store = FileStore("torchrun-" + secret.hex(), launch.rank)
        else:
            store = ClientStore(secret, _torch_group(secret),
                                [tuple(address) for address in word["addresses"]],
                                launch.rank, deadline)
    return store, None if launch.one_host else secret


def _torch_group(secret):
    return digest(secret, b"job", b"torchrun")[:16]


def _secret(config):
    """The job's secret as a key; ConfigError if there is none or it is too easy."""
    text, name = config.secret, "ROCECOMM_SECRET"
    if text is None and config.secret_file is not None:
        name = "ROCECOMM_SECRET_FILE"
        try:
            with open(config.secret_file, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(4096).strip().decode(errors="surrogateescape")
        except OSError as error:
            raise ConfigError(f"ROCECOMM_SECRET_FILE {config.secret_file} cannot be read: "
                              f"{error.strerror}", name=name) from error
        if mode & 0o077:
            raise ConfigError(
                f"ROCECOMM_SECRET_FILE {config.secret_file} has mode "
                f"{stat.S_IMODE(mode):04o}, so others can read it: make it 0600", name=name)
    if text is None:
        raise ConfigError("ROCECOMM_STORE needs a secret that only the ranks of the job "
                          "know: set ROCECOMM_SECRET or ROCECOMM_SECRET_FILE to the same "
                          "random text on all of them", name=name)
    if len(text) < MIN_SECRET:
        raise ConfigError(f"{name} has {len(text)} characters, which can be guessed: use a "
                          f"random text of at least {MIN_SECRET}, such as the output of "
                          "'openssl rand -hex 32'", name=name)
    return digest(b"rocecomm secret", text.encode(errors="surrogateescape"))


class LocalStore:
    """A world of one."""

    trusted, where = True, "this process"

    def __init__(self):
        self._values = {}

    def set(self, key, value):
        check_key(key)
        self._values[key] = check_value(key, value)

    def claim(self, key, value):
        return self._values.setdefault(key, value)

    def get(self, key, timeout):
        # Nobody else could set it while we wait.
        if key not in self._values:
            raise trouble.late(key, Deadline(timeout), self.where)
        return self._values[key]

    def wait(self, keys, timeout):
        for key in keys:
            self.get(key, timeout)

    def abort(self, reason):
        pass

    def close(self, timeout=0.0, linger=0.0):
        self._values.clear()


class PlainStore:
    """A store of the user's own: any object with ``set(key, bytes)`` and
    ``get(key, timeout) -> bytes`` that raises TimeoutError. It is trusted."""

    trusted, where = True, "the given store"
    _SLICE = 0.2

    def __init__(self, store):
        for name in ("set", "get"):
            if not callable(getattr(store, name, None)):
                raise TypeError(f"store must be 'host:port', 'file:FOLDER' or an object with "
                                f"set and get, and {brief(store)} has no {name}")
        self._store = store

    def set(self, key, value):
        self._store.set(key, check_value(key, value))

    def claim(self, key, value):
        # Not atomic, which set and get alone cannot be: the later of two is caught by
        # whoever reads its own entry back.
        present = self._peek(key)
        if present is not None:
            return present
        self.set(key, value)
        return self._peek(key) or value

    def get(self, key, timeout):
        deadline = Deadline(timeout)
        while True:
            try:
                return bytes(self._store.get(key, deadline.slice(self._SLICE)))
            except builtins.TimeoutError:
                pass
            reason = self._peek("abort")
            if reason is not None:
                raise trouble.Aborted(reason)
            if deadline.expired():
                raise trouble.late(key, deadline, self.where)

    def wait(self, keys, timeout):
        deadline = Deadline(timeout)
        for key in keys:
            self.get(key, None if deadline.timeout is None else deadline.remaining())

    def abort(self, reason):
        self.set("abort", reason)

    def close(self, timeout=0.0, linger=0.0):
        pass                                      # it is the user's

    def _peek(self, key):
        try:
            return bytes(self._store.get(key, 0.0))
        except builtins.TimeoutError:
            return None


class _Held:
    """A store that keeps another one open as long as itself."""

    def __init__(self, store, other):
        self._store, self._other = store, other

    def __getattr__(self, name):
        return getattr(self._store, name)

    def close(self, timeout=0.0, linger=0.0):
        self._store.close(timeout, linger)
        self._other.close()
