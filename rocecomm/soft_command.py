"""``rocecomm soft``: run any verbs program on softnic, the user-space RDMA device.

libsoftnic.so has libibverbs' own symbols, so the loader only has to see it first
(``LD_PRELOAD``). The command takes this process's place: its signals, exit status,
terminal and parent are what they would be without us.
"""

import argparse
import contextlib
import os
import re
import signal
import sys

from .errors import RocecommError

#: options that are an environment variable of the device
_VARIABLES = {"devices": "ROCECOMM_SOFT_DEVICES", "mtu": "ROCECOMM_SOFT_MTU", "dir": "ROCECOMM_SOFT_DIR",
              "part-id": "ROCECOMM_SOFT_PART_ID"}

#: must be loaded before anything else, or they end the program
_SANITIZERS = re.compile(r"lib(a|t|ub|l|m|hwa|clang_rt\.\w*)san\b.*\.so")

_EXAMPLES = """\
examples:
  rocecomm soft -- ibv_devinfo
  rocecomm soft -- ib_write_bw -d soft0 & sleep 1; rocecomm soft -- ib_write_bw -d soft0 localhost
  LD_PRELOAD=$(rocecomm soft --path) pytest my_verbs_tests
"""


def main(arguments):
    """Run ``rocecomm soft``; returns the exit status, unless a command takes over."""
    parser = _parser()
    own, command = _split(arguments)
    options = parser.parse_args(own)
    path = library()
    if options.path:
        if command:
            parser.error("--path runs no command")
        print(path)
        return 0
    if not command:
        parser.print_help()
        return 0
    values = {variable: getattr(options, name.replace("-", "_")) for name, variable in _VARIABLES.items()}
    return _replace_by(command, environment(path, values))


def _parser():
    parser = argparse.ArgumentParser(
        prog="rocecomm soft",
        usage="rocecomm soft [OPTIONS] -- COMMAND [ARGUMENTS]\n       rocecomm soft --path",
        description="Run a program that uses libibverbs on soft0, the RDMA device in user space, unmodified: "
        "no NIC, no kernel module, no root. Both ends run on this host, under the same user.",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--path", action="store_true", help="print the path of libsoftnic.so, for LD_PRELOAD")
    parser.add_argument("--devices", type=_between(1, 8), metavar="N",
                        help="number of devices: soft0, soft1, ... (default 1)")
    parser.add_argument("--mtu", type=int, choices=(256, 512, 1024, 2048, 4096), metavar="BYTES",
                        help="active MTU of the ports: 256, 512, 1024, 2048 or 4096 (default)")
    parser.add_argument("--dir", metavar="FOLDER",
                        help="where the processes meet (default /dev/shm); those of another folder are on "
                        "another network")
    parser.add_argument("--part-id", type=_between(0, 2**32 - 1), metavar="N",
                        help="vendor_part_id of the devices, by which some programs choose what to do: with "
                        "4119 perftest posts inline and through ibv_wr_* (default 0)")
    return parser


def _split(arguments):
    """Our own options, and the command: what follows ``--`` or begins without a dash."""
    i = 0
    while i < len(arguments) and arguments[i].startswith("-"):
        if arguments[i] == "--":
            return arguments[:i], arguments[i + 1:]
        i += 2 if arguments[i].removeprefix("--") in _VARIABLES else 1
    return arguments[:i], arguments[i:]


def _between(least, most):
    def parse(text):
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be from {least} to {most}, not {value}")
        return value
    parse.__name__ = "number"                    # in argparse's "invalid ... value"
    return parse


def library():
    """Absolute path of libsoftnic.so.

    Raises RocecommError if the file is missing or its path cannot stand in ``LD_PRELOAD``.
    """
    from .verbs.provider import library_path
    path = os.path.abspath(library_path("softnic"))
    if not os.path.isfile(path):
        hint = "ROCECOMM_SOFTNIC names it" if os.environ.get("ROCECOMM_SOFTNIC") \
            else "the package is not built, or not whole: install it again"
        raise RocecommError(f"soft: there is no {path}; {hint}")
    if set(path) & set(" :"):
        raise RocecommError(f"soft: LD_PRELOAD cannot hold {path!r}, which has a space or colon in it; make "
                            f"a link to it elsewhere and name that by ROCECOMM_SOFTNIC")
    return path


def environment(path, variables=(), base=None):
    """The environment of a program on softnic: ``path`` preloaded, ``variables`` set unless None."""
    env = dict(os.environ if base is None else base)
    others = [p for p in re.split("[ :]+", env.get("LD_PRELOAD", "")) if p and p != path]
    first = [p for p in others if _SANITIZERS.match(os.path.basename(p))]
    env["LD_PRELOAD"] = ":".join([*first, path, *(p for p in others if p not in first)])
    for name, value in dict(variables).items():
        if value is not None:
            env[name] = str(value)
    return env


def _replace_by(command, env):
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these, and what is ignored stays so across exec
    for name in ("SIGPIPE", "SIGXFSZ"):
        with contextlib.suppress(AttributeError):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        known = {"FileNotFoundError": "no such program", "PermissionError": "it may not be executed"}
        reason = known.get(type(error).__name__, error.strerror)
        print(f"rocecomm soft: cannot run {command[0]!r}: {reason}", file=sys.stderr)
        return 126 if isinstance(error, PermissionError) else 127
