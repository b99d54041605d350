"""The store that rank 0 serves over TCP, without a thread.

:class:`ServerStore` is rank 0's own store as well: while it waits in ``get`` or
``close`` it serves the others. Between its calls requests lie in the sockets. It ends
when every member has said good-bye.

Strangers on the port cost little: they get a nonce, have a few seconds and 88 bytes to
prove that they know the secret, and are bounded in number; the oldest goes first.
"""

import errno
import hmac
import secrets
import selectors
import socket
import time

from ..errors import ClosedError, JoinError
from . import frames, trouble
from .address import format_address, resolve
from .deadline import Deadline
from .limits import MAX_KEYS, MAX_TOTAL, check_key, check_value

STRANGER_SECONDS = 5.0
MAX_STRANGERS = 256


class ServerStore:
    """Serves on every address of ``host`` (None: all of this machine's) and ``port``
    (0: any free one; ``port`` then says which). JoinError if the port is taken."""

    trusted = False        # seen by the network, so the secret itself never goes through

    def __init__(self, secret, group, host, port, deadline):
        self._secret, self._group = secret, group
        self._values, self._total = {}, 0
        self._reason = None
        self._waiting = []                        # (member, number, key, end)
        self._strangers, self._members = {}, {}   # socket -> peer
        self._selector = selectors.DefaultSelector()
        self._listeners = []
        self.host, self.port = host, port
        try:
            self._listen(host, port, deadline)
        except BaseException:
            self._shut()
            raise

    @property
    def where(self):
        return f"the store at {format_address(self.host or '*', self.port)}"

    # --- the store, for rank 0 itself

    def set(self, key, value):
        self._store(check_key(key), check_value(key, value))
        self._serve(0.0)

    def claim(self, key, value):
        present = self._values.get(check_key(key))
        if present is None:
            self.set(key, value)
            return value
        return present

    def get(self, key, timeout):
        name, deadline = check_key(key), Deadline(timeout)
        self._ensure_open()
        while True:
            self._serve(0.0)
            if name in self._values:
                return self._values[name]
            if self._reason is not None:
                raise trouble.Aborted(self._reason)
            if deadline.expired():
                raise trouble.late(key, deadline, self.where)
            self._serve(deadline.slice(1.0))

    def wait(self, keys, timeout):
        deadline = Deadline(timeout)
        for key in keys:
            self.get(key, None if deadline.timeout is None else deadline.remaining())

    def abort(self, reason):
        if self._reason is None:
            self._reason = reason
            for member, number, _, _ in self._waiting:
                member.answer(frames.ABORTED, number, reason)
            self._waiting.clear()

    def close(self, timeout=0.0, linger=0.0):
        """Serve for ``linger`` seconds, then until every member has left, but at most
        ``timeout`` seconds."""
        if self._selector is None:
            return
        linger, deadline = Deadline(linger), Deadline(timeout)
        try:
            while not linger.expired():
                self._serve(linger.slice(0.5))
            while self._members and not deadline.expired():
                self._serve(deadline.slice(0.5))
        finally:
            self._shut()

    # --- inside

    def _ensure_open(self):
        if self._selector is None:
            raise ClosedError("the store was closed")

    def _shut(self):
        for sock in [*self._listeners, *self._strangers, *self._members]:
            sock.close()
        self._strangers.clear()
        self._members.clear()
        self._selector.close()
        self._selector = None

    def _listen(self, host, port, deadline):
        if host is None:
            addresses = [(socket.AF_INET, ("0.0.0.0", port)),
                         (socket.AF_INET6, ("::", port, 0, 0))]
        else:
            addresses = resolve(host, port, deadline)
        problems = []
        for family, address in addresses:
            try:
                listener = self._bind(family, (address[0], self.port, *address[2:]))
            except OSError as error:
                problems.append((format_address(address[0], self.port), error))
                continue
            self.port = listener.getsockname()[1]
            self._listeners.append(listener)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
        taken = [where for where, error in problems if error.errno == errno.EADDRINUSE]
        if taken or not self._listeners:
            where, error = (taken[0], "another program, or another rank 0, "
                            "has this port") if taken \
                else (problems[0][0], problems[0][1].strerror)
            raise JoinError(f"rank 0 cannot serve the store at {where}: {error}; choose a "
                            "free port and an address of rank 0's host in ROCECOMM_STORE")

    @staticmethod
    def _bind(family, address):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(1024)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        return listener

    def _serve(self, timeout):
        """One turn: wait up to ``timeout`` seconds for traffic, handle what is there."""
        self._ensure_open()
        now = time.monotonic()
        ends = [peer.end for peer in self._strangers.values()]
        ends += [end for _, _, _, end in self._waiting]
        timeout = max(0.0, min([timeout, *(end - now for end in ends)]))
        for key, events in self._selector.select(timeout):
            if key.fileobj.fileno() >= 0:         # not closed by an earlier handler
                key.data(key.fileobj, events)
        now = time.monotonic()
        for sock, peer in list(self._strangers.items()):
            if peer.end <= now:
                self._drop(sock)
        for entry in [entry for entry in self._waiting if entry[3] <= now]:
            self._waiting.remove(entry)
            entry[0].answer(frames.LATE, entry[1])

    def _accept(self, listener, _events):
        try:
            sock, _ = listener.accept()
        except OSError:
            return                                # it went away again, or no fd is left
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = _Peer(sock, self._selector, self._event)
        self._strangers[sock] = peer
        peer.send(frames.MAGIC + peer.nonce)

    def _event(self, sock, events):
        peer = self._strangers.get(sock) or self._members.get(sock)
        try:
            if events & selectors.EVENT_WRITE:
                peer.flush()
            if events & selectors.EVENT_READ:
                self._read(peer, sock)
        except (OSError, frames.BadFrame):
            self._drop(sock)

    def _read(self, peer, sock):
        data = sock.recv(1 << 16 if peer.channel else frames.HELLO.size - len(peer.hello))
        if not data:
            raise ConnectionResetError
        if peer.channel is None:
            peer.hello += data
            if len(peer.hello) < min(frames.HELLO.size, len(frames.MAGIC)):
                return
            if not peer.hello.startswith(frames.MAGIC):
                raise frames.BadFrame("not rocecomm")
            if len(peer.hello) == frames.HELLO.size:
                self._admit(peer, sock)
            return
        for payload in peer.channel.feed(data):
            self._handle(peer, *frames.unpack_request(payload))
            if sock not in self._members:
                return

    def _admit(self, peer, sock):
        _, group, rank, nonce_c, given = frames.HELLO.unpack(bytes(peer.hello))
        wanted = frames.proof(self._secret, b"client", peer.nonce, nonce_c, group, rank)
        if not hmac.compare_digest(given, wanted):
            peer.send(bytes([frames.DENIED]) + bytes(32))
            raise frames.BadFrame("wrong secret")
        status = frames.OK if group == self._group else frames.OTHER_GROUP
        answer = frames.proof(self._secret, b"server", peer.nonce, nonce_c, group, rank)
        peer.send(bytes([status]) + answer)
        if status != frames.OK:
            raise frames.BadFrame("another group")
        peer.channel = frames.Channel(self._secret, peer.nonce, nonce_c, server=True)
        peer.rank = rank
        self._members[sock] = self._strangers.pop(sock)

    def _handle(self, peer, operation, number, key, value, timeout):
        if operation == frames.BYE:
            peer.left = True
            self._drop(peer.sock)
        elif operation == frames.ABORT:
            self.abort(value)
            peer.answer(frames.DONE, number)
        elif operation == frames.GET and key not in self._values:
            if self._reason is not None:
                peer.answer(frames.ABORTED, number, self._reason)
            else:
                self._waiting.append((peer, number, key, time.monotonic() + timeout))
        elif operation == frames.GET or (operation == frames.CLAIM
                                         and key in self._values):
            peer.answer(frames.DONE, number, self._values[key])
        else:
            try:
                self._store(key, value)
            except MemoryError as error:
                peer.answer(frames.REFUSED, number, str(error).encode())
            else:
                peer.answer(frames.DONE, number, value if operation == frames.CLAIM else b"")

    def _store(self, key, value):
        self._ensure_open()
        total = self._total + len(key) + len(value)
        if total > MAX_TOTAL or len(self._values) >= MAX_KEYS:
            raise MemoryError(f"the store is full: {len(self._values)} keys, "
                              f"{self._total} bytes")
        self._values[key], self._total = value, total
        for entry in [entry for entry in self._waiting if entry[2] == key]:
            self._waiting.remove(entry)
            entry[0].answer(frames.DONE, entry[1], value)

    def _drop(self, sock):
        self._selector.unregister(sock)
        peer = self._strangers.pop(sock, None) or self._members.pop(sock)
        sock.close()
        self._waiting = [entry for entry in self._waiting if entry[0] is not peer]
        if peer.channel is not None and not peer.left:
            self.abort(trouble.died(peer.rank))


class _Peer:
    """One connection: its buffers and what is known of it."""

    def __init__(self, sock, selector, handler):
        self.sock, self._selector, self._handler = sock, selector, handler
        self.nonce = secrets.token_bytes(frames.NONCE)
        self.end = time.monotonic() + STRANGER_SECONDS
        self.hello = bytearray()
        self.channel = self.rank = None
        self.left = False
        self._out = bytearray()
        selector.register(sock, selectors.EVENT_READ, handler)

    def answer(self, status, number, value=b""):
        try:
            self.send(self.channel.pack(frames.pack_answer(status, number, value)))
        except OSError:
            pass                                  # reading finds the connection closed

    def send(self, data):
        self._out += data
        self.flush()

    def flush(self):
        try:
            while self._out:
                del self._out[:self.sock.send(self._out)]
        except BlockingIOError:
            pass
        want = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        self._selector.modify(self.sock, want, self._handler)
