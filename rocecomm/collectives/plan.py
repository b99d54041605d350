"""Who sends what to whom, as arithmetic: every function is pure.

Words, used all over this package:

* ``count`` elements are reduced over ``world`` ranks.
* A **chunk** is a contiguous share of the array; there are ``world`` of them. Their sizes
  differ by at most one element, the larger ones come first, and some are empty when
  ``count < world``.
* A **segment** is the piece of a chunk that travels as one message. While one segment is
  reduced, the next is on its way. All segments but the last of a chunk are equally long.
* A **step** is one turn of an algorithm. In every step of a ring a rank sends one chunk to
  its right neighbour (rank + 1) and receives another from the left one.

Ranges are ``(start, stop)`` in elements.
"""

import functools

RING, DOUBLING = "ring", "doubling"


def choose(nbytes, count, world, algorithm="auto", doubling_limit=32 << 10):
    """The all-reduce algorithm: ``"ring"`` or ``"doubling"``.

    A function of what all ranks have in common only, so all choose the same, every time.
    """
    if algorithm != "auto":
        return algorithm
    return DOUBLING if nbytes <= doubling_limit or count < world else RING


# --- ring

def chunk(index, count, world):
    """Range of chunk ``index``."""
    size, extra = divmod(count, world)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def segments(start, stop, length):
    """The ranges of at most ``length`` elements that ``start..stop`` is cut into.

    An empty range is one empty segment: every step sends at least one message, so that
    ranks that disagree meet.
    """
    if start == stop:
        return [(start, stop)]
    return [(at, min(at + length, stop)) for at in range(start, stop, length)]


def ring_reduce_scatter(rank, world):
    """``(chunk sent, chunk received and reduced)`` for each of the ``world - 1`` steps.

    A chunk that was received is sent in the next step. At the end chunk
    ``(rank + 1) % world`` is complete on this rank.
    """
    return [((rank - step) % world, (rank - step - 1) % world)
            for step in range(world - 1)]


def ring_all_gather(rank, world):
    """``(chunk sent, chunk received)`` for each step, starting where
    :func:`ring_reduce_scatter` ended."""
    return [((rank + 1 - step) % world, (rank - step) % world)
            for step in range(world - 1)]


# --- recursive doubling

FOLD_SEND, FOLD_RECV, EXCHANGE, UNFOLD_SEND, UNFOLD_RECV = (
    "fold_send", "fold_recv", "exchange", "unfold_send", "unfold_recv")


@functools.lru_cache
def doubling(rank, world):
    """Steps ``(kind, peer, number)`` of a recursive doubling all-reduce.

    With ``p`` the largest power of two up to ``world``, the first ``2 * (world - p)`` ranks
    pair up: the even one gives its data to the odd one (fold) and gets the result back
    (unfold). The remaining ``p`` exchange with a partner at distance 1, 2, 4, ...
    The number of a step is the same on both sides.
    """
    power = 1 << (world.bit_length() - 1)
    extra = world - power
    unfold = power.bit_length()
    if rank < 2 * extra and rank % 2 == 0:
        return (FOLD_SEND, rank + 1, 0), (UNFOLD_RECV, rank + 1, unfold)
    place = rank // 2 if rank < 2 * extra else rank - extra
    steps = [(FOLD_RECV, rank - 1, 0)] if rank < 2 * extra else []
    for turn in range(unfold - 1):
        other = place ^ (1 << turn)
        peer = 2 * other + 1 if other < extra else other + extra
        steps.append((EXCHANGE, peer, turn + 1))
    if rank < 2 * extra:
        steps.append((UNFOLD_SEND, rank - 1, unfold))
    return tuple(steps)


# --- barrier

@functools.lru_cache
def dissemination(rank, world):
    """``(send to, receive from)`` for each of the ``ceil(log2(world))`` rounds: after round
    k a rank has heard, directly or not, from the 2^(k+1) - 1 ranks before it."""
    rounds, distance = [], 1
    while distance < world:
        rounds.append(((rank + distance) % world, (rank - distance) % world))
        distance *= 2
    return tuple(rounds)
