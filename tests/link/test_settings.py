"""Settings reach the device, are agreed between ranks, and are refused where ranks differ."""

import numpy as np
import pytest
from together import start, together

import rocecomm
from rocecomm.config import settings
from rocecomm.link import wireup


def test_what_is_set_is_on_the_queue_pairs(device):
    with together(2, device, traffic_class=104, service_level=0, ib_timeout=15, ib_retry_cnt=3,
                  ib_mtu=1024) as comms:
        for comm in comms:
            (qp,) = comm._engine.queue_pairs().values()
            attr = qp.query()
            assert (attr.timeout, attr.retry_cnt, attr.rnr_retry) == (15, 3, 7)
            assert attr.ah_attr.traffic_class == 104 and attr.ah_attr.sl == 0
            assert wireup._MTU_BYTES[int(attr.path_mtu)] == 1024
            assert attr.ah_attr.sgid_index == comm._engine.describe()[1 - comm.rank].gid_index


def test_a_service_level():
    # Ethernet knows none: kernel Soft-RoCE takes it and does not report it
    with together(2, "soft0", service_level=3) as comms:
        for comm in comms:
            (qp,) = comm._engine.queue_pairs().values()
            assert qp.query().ah_attr.sl == 3


def test_a_gid_index_of_the_users_own(device):
    with together(2, device) as (a, b):
        index = a._engine.describe()[1].gid_index
        table = a._engine.queue_pairs()[1].pd.context.query_gid_table(1)
    other = next((entry for entry in reversed(table) if entry.index != index and any(entry.gid)), None)
    if other is None:
        pytest.skip("the port has one GID only")
    with together(2, device, gid_index=other.index) as (a, b):
        (qp,) = a._engine.queue_pairs().values()
        assert qp.query().ah_attr.sgid_index == other.index
        assert a._engine.describe()[1].gid == bytes(other.gid)
        got = np.zeros(4)
        sending = b.isend(np.ones(4), 0)
        a.recv(got, 1)
        sending.wait()
        assert (got == 1).all()


def test_the_retry_count_that_means_for_ever_is_not_used(device):
    with together(2, device, ib_timeout=14, ib_retry_cnt=7) as comms:
        (qp,) = comms[0]._engine.queue_pairs().values()
        assert qp.query().retry_cnt == 6


# a value that one rank has, the other ranks have the default
OTHER = {"eager_limit": 4096, "peer_credits": 7, "algorithm": "ring", "doubling_limit": 0,
         "segment": 4096, "connect": "lazy"}


@pytest.mark.parametrize("field", [f for f in settings() if f.metadata["wire"]], ids=lambda f: f.name)
def test_a_setting_on_one_rank_only(device, field):                # G13
    assert OTHER[field.name] != field.default
    made = start(2, device, by_rank={1: {field.name: OTHER[field.name]}}, timeout=10)
    for error in made:
        assert isinstance(error, rocecomm.JoinError), error
        assert error.setting == field.metadata["env"] in str(error)
        assert f"{'auto' if field.default is None else field.default} on rank 0" in str(error)
        assert f"{OTHER[field.name]} on rank 1" in str(error)


def test_settings_that_may_differ(device):
    differ = {"dead_after": 2, "recv_pool": 64, "unexpected_limit": 1 << 20, "ib_mtu": 512,
              "spin": 0.001, "traffic_class": 8, "ib_timeout": 15, "reg_cache": 0, "timeout": 9}
    made = start(2, device, by_rank={1: differ})
    try:
        got = np.zeros(20000)
        receiving, sending = made[0].irecv(got, 1), made[1].isend(np.ones(20000), 0)
        while not (receiving.test() and sending.test()):
            pass
        assert (got == 1).all()
        assert [comm._engine.describe()[1 - comm.rank].mtu for comm in made] == [512, 512]
    finally:
        from together import close
        close(made)


def test_an_older_protocol_version(device, monkeypatch):
    import rocecomm.config as config
    wire = config.Config.wire_settings

    def as_of_old(self):
        return {**wire(self), **({"protocol version": "0"} if self.spin == 0.5 else {})}
    monkeypatch.setattr(config.Config, "wire_settings", as_of_old)
    for error in start(2, device, by_rank={1: {"spin": 0.5}}, timeout=10):
        assert isinstance(error, rocecomm.JoinError) and error.setting == "protocol version"
        assert f"{config.WIRE_VERSION} on rank 0" in str(error) and "0 on rank 1" in str(error)
