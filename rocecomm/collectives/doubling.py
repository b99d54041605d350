"""Recursive doubling all-reduce: ``log2(world)`` steps, each with the whole array.

The fewest steps there can be, so it is the choice for small arrays. Both partners of an
exchange add the same two operands, the lower rank's first, so all ranks get the same bits.
"""

from . import plan


def all_reduce(operation):
    """Run it; the result is in ``operation.target`` on return."""
    rank = operation.engine.rank
    count, item = operation.count, operation.itemsize
    scratch = operation.take_scratch(max(1, count * item))
    target = operation.target.address
    current = operation.source                # until the first reduction
    pending = []
    for kind, peer, number in plan.doubling(rank, operation.engine.size):
        if kind == plan.UNFOLD_RECV:
            operation.wait([operation.recv(operation.target, peer, number, 0, count)])
            continue
        receive = None
        if kind in (plan.EXCHANGE, plan.FOLD_RECV):
            receive = operation.recv(operation.scratch, peer, number, 0, count)
        if kind != plan.FOLD_RECV:
            pending.append(operation.send(current, peer, number, 0, count))
        if receive is None:
            continue
        # The sum overwrites what is being sent, so that must have gone.
        operation.wait([receive, *pending])
        pending.clear()
        own, theirs = current.address, scratch
        first, second = (own, theirs) if rank < peer else (theirs, own)
        operation.reduce(target, first, second, count)
        current = operation.target
    operation.wait(pending)

