"""Joining: files on one host, TCP with a secret; who is missing, doubled, surplus, different."""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
from together import Shared

from rocecomm import bootstrap
from rocecomm.config import WIRE_VERSION, Config
from rocecomm.errors import ConfigError, JoinError

SECRET = "0123456789abcdef0123456789abcdef"


def join(rank, size, timeout=3.0, store=None, **settings):
    """Join and exchange; the outcome as plain data."""
    start = time.monotonic()
    try:
        group = bootstrap.join(Config.from_env(**settings), rank, size, store, timeout)
        try:                                      # as init does
            group.store.set(f"x/{rank}", b"value %d" % rank)
            values = [group.store.get(f"x/{r}", 10) for r in range(size)]
        finally:
            group.store.close()
    except (JoinError, ConfigError) as error:
        return {"error": str(error), "type": type(error).__name__,
                "missing": getattr(error, "missing", ()),
                "doubled": getattr(error, "doubled", ()),
                "surplus": getattr(error, "surplus", ()),
                "setting": getattr(error, "setting", None),
                "seconds": time.monotonic() - start}
    assert values == [b"value %d" % r for r in range(size)]
    return {"job": group.job_id, "secret": group.secret, "local": group.local_rank,
            "rank": group.rank, "error": None}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_told(peers, plan, timeout=1.0, settings=None):
    """Rank i of the plain world joins as ``plan[i]`` = (rank, size)."""
    rank, size = plan[peers.rank]
    mine = (settings or {}).get(peers.rank, {})
    peers.barrier()                       # processes start at very different times
    bootstrap.LINGER = 0.2
    return join(rank, size, timeout, **mine)


def run(world, plan, settings=None, where="files", timeout=1.0, **options):
    env = {}
    if where != "files":
        env = {"ROCECOMM_STORE": where, "ROCECOMM_SECRET": SECRET}
    return world(len(plan), as_told, plan, timeout, settings, plain=True, env=env, **options)


@pytest.fixture(params=["files", "tcp"])
def where(request):
    return f"localhost:{free_port()}" if request.param == "tcp" else request.param


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("where", ["files", "127.0.0.1:0", "tcp"], indirect=True)
def test_ranks_meet(world, where, size):
    results = run(world, [(r, size) for r in range(size)], where=where, timeout=20.0)
    assert [r["error"] for r in results] == [None] * size
    assert len({(r["job"], r["secret"]) for r in results}) == 1
    assert [r["local"] for r in results] == list(range(size))
    assert len(results[0]["job"]) == 16 and len(results[0]["secret"]) == 32


def test_missing_rank_is_named_everywhere(world, where):
    for result in run(world, [(0, 3), (2, 3)], where=where):
        assert result["missing"] == (1,) and "rank 1 of 3" in result["error"]
        assert 0.9 < result["seconds"] < 2.0


def test_missing_rank_zero_is_named(world, where):
    for result in run(world, [(1, 3), (2, 3)], where=where):
        assert 0 in result["missing"] and result["seconds"] < 2.0
        assert "rank 0" in result["error"]


def test_doubled_rank(world, where):
    results = run(world, [(0, 3), (1, 3), (1, 3)], where=where)
    for result in results:
        assert result["doubled"] == (1,) and "rank 1 is there twice" in result["error"]
        assert result["seconds"] < 2.0


def test_two_rank_zeros(world):
    for result in run(world, [(0, 2), (0, 2)]):
        assert result["doubled"] == (0,) and result["seconds"] < 2.0


def test_two_rank_zeros_on_one_port(world):
    results = run(world, [(0, 2), (0, 2)], where=f"127.0.0.1:{free_port()}")
    # One of them gets the port, or neither, when both listen at the same instant.
    texts = [r["error"] for r in results]
    assert any("another rank 0" in text for text in texts)
    assert all("another rank 0" in text or "rank 1 of 2" in text for text in texts)
    assert all(r["seconds"] < 2.0 for r in results)


def test_surplus_rank(world, where):
    for result in run(world, [(0, 3), (1, 3), (3, 3)], where=where):
        assert result["surplus"] == (3,) and "0 to 2" in result["error"]
        assert result["seconds"] < 2.0


def test_a_fourth_process_for_a_world_of_three(world, where):
    *three, fourth = run(world, [(0, 3), (1, 3), (2, 3), (3, 3)], where=where, timeout=2.0)
    assert fourth["surplus"] == (3,) and fourth["seconds"] < 3.0
    # The three may have met and left before it came; then it is the only one to know.
    for result in three:
        assert result["error"] is None or result["surplus"] == (3,)


def test_world_sizes_that_disagree(world, where):
    for result in run(world, [(0, 2), (1, 3)], where=where):
        assert result["setting"] == "world_size" and result["seconds"] < 2.0
        assert "rank 0 says 2" in result["error"] and "rank 1 says 3" in result["error"]


def test_settings_that_must_match(world, where):
    results = run(world, [(0, 2), (1, 2)], {1: {"eager_limit": 1024}}, where)
    for result in results:
        assert result["setting"] == "ROCECOMM_EAGER_LIMIT"
        assert "auto on rank 0" in result["error"] and "1024 on rank 1" in result["error"]


def every_setting(peers, names):
    """One rank differs in one setting after the other."""
    outcomes, bootstrap.LINGER = {}, 0.1
    for name, value in names:
        mine = {name: value} if peers.rank == 1 else {}
        outcomes[name] = join(peers.rank, 2, 10.0, **mine)["setting"]
        peers.barrier()
    return outcomes


def test_each_wire_setting_is_compared(world):
    from rocecomm.config import settings
    other = {"eager_limit": 4096, "peer_credits": 7, "algorithm": "ring",
             "doubling_limit": 0, "segment": 4096, "connect": "lazy"}
    wire = [field for field in settings() if field.metadata["wire"]]
    values = [(f.name, other.get(f.name)) for f in wire]
    assert all(value is not None for _, value in values), "a new setting needs a value here"
    for outcome in world(2, every_setting, values, plain=True):
        assert outcome == {f.name: f.metadata["env"] for f in wire}


def older(peers):
    from rocecomm import config
    if peers.rank == 1:
        config.WIRE_VERSION = 0
    peers.barrier()
    return join(peers.rank, 2)


def test_an_older_protocol_version(world):
    for result in world(2, older, plain=True):
        assert result["setting"] == "protocol version"
        assert f"{WIRE_VERSION} on rank 0" in result["error"] and "0 on rank 1" in result["error"]


def from_another_age(peers):
    """Rank 1 signs in with something that this version cannot read."""
    from rocecomm.bootstrap import roster
    if peers.rank == 1:
        roster.json = type("Json", (), {"dumps": lambda _: '{"hello": 1}',
                                        "loads": roster.json.loads})
    peers.barrier()
    return join(peers.rank, 2)


def test_a_member_that_cannot_be_read(world):
    for result in world(2, from_another_age, plain=True):
        assert result["setting"] == "protocol version" and "what rank 1 published" in result["error"]


def again(peers, rounds):
    """Groups one after the other in the same processes, some of them failing."""
    jobs = []
    for i in range(rounds):
        time.sleep(0.01 * ((peers.rank + i) % 3))
        jobs.append(join(peers.rank, peers.size, 10.0)["job"])
    if peers.rank == 0:
        join(0, peers.size, 0.05)
    peers.barrier()
    return jobs + [join(peers.rank, peers.size, 10.0)["job"]]


def test_many_groups_in_a_row(world, where):
    env = {} if where == "files" else {"ROCECOMM_STORE": where, "ROCECOMM_SECRET": SECRET}
    results = world(3, again, 8, plain=True, env=env)
    assert results[0] == results[1] == results[2] and len(set(results[0])) == 9


def doomed(peers, where):
    if peers.rank == 1:
        peers.get("joining")
        time.sleep(0.5)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        join(1, 3, 30.0)
    peers.put("joining", None)
    return join(0, 3, 30.0)


def test_a_rank_that_dies_while_joining_is_found(world, where):
    env = {} if where == "files" else {"ROCECOMM_STORE": where, "ROCECOMM_SECRET": SECRET}
    result = world(2, doomed, where, plain=True, mortal=[1], env=env)[0]
    assert "rank 1" in result["error"] and "ended" in result["error"]
    assert result["seconds"] < 5.0


def crossing(peers, count):
    """``count`` groups at the same time, each of threads of both processes."""
    found = {}

    def one(i):
        config = Config.from_env(job_id=f"{os.environ['ROCECOMM_JOB_ID']}-{i}")
        group = bootstrap.join(config, peers.rank, peers.size, timeout=30)
        group.store.close()
        found[i] = group.job_id

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_twenty_groups_at_once(world):
    env = {"ROCECOMM_STORE": "localhost:0", "ROCECOMM_SECRET": SECRET}
    results = world(2, crossing, 20, plain=True, env=env)
    assert results[0] == results[1] and len(set(results[0].values())) == 20


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_names_and_ipv6(world, host):
    if host == "[::1]" and not has_ipv6():
        host = "[::ffff:127.0.0.1]"
    results = run(world, [(0, 2), (1, 2)], where=f"{host}:{free_port()}", timeout=20.0)
    assert [r["error"] for r in results] == [None, None]


def has_ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


def test_unknown_name(world):
    for result in run(world, [(0, 2), (1, 2)], where="no-such-host.invalid:4000"):
        assert "no-such-host.invalid" in result["error"] and result["seconds"] < 2.0


def test_port_taken(world):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        zero, one = run(world, [(0, 2), (1, 2)], where=f"127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in zero["error"] and "has this port" in zero["error"]
    assert zero["seconds"] < 1.0
    assert f"127.0.0.1:{port}" in one["error"] and one["seconds"] < 2.0


def test_secrets_that_differ(world):
    zero, one = run(world, [(0, 2), (1, 2)], {1: {"secret": SECRET[::-1]}},
                    where=f"127.0.0.1:{free_port()}")
    assert "secret" in one["error"] and one["seconds"] < 2.0
    assert zero["missing"] == (1,)


@pytest.mark.parametrize("settings, words", [
    ({"store": "127.0.0.1:4000"}, "ROCECOMM_SECRET"),
    ({"store": "127.0.0.1:4000", "secret": "short"}, "at least 16"),
    ({"store": "nonsense", "secret": SECRET}, "host:port"),
    ({"store": "::1:4000", "secret": SECRET}, "brackets"),
    ({"store": "127.0.0.1:70000", "secret": SECRET}, "65535"),
    ({"store": "127.0.0.1:4000", "secret_file": "/no/such/file"}, "/no/such/file"),
])
def test_settings_that_cannot_work(settings, words):
    with pytest.raises(ConfigError, match=words):
        bootstrap.join(Config(**settings), 0, 2, timeout=1)


def test_secret_file_must_be_private(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="0644"):
        bootstrap.join(Config(store="127.0.0.1:4000", secret_file=str(path)), 0, 2)
    path.chmod(0o600)
    with pytest.raises(JoinError, match="rank 1 of 2"):
        bootstrap.join(Config(store="127.0.0.1:0", secret_file=str(path), job_id="sf"),
                       0, 2, timeout=0.1)


@pytest.mark.parametrize("timeout, error", [(-1, ValueError), ("5", TypeError),
                                            (1e12, ValueError), (True, TypeError)])
def test_timeouts_that_make_no_sense(timeout, error):
    with pytest.raises(error, match="timeout"):
        bootstrap.join(Config(), 0, 2, timeout=timeout)


def test_timeout_zero_polls_and_half_a_second_is_that():
    for timeout, low, high in ((0, 0.0, 0.5), (0.5, 0.45, 1.5)):
        start = time.monotonic()
        with pytest.raises(JoinError, match="rank 1 of 2"):
            bootstrap.join(Config(job_id=f"poll-{os.getpid()}"), 0, 2, timeout=timeout)
        assert low <= time.monotonic() - start < high


def late(peers):
    if peers.rank == 1:
        time.sleep(1.0)
    return join(peers.rank, 2, None)


def test_timeout_none_waits(world):
    assert [r["error"] for r in world(2, late, plain=True)] == [None, None]


def interrupted(peers, where):
    """Ctrl-C while joining, after a harmless signal that is handled on the way."""
    seen = []
    signal.signal(signal.SIGINT, signal.default_int_handler)    # a shell's background job ignores it
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(time.monotonic()))
    for delay, number in ((0.3, signal.SIGUSR1), (0.6, signal.SIGUSR1), (1.0, signal.SIGINT)):
        threading.Timer(delay, os.kill, (os.getpid(), number)).start()
    start = time.monotonic()
    try:
        bootstrap.join(Config.from_env(), peers.rank, 3, timeout=30)
    except KeyboardInterrupt:
        return time.monotonic() - start, len(seen)


def test_ctrl_c_while_joining(world, where):
    env = {} if where == "files" else {"ROCECOMM_STORE": where, "ROCECOMM_SECRET": SECRET}
    for seconds, signals in world(2, interrupted, where, plain=True, env=env):
        assert 0.9 < seconds < 2.5 and signals == 2


def test_no_thread_stays():
    before = threading.active_count()
    with pytest.raises(JoinError):
        bootstrap.join(Config(store="localhost:0", secret=SECRET), 0, 2, timeout=0.2)
    assert threading.active_count() == before


def test_a_store_of_the_users_own():
    shared, groups = Shared(), {}

    def one(rank):
        groups[rank] = bootstrap.join(Config(), rank, 3, store=shared, timeout=10)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({group.secret for group in groups.values()}) == 1 and len(groups) == 3
    with pytest.raises(TypeError, match="no set"):
        bootstrap.join(Config(), 0, 2, store=object(), timeout=1)


def test_the_groups_store_is_closed_for_good():
    group = bootstrap.join(Config(), 0, 1)
    group.store.set("a", b"1")
    assert group.store.get("a", 0) == b"1"
    with pytest.raises(TimeoutError):
        group.store.get("b", 0)
    group.store.close()
    group.store.close()
    with pytest.raises(ValueError, match="closed"):
        group.store.get("a", 0)
    assert "secret" not in repr(group)
