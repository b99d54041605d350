"""torchrun across hosts: its store carries the address and secret of rank 0's own store."""

import threading

import pytest

from rocecomm.bootstrap import roster, stores
from rocecomm.bootstrap.carrier import TorchCarrier
from rocecomm.bootstrap.client import ClientStore
from rocecomm.bootstrap.deadline import Deadline
from rocecomm.bootstrap.environ import Launch
from rocecomm.bootstrap.server import ServerStore
from rocecomm.config import Config
from rocecomm.errors import JoinError


@pytest.fixture
def agent():
    """A store as the agent of torchrun holds it: ``(host, port)``."""
    pytest.importorskip("torch")
    from torch.distributed import TCPStore
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield "127.0.0.1", store.port


def meet(agent, ranks, size, timeout, addresses=("127.0.0.1",), key="run"):
    """The ranks as threads; their groups or errors."""
    results = {}

    def one(rank):
        launch = Launch("torchrun", rank, size, rank % 2, key, False, agent)
        deadline = Deadline(timeout)
        try:
            store, secret = stores.open_store(Config(), launch, None, 0, 0, deadline)
            assert isinstance(store, ClientStore if rank else ServerStore)
            results[rank] = roster.meet(store, launch, Config(), deadline, secret)
            store.close(5.0)
        except JoinError as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_ranks_meet_through_the_agents_store(agent, monkeypatch):
    monkeypatch.setattr(stores, "announced_addresses", lambda ifname: ["127.0.0.1"])
    results = meet(agent, range(4), 4, 20.0)
    assert len({(job, secret) for job, secret, _ in results.values()}) == 1
    assert [results[rank][2] for rank in range(4)] == [0, 1, 0, 1]


def test_the_first_address_that_answers_is_used(agent, monkeypatch):
    monkeypatch.setattr(stores, "announced_addresses", lambda ifname: ["127.0.0.9", "127.0.0.1"])
    assert len(meet(agent, range(2), 2, 20.0, key="two")) == 2


def test_rank_zero_does_not_come(agent):
    results = meet(agent, [1], 2, 0.5, key="late")
    assert results[1].missing == (0,) and "rank 0 did not come within 0.5 s" in str(results[1])


def test_no_agent_there():
    pytest.importorskip("torch")
    with pytest.raises(JoinError, match="MASTER_ADDR"):
        TorchCarrier(("127.0.0.1", 1), "x", Deadline(0.5))
