"""Compares libibverbs' public symbols with libsoftnic's: names and version nodes.

    abi_check.py [LIBIBVERBS]

A program that runs on a preloaded libsoftnic.so must not reach the real library with one of our
objects: their private parts differ, so it would crash. Hence every public symbol of libibverbs
is ours, under the same version node (dlvsym asks for it), or stands in tools/abi_allowed.txt with
the reason why it may stay with the real library. Exit status 1 and one line per difference if not.
"""

import ctypes.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ROOT / "rocecomm/softnic/libsoftnic.so"
ALLOWED = ROOT / "tools/abi_allowed.txt"
PRIVATE = "ibv_query_gid_type"  # the one private symbol that programs use


def symbols(library):
    """``name@NODE`` (old) and ``name@@NODE`` (default) of what a library defines."""
    out = subprocess.run(["nm", "-D", "--defined-only", str(library)], check=True, text=True,
                         stdout=subprocess.PIPE).stdout
    found = set()
    for line in out.splitlines():
        kind, name = line.split()[-2:]
        if kind in "TBDR" and "@" in name:
            found.add(name)
    return found


def allowed():
    """The lines of the allow-list: symbol, then the reason."""
    entries = {}
    for number, line in enumerate(ALLOWED.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, reason = line.partition(" ")
        if not reason.strip():
            sys.exit(f"{ALLOWED.name}:{number}: {name} has no reason")
        entries[name] = reason.strip()
    return entries


def real_library(argv):
    """Path of libibverbs: the argument, or the system's."""
    if argv:
        return argv[0]
    name = ctypes.util.find_library("ibverbs")
    if not name:
        return None
    cache = subprocess.run(["/sbin/ldconfig", "-p"], text=True, stdout=subprocess.PIPE).stdout
    match = re.search(rf"^\s*{re.escape(name)} \(.*x86-64.*\) => (\S+)$", cache, re.MULTILINE) or \
        re.search(rf"^\s*{re.escape(name)} \(.*\) => (\S+)$", cache, re.MULTILINE)
    return match.group(1) if match else None


def differences(real, ours, may_stay):
    """One sentence per symbol that is missing, has another node, or need not be on the list."""
    public = {s for s in real if "PRIVATE" not in s or s.split("@")[0] == PRIVATE}
    ours = ours | {s.replace("@", "@@", 1) for s in ours if "PRIVATE" in s and "@@" not in s}
    names = {re.split("@+", s)[0]: s for s in ours}
    for symbol in sorted(public - ours):
        if symbol in may_stay:
            continue
        name = symbol.split("@")[0]
        if "@@" in symbol and name in names:
            yield f"{symbol}: libsoftnic has it as {names[name]}"
        else:
            yield f"{symbol}: not in libsoftnic, and not on the list of those that may be missing"
    for symbol in sorted(set(may_stay) & ours):
        yield f"{symbol}: libsoftnic has it, so it does not belong on the list"
    for symbol in sorted(set(may_stay) - public):
        yield f"{symbol}: on the list, and libibverbs does not have it"


def main(argv):
    real = real_library(argv)
    if not real:
        print("abi_check: no libibverbs on this machine; nothing to compare with")
        return 0
    if not OURS.exists():
        sys.exit(f"abi_check: {OURS} is not built")
    public, ours = symbols(real), symbols(OURS)
    found = list(differences(public, ours, allowed()))
    for line in found:
        print(line)
    if not found:
        print(f"abi_check: {len(public & ours)} symbols of {real} are ours, {len(allowed())} stay there")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
