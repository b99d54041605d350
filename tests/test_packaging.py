"""What ships: nothing linked but libc, an import without side effects, stubs, docstrings."""

import ast
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import rocecomm

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rocecomm"
PYX = sorted(PACKAGE.rglob("*.pyx"))
SHARED = sorted(p for p in PACKAGE.rglob("*.so"))
MAX_LINES = 600  # aim for 500
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def name_of(path):
    return str(path.relative_to(ROOT))


def tool(*command):
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout


def fresh(code, **env):
    """Runs code in a fresh interpreter and returns what it printed."""
    full = dict(os.environ, PYTHONPATH=str(ROOT), OPENBLAS_NUM_THREADS="1", **env)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], text=True, env=full,
                          capture_output=True, timeout=50, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- shared objects -----------------------------------------------------------------


def test_every_extension_is_built():
    built = {p.name.split(".")[0] for p in SHARED}
    assert {p.stem for p in PYX} <= built and "libsoftnic" in built


@pytest.mark.parametrize("path", SHARED, ids=name_of)
def test_no_verbs_symbol_is_left_undefined(path):
    undefined = tool("nm", "-D", "--undefined-only", path)
    assert "ibv_" not in undefined, re.findall(r"\S*ibv_\S*", undefined)


@pytest.mark.parametrize("path", SHARED, ids=name_of)
def test_nothing_is_linked_but_libc(path):
    needed = re.findall(r"NEEDED.*\[(.*)\]", tool("readelf", "-d", path))
    allowed = r"(libc|libm|libdl|libpthread|librt|ld-linux.*)\.so.*"
    if os.environ.get("ROCECOMM_TEST_SANITIZER"):
        allowed = r"(libc|libm|libdl|libpthread|librt|ld-linux.*|libasan|libubsan|libgcc_s)\.so.*"
    assert [n for n in needed if not re.fullmatch(allowed, n)] == []


def test_libsoftnic_exports_verbs_and_its_extras_only():
    defined = tool("nm", "-D", "--defined-only", PACKAGE / "softnic" / "libsoftnic.so")
    names = {line.split()[2] for line in defined.splitlines() if line.split()[1] in "TDBRVW"}
    assert {n.partition("@")[0] for n in names} >= {"ibv_get_device_list", "ibv_open_device", "ibv_reg_mr"}
    odd = [n for n in names if not re.match(r"_?(ibv|softnic)_|m(ult|bps)_to_ibv_rate@", n)]
    assert not odd


# --- import -------------------------------------------------------------------------


def test_import_has_no_side_effects():
    out = fresh("""
        import logging, os, signal, sys, threading, warnings
        import numpy
        def state():
            fds = {f: os.readlink(f"/proc/self/fd/{f}") for f in os.listdir("/proc/self/fd")
                   if os.path.islink(f"/proc/self/fd/{f}")}
            return dict(
                environ=dict(os.environ), threads=len(os.listdir("/proc/self/task")),
                fds=sorted(fds.items()), handlers=list(logging.root.handlers),
                level=logging.root.level, filters=list(warnings.filters),
                signals=[signal.getsignal(s) for s in range(1, 32) if s not in (9, 19)],
                shm=sorted(os.listdir("/dev/shm")), cwd=os.getcwd(),
                hooks=(sys.excepthook, threading.excepthook, sys.unraisablehook))
        before = state()
        import rocecomm
        after = state()
        for key in before:
            if key != "shm":
                assert before[key] == after[key], (key, before[key], after[key])
        log = logging.getLogger("rocecomm")
        assert log.level == logging.NOTSET and all(
            isinstance(h, logging.NullHandler) for h in log.handlers)
        maps = open("/proc/self/maps").read()
        assert "libibverbs" not in maps and "libsoftnic" not in maps
        assert not {"torch", "mpi4py", "scipy", "cupy"} & set(sys.modules)
        print("fine")
    """)
    assert out == "fine\n"


HIDE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
void *dlopen(const char *name, int flags)
{
    void *(*real)(const char *, int) = dlsym(RTLD_NEXT, "dlopen");
    return real(name && strstr(name, "libibverbs") ? "libibverbs.so.1-hidden" : name, flags);
}
"""


@pytest.fixture(scope="module")
def no_libibverbs(tmp_path_factory):
    """LD_PRELOAD value under which no libibverbs can be opened."""
    folder = tmp_path_factory.mktemp("hide")
    (folder / "hide.c").write_text(HIDE)
    tool("gcc", "-shared", "-fPIC", "-o", folder / "hide.so", folder / "hide.c", "-ldl")
    return " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(folder / "hide.so")]))


def test_without_libibverbs_import_and_soft0_work(no_libibverbs):
    out = fresh("""
        import numpy as np
        import rocecomm
        with rocecomm.init(rank=0, world_size=1, device="soft0") as comm:
            x = np.arange(4.0)
            comm.all_reduce(x)
            print(comm.device, x.tolist())
    """, LD_PRELOAD=no_libibverbs)
    assert out == "soft0 [0.0, 1.0, 2.0, 3.0]\n"


def test_without_libibverbs_another_device_is_a_clear_error(no_libibverbs):
    out = fresh("""
        import rocecomm
        from rocecomm.errors import DeviceNotFoundError
        try:
            rocecomm.init(rank=0, world_size=1, device="mlx5_0")
        except DeviceNotFoundError as err:
            print(err)
    """, LD_PRELOAD=no_libibverbs)
    assert "mlx5_0" in out and "libibverbs" in out


# --- sources ------------------------------------------------------------------------


def test_typed():
    assert (PACKAGE / "py.typed").exists()


def public(names):
    return {n for n in names if not n.startswith("_")}


def own_names(module):
    """Public names that a module defines itself."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    return {n for n, v in vars(module).items()
            if not n.startswith("_") and getattr(v, "__module__", None) == module.__name__}


@pytest.mark.parametrize("path", PYX, ids=name_of)
def test_stub_beside_extension_names_what_is_there(path):
    stub = path.with_suffix(".pyi")
    assert stub.exists(), f"{stub.name} is missing"
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    classes, names = {}, set()
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = {n.name for n in node.body if isinstance(n, FUNCTION)}
            names.add(node.name)
        elif isinstance(node, FUNCTION):
            names.add(node.name)
    missing = [n for n in public(names) if not hasattr(module, n)]
    assert not missing, f"in the stub, not in the module: {missing}"
    assert public(own_names(module)) <= names | public_assignments(stub), \
        f"not in the stub: {public(own_names(module)) - names}"
    for cls, methods in classes.items():
        real = getattr(module, cls, None)
        gone = [m for m in public(methods) if real is not None and not hasattr(real, m)]
        assert not gone, f"{cls} has no {gone}"


def public_assignments(stub):
    found = set()
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {a.asname or a.name for a in node.names}
    return found


def modules():
    yield rocecomm
    for info in pkgutil.walk_packages(rocecomm.__path__, "rocecomm."):
        if not info.name.endswith("__main__"):
            yield importlib.import_module(info.name)


def test_public_things_have_docstrings():
    """Every module; and what ``__all__`` of packages, verbs and top-level modules names, with
    the public methods of its classes."""
    bare = set()
    for module in modules():
        if not (module.__doc__ or "").strip():
            bare.add(module.__name__)
        if not (hasattr(module, "__path__") or module.__name__.count(".") == 1
                or module.__name__.startswith("rocecomm.verbs.")):
            continue
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if not (inspect.isclass(thing) or inspect.isroutine(thing)):
                continue
            if not (thing.__doc__ or "").strip():
                bare.add(f"{module.__name__}.{name}")
            if inspect.isclass(thing):
                bare |= {f"{module.__name__}.{name}.{method}" for method, value in vars(thing).items()
                         if not method.startswith("_") and inspect.isroutine(value)
                         and not (inspect.getdoc(getattr(thing, method)) or "").strip()}
    assert not bare, f"no docstring: {sorted(bare)}"


def test_everything_in_all_exists():
    for module in modules():
        missing = [n for n in getattr(module, "__all__", []) if not hasattr(module, n)]
        assert not missing, f"{module.__name__}.__all__ names {missing}"


def sources():
    for folder in ("rocecomm", "tests", "tools", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".pyx", ".pxd", ".pyi", ".c", ".h", ".sh"):
                yield path


def test_no_file_grows_too_long():
    long = {name_of(p): n for p in sources() if (n := p.read_text().count("\n")) > MAX_LINES}
    assert not long, f"split these: {long}"


def test_package_data_is_found_by_setup(tmp_path):
    """Stubs, declarations and the marker go into a wheel, no C source of Cython does."""
    subprocess.run([sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path],
                   cwd=ROOT, check=True, capture_output=True)
    shipped = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    for path in [*PYX, PACKAGE / "py.typed"]:
        want = path.with_suffix(".pyi") if path.suffix == ".pyx" else path
        assert name_of(want) in shipped
    assert not [s for s in shipped if s.endswith((".c", ".o"))]


def test_header_for_c_programs(tmp_path):
    """Declares all that libsoftnic exports beside libibverbs' symbols, in C and C++, and ships."""
    header = PACKAGE / "softnic" / "softnic_api.h"
    defined = tool("nm", "-D", "--defined-only", PACKAGE / "softnic" / "libsoftnic.so")
    exported = set(re.findall(r" T (softnic_\w+)", defined))
    assert exported == set(re.findall(r"^[^ *].*?(softnic_\w+)\(", header.read_text(), re.M))
    for language in ("c", "c++"):
        tool("gcc", "-fsyntax-only", "-Wall", "-Werror", "-x", language, header)
    code = "import setup; c = setup.build_ext(setup.Distribution({'name': 'x'})); c.build_lib = 'lib'; " \
           "c.extensions = []; c.inplace = 0; print(c.get_outputs())"
    assert "lib/rocecomm/softnic/softnic_api.h" in tool(
        sys.executable, "-c", "import sys; sys.argv[1:] = ['-q', '--version']; " + code)
