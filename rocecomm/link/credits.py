"""How many receive slots a rank has, and who may fill them at first (pure arithmetic).

Every peer has a small reserve, so nobody is ever locked out; the pool beyond the reserves is
lent to whoever sends (lend.pyx). Memory is therefore the pool and a little per peer.
"""

import dataclasses

from ..errors import ConfigError

__all__ = ["MAX_GRANT", "SPARE_SLOTS", "Plan", "eager_limit", "plan_credits"]

#: Slots beyond the grants of a peer: CREDIT and GOODBYE, which need no credit (see peer.pyx).
SPARE_SLOTS = 6
#: More payload slots than these make no sender faster.
MAX_GRANT = 64
#: The pool needs no more memory than this however large its slots are.
POOL_BYTES = 6 << 20


def eager_limit(size, max_region):
    """The largest message that goes through a slot when nothing is configured. Two copies are
    faster than the handshake up to 64 KiB and more, but the slots' memory grows with the ranks
    and must fit into one region of the device."""
    limit = 64 << 10 if size <= 4 else 32 << 10 if size <= 8 else 8 << 10
    while limit > 8 << 10 and 256 * limit > max_region:
        limit //= 2
    return limit


@dataclasses.dataclass(frozen=True)
class Plan:
    """Slots of one rank: for each peer, and to be lent."""

    reserve: int        # payload slots of each peer that are never lent to others
    ctrl: int           # slots of each peer for short messages
    pool: int           # payload slots beyond the reserves
    grant: int          # payload slots that each peer may fill at first
    most: int           # and at most

    def slots(self, others):
        """Receive slots in all."""
        return others * (self.reserve + self.ctrl + SPARE_SLOTS) + self.pool


def plan_credits(config, slot_size, others, max_slots, device):
    """The :class:`Plan` for ``others`` peers within ``max_slots`` receives of the device and
    ``config.unexpected_limit`` bytes of unread payloads; ConfigError if that is too little."""
    if others == 0:
        return Plan(1, 1, 0, 1, 1)
    reserve, ctrl = config.peer_credits, 16 if others <= 8 else 8
    room = min(max_slots - 2 * SPARE_SLOTS, others * (MAX_GRANT + ctrl + SPARE_SLOTS))
    payloads = max(2 * others, config.unexpected_limit // slot_size)
    while others * (reserve + ctrl + SPARE_SLOTS) > room or others * reserve > payloads:
        if reserve <= 2 and ctrl <= 4:
            raise ConfigError(
                f"{device} holds {max_slots} shared receives, too few for {others} peers; use fewer "
                "ranks", name="peer_credits", value=config.peer_credits)
        reserve, ctrl = max(2, reserve // 2), max(4, ctrl // 2)
    pool = min(config.recv_pool, max(16, POOL_BYTES // slot_size),
               room - others * (reserve + ctrl + SPARE_SLOTS), payloads - others * reserve,
               others * max(0, MAX_GRANT - reserve))
    # with many peers half of the pool waits for those who turn out to need it
    lent = (pool if others <= 8 else pool // 2) // others
    return Plan(reserve, ctrl, pool, reserve + lent, max(MAX_GRANT, reserve))
