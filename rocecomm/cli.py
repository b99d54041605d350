"""The command ``rocecomm``, also ``python -m rocecomm``."""

import argparse
import sys

from .errors import RocecommError


def main(argv=None):
    """Run the command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["pingpong"]:
        from .pingpong import main as pingpong
        return _guarded(pingpong, argv[1:])
    if argv[:1] == ["soft"]:
        from .soft_command import main as soft
        return _guarded(soft, argv[1:])
    options = _parser().parse_args(argv)
    return _guarded(options.run, options)


def _guarded(function, argument):
    try:
        return function(argument) or 0
    except RocecommError as error:
        print(f"rocecomm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()                       # the reader of our output has gone
        return 0


def _parser():
    parser = argparse.ArgumentParser(
        prog="rocecomm", description="Direct RDMA messaging for Python.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run", help="start the ranks of a job on this host",
        description="Start N copies of a program on this host as the ranks of one job. "
        "PROGRAM is a Python file, any other program, or with -m a module. When one rank "
        "fails the others are ended, and its exit status is returned. Standard input is "
        "empty. For several hosts use torchrun, mpirun or srun.")
    run.add_argument("-n", "--ranks", type=_positive, required=True, metavar="N",
                     help="number of ranks")
    run.add_argument("-l", "--label", action="store_true",
                     help="put the rank before each line of output")
    run.add_argument("--grace", type=_seconds, default=5.0, metavar="SECONDS",
                     help="time for the others to end by themselves when one failed "
                     "(default 5)")
    run.add_argument("-m", "--module", action="store_true",
                     help="PROGRAM is the name of a Python module")
    run.add_argument("program", metavar="PROGRAM")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS")
    run.set_defaults(run=_run)

    devices = commands.add_parser("devices", help="list the RDMA devices, one a line")
    devices.set_defaults(run=_devices)

    info = commands.add_parser(
        "info", help="show devices, ports and GIDs, and what rocecomm would use",
        description="Show the RDMA devices with their ports and GID tables, and which of "
        "them rocecomm would use and why.")
    info.add_argument("--config", action="store_true",
                      help="show every setting, its value, where that comes from, its meaning")
    info.set_defaults(run=_info)

    commands.add_parser("pingpong", add_help=False,
                        help="measure a queue pair against another host or program")
    commands.add_parser("soft", add_help=False,
                        help="run any libibverbs program on soft0, the device in user space")
    return parser


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _seconds(text):
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"must be seconds from 0 up, not {text}")
    return value


def _run(options):
    from .launcher import Job, command_for
    command = command_for(options.program, options.arguments, options.module, options.label)
    return Job(options.ranks, command, options.grace, options.label).run()


def _devices(options):
    from .verbs import devices
    for device in devices():
        print(device.name)


def _info(options):
    from . import info
    return info.show_config() if options.config else info.show_devices()
