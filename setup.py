"""Builds the Cython extensions and libsoftnic.so, the user-space RDMA device.

Every ``rocecomm/**/*.pyx`` becomes an extension of its own, and all of
``rocecomm/softnic/*.c`` becomes one plain shared library without Python.h. Neither
links libibverbs: its header is enough.

``SAN=address,undefined`` or ``SAN=thread`` adds sanitizers to both and keeps its
objects apart. A build that was interrupted is repaired by the next one: nothing is put in
its place before it is complete.
"""

import concurrent.futures
import contextlib
import fcntl
import filecmp
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Command, Distribution, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext as _build_ext

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)
SOFTNIC = Path("rocecomm/softnic")
API = SOFTNIC / "softnic_api.h"  # for C programs
SAN = ",".join(s.strip() for s in os.environ.get("SAN", "").split(",") if s.strip())
JOBS = int(os.environ.get("ROCECOMM_BUILD_JOBS", "2"))
# objects of a sanitizer build never mix with those of the normal one
BASE = Path("build") / (f"san-{SAN.replace(',', '-')}" if SAN else "plain")

SAN_FLAGS = [f"-fsanitize={SAN}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"] if SAN else []
OPT = ["-O1" if SAN else "-O2", "-g"]
C_FLAGS = [
    *OPT, "-fPIC", "-std=gnu11", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread", *SAN_FLAGS,
]
# sanitizer runtimes leave symbols undefined on purpose, so -z,defs is for normal builds
C_LINK = ["-shared", "-pthread", "-Wl,-Bsymbolic", *([] if SAN else ["-Wl,-z,defs"]), *SAN_FLAGS]
EXT_FLAGS = [*OPT, "-std=gnu11", "-fvisibility=hidden", "-Wno-unused-function", *SAN_FLAGS]

DIRECTIVES = {"language_level": 3, "binding": True}


def compiler():
    """The C compiler: $CC, else gcc, else cc."""
    cc = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if not cc:
        sys.exit("rocecomm: no C compiler found; on Debian: apt-get install build-essential")
    return cc.split()


def require_headers():
    """Ends the build with a hint if libibverbs' header is missing."""
    probe = subprocess.run(
        [*compiler(), "-E", "-x", "c", "-o", os.devnull, "-"],
        input="#include <infiniband/verbs.h>\n", text=True, capture_output=True,
    )
    if probe.returncode:
        sys.exit(
            "rocecomm: <infiniband/verbs.h> not found; on Debian: apt-get install libibverbs-dev\n"
            + probe.stderr
        )


@contextlib.contextmanager
def build_lock():
    """One build of a tree at a time."""
    Path("build").mkdir(exist_ok=True)
    with open("build/.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def put(source, target):
    """Copies source to target in one step, unless target already has its content."""
    source, target = Path(source), Path(target)
    if target.exists() and filecmp.cmp(source, target, shallow=False):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, part)
    shutil.copymode(source, part)
    os.replace(part, target)  # running programs keep the old file mapped


def digest(*parts):
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


# --- libsoftnic.so ------------------------------------------------------------------


def _dependencies(depfile):
    """Names of the files that an object was made from, from gcc -MMD output."""
    text = depfile.read_text().replace("\\\n", " ")
    return re.split(r"(?<!\\)\s+", text.partition(": ")[2].strip())


def _compile(source):
    """Compiles one C file if anything it depends on has changed; returns its object."""
    obj = BASE / "softnic" / (source.stem + ".o")
    dep, stamp = obj.with_suffix(".d"), obj.with_suffix(".flags")
    wanted = digest(*compiler(), *C_FLAGS)
    try:
        made = obj.stat().st_mtime_ns
        fresh = stamp.read_text() == wanted and all(
            os.stat(name).st_mtime_ns < made for name in _dependencies(dep)
        )
    except OSError:
        fresh = False
    if not fresh:
        stamp.unlink(missing_ok=True)
        command = [*compiler(), *C_FLAGS, "-I", str(SOFTNIC), "-MMD", "-MF", str(dep),
                   "-c", str(source), "-o", str(obj)]
        print(" ".join(command), flush=True)
        subprocess.run(command, check=True)
        stamp.write_text(wanted)  # last: without it the object counts as unfinished
    return obj


def build_softnic():
    """Builds libsoftnic.so under build/ and returns its path, or None without sources."""
    sources = sorted(SOFTNIC.glob("*.c"))
    if not sources:
        return None
    (BASE / "softnic").mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        objects = list(pool.map(_compile, sources))
    link = list(C_LINK)
    version_map = SOFTNIC / "libsoftnic.map"
    inputs = list(objects)
    if version_map.exists():
        link.append(f"-Wl,--version-script={version_map}")
        inputs.append(version_map)
    library, stamp = BASE / "softnic/libsoftnic.so", BASE / "softnic/libsoftnic.flags"
    wanted = digest(*compiler(), *link, *objects)
    try:
        made = library.stat().st_mtime_ns
        fresh = stamp.read_text() == wanted and all(i.stat().st_mtime_ns < made for i in inputs)
    except OSError:
        fresh = False
    if not fresh:
        stamp.unlink(missing_ok=True)
        command = [*compiler(), *C_FLAGS, *link, "-o", str(library), *map(str, objects)]
        print(" ".join(command), flush=True)
        subprocess.run(command, check=True)
        stamp.write_text(wanted)
    return library


# --- extensions ---------------------------------------------------------------------


def extensions():
    """One Extension per .pyx file of the package."""
    found = []
    for path in sorted(Path("rocecomm").rglob("*.pyx")):
        includes = []
        if re.search(r"^\s*(cimport|from)\s+numpy\b.*", path.read_text(), re.M):
            if re.search(r"^\s*(cimport numpy|from numpy cimport)", path.read_text(), re.M):
                import numpy

                includes.append(numpy.get_include())
        found.append(
            Extension(
                ".".join(path.with_suffix("").parts), [str(path)],
                include_dirs=includes,
                define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")] if includes else [],
                extra_compile_args=EXT_FLAGS, extra_link_args=SAN_FLAGS,
            )
        )
    return found


def translate(exts):
    """Cython to C under build/cython, only what has changed."""
    from Cython.Build import cythonize

    out = Path("build/cython")
    for ext in exts:
        made = out / Path(ext.sources[0]).with_suffix(".c")
        # Cython writes in place: a file without its closing guard is half of one
        if made.exists() and "Py_PYTHON_H" not in made.read_text(errors="replace")[-200:]:
            made.unlink()
    parallel = JOBS if len(exts) > 1 and sys.version_info < (3, 14) else 0
    return cythonize(
        exts, build_dir=str(out), compiler_directives=DIRECTIVES, nthreads=parallel, quiet=True,
    )


class build_ext(_build_ext):
    """Builds libsoftnic.so and the extensions, and puts each in place in one step."""

    _translated = False

    def finalize_options(self):
        if not self._translated and self.distribution.ext_modules:
            require_headers()
            with build_lock():
                self.distribution.ext_modules = translate(self.distribution.ext_modules)
            self._translated = True
        super().finalize_options()
        if self.parallel is None:
            self.parallel = JOBS
        self.build_temp = str(BASE / "temp")
        if self.inplace or getattr(self, "editable_mode", False):
            self.build_lib = str(BASE / "lib")

    def run(self):
        self._in_tree = bool(self.inplace or getattr(self, "editable_mode", False))
        with build_lock():
            library = build_softnic()
            if library:
                place = Path("." if self._in_tree else self.build_lib)
                put(library, place / SOFTNIC / "libsoftnic.so")
                put(API, place / API)
            super().run()

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name))
        name = f"{ext.name}.{sysconfig.get_config_var('SOABI')}.ok"
        stamp = BASE / "stamps" / digest(target.parent.resolve())[:8] / name
        wanted = digest(*EXT_FLAGS, *ext.include_dirs, sys.prefix)
        sound = stamp.exists() and target.exists() and stamp.read_text() == wanted
        if not sound:
            target.unlink(missing_ok=True)  # another build's or an interrupted one's
        stamp.unlink(missing_ok=True)
        super().build_extension(ext)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(wanted)

    def copy_extensions_to_source(self):
        """After all have been built: those in the tree always fit each other."""
        for ext in self.extensions:
            name = self.get_ext_filename(self.get_ext_fullname(ext.name))
            put(Path(self.build_lib) / name, name)

    def get_outputs(self):
        outputs = super().get_outputs()
        if any(SOFTNIC.glob("*.c")):
            outputs += [str(Path(self.build_lib) / f) for f in (SOFTNIC / "libsoftnic.so", API)]
        return outputs


class build_softnic_only(Command):
    """Builds only libsoftnic.so, in place unless it is a sanitizer build; prints its path."""

    user_options = []

    def initialize_options(self):
        pass

    def finalize_options(self):
        require_headers()

    def run(self):
        with build_lock():
            library = build_softnic()
            if library and not SAN:
                put(library, SOFTNIC / "libsoftnic.so")
                library = SOFTNIC / "libsoftnic.so"
        print(f"softnic: {library.resolve() if library else 'no sources'}")


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(
    packages=find_packages(include=["rocecomm", "rocecomm.*"]),
    package_dir={"": "."},
    package_data={"": ["*.pyi", "*.pxd", "py.typed"]},
    ext_modules=extensions(),
    cmdclass={"build_ext": build_ext, "build_softnic": build_softnic_only},
    distclass=BinaryDistribution,
    zip_safe=False,
)
