"""The TCP store against whoever else finds its port."""

import os
import secrets
import socket
import struct
import threading
import time

import pytest

from rocecomm.bootstrap import frames, server
from rocecomm.bootstrap.client import ClientStore
from rocecomm.bootstrap.deadline import Deadline
from rocecomm.bootstrap.trouble import Aborted
from rocecomm.errors import JoinError

KEY, GROUP = secrets.token_bytes(32), secrets.token_bytes(16)


@pytest.fixture
def store():
    store = server.ServerStore(KEY, GROUP, "127.0.0.1", 0, Deadline(5))
    yield store
    store.close()


def serve(store, seconds=0.1):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        store._serve(0.01)


def connect(store):
    return socket.create_connection(("127.0.0.1", store.port), timeout=5)


class Client(threading.Thread):
    """A member in a thread: runs ``work(store)``, keeps its result or error."""

    def __init__(self, store, work, rank=1, key=KEY, group=GROUP):
        super().__init__(daemon=True)
        self.args = (key, group, [("127.0.0.1", store.port)], rank, Deadline(5))
        self.work, self.result, self.error = work, None, None
        self.start()

    def run(self):
        try:
            client = ClientStore(*self.args)
            self.result = self.work(client)
            client.close()
        except Exception as error:
            self.error = error


def finish(store, client):
    while client.is_alive():
        store._serve(0.02)
    serve(store, 0.05)


def exchange(client):
    client.set("a", b"from the client")
    return client.get("b", 5)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "zeros": bytes(4096),
    "random": os.urandom(100_000), "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "magic, then junk": frames.MAGIC + bytes(200),
    "huge length": struct.pack("<I", 0xFFFFFFFF) * 40,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_dropped_and_members_are_served(store, what):
    with connect(store) as stranger:
        stranger.sendall(GARBAGE[what])
        store.set("b", b"from rank 0")
        client = Client(store, exchange)
        finish(store, client)
        assert client.error is None and client.result == b"from rank 0"
        assert store.get("a", 0) == b"from the client"
        stranger.settimeout(2)
        told = b""
        try:
            while piece := stranger.recv(4096):
                told += piece
        except ConnectionResetError:
            pass
    # A stranger learns a nonce, and at most that it was denied.
    assert len(told) <= frames.GREETING + frames.VERDICT
    assert not store._members and not store._strangers


def test_silent_strangers_are_dropped_in_time_and_bounded_in_number(store, monkeypatch):
    monkeypatch.setattr(server, "STRANGER_SECONDS", 0.3)
    monkeypatch.setattr(server, "MAX_STRANGERS", 20)
    silent = [connect(store) for _ in range(50)]
    serve(store, 0.2)
    assert len(store._strangers) <= 20
    store.set("b", b"still here")
    client = Client(store, exchange)
    finish(store, client)
    assert client.result == b"still here"
    serve(store, 0.4)
    assert not store._strangers
    for sock in silent:
        sock.close()


def test_connect_and_leave(store):
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        connect(store).close()
        serve(store, 0.0005)
    serve(store, 0.1)
    assert len(os.listdir("/proc/self/fd")) <= fds


def test_the_port_can_be_used_again_at_once():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for _ in range(3):
        store = server.ServerStore(KEY, GROUP, "127.0.0.1", port, Deadline(5))
        closed = threading.Event()
        client = Client(store, lambda c, closed=closed: closed.wait(20))
        end = time.monotonic() + 10
        while not store._members and time.monotonic() < end:
            serve(store, 0.02)
        assert len(store._members) == 1
        store.close()                     # rank 0's side closes first: TIME_WAIT is here
        closed.set()
        client.join(5)


def test_wrong_secret_is_told_to_the_one_who_has_it(store):
    client = Client(store, exchange, key=secrets.token_bytes(32))
    finish(store, client)
    assert isinstance(client.error, JoinError) and "secret" in str(client.error)
    assert not store._members and store._reason is None


def test_client_does_not_trust_a_server_that_cannot_prove_the_secret():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)

        class Fake:
            port = listener.getsockname()[1]

        client = Client(Fake, exchange)
        sock, _ = listener.accept()
        with sock:
            sock.sendall(frames.MAGIC + bytes(16))
            hello = sock.recv(1000)
            sock.sendall(bytes([frames.OK]) + hello[-32:])      # its own proof, reflected
            client.join(5)
    assert isinstance(client.error, JoinError) and "secret" in str(client.error)


def test_another_group_waits_for_its_turn(store):
    client = Client(store, exchange, group=secrets.token_bytes(16))
    client.args[-1]._end = time.monotonic() + 0.5
    finish(store, client)
    assert "another group" in str(client.error)


@pytest.mark.parametrize("change", ["bit", "repeat", "length"])
def test_frames_cannot_be_changed_or_repeated(change):
    keys = KEY, secrets.token_bytes(16), secrets.token_bytes(16)
    sender = frames.Channel(*keys, server=False)
    receiver = frames.Channel(*keys, server=True)
    first = sender.pack(b"hello")
    if change == "bit":
        spoiled = first[:-1] + bytes([first[-1] ^ 1])
    elif change == "repeat":
        assert list(receiver.feed(first)) == [b"hello"]
        spoiled = first
    else:
        spoiled = struct.pack("<I", frames.MAX_PAYLOAD + 1) + first[4:]
    with pytest.raises(frames.BadFrame):
        list(receiver.feed(spoiled))


def test_own_frames_do_not_count_as_the_peers():
    keys = KEY, bytes(16), bytes(16)
    sender = frames.Channel(*keys, server=False)
    with pytest.raises(frames.BadFrame):
        list(frames.Channel(*keys, server=False).feed(sender.pack(b"x")))


def test_frames_in_pieces():
    keys = KEY, bytes(16), bytes(16)
    sender = frames.Channel(*keys, server=False)
    receiver = frames.Channel(*keys, server=True)
    data = b"".join(sender.pack(bytes([i]) * i) for i in range(50))
    got = [p for i in range(0, len(data), 7) for p in receiver.feed(data[i:i + 7])]
    assert got == [bytes([i]) * i for i in range(50)]


@pytest.mark.parametrize("payload", [b"", b"\x09" + bytes(14), os.urandom(13),
                                     frames.pack_request(frames.SET, 1, b"k")[:-1]])
def test_malformed_requests_of_a_member_drop_it(store, payload):
    def misbehave(client):
        client._send(client._channel.pack(payload), Deadline(1))
        time.sleep(0.2)

    finish(store, Client(store, misbehave))
    assert not store._members
    with pytest.raises(Aborted):
        store.get("never", 1)


def test_bounds(store):
    for key in ("", "k" * 500):
        with pytest.raises(ValueError, match="bytes"):
            store.set(key, b"")
    with pytest.raises(ValueError, match="takes up to"):
        store.set("k", bytes((1 << 20) + 1))
    with pytest.raises(TypeError):
        store.set("k", "text")
    client = Client(store, lambda c: c.set("big", bytes(1 << 20)))
    finish(store, client)
    assert client.error is None and len(store.get("big", 0)) == 1 << 20


def test_a_full_store_says_so(store, monkeypatch):
    monkeypatch.setattr(server, "MAX_KEYS", 2)
    client = Client(store, lambda c: [c.set(f"k{i}", b"") for i in range(4)])
    finish(store, client)
    assert isinstance(client.error, JoinError) and "full" in str(client.error)


def test_late_answer_to_a_get_that_timed_out_is_not_taken_for_another(store):
    def work(client):
        try:
            client.get("slow", 0.05)
        except TimeoutError:
            pass
        return client.get("b", 5)

    client = Client(store, work)
    serve(store, 0.3)
    store.set("slow", b"wrong")
    store.set("b", b"right")
    finish(store, client)
    assert client.result == b"right"
