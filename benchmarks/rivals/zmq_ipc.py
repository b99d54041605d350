"""pyzmq: a pair of PAIR sockets over ipc (a Unix socket)."""

from .base import Rival, in_folder


class Pyzmq(Rival):
    """The array is sent without a copy by pyzmq from 64 KiB on (its own default threshold), and received
    straight into the array where pyzmq has recv_into."""

    name = "pyzmq"
    module = "zmq"
    install = "tools/setup.sh bench"

    def __init__(self):
        super().__init__()
        import zmq

        self.socket = zmq.Context().socket(zmq.PAIR)
        self.socket.set_hwm(0)
        self.socket.linger = 0
        address = "ipc://" + in_folder("zmq")
        if self.me == 0:
            self.socket.bind(address)
        else:
            self.socket.connect(address)
        self.into = hasattr(self.socket, "recv_into")

    def send(self, buf):
        self.socket.send(buf, copy=buf.nbytes < 65536)

    def recv(self, buf):
        if self.into:
            self.socket.recv_into(buf)
        else:
            buf[:] = memoryview(self.socket.recv(copy=False))

    def isend(self, buf):
        self.send(buf)

    def irecv(self, buf):
        return buf

    def wait(self, requests):
        for buf in requests:
            if buf is not None:
                self.recv(buf)

    def close(self):
        self.socket.close()
