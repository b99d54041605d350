"""A worker/server training loop with a torch model, over point-to-point messages.

    rocecomm run -n 3 examples/gradient_sync.py
    torchrun --nproc-per-node 3 examples/gradient_sync.py

Rank 0 is the server: it collects the workers' gradients, averages them, takes the optimizer's
step and sends the new parameters back. ``RoCEv2Communicator`` is all the communication
code: tensors go from the sender's memory straight into the receiver's.
"""

import json
import sys

import torch

import rocecomm

HEADER, TENSORS = 0, 1          # message tags
HEADER_LIMIT = 1 << 16


class RoCEv2Communicator:
    """Sends and receives lists of gradients between ranks.

    ``rank`` and ``world_size``: None to take the launcher's.
    """

    def __init__(self, rank=None, world_size=None, **options):
        self.comm = rocecomm.init(rank, world_size, **options)
        self.rank, self.world_size = self.comm.rank, self.comm.size
        self._received = {}     # (source, description) -> tensors, used again each time

    def send_gradients(self, gradients, dst_rank):
        """Send a list of tensors to ``dst_rank``; they may be changed again on return."""
        gradients = [gradient.detach().contiguous() for gradient in gradients]
        description = [[str(g.dtype).removeprefix("torch."), list(g.shape)] for g in gradients]
        requests = [self.comm.isend(json.dumps(description).encode(), dst_rank, HEADER)]
        requests += [self.comm.isend(g, dst_rank, TENSORS) for g in gradients]
        self.comm.wait_all(requests)

    def recv_gradients(self, src_rank):
        """Receive a list of tensors from ``src_rank``. The next call with the same source
        and shapes fills the same tensors again."""
        header = bytearray(HEADER_LIMIT)
        text = bytes(header[:self.comm.recv(header, src_rank, HEADER)])
        if (src_rank, text) not in self._received:
            self._received[src_rank, text] = [
                torch.empty(shape, dtype=getattr(torch, dtype))
                for dtype, shape in json.loads(text)]
        tensors = self._received[src_rank, text]
        self.comm.wait_all([self.comm.irecv(tensor, src_rank, TENSORS) for tensor in tensors])
        return tensors

    def close(self):
        self.comm.close()


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def make_data(share, shares, samples=1200):
    """A regression problem; every worker has its own share of the samples."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 20, generator=generator)
    y = torch.sin(x[:, :3].sum(dim=1, keepdim=True)) + 0.1 * x[:, 3:4]
    return x[share::shares], y[share::shares]


def work(comm, steps):
    """A worker: gradients of its own data out, parameters in."""
    model, loss_of = make_model(), torch.nn.MSELoss()
    x, y = make_data(comm.rank - 1, comm.world_size - 1)
    for _ in range(steps):
        model.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        comm.send_gradients([p.grad for p in model.parameters()], 0)
        with torch.no_grad():
            for parameter, new in zip(model.parameters(), comm.recv_gradients(0), strict=True):
                parameter.copy_(new)
    return model


def serve(comm, steps):
    """The server: average the workers' gradients, take the step, send the parameters."""
    model, loss_of = make_model(), torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = make_data(0, 1)
    workers = range(1, comm.world_size)
    for step in range(1, steps + 1):
        received = [comm.recv_gradients(worker) for worker in workers]
        for parameter, *gradients in zip(model.parameters(), *received, strict=True):
            parameter.grad = torch.stack(gradients).mean(dim=0)
        optimizer.step()
        for worker in workers:
            comm.send_gradients(list(model.parameters()), worker)
        if step % max(1, steps // 10) == 0:
            with torch.no_grad():
                print(f"step {step:4}  loss {loss_of(model(x), y):.4f}", flush=True)
    return model


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    torch.set_num_threads(1)
    comm = RoCEv2Communicator()
    if comm.world_size < 2:
        comm.close()
        sys.exit("one server and at least one worker are needed: "
                 "rocecomm run -n 3 examples/gradient_sync.py")
    model = serve(comm, steps) if comm.rank == 0 else work(comm, steps)
    checksum = torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum()
    total = comm.comm.all_reduce(checksum.clone())
    if not torch.isclose(total, checksum * comm.world_size):
        sys.exit(f"rank {comm.rank}: parameters differ between ranks")
    if comm.rank == 0:
        moved = comm.comm.counters
        print(f"{comm.world_size - 1} workers and a server on {comm.comm.device} agree on all "
              f"parameters; the server sent {moved['bytes_sent'] / 1e6:.1f} MB and received "
              f"{moved['bytes_received'] / 1e6:.1f} MB")
    comm.close()


if __name__ == "__main__":
    main()
