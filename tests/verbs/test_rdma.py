"""Write, read and atomics: data, keys, bounds, rights, alignment (cases D1, D2, D4, D5, D7, D8)."""

import numpy as np
import pytest
from verbs.departures import rxe
from verbs.pair import ALL, ATOMIC, LOCAL, READ, WRITE, Pair, drain, pattern, quiet

from rocecomm import verbs as v
from rocecomm.errors import VerbsError

WRITE_OP, WRITE_IMM, READ_OP = v.IBV_WR_RDMA_WRITE, v.IBV_WR_RDMA_WRITE_WITH_IMM, v.IBV_WR_RDMA_READ
CAS, ADD = v.IBV_WR_ATOMIC_CMP_AND_SWP, v.IBV_WR_ATOMIC_FETCH_AND_ADD


@pytest.fixture
def ends(device):
    with Pair(device, max_send_sge=4, max_inline_data=64) as p:
        yield p


def do(a, op, local, remote, offset=0, time=1.0, **kw):
    """One operation against an MR of the peer, to its completion."""
    kw.setdefault("rkey", remote.rkey)
    a.qp.post_send(op, local, remote_addr=remote.addr + offset, **kw)
    return drain(a.send_cq, 1, time)[0]


@pytest.mark.parametrize("op", [WRITE_OP, READ_OP])
def test_sizes(ends, scale, op):
    a, b = ends
    for n in scale.sizes(1, 8, 255, 256, 1023, 1024, 1025, 4096, 4097, 65537, 1 << 20, (16 << 20) - 5):
        mine, theirs = np.full(n + 64, 0xAA, "u1"), np.full(n + 64, 0xAA, "u1")
        (mine if op == WRITE_OP else theirs)[32:-32] = pattern(n, n)
        src, dst = a.mr(mine), b.mr(theirs)
        w = do(a, op, src.sge(32, n), dst, 32, scale.time).check()
        assert w.opcode == (v.IBV_WC_RDMA_WRITE if op == WRITE_OP else v.IBV_WC_RDMA_READ)
        assert (mine[32:-32] == pattern(n, n)).all() and (mine == theirs).all(), n
        src.close()
        dst.close()
    quiet(b.recv_cq, b.send_cq, seconds=0.01)       # one-sided: the peer sees no completion


def test_zero_bytes(ends, scale):
    a, b = ends
    dst = b.mr(bytearray(16))
    for op in (WRITE_OP, READ_OP):
        assert do(a, op, None, dst, time=scale.time).ok
    # a zero-byte write names no memory, so a key of nothing is no error
    a.qp.post_send(WRITE_OP, None, remote_addr=0, rkey=0)
    assert drain(a.send_cq, 1, scale.time)[0].ok


def test_gathered_write_and_scattered_read(ends, scale):
    a, b = ends
    theirs = np.zeros(100, "u1")
    dst = b.mr(theirs)
    parts = [a.mr(pattern(n, n)) for n in (10, 20, 30)]
    do(a, WRITE_OP, parts, dst, 5, scale.time).check()
    whole = np.concatenate([pattern(n, n) for n in (10, 20, 30)])
    assert (theirs[5:65] == whole).all() and not theirs[:5].any() and not theirs[65:].any()
    back = [np.zeros(n, "u1") for n in (35, 25)]
    do(a, READ_OP, [a.mr(x) for x in back], dst, 5, scale.time).check()
    assert (np.concatenate(back) == whole).all()


def test_inline_write(ends, scale):
    a, b = ends
    theirs = bytearray(8)
    do(a, WRITE_OP, b"abcdefgh", b.mr(theirs), time=scale.time,
       flags=v.IBV_SEND_INLINE | v.IBV_SEND_SIGNALED).check()
    assert theirs == b"abcdefgh"


@pytest.mark.parametrize("value", [0, 1, 0x89ABCDEF, 0xFFFFFFFF])
@pytest.mark.parametrize("nbytes", [0, 100])
def test_write_with_immediate(ends, scale, value, nbytes):
    a, b = ends
    theirs = np.zeros(128, "u1")
    dst = b.mr(theirs)
    src = a.mr(pattern(128))
    b.qp.post_recv(None, wr_id=4)
    w = do(a, WRITE_IMM, src.sge(0, nbytes) if nbytes else None, dst, time=scale.time, imm_data=value)
    assert w.check().opcode == v.IBV_WC_RDMA_WRITE
    r = drain(b.recv_cq, 1, scale.time)[0].check()
    assert (r.opcode, r.imm_data, r.wr_id) == (v.IBV_WC_RECV_RDMA_WITH_IMM, value, 4)
    assert r.byte_len == nbytes and (theirs[:nbytes] == pattern(nbytes)).all() and not theirs[nbytes:].any()


def test_write_with_immediate_waits_for_a_receive(ends, scale):
    a, b = ends
    dst = b.mr(bytearray(16))
    a.qp.post_send(WRITE_IMM, a.mr(b"x" * 16, 0), remote_addr=dst.addr, rkey=dst.rkey, imm_data=7)
    quiet(a.send_cq, b.recv_cq)
    b.qp.post_recv(None)
    assert drain(b.recv_cq, 1, scale.time)[0].check().imm_data == 7
    drain(a.send_cq, 1, scale.time)[0].check()


def test_fetch_and_add(ends, scale):
    a, b = ends
    theirs, old = np.array([1, 100, 2**64 - 1], "u8"), np.zeros(1, "u8")
    dst, res = b.mr(theirs), a.mr(old)
    w = do(a, ADD, res, dst, 8, scale.time, compare_add=23).check()
    assert w.opcode == v.IBV_WC_FETCH_ADD and old[0] == 100 and theirs.tolist() == [1, 123, 2**64 - 1]
    do(a, ADD, res, dst, 16, scale.time, compare_add=3).check()
    assert old[0] == 2**64 - 1 and theirs[2] == 2


def test_compare_and_swap(ends, scale):
    a, b = ends
    theirs, old = np.array([1, 100, 3], "u8"), np.zeros(1, "u8")
    dst, res = b.mr(theirs), a.mr(old)
    w = do(a, CAS, res, dst, 8, scale.time, compare_add=99, swap=7).check()
    assert w.opcode == v.IBV_WC_COMP_SWAP and old[0] == 100 and theirs[1] == 100
    do(a, CAS, res, dst, 8, scale.time, compare_add=100, swap=2**64 - 2).check()
    assert old[0] == 100 and theirs.tolist() == [1, 2**64 - 2, 3]


def add_many(peers, n):
    from verbs.pair import End
    mine = End(peers.device)
    counter = np.zeros(1, "u8")
    mr = mine.mr(counter)
    qps = [mine.qp, v.QP(mine.pd, mine.send_cq, mine.recv_cq), v.QP(mine.pd, mine.send_cq, mine.recv_cq)]
    everyone = peers.all_gather("a", ([q.qp_num for q in qps], mine.gid.gid, mr.addr, mr.rkey))
    for r, (numbers, gid, _, _) in enumerate(everyone):
        mine.qp = qps[r]
        mine.connect((numbers[peers.rank], gid))
    peers.barrier()
    old = np.zeros(1, "u8")
    res = mine.mr(old)
    seen = []
    _, _, addr, rkey = everyone[0]
    for _ in range(n):
        qps[0].post_send(ADD, res, remote_addr=addr, rkey=rkey, compare_add=1)
        drain(mine.send_cq, 1, 10)[0].check()
        seen.append(int(old[0]))
    peers.barrier()
    total = int(counter[0])
    peers.barrier()
    mine.close()
    return seen, total


def test_atomics_of_three_processes_lose_nothing(world, scale):
    n = scale.rounds(3000, 50)
    out = world(3, add_many, n, plain=True)
    assert out[0][1] == 3 * n
    assert sorted(x for seen, _ in out for x in seen) == list(range(3 * n))


# --------------------------------------------------------------------------- D2
@pytest.mark.parametrize("op", [CAS, ADD])
@pytest.mark.parametrize("offset", [1, 4, 8, 4092])
def test_alignment(device, scale, op, offset):
    with Pair(device) as (a, b):
        theirs = np.frombuffer(bytearray(pattern(8192)), "u1")
        start = -theirs.__array_interface__["data"][0] % 8
        theirs = theirs[start:start + 4096]
        before = theirs.copy()
        dst, res = b.mr(theirs), a.mr(np.zeros(1, "u8"))
        if offset % 8 and rxe(a.ctx):       # departure "alignment"
            with pytest.raises(VerbsError, match="8 aligned bytes"):
                do(a, op, res, dst, offset, scale.time, compare_add=1, swap=2)
            assert (theirs == before).all()
            return
        w = do(a, op, res, dst, offset, scale.time, compare_add=1, swap=2)
        if offset == 8:
            assert w.ok
        else:
            expected = (v.IBV_WC_REM_INV_REQ_ERR,) if offset < 4092 else \
                (v.IBV_WC_REM_INV_REQ_ERR, v.IBV_WC_REM_ACCESS_ERR)     # misaligned and out of bounds
            assert w.status in expected and (theirs == before).all()


# --------------------------------------------------------------------------- D1
@pytest.mark.parametrize("op", [WRITE_OP, READ_OP])
@pytest.mark.parametrize("offset", [4092, 4096, -8, -4096, 1 << 40])
def test_bounds(device, scale, op, offset):
    with Pair(device) as (a, b):
        theirs, mine = np.full(3 * 4096, 0xAA, "u1"), np.full(8, 0x55, "u1")
        dst, src = b.mr(theirs[4096:8192]), a.mr(mine)
        w = do(a, op, src, dst, offset, scale.time)
        assert w.status == v.IBV_WC_REM_ACCESS_ERR and w.opcode is None
        assert (theirs == 0xAA).all() and (mine == 0x55).all()
        assert a.qp.state == v.IBV_QPS_ERR


def test_bounds_at_the_end_of_the_address_space(device, scale):
    with Pair(device) as (a, b):
        dst, src = b.mr(np.full(64, 0xAA, "u1")), a.mr(np.zeros(8, "u1"))
        a.qp.post_send(WRITE_OP, src, remote_addr=2**64 - 4, rkey=dst.rkey)
        assert drain(a.send_cq, 1, scale.time)[0].status == v.IBV_WC_REM_ACCESS_ERR


def test_local_slice_longer_than_the_remote_region(device, scale):
    with Pair(device) as (a, b):
        theirs = np.full(8192, 0xAA, "u1")
        dst, src = b.mr(theirs[:4096]), a.mr(np.zeros(8192, "u1"))
        assert do(a, WRITE_OP, src, dst, 0, scale.time).status == v.IBV_WC_REM_ACCESS_ERR
        assert (theirs[4096:] == 0xAA).all()


@pytest.mark.parametrize("op", [WRITE_OP, READ_OP, ADD])
def test_wrong_key(device, scale, op):
    with Pair(device) as (a, b):
        theirs = np.full(64, 0xAA, "u1")
        dst, src = b.mr(theirs), a.mr(np.zeros(8, "u1"))
        w = do(a, op, src, dst, 0, scale.time, rkey=dst.rkey ^ 0x55555500)
        assert w.status == v.IBV_WC_REM_ACCESS_ERR and (theirs == 0xAA).all()


def local_protection(end):
    """What a fault of local memory completes with (departure "local-key")."""
    return (v.IBV_WC_LOC_PROT_ERR, v.IBV_WC_LOC_QP_OP_ERR) if rxe(end.ctx) else (v.IBV_WC_LOC_PROT_ERR,)


@pytest.mark.parametrize("op", [WRITE_OP, READ_OP, v.IBV_WR_SEND])
def test_wrong_local_key(device, scale, op):
    with Pair(device) as (a, b):
        dst, src = b.mr(np.zeros(64, "u1")), a.mr(np.zeros(64, "u1"))
        b.qp.post_recv(dst)
        bad = v.SGE(src.addr, 8, src.lkey ^ 0x55555500)
        a.qp.post_send(op, bad, **({} if op == v.IBV_WR_SEND else dict(remote_addr=dst.addr, rkey=dst.rkey)))
        assert drain(a.send_cq, 1, scale.time)[0].status in local_protection(a)
        assert a.qp.state == v.IBV_QPS_ERR


def test_local_element_out_of_bounds(device, scale):
    with Pair(device) as (a, b):
        dst, src = b.mr(np.zeros(64, "u1")), a.mr(np.zeros(64, "u1"))
        with pytest.raises(ValueError, match="do not lie inside"):
            src.sge(60, 8)
        do_w = do(a, WRITE_OP, v.SGE(src.addr + 60, 8, src.lkey), dst, 0, scale.time)
        assert do_w.status in local_protection(a)


def test_closed_registration(device, scale):
    with Pair(device) as (a, b):
        theirs = np.full(64, 0xAA, "u1")
        dst, src = b.mr(theirs), a.mr(np.zeros(8, "u1"))
        addr, rkey = dst.addr, dst.rkey
        dst.close()
        a.qp.post_send(WRITE_OP, src, remote_addr=addr, rkey=rkey)
        assert drain(a.send_cq, 1, scale.time)[0].status == v.IBV_WC_REM_ACCESS_ERR
        assert (theirs == 0xAA).all()


def test_key_of_another_protection_domain(device, scale):
    with Pair(device) as (a, b):
        theirs = np.full(64, 0xAA, "u1")
        foreign = v.MR(v.PD(b.ctx), theirs, ALL)
        w = do(a, WRITE_OP, a.mr(np.zeros(8, "u1")), foreign, 0, scale.time)
        assert w.status == v.IBV_WC_REM_ACCESS_ERR and (theirs == 0xAA).all()


# --------------------------------------------------------------------------- D4
ACTS = {"write": (WRITE_OP, WRITE), "read": (READ_OP, READ), "add": (ADD, ATOMIC), "swap": (CAS, ATOMIC)}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("rights", [0, WRITE, READ, ATOMIC, WRITE | READ, ALL & ~LOCAL])
@pytest.mark.parametrize("where", ["region", "queue pair"])
def test_access_rights(device, scale, act, rights, where):
    """Exactly what was granted works, by the region's rights and by the queue pair's."""
    op, needed = ACTS[act]
    region, pair = (rights | LOCAL, ALL) if where == "region" else (ALL, rights)
    with Pair(device, access=pair) as (a, b):
        theirs, mine = np.full(4, 1, "u8"), np.zeros(1, "u8")
        dst, src = b.mr(theirs, region), a.mr(mine)
        w = do(a, op, src, dst, 8, scale.time, compare_add=1, swap=9)
        if rights & needed:
            assert w.ok
            assert theirs.tolist() == [1, {"write": 0, "read": 1, "add": 2, "swap": 9}[act], 1, 1]
        elif where == "region":
            assert w.status == v.IBV_WC_REM_ACCESS_ERR and theirs.tolist() == [1] * 4
        else:
            # the responder's own rights: an invalid request to the spec, and to some an access error
            assert w.status in (v.IBV_WC_REM_INV_REQ_ERR, v.IBV_WC_REM_ACCESS_ERR)
            assert theirs.tolist() == [1] * 4


def test_local_write_is_needed_to_receive(device, scale):
    with Pair(device) as (a, b):
        theirs = np.full(64, 0xAA, "u1")
        b.qp.post_recv(b.mr(theirs, READ))
        a.qp.post_send(v.IBV_WR_SEND, a.mr(np.zeros(8, "u1"), 0))
        assert drain(b.recv_cq, 1, scale.time)[0].status in local_protection(b)
        assert drain(a.send_cq, 1, scale.time)[0].status in (v.IBV_WC_REM_OP_ERR,)
        assert (theirs == 0xAA).all()


def test_local_write_is_needed_to_read(device, scale):
    with Pair(device) as (a, b):
        mine = np.full(8, 0x55, "u1")
        w = do(a, READ_OP, a.mr(mine, 0), b.mr(np.zeros(8, "u1")), 0, scale.time)
        assert w.status in (v.IBV_WC_LOC_PROT_ERR, v.IBV_WC_LOC_ACCESS_ERR) and (mine == 0x55).all()


# --------------------------------------------------------------------------- D5, D7
def write_then_notify(peers, rounds, nbytes):
    from verbs.pair import End
    mine = End(peers.device)
    data = np.zeros(nbytes, "u1")
    mr = mine.mr(data)
    mine.connect([x for r, x in enumerate(peers.all_gather("a", mine.address())) if r != peers.rank][0])
    addr, rkey = peers.all_gather("m", (mr.addr, mr.rkey))[1]
    note = np.zeros(1, "u8")
    note_mr = mine.mr(note)
    if peers.rank == 1:
        mine.qp.post_recv(note_mr)
    peers.barrier()
    bad = 0
    for k in range(1, rounds + 1):
        if peers.rank == 0:
            data[:] = k % 251
            note[0] = k
            mine.qp.post_send(WRITE_OP, mr, remote_addr=addr, rkey=rkey, flags=0)
            mine.qp.post_send(v.IBV_WR_SEND, note_mr)
            drain(mine.send_cq, 1, 10)[0].check()
        else:
            drain(mine.recv_cq, 1, 10)[0].check()
            bad += int(note[0] != k or (data != k % 251).any())
            mine.qp.post_recv(note_mr)
        peers.barrier()
    mine.close()
    return bad


def test_write_then_send_is_in_order(world, scale):
    assert world(2, write_then_notify, scale.rounds(60, 6), 1 << 20, plain=True) == [0, 0]


def test_many_reads_in_flight(device, scale):
    n = 64
    with Pair(device, max_send_wr=n, depth=2 * n) as (a, b):
        theirs, mine = pattern(n * 512), np.zeros(n * 512, "u1")
        dst, src = b.mr(theirs), a.mr(mine)
        order = [(i * 37) % n for i in range(n)]
        for i in order:
            a.qp.post_send(READ_OP, src.sge(512 * i, 512), wr_id=i, remote_addr=dst.addr + 512 * i,
                           rkey=dst.rkey)
        assert [w.check().wr_id for w in drain(a.send_cq, n, scale.time)] == order
        assert (mine == theirs).all()


def test_fenced_write_follows_read(ends, scale):
    a, b = ends
    theirs, mine = np.full(8, 1, "u8"), np.zeros(8, "u8")
    dst, src = b.mr(theirs), a.mr(mine)
    for k in range(2, 20):
        a.qp.post_send(READ_OP, src, remote_addr=dst.addr, rkey=dst.rkey, flags=0)
        a.qp.post_send(WRITE_OP, np.full(8, k, "u8"), remote_addr=dst.addr, rkey=dst.rkey,
                       flags=v.IBV_SEND_FENCE | v.IBV_SEND_SIGNALED | v.IBV_SEND_INLINE)
        drain(a.send_cq, 1, scale.time)[0].check()
        assert (mine == k - 1).all() and (theirs == k).all()
