"""Ring all-reduce: every rank sends and receives ``2 (world - 1) / world`` of the array.

Two phases of ``world - 1`` steps. In the first, partial sums travel round the ring, each
rank adding its own share; then the complete chunks travel round once more. A segment is
sent on as soon as it was reduced, while the next ones are on their way, so transfer and
arithmetic overlap; in the second phase segments go straight to their place.

Why nothing is overwritten too early: the final value of a segment reaches a rank only
after every rank, its right neighbour included, has taken that rank's own partial sum of
it. The source is only read.

The order of the additions depends on the position of a chunk alone, so all ranks get the
same bits, in every run.
"""

from . import plan
from .operation import ALIGN

#: Receives that are posted ahead of the one that is waited for, and scratch pieces.
DEPTH = 4


def all_reduce(operation, segment_bytes):
    """Run it; the result is in ``operation.target`` on return."""
    rank, world = operation.engine.rank, operation.engine.size
    length = max(1, segment_bytes // operation.itemsize)
    chunks = [plan.chunk(i, operation.count, world) for i in range(world)]
    cut = [plan.segments(start, stop, length) for start, stop in chunks]
    right, left = (rank + 1) % world, (rank - 1) % world
    sends = []

    def forward(step, index):
        # Messages of one step and pair match in order, so segments need no number.
        start, stop = index
        buffer = operation.source if step == 0 else operation.target
        sends.append(operation.send(buffer, right, step, start, stop))

    for index in cut[rank]:
        forward(0, index)
    _reduce_scatter(operation, plan.ring_reduce_scatter(rank, world), cut, left, length,
                    forward)
    _all_gather(operation, plan.ring_all_gather(rank, world), cut, left, world - 1, forward)
    operation.wait(sends)


def _reduce_scatter(operation, steps, cut, left, length, forward):
    work = [(step, index) for step, (_, received) in enumerate(steps)
            for index in cut[received]]
    item = operation.itemsize
    longest = max(stop - start for _, (start, stop) in work)
    slot = -(-longest * item // ALIGN) * ALIGN
    depth = min(DEPTH, len(work))
    scratch = operation.take_scratch(slot * depth)
    source, target = operation.source.address, operation.target.address

    def post(number):
        step, (start, stop) = work[number]
        return operation.recv_bytes(operation.scratch, left, step, number % depth * slot,
                                    (stop - start) * item)

    posted = [post(number) for number in range(depth)]
    for number, (step, (start, stop)) in enumerate(work):
        operation.wait([posted[number % depth]])
        operation.reduce(target + start * item, source + start * item,
                         scratch + number % depth * slot, stop - start)
        forward(step + 1, (start, stop))
        if number + depth < len(work):
            posted[number % depth] = post(number + depth)


def _all_gather(operation, steps, cut, left, first, forward):
    work = [(first + step, index) for step, (_, received) in enumerate(steps)
            for index in cut[received]]

    def post(number):
        step, (start, stop) = work[number]
        return operation.recv(operation.target, left, step, start, stop)

    depth = min(DEPTH, len(work))
    posted = [post(number) for number in range(depth)]
    last = first + len(steps) - 1
    for number, (step, index) in enumerate(work):
        operation.wait([posted[number % depth]])
        if step < last:
            forward(step + 1, index)
        if number + depth < len(work):
            posted[number % depth] = post(number + depth)
