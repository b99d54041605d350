"""Builds tests/verbs/shim.c: libsoftnic, except that verbs fail when told to."""

import os
import shutil
import subprocess
from pathlib import Path

import rocecomm

SOFTNIC = Path(rocecomm.__file__).parent / "softnic" / "libsoftnic.so"


def build(folder):
    """The library's path; a program takes it for libsoftnic by ``ROCECOMM_SOFTNIC``."""
    out = folder / "libshim.so"
    cc = shutil.which("gcc") or shutil.which("cc")
    source = Path(__file__).with_name("verbs") / "shim.c"
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}   # a sanitizer's
    subprocess.run([cc, "-shared", "-fPIC", "-O1", "-w", str(source), "-o", str(out), "-Wl,--no-as-needed",
                    str(SOFTNIC), f"-Wl,-rpath,{SOFTNIC.parent}"], check=True, env=env)
    return out
