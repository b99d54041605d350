"""Settings of rocecomm: one frozen dataclass, read from the environment and arguments.

Each field says its environment variable (spelled as NCCL does where NCCL has it), what
values it takes, what it does, and whether the ranks must agree on it (``wire``): those
are compared when the ranks join. ``rocecomm info --config`` prints them with the place
each value came from.

Nothing here reads the environment at import; :meth:`Config.from_env` does.
"""

import dataclasses
import difflib
import logging
import math
import numbers
import operator
import os

from .errors import ConfigError, brief

__all__ = ["Config", "WIRE_VERSION", "USE_CONFIG", "as_integer", "check_timeout", "unknown_variables",
           "warn_of_unknown_variables"]

#: Version of everything that ranks exchange. Ranks of different versions do not join.
WIRE_VERSION = 2

#: Larger worlds connect on first use.
LAZY_ABOVE = 64

#: A year. A longer timeout is taken for a mistake (milliseconds, nanoseconds); ``None``
#: is how one says "wait for ever".
MAX_TIMEOUT = 366 * 86400.0


class _UseConfig:
    """Default of ``timeout=`` arguments: take the configured one (None means for ever)."""

    def __repr__(self):
        return "USE_CONFIG"


USE_CONFIG = _UseConfig()


def as_integer(value):
    """``value`` as an int, or None if it is none: bools and arrays (of more than one element) are not."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_timeout(value, what="timeout"):
    """``value`` as seconds (float), or None for "wait for ever". 0 means "poll once".

    Refuses what is not a number (TypeError: ``"5"``, ``True``) and what is negative,
    NaN or beyond a year (ValueError).
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a number of seconds or None (wait for ever), "
                        f"not {brief(value)} of type {type(value).__name__}")
    seconds = float(value)
    if not 0.0 <= seconds <= MAX_TIMEOUT:      # false for NaN as well
        raise ValueError(f"{what} must lie between 0 and {MAX_TIMEOUT:.0f} seconds, "
                         f"not {brief(value)}; pass None to wait for ever")
    return seconds


# --- parsers: text or Python value -> value; ValueError/TypeError says what is allowed

def _integer(low, high, none=None):
    allowed = f"an integer from {low} to {high}" + (f", or {none!r}" if none else "")

    def parse(value):
        if none and (value is None or value == none):
            return None
        if isinstance(value, bool):
            raise ValueError
        if isinstance(value, str):
            value = int(value.strip(), 0)
        elif isinstance(value, numbers.Integral):
            value = int(value)
        else:
            raise ValueError
        if not low <= value <= high:
            raise ValueError
        return value
    parse.allowed = allowed
    return parse


_SUFFIX = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def _size(low, high, none=None):
    def parse(value):
        if isinstance(value, str):
            text = value.strip().lower()
            if none and text == none:
                return None
            text = text.removesuffix("ib").removesuffix("b")
            digits = text.rstrip("kmg")
            value = int(digits, 0) * _SUFFIX[text[len(digits):]]
        return inner(value)
    inner = _integer(low, high, none)
    parse.allowed = (f"bytes from {low} to {high}; K, M and G multiply by 1024"
                     + (f"; or {none!r}" if none else ""))
    return parse


def _seconds(none=None):
    def parse(value):
        if none and (value is None or (isinstance(value, str) and value.lower() == none)):
            return None
        return check_timeout(float(value) if isinstance(value, str) else value)
    parse.allowed = (f"seconds from 0 to {MAX_TIMEOUT:.0f}"
                     + (f", or {none!r}" if none else ""))
    return parse


def _choice(*names):
    def parse(value):
        if isinstance(value, str) and value.lower() in names:
            return value.lower()
        raise ValueError
    parse.allowed = "one of " + ", ".join(names)
    return parse


def _text(value):
    if not isinstance(value, str) or "\0" in value:
        raise ValueError
    return value.strip()


_text.allowed = "text"


def _optional_text(value):
    return None if value is None else (_text(value) or None)


_optional_text.allowed = "text"


def _setting(env, parse, default, doc, wire=False, secret=False):
    return dataclasses.field(
        default=default, repr=not secret,
        metadata={"env": "ROCECOMM_" + env, "parse": parse, "doc": doc,
                  "wire": wire, "secret": secret})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings. Build it with :meth:`from_env`; see the fields' ``doc`` metadata."""

    # which device, and how its packets look
    device: str | None = _setting(
        "IB_HCA", _optional_text, None,
        "RDMA device, 'name' or 'name:port'; unset: the first with an active RoCE port, "
        "else soft0")
    gid_index: int | None = _setting(
        "IB_GID_INDEX", _integer(0, 65535, "auto"), None,
        "index into the port's GID table; auto: RoCE v2, IPv4, the peers' subnet first")
    traffic_class: int = _setting(
        "IB_TC", _integer(0, 255), 0, "traffic class (DSCP is the upper six bits)")
    service_level: int = _setting("IB_SL", _integer(0, 15), 0, "service level")
    ib_timeout: int | None = _setting(
        "IB_TIMEOUT", _integer(1, 31, "auto"), None,
        "transport timeout, 4.096 us * 2^n; auto: from ROCECOMM_DEAD_AFTER, which a value set here "
        "may exceed")
    ib_retry_cnt: int = _setting(
        "IB_RETRY_CNT", _integer(0, 7), 7,
        "how often the device repeats a lost packet; 7 counts as 6, since kernel Soft-RoCE takes "
        "7 for ever")
    ib_mtu: int | None = _setting(
        "IB_MTU", _integer(256, 4096, "auto"), None,
        "largest path MTU in bytes; the smaller of both ports and this is used")
    socket_ifname: str | None = _setting(
        "SOCKET_IFNAME", _optional_text, None,
        "network interface for joining: a name or prefix, '=name' exact, '^name' not")

    # time
    timeout: float | None = _setting(
        "TIMEOUT", _seconds("none"), 300.0,
        "seconds until an operation gives up; none: never")
    join_timeout: float | None = _setting(
        "JOIN_TIMEOUT", _seconds("none"), 300.0,
        "seconds until joining gives up on ranks that do not come; none: never")
    dead_after: float = _setting(
        "DEAD_AFTER", _seconds(), 5.0, "seconds within which a dead peer is found")
    spin: float = _setting(
        "SPIN", _seconds(), 0.0002,
        "seconds of polling before a waiting rank sleeps on the completion channel")
    progress: str = _setting(
        "PROGRESS", _choice("calls", "thread"), "calls",
        "who moves pending traffic: calls into the library, or one sleeping thread")

    connect: str = _setting(
        "CONNECT", _choice("auto", "init", "lazy"), "auto",
        "when two ranks are connected: at init, or when one first needs the other (lazy); auto: at init "
        "up to 64 ranks", wire=True)

    # messages
    eager_limit: int | None = _setting(
        "EAGER_LIMIT", _size(0, 1 << 20, "auto"), None,
        "largest message copied through a receive slot; above it the receiver reads "
        "straight from the sender's array; auto: 64K up to 4 ranks, 32K up to 8, else 8K",
        wire=True)
    peer_credits: int = _setting(
        "PEER_CREDITS", _integer(2, 4096), 4,
        "receive slots for payloads that each peer has to itself", wire=True)
    recv_pool: int = _setting(
        "RECV_POOL", _integer(16, 1 << 20), 512,
        "receive slots beyond those, lent to the peers that send")
    unexpected_limit: int = _setting(
        "UNEXPECTED_LIMIT", _size(0, 1 << 40), 64 << 20,
        "bytes of messages without a matching receive that a rank stores; beyond it they "
        "stay at the sender")
    reg_cache: int = _setting(
        "REG_CACHE", _size(0, 1 << 50), 1 << 30,
        "bytes of registrations kept for reuse where registering costs something")
    reg_cache_mode: str = _setting(
        "REG_CACHE_MODE", _choice("auto", "always"), "auto",
        "whether registrations are kept where registering costs nothing as well (for tests)")

    # collectives
    algorithm: str = _setting(
        "ALGO", _choice("auto", "ring", "doubling"), "auto",
        "all-reduce algorithm; auto chooses by size, dtype and world", wire=True)
    doubling_limit: int = _setting(
        "DOUBLING_LIMIT", _size(0, 1 << 30), 32 << 10,
        "largest all-reduce, in bytes, for recursive doubling when ALGO is auto",
        wire=True)
    segment: int = _setting(
        "SEGMENT", _size(64, 1 << 30), 512 << 10,
        "bytes of a ring segment: the piece that is reduced while the next one travels",
        wire=True)

    # who and where
    rank: int | None = _setting(
        "RANK", _integer(0, (1 << 20) - 1), None, "this process's rank")
    world_size: int | None = _setting(
        "WORLD_SIZE", _integer(1, 1 << 20), None, "number of ranks")
    local_rank: int | None = _setting(
        "LOCAL_RANK", _integer(0, (1 << 20) - 1), None, "rank within this host")
    job_id: str | None = _setting(
        "JOB_ID", _optional_text, None, "name of the job; tells jobs of one user apart")
    store: str | None = _setting(
        "STORE", _optional_text, None,
        "host:port where rank 0 serves the store; unset: files on this host")
    secret: str | None = _setting(
        "SECRET", _optional_text, None, "the job's secret, needed with ROCECOMM_STORE",
        secret=True)
    secret_file: str | None = _setting(
        "SECRET_FILE", _optional_text, None, "file (mode 0600) that holds the secret")

    log_level: str = _setting(
        "LOG_LEVEL", _choice("error", "warning", "info", "debug"), "warning",
        "level of the logger 'rocecomm'; when set, it also writes to stderr")

    #: Where each value that is not a default came from: field name -> text.
    sources: dict = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        for field in settings():
            object.__setattr__(self, field.name,
                               _parse(field, field.name, getattr(self, field.name)))
        if self.ib_mtu not in (None, 256, 512, 1024, 2048, 4096):
            raise _bad("ib_mtu", self.ib_mtu, "256, 512, 1024, 2048, 4096 or 'auto'")
        if self.dead_after < 0.05:
            raise _bad("dead_after", self.dead_after, "seconds from 0.05 up")

    @classmethod
    def from_env(cls, environ=None, **overrides):
        """The settings of ``environ`` (default: ``os.environ``), then ``overrides``.

        An empty variable counts as unset. An override of None counts as not given,
        except for fields where None has a meaning of its own and the environment says
        nothing. Raises ConfigError naming variable, value and what is allowed.
        """
        environ = os.environ if environ is None else environ
        values, sources = {}, {}
        for field in settings():
            env = field.metadata["env"]
            if environ.get(env, "").strip():
                values[field.name] = _parse(field, env, environ[env])
                sources[field.name] = f"environment {env}"
        names = {field.name for field in settings()}
        for name, value in overrides.items():
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean {near[0]!r}" if near else ""
                raise ConfigError(f"there is no option {name!r}{hint}", name=name,
                                  value=value)
            if value is not None:
                values[name] = value
                sources[name] = "argument"
        return cls(sources=sources, **values)

    def replace(self, source="argument", **changes):
        """A copy with ``changes``, whose provenance is ``source``."""
        return dataclasses.replace(
            self, sources={**self.sources, **dict.fromkeys(changes, source)}, **changes)

    def logger(self):
        """The logger ``rocecomm``. Untouched, unless the level was set on purpose: then it
        has that level, and a handler for stderr if the program configured none."""
        logger = logging.getLogger("rocecomm")
        if "log_level" in self.sources:
            logger.setLevel(self.log_level.upper())
            if not logger.hasHandlers():
                handler = logging.StreamHandler()
                handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
                logger.addHandler(handler)
        return logger

    def wire_settings(self):
        """What must be the same on all ranks: environment name -> text."""
        values = {field.metadata["env"]: getattr(self, field.name)
                  for field in settings() if field.metadata["wire"]}
        agreed = {name: "auto" if value is None else str(value) for name, value in values.items()}
        return {"protocol version": str(WIRE_VERSION), **agreed}

    def connects_lazily(self, size):
        """Whether the ranks of a world of ``size`` connect when they first need each other."""
        return size > 1 and (self.connect == "lazy" or (self.connect == "auto" and size > LAZY_ABOVE))

    def transport_retry(self):
        """``(timeout, retry_cnt)`` for the queue pairs, so that a dead peer is found
        within ``dead_after``: 4.096 us * 2^timeout * (retry_cnt + 1) stays below it."""
        if self.ib_timeout is not None:
            return self.ib_timeout, self.ib_retry_cnt
        share = self.dead_after / (self.ib_retry_cnt + 1) / 4.096e-6
        return max(1, min(31, math.floor(math.log2(max(2.0, share))))), self.ib_retry_cnt

    def describe(self):
        """Rows ``(variable, value, source, meaning)`` as text; the secret is masked."""
        rows = []
        for field in settings():
            value = getattr(self, field.name)
            if field.metadata["secret"] and value is not None:
                value = "********"
            meaning = field.metadata["doc"]
            if field.metadata["wire"]:
                meaning += " (same on all ranks)"
            rows.append((field.metadata["env"], "unset" if value is None else str(value),
                         self.sources.get(field.name, "default"), meaning))
        return rows


def settings():
    """The dataclass fields that are settings, in order."""
    return [f for f in dataclasses.fields(Config) if "env" in f.metadata]


def _bad(name, value, allowed):
    return ConfigError(f"{name} is {brief(value)}, but it must be {allowed}",
                       name=name, value=value)


def _parse(field, name, value):
    if value is None and field.default is None:
        return None
    try:
        return field.metadata["parse"](value)
    except (ValueError, TypeError, KeyError, OverflowError):
        shown = "(hidden)" if field.metadata["secret"] else value
        raise _bad(name, shown, field.metadata["parse"].allowed) from None


#: Variables of the project that are no settings: the tests' and the launchers' own.
_OTHER_PREFIXES = ("ROCECOMM_TEST_", "ROCECOMM_SOFT", "ROCECOMM_BUILD_")


_warned: set = set()


def warn_of_unknown_variables(logger, environ=None):
    """A warning for each variable of :func:`unknown_variables`, once per process."""
    for name, near in unknown_variables(environ):
        if name not in _warned:
            _warned.add(name)
            logger.warning("%s is set, but nothing reads it%s; see 'rocecomm info --config'",
                           name, f" (is {near} meant?)" if near else "")


def unknown_variables(environ=None):
    """Pairs ``(variable, nearest known one or None)`` for ROCECOMM_* variables that
    nothing reads: most often a typing error."""
    environ = os.environ if environ is None else environ
    known = [field.metadata["env"] for field in settings()]
    tails = {name.removeprefix("ROCECOMM_"): name for name in known}    # all begin alike
    return [(name, tails.get(next(iter(difflib.get_close_matches(
                name.removeprefix("ROCECOMM_"), tails, 1)), None)))
            for name in sorted(environ)
            if name.startswith("ROCECOMM_") and name not in known
            and not name.startswith(_OTHER_PREFIXES)]
