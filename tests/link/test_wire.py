"""The header, dtype codes, and what ranks compute from each other's endpoints."""

import dataclasses

import numpy as np
import pytest

from rocecomm.config import Config
from rocecomm.errors import JoinError, MismatchError, PeerDeadError
from rocecomm.link import failure, wire, wireup
from rocecomm.link.wireup import Endpoint, agree


def test_header_has_its_documented_size():
    assert (wire.HEADER_SIZE, wire.SHORT_SIZE) == (104, 48)
    data = bytearray(range(104))
    data[4] = 0                                         # flags
    fields = wire.unpack_header(bytes(data))
    assert fields["magic"] == 0x0100
    assert fields["kind"] == 3
    for name, at, size in (("tag", 24, 8), ("ctrl_back", 40, 4), ("size", 48, 8), ("gen", 76, 4),
                           ("root", 100, 4)):
        assert fields[name] == int.from_bytes(data[at:at + size], "little"), name
    with pytest.raises(ValueError, match="104"):
        wire.unpack_header(bytes(data[:103]))


def test_a_short_header_ends_after_the_group():
    data = bytearray(range(48))
    data[4] = wire.Flag.FLAG_SHORT
    fields = wire.unpack_header(bytes(data))
    assert fields["group"] == int.from_bytes(data[44:48], "little") and "size" not in fields
    with pytest.raises(ValueError, match="48"):
        wire.unpack_header(bytes(data[:47]))


@pytest.mark.parametrize("name", ["bool", "int8", "uint8", "int16", "int32", "int64", "uint64",
                                  "float16", "float32", "float64", "complex64", "complex128",
                                  "bfloat16", "float128", "int2", "int4", "uint4", "float8_e5m2",
                                  "float8_e4m3fn", "float4_e2m1fn_x2", "datetime64", "timedelta64[ns]",
                                  "datetime64[D]", "datetime64[25s]", ">i2", ">f4", ">c16", ">M8[D]",
                                  ">m8", ">m8[25us]", ">U3"])
def test_dtype_codes_come_back(name):
    assert wire.dtype_name(wire.dtype_code(name)) == name


@pytest.mark.parametrize("name", ["void64", "bytes16", "[('x', '<f4')]", "T{<f:x:}", ">V3", "w"])
def test_structures_and_byte_strings_are_bytes(name):
    assert wire.dtype_name(wire.dtype_code(name)) == "bytes"


def test_vectors_have_the_dtype_of_their_elements_and_text_its_length():
    assert wire.dtype_name(wire.dtype_code("float32x4")) == "float32"
    assert wire.dtype_name(wire.dtype_code(np.dtype("U5").name)) == "U5"


def test_dtype_codes_differ_and_foreign_byte_order_is_its_own():
    names = ["bool", "int8", "uint8", "int32", "uint32", "float32", "float16", "bfloat16",
             "complex64", np.dtype(">f8").str, np.dtype(">i8").str, np.dtype(">c8").str,
             np.dtype("M8[D]").name, np.dtype("M8[s]").name, np.dtype("M8[2s]").name,
             np.dtype("m8[s]").name, np.dtype(">M8[s]").str, "float8_e4m3", "float8_e5m2", "str32",
             "str64", "int4", "int2"]
    assert len({wire.dtype_code(n) for n in names}) == len(names)


def test_names_of_operations_are_positions():
    assert wire.op_code("message") == 0
    assert wire.reduction_code(None) == 0
    assert wire.REDUCTIONS[wire.reduction_code("avg")] == "avg"


def endpoint(rank=0, **changes):
    gid = "00000000000000000000ffff0a000001" if rank == 0 else "00000000000000000000ffff0a000002"
    fields = dict(
        rank=rank, device="dev", instance=1 + rank, mtu=4096, reads_out=16, reads_in=16,
        max_message=1 << 30, gids=((1, gid, 2),), gid_index=None, qps=((0, 0), (17, 18)),
        lanes=((0, 0, 0), (19, 20, 21)),
        eager=16, ctrl=16, slot_size=8320, status_addr=4096, status_rkey=7, host="here")
    return Endpoint(**{**fields, **changes})


def test_mtu_is_the_smaller_one_from_both_sides():         # G7
    a, b = endpoint(0, mtu=4096), endpoint(1, mtu=1024)
    assert agree(a, b).mtu == agree(b, a).mtu == 1024


def test_outstanding_reads_fit_both_devices():              # D7
    a, b = endpoint(0, reads_out=16, reads_in=16), endpoint(1, reads_out=1, reads_in=4)
    assert (agree(a, b).reads, agree(a, b).serves) == (4, 1)
    assert (agree(b, a).reads, agree(b, a).serves) == (1, 4)
    none = endpoint(1, reads_out=0, reads_in=0)
    assert agree(a, none).reads == agree(a, none).serves == 1


def test_both_sides_agree_on_the_gids():                    # G2
    v6 = "fe800000000000000000000000000001"
    a = endpoint(0, gids=((0, v6, 2), (1, "00000000000000000000ffff0a000001", 1),
                          (2, "00000000000000000000ffff0a000001", 2),
                          (3, "00000000000000000000ffff0a010001", 2)))
    b = endpoint(1, gids=((0, "00000000000000000000ffff0a010002", 2),))
    here, there = agree(a, b), agree(b, a)
    assert here.gid_index == 3                              # the peer's subnet
    assert (here.gid, here.peer_gid) == (there.peer_gid, there.gid)


def test_roce_versions_must_match():
    a = endpoint(0, gids=((0, "00000000000000000000ffff0a000001", 1),))
    with pytest.raises(JoinError, match="GID_INDEX"):
        agree(a, endpoint(1))


def test_slot_sizes_must_match():                           # G13
    with pytest.raises(JoinError, match="EAGER_LIMIT") as caught:
        agree(endpoint(0), endpoint(1, slot_size=16512))
    assert "8320" in str(caught.value) and "16512" in str(caught.value)


def test_endpoints_travel():
    sent = endpoint(1)
    assert Endpoint.unpack(sent.pack(), 1) == sent


@pytest.mark.parametrize("change, words", [
    ({"version": 99}, "version 99"), ({"byteorder": "middle"}, "middle-endian")])
def test_other_versions_are_refused(change, words):
    with pytest.raises(JoinError, match=words):
        Endpoint.unpack(dataclasses.replace(endpoint(1), **change).pack(), 1)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff\xfe", b'{"version": 1}',
                                  b"x" * (wireup.BLOB_LIMIT + 1)])
def test_garbage_for_an_endpoint_is_a_join_error(data):
    with pytest.raises(JoinError, match="rank 3"):
        Endpoint.unpack(data, 3)


@pytest.mark.parametrize("dead_after", [0.5, 1, 5, 30])
def test_a_death_is_found_in_time(dead_after):
    config = Config(dead_after=dead_after)
    timeout, retries = wireup.transport_timer(config)
    assert retries < 7                      # kernel Soft-RoCE takes 7 for "for ever"
    worst = wireup.beat_interval(config) + 4.096e-6 * 2**timeout * (retries + 1)
    assert 0.3 * dead_after < worst < dead_after


def test_failures_say_what_happened():
    dead = failure.lost_peer("recv", 2, "dev", status=12, opcode=19, vendor=0, err=0, nbytes=0,
                             left=False, dead_after=5)
    assert isinstance(dead, PeerDeadError) and dead.peer == 2 and "rank 2" in str(dead)
    access = failure.lost_peer("recv", 1, "dev", status=10, opcode=18, vendor=3, err=0,
                               nbytes=1 << 20, left=False, dead_after=5)
    assert "IBV_WC_REM_ACCESS_ERR" in str(access) and "1 MiB" in str(access)
    assert (access.status, access.vendor_err, access.peer) == (10, 3, 1)
    mismatch = failure.aborted("all_reduce", 1, 0, "dev", "all_reduce of 100", "broadcast of 7", 2, "")
    assert isinstance(mismatch, MismatchError) and mismatch.peer == 2
    assert "all_reduce of 100" in str(mismatch) and "broadcast of 7" in str(mismatch)


@pytest.mark.parametrize("n, text", [(0, "0 bytes"), (5000, "5000 bytes"),
                                     (1 << 20, "1048576 bytes (1 MiB)")])
def test_sizes_for_people(n, text):
    assert failure.size(n) == text
