"""Who may import whom: arrows point down only (docs/design/foundation.md)."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rocecomm"
BASE = {"errors", "enums", "config"}

#: layer -> layers that it may import besides itself
ALLOWED = {
    "errors": set(),
    "enums": set(),
    "config": {"errors"},
    "verbs": {"errors", "enums"},
    "bootstrap": {"errors", "config"},
    "link": {"verbs", "bootstrap"} | BASE,
    "collectives": {"link"} | BASE,
    "ps": {"collectives", "link"} | BASE,
}
#: every other module at the top (communicator, __main__, ...) may import everything

#: words that a layer must not contain outside comments and docstrings: what it must not know
UNKNOWN = {
    "collectives": r"\bibv_|\bverbs\b|soft0|rxe|softnic|mlx5|\bMPI\b",
    "ps": r"\bibv_|\bverbs\b|soft0|rxe|softnic|mlx5|\bMPI\b",
    "link": r"rxe|mlx5|\bMPI\b|mpi4py",
    "bootstrap": r"\bibv_|rxe|mlx5|mpi4py",
    "communicator": r"rxe|softnic|mlx5",
}

IMPORT = re.compile(
    r"^\s*(?:from\s+(?P<from>[.\w]+)\s+c?import\s+(?P<names>[^#\n]+)|c?import\s+(?P<plain>[\w., ]+))", re.M)


def sources():
    return sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".pyx", ".pxd", ".pyi"))


def code(path):
    """The source without comments and docstrings."""
    text = path.read_text()
    text = re.sub(r'("""|\'\'\')(?:.|\n)*?\1', '""', text)
    return re.sub(r"(?m)(^|\s)#.*$", "", text)


def layer_of(path):
    return path.relative_to(PACKAGE).parts[0].partition(".")[0]


def imported(path):
    """Dotted names of the modules that a source imports, absolute."""
    package = ("rocecomm", *path.relative_to(PACKAGE).parts[:-1])
    text = re.sub(r"\(([^)]*)\)", lambda m: "(" + m[1].replace("\n", " ") + ")", code(path))
    for match in IMPORT.finditer(text):
        if match["plain"]:
            for name in match["plain"].split(","):
                yield name.split()[0] if name.split() else ""
            continue
        module = match["from"]
        dots = len(module) - len(module.lstrip("."))
        if dots:
            parts = [*package[: len(package) - dots + 1], *filter(None, [module.lstrip(".")])]
            module = ".".join(parts)
        if module == "rocecomm" or (dots and not match["from"].strip(".")):
            for name in match["names"].strip(" ()").split(","):
                if name.split():
                    yield f"{module}.{name.split()[0]}"
        else:
            yield module


def test_the_scanner_sees_imports():
    link = {name for p in sources() if layer_of(p) == "link" for name in imported(p)}
    assert any(n.startswith("rocecomm.verbs") for n in link), "no import of verbs found in link"
    assert any(n.startswith("rocecomm.errors") for n in link)


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_point_down(path):
    layer = layer_of(path)
    if layer not in ALLOWED:
        return  # the top may import everything
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "rocecomm" or len(parts) < 2:
            continue
        assert parts[1] == layer or parts[1] in ALLOWED[layer], f"{layer} imports {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nobody_knows_what_lies_beyond_a_layer(path):
    pattern = UNKNOWN.get(layer_of(path))
    if pattern:
        found = re.search(pattern, code(path))
        assert not found, f"{path.name} knows about {found[0]!r}"


def test_plan_imports_nothing_of_the_package():
    plan = PACKAGE / "collectives" / "plan.py"
    names = [n for n in imported(plan) if n.startswith("rocecomm")]
    assert not names, f"plan.py imports {names}"


def test_top_level_imports_are_numpy_and_the_standard_library():
    for path in PACKAGE.rglob("*.py"):
        also = {"pytest"} if path.name == "testing.py" else set()   # fixtures; nobody imports it
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                assert top in {"numpy", "rocecomm", *also} or top in sys.stdlib_module_names, \
                    f"{path.relative_to(ROOT)} imports {name} at import time"


def test_nobody_imports_the_fixtures():
    assert (PACKAGE / "testing.py").exists()
    users = [p.name for p in sources() if "rocecomm.testing" in set(imported(p)) - {p.stem}]
    assert not users, f"{users} import rocecomm.testing, which needs pytest"


def test_verbs_header_is_declared_in_one_place():
    users = [p.name for p in sources() if re.search(r"extern\s+from\s+.<?infiniband/", p.read_text())]
    assert users == ["libibverbs.pxd"]


def test_softnic_is_plain_c():
    files = [*(PACKAGE / "softnic").glob("*.[ch]")]
    assert files
    for path in files:
        assert "Python.h" not in path.read_text(), f"{path.name} includes Python.h"


def test_tests_ask_no_device_for_its_name():
    """Whether a test runs depends on what the device can do, never on what it is called."""
    pattern = re.compile(r"""(?m)^\s*(?:el)?if\b.*\bdevice\w*\s*[!=]=\s*["']|startswith\(["'](soft|rxe)""")
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path == Path(__file__) or "roce" in path.parts or "softnic" in path.parts:
            continue  # tests/roce and tests/softnic are about one device
        found = pattern.search(code(path))
        assert not found, f"{path.relative_to(ROOT)}: {found[0]!r}"
