"""The GID chooser, on the tables of case G2 and then some."""

import itertools

import pytest

from rocecomm.errors import ConfigError, DeviceNotFoundError
from rocecomm.link.gid import ROCE_V1, ROCE_V2, GidEntry, choose_gid, format_gid, parse_gid

V1, V2 = ROCE_V1, ROCE_V2
ZERO = bytes(16)


def table(*rows):
    return [GidEntry(i, ZERO if gid is None else parse_gid(gid), kind)
            for i, (gid, kind) in enumerate(rows)]


LL, V4 = "fe80::1", "::ffff:10.0.0.1"


@pytest.mark.parametrize("rows, expected", [
    ([(LL, V2), (V4, V2)], 1),
    ([(LL, V1), (LL, V2), (V4, V1), (V4, V2)], 3),
    ([(LL, V2), ("fd93::1", V2)], 1),
    ([(None, V1), (None, V1), (V4, V2)], 2),
    ([(LL, V2)], 0),
    ([(V4, V1), (LL, V2)], 1),                       # v2 before everything else
    ([("fd93::1", V2), (V4, V2)], 1),                # IPv4 before IPv6
    ([("169.254.3.4", V2), ("fd93::1", V2)], 1),     # IPv4's own link-local block
    ([("fe80::", V2), (LL, V2)], 1),                 # a prefix without interface id
    ([(V4, V2), ("10.0.0.2", V2)], 0),               # the lower index
])
def test_choice(rows, expected):
    choice = choose_gid(table(*rows))
    assert choice.index == expected
    assert choice.gid == parse_gid(rows[expected][0]) and choice.reason


def test_last_resort_says_so():
    assert "last resort" in choose_gid(table((LL, V2))).reason


def test_peers_subnet():
    rows = [(LL, V2), ("10.0.0.1", V2), ("192.168.7.1", V2), ("fd93::1", V2)]
    def pick(*peers):
        return choose_gid(
            table(*rows), peers=[parse_gid(p) for p in peers]).index
    assert pick("10.0.0.9") == 1
    assert pick("192.168.7.200") == 2
    assert pick("fd93::2") == 3
    assert pick("10.0.0.9", "192.168.7.2", "192.168.7.3") == 2     # most of them
    assert pick("192.168.200.1") == 2        # another /24, still the nearer one
    assert "subnet" in choose_gid(table(*rows), peers=[parse_gid("10.0.0.9")]).reason


def test_known_prefix_length_counts():
    rows = [GidEntry(0, parse_gid("10.0.0.1"), V2, "a", 28),
            GidEntry(1, parse_gid("10.0.0.129"), V2, "b", 25)]
    assert choose_gid(rows, peers=[parse_gid("10.0.0.250")]).index == 1


def test_users_index_wins_or_is_an_error():
    rows = table((LL, V1), (V4, V2), (None, V2))
    assert choose_gid(rows, index=0).index == 0
    for bad, word in ((7, "does not exist"), (2, "is empty")):
        with pytest.raises(ConfigError, match=word) as caught:
            choose_gid(rows, index=bad, port="mlx5_0 port 1")
        assert f"GID index {bad} of mlx5_0 port 1" in str(caught.value)
        assert "1 (::ffff:10.0.0.1)" in str(caught.value)


@pytest.mark.parametrize("rows", [[], [(None, V2)] * 4])
def test_no_address_at_all(rows):
    with pytest.raises(DeviceNotFoundError, match="holds an address"):
        choose_gid(table(*rows), port="rxe0 port 1")


def test_order_of_the_rows_does_not_matter():
    rows = table((LL, V1), (LL, V2), (V4, V1), (V4, V2), ("fd93::1", V2))
    assert {choose_gid(p).index for p in itertools.permutations(rows)} == {3}


def test_text():
    assert format_gid(parse_gid("10.0.0.1")) == "::ffff:10.0.0.1"
    assert format_gid(parse_gid("fe80::1")) == "fe80::1"
    with pytest.raises(ValueError, match="not 16"):
        choose_gid([(0, b"short", V2)])
