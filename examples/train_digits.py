"""Train a small network on real images, data-parallel, over RDMA.

    rocecomm run -n 4 examples/train_digits.py
    rocecomm run -n 4 examples/train_digits.py --mode ps
    torchrun --nproc-per-node 4 examples/train_digits.py
    mpirun -n 4 python examples/train_digits.py
    python examples/train_digits.py

The images are scikit-learn's handwritten digits (1797 of 8 x 8 pixels), the network is
64-256-10 in numpy. Every mini-batch is divided among the workers.

--mode allreduce: every rank is a worker; the gradients are summed with a ring all-reduce
    and every rank takes the same step.
--mode ps: rank 0 is a parameter server that takes the step; the others push gradients and
    pull weights. (A world of one runs both in one process.)

At the end the same training runs in a single process, and the weights must agree to within
rounding. Exit status 1 if they do not, or if the accuracy is below 0.95.
"""

import argparse
import sys
import threading
import time

import numpy as np
from sklearn.datasets import load_digits

import rocecomm
from rocecomm import ps

HIDDEN, CLASSES = 256, 10
BATCH, LEARNING_RATE, MOMENTUM = 48, 0.1, 0.9
SEED = 7
GOAL, TOLERANCE = 0.95, 1e-9


def load():
    """Training images and labels, test images and labels; a fixed fifth is for testing."""
    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(len(digits.target))
    images, labels = digits.data[order] / 16.0, digits.target[order]
    split = len(order) // 5
    return images[split:], labels[split:], images[:split], labels[:split]


class Network:
    """All weights in one flat vector, so that one message carries a whole gradient."""

    def __init__(self, inputs):
        shapes = [(inputs, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
        self.weights, self.parts = self._flat(shapes)
        self.gradient, self.slopes = self._flat(shapes)
        random = np.random.default_rng(SEED)
        for part in self.parts:
            if part.ndim == 2:
                part[:] = random.standard_normal(part.shape) * np.sqrt(2 / part.shape[0])

    @staticmethod
    def _flat(shapes):
        flat = np.zeros(sum(int(np.prod(shape)) for shape in shapes))
        parts, at = [], 0
        for shape in shapes:
            size = int(np.prod(shape))
            parts.append(flat[at:at + size].reshape(shape))
            at += size
        return flat, parts

    def forward(self, images):
        w1, b1, w2, b2 = self.parts
        hidden = np.maximum(images @ w1 + b1, 0.0)
        scores = hidden @ w2 + b2
        scores -= scores.max(axis=1, keepdims=True)
        exp = np.exp(scores)
        return hidden, exp / exp.sum(axis=1, keepdims=True)

    def backward(self, images, labels, batch):
        """Fill ``gradient`` with the share that these images have in a batch's gradient."""
        hidden, error = self.forward(images)
        error[np.arange(len(labels)), labels] -= 1.0
        error /= batch
        d1, db1, d2, db2 = self.slopes
        np.matmul(hidden.T, error, out=d2)
        np.sum(error, axis=0, out=db2)
        back = (error @ self.parts[2].T) * (hidden > 0)
        np.matmul(images.T, back, out=d1)
        np.sum(back, axis=0, out=db1)

    def loss(self, images, labels):
        chosen = self.forward(images)[1][np.arange(len(labels)), labels]
        return float(-np.log(np.maximum(chosen, 1e-300)).mean())

    def accuracy(self, images, labels):
        return float((self.forward(images)[1].argmax(axis=1) == labels).mean())


class Local:
    """A step in this process alone, or after the gradients were summed."""

    def __init__(self, network):
        self.network = network
        self.velocity = np.zeros_like(network.weights)

    def step(self):
        self.velocity *= MOMENTUM
        self.velocity += self.network.gradient
        self.network.weights -= LEARNING_RATE * self.velocity


class AllReduce(Local):
    """Sum the gradients over all ranks, then every rank takes the same step."""

    def __init__(self, network, comm):
        super().__init__(network)
        self.comm, self.seconds = comm, 0.0

    def step(self):
        start = time.perf_counter()
        self.comm.all_reduce(self.network.gradient)
        self.seconds += time.perf_counter() - start
        super().step()


class PushPull:
    """Push the gradient to the server, which takes the step, and pull the new weights."""

    def __init__(self, network, worker):
        self.network, self.worker, self.seconds = network, worker, 0.0
        worker.init("weights", network.weights)

    def step(self):
        start = time.perf_counter()
        self.worker.push("weights", self.network.gradient)
        self.worker.pull("weights", self.network.weights)
        self.seconds += time.perf_counter() - start


def train(network, stepper, data, epochs, share, shares, report):
    """Train on every ``shares``-th image of each batch, beginning with number ``share``."""
    images, labels, test_images, test_labels = data
    for epoch in range(1, epochs + 1):
        order = np.random.default_rng((SEED, epoch)).permutation(len(labels))
        for at in range(0, len(order), BATCH):
            batch = order[at:at + BATCH]
            mine = batch[share::shares]
            network.backward(images[mine], labels[mine], len(batch))
            stepper.step()
        if report:
            print(f"epoch {epoch:2}  loss {network.loss(images, labels):.4f}  "
                  f"test accuracy {network.accuracy(test_images, test_labels):.4f}", flush=True)


def serve(comm, into):
    optimizer = ps.SGD(LEARNING_RATE, momentum=MOMENTUM)
    into[:] = ps.Server(comm, optimizer=optimizer).run()["weights"]


def run(comm, mode, epochs):
    """Train as this rank's role says; returns (network, seconds communicating, reporter)."""
    data = load()
    network = Network(data[0].shape[1])
    servers = 1 if mode == "ps" and comm.size > 1 else 0
    reporter = comm.rank == servers
    if reporter:
        print(f"{comm.size} rank{'s' * (comm.size > 1)} on {comm.device}, mode {mode}: "
              f"{len(data[1])} training and {len(data[3])} test images, "
              f"{network.weights.size} weights", flush=True)
    share, shares = comm.rank - servers, comm.size - servers
    if mode == "allreduce":
        stepper = AllReduce(network, comm)
        train(network, stepper, data, epochs, share, shares, reporter)
    elif comm.rank < servers:
        serve(comm, network.weights)
        return network, data, 0.0, False
    else:
        thread = None
        if comm.size == 1:
            thread = threading.Thread(target=serve, args=(comm, np.empty_like(network.weights)))
            thread.start()
        with ps.Worker(comm) as worker:
            stepper = PushPull(network, worker)
            train(network, stepper, data, epochs, share, shares, reporter)
        if thread is not None:
            thread.join()
    return network, data, stepper.seconds, reporter


def check(comm, network, data, epochs, reporter):
    """Whether all ranks have the same weights, and those of a single process."""
    mean = comm.all_reduce(network.weights.copy()) / comm.size
    spread = float(np.abs(mean - network.weights).max())
    if spread > TOLERANCE:
        print(f"rank {comm.rank}: weights differ between ranks by {spread:.1e}")
        return False
    if not reporter:
        return True
    alone = Network(data[0].shape[1])
    train(alone, Local(alone), data, epochs, 0, 1, False)
    difference = float(np.abs(alone.weights - network.weights).max())
    accuracy = network.accuracy(*data[2:])
    print(f"final test accuracy {accuracy:.4f}, in a single process "
          f"{alone.accuracy(*data[2:]):.4f}; weights differ by at most {difference:.1e}",
          flush=True)
    if difference > TOLERANCE:
        print(f"FAILED: the weights differ by more than {TOLERANCE:.0e}")
    if accuracy < GOAL:
        print(f"FAILED: the accuracy is below {GOAL}")
    return difference <= TOLERANCE and accuracy >= GOAL


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits over RDMA.")
    parser.add_argument("--mode", choices=("allreduce", "ps"), default="allreduce")
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    with rocecomm.init() as comm:
        start = time.perf_counter()
        network, data, communicating, reporter = run(comm, options.mode, options.epochs)
        total = time.perf_counter() - start
        moved = comm.counters
        good = check(comm, network, data, options.epochs, reporter)
        if reporter:
            print(f"device {comm.device}; rank {comm.rank} sent {moved['bytes_sent'] / 1e6:.1f} MB "
                  f"and received {moved['bytes_received'] / 1e6:.1f} MB; {communicating:.2f} s of "
                  f"{total:.2f} s in communication", flush=True)
        comm.barrier()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
