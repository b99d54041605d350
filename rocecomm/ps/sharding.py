"""Which server holds which key, and who is what. Pure."""

import zlib

from ..errors import brief


def server_of(key, servers):
    """The rank among ``servers`` that holds ``key``: the same on every rank, in every run."""
    kind = b"i" if isinstance(key, int) else b"s"
    return servers[zlib.crc32(kind + str(key).encode()) % len(servers)]


def roles(size, servers=(0,), workers=None):
    """``(servers, workers)`` as tuples of ranks. By default everyone who does not serve
    works, and in a world of servers only everyone does both."""
    servers = tuple(servers)
    if workers is None:
        workers = [rank for rank in range(size) if rank not in servers] or range(size)
    workers = tuple(sorted(workers))
    for name, ranks in (("servers", servers), ("workers", workers)):
        if not ranks or len(set(ranks)) != len(ranks) \
                or not all(isinstance(r, int) and 0 <= r < size for r in ranks):
            raise ValueError(f"{name} must be different ranks of a world of {size}, at least "
                             f"one, not {brief(ranks)}")
    return servers, workers
