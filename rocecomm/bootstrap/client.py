"""The store as the other ranks see it: one TCP connection to rank 0."""

import hmac
import secrets
import select
import socket
import time

from ..errors import ClosedError, JoinError
from . import frames, trouble
from .address import format_address, resolve
from .deadline import Deadline, backoff
from .limits import check_key, check_value

_ANSWER_GRACE = 5.0       # rank 0 serves only inside its own calls
_GET_SLICE = 20.0
_HANDSHAKE_SECONDS = 3.0


class _NotYet(Exception):
    """The store is not up: try again until the deadline."""


class ClientStore:
    """Connects to one of ``addresses`` (pairs of host and port) and authenticates.

    Tries again until the deadline, since rank 0 may come last. JoinError at the deadline,
    and at once if a name cannot be resolved or the secrets differ.
    """

    trusted = False

    def __init__(self, secret, group, addresses, rank, deadline):
        self._sock, self._number = None, 0
        self._reason = None
        self._names = ", ".join(format_address(*address) for address in addresses)
        problem = "nothing was tried"
        places = [place for host, port in addresses
                  for place in resolve(host, port, deadline)]
        for pause in backoff(0.01, 0.2):
            for family, address in places:
                try:
                    self._connect(secret, group, family, address, rank, deadline)
                    return
                except (_NotYet, OSError, EOFError) as error:
                    problem = error
            if deadline.expired():
                raise JoinError(
                    f"rank {rank} cannot reach rank 0's store at {self._names} within "
                    f"{deadline} ({problem}): check that rank 0 runs, that all ranks were "
                    "given the same address, and that no firewall is between them",
                    missing=[0])
            time.sleep(deadline.slice(pause))

    @property
    def where(self):
        return f"rank 0's store at {self._names}"

    def set(self, key, value):
        self._ask(frames.SET, check_key(key), check_value(key, value), 30.0)

    def claim(self, key, value):
        return self._ask(frames.CLAIM, check_key(key), check_value(key, value), 30.0)

    def get(self, key, timeout):
        name, deadline = check_key(key), Deadline(timeout)
        while True:
            value = self._ask(frames.GET, name, b"", deadline.slice(_GET_SLICE))
            if value is not None:
                return value
            if deadline.expired():
                raise trouble.late(key, deadline, self.where)

    def wait(self, keys, timeout):
        deadline = Deadline(timeout)
        for key in keys:
            self.get(key, None if deadline.timeout is None else deadline.remaining())

    def abort(self, reason):
        try:
            self._ask(frames.ABORT, b"", reason, 1.0)
        except (trouble.Aborted, JoinError, ClosedError):
            pass                                  # the others know already

    def close(self, timeout=0.0, linger=0.0):
        sock, self._sock = self._sock, None
        if sock is None:
            return
        try:
            sock.sendall(self._channel.pack(frames.pack_request(frames.BYE, 0)))
        except OSError:
            pass                                  # rank 0 has left before us
        sock.close()

    # --- inside

    def _connect(self, secret, group, family, address, rank, deadline):
        end = Deadline(max(0.05, deadline.slice(_HANDSHAKE_SECONDS)))
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(end.remaining() or 0.05)
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = _receive(sock, frames.GREETING, end)
            if not greeting.startswith(frames.MAGIC):
                raise _NotYet("what answers there is no store of this rocecomm version")
            nonce_s, nonce_c = greeting[len(frames.MAGIC):], secrets.token_bytes(
                frames.NONCE)
            sock.sendall(frames.HELLO.pack(
                frames.MAGIC, group, rank, nonce_c,
                frames.proof(secret, b"client", nonce_s, nonce_c, group, rank)))
            verdict = _receive(sock, frames.VERDICT, end)
            wanted = frames.proof(secret, b"server", nonce_s, nonce_c, group, rank)
            if verdict[0] == frames.DENIED or not hmac.compare_digest(verdict[1:], wanted):
                raise JoinError(
                    f"rank {rank} and the store at {format_address(*address[:2])} do not "
                    "have the same secret: give every rank the same ROCECOMM_SECRET, and "
                    "check that the port is not another job's")
            if verdict[0] != frames.OK:
                raise _NotYet("it serves another group of ranks of this job")
        except BaseException:
            sock.close()
            raise
        sock.setblocking(False)
        self._sock = sock
        self._channel = frames.Channel(secret, nonce_s, nonce_c, server=False)

    def _ask(self, operation, key, value, timeout):
        """The answer's value, or None if ``timeout`` passed at the server."""
        if self._sock is None:
            raise ClosedError("the store was closed")
        self._number += 1
        request = frames.pack_request(operation, self._number, key, value, timeout)
        end = Deadline(timeout + _ANSWER_GRACE) if operation == frames.GET \
            else Deadline(max(timeout, 1.0))
        try:
            self._send(self._channel.pack(request), end)
            while True:
                for payload in self._channel.feed(self._receive_some(end)):
                    status, number, content = frames.unpack_answer(payload)
                    if number != self._number:
                        continue                  # the late answer to a request given up
                    if status == frames.ABORTED:
                        raise trouble.Aborted(content)
                    if status == frames.REFUSED:
                        raise JoinError(f"{self.where} refused {key!r}: "
                                        f"{content.decode(errors='replace')}")
                    return None if status == frames.LATE else content
        except TimeoutError:
            if operation == frames.GET:
                return None
            raise JoinError(f"rank 0 did not answer within {end} in {self.where}: is it "
                            "stopped or overloaded?", missing=[0]) from None
        except (OSError, EOFError, frames.BadFrame) as error:
            self._sock.close()
            self._sock = None
            raise JoinError(f"the connection to {self.where} broke ({error}): rank 0 has "
                            "left or died, see its own output", missing=[0]) from None

    def _send(self, data, end):
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view):]
            except BlockingIOError:
                try:
                    self._poll(select.POLLOUT, end)
                except TimeoutError:              # half a request was sent: no way back
                    raise ConnectionError(f"it took no data within {end}") from None

    def _receive_some(self, end):
        while True:
            try:
                data = self._sock.recv(1 << 16)
            except BlockingIOError:
                self._poll(select.POLLIN, end)
                continue
            if not data:
                raise EOFError("closed by the other side")
            return data

    def _poll(self, event, end):
        poller = select.poll()
        poller.register(self._sock, event)
        if not poller.poll(end.slice(1.0) * 1000) and end.expired():
            raise TimeoutError


def _receive(sock, count, end):
    data = b""
    while len(data) < count:
        sock.settimeout(max(0.001, end.remaining()))
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError("closed by the other side")
        data += piece
    return data
