"""The pages' programs run, and what pages point at exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def run(path, ranks, device, *arguments):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ROCECOMM_IB_HCA": device}
    return subprocess.run([sys.executable, "-m", "rocecomm", "run", "-n", str(ranks), str(path),
                           *arguments], env=env, capture_output=True, text=True, timeout=50)


def programs(page):
    """Name -> source of the Python blocks that begin with ``# name.py``."""
    return dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(), re.S))


def test_tutorial(device, tmp_path):
    text = (DOCS / "tutorial.md").read_text()
    found = programs(DOCS / "tutorial.md")
    for name, ranks in (("hello.py", 2), ("sum.py", 4)):
        (tmp_path / name).write_text(found[name])
        done = run(tmp_path / name, ranks, device)
        assert done.returncode == 0 and done.stderr == ""
        assert done.stdout.replace(device, "soft0").strip() in text
    (tmp_path / "short.py").write_text(found["hello.py"].replace("empty(5)", "empty(3)"))
    done = run(tmp_path / "short.py", 2, device)
    told = next(line for line in done.stderr.splitlines() if "MessageTruncatedError" in line)
    assert " ".join(told.split()) in " ".join(text.split())


def test_parameter_server_page(tmp_path):
    page = (DOCS / "how-to/parameter-server.md").read_text()
    source = re.search(r"```python\n(.*?)```", page, re.S)[1]
    (tmp_path / "ps.py").write_text(source + "    if comm.rank in servers:\n"
                                    "        print(values['weights'][0] < -100)\n")
    done = run(tmp_path / "ps.py", 3, "soft0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_memory_page(device, tmp_path):
    (tmp_path / "memory.py").write_text(programs(DOCS / "how-to/memory.md")["memory.py"])
    done = run(tmp_path / "memory.py", 2, device)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == "10.0\n"


def test_one_sided_page(device, tmp_path):
    (tmp_path / "regions.py").write_text(programs(DOCS / "how-to/one-sided.md")["regions.py"])
    done = run(tmp_path / "regions.py", 2, device)
    assert done.returncode == 0 and done.stderr == ""
    assert sorted(done.stdout.splitlines()) == ["0", "[1. 2. 3.] 2.5e-323"]


def test_asyncio_page(device, tmp_path):
    (tmp_path / "awaiting.py").write_text(programs(DOCS / "how-to/asyncio.md")["awaiting.py"])
    done = run(tmp_path / "awaiting.py", 2, device)
    assert done.returncode == 0 and done.stderr == ""
    assert sorted(done.stdout.splitlines()) == ["0 8000", "1 8000"]


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")),
                         ids=lambda page: str(page.relative_to(DOCS)))
def test_what_a_page_points_at_exists(page):
    text = page.read_text()
    for target in re.findall(r"`([\w./-]+\.(?:md|py|pyx|pxd|c|h))`", text):
        places = [page.parent / target, DOCS / target, ROOT / target, ROOT / "rocecomm" / target]
        if "/" in target:
            assert any(place.exists() for place in places), f"{page.name}: {target}"


def test_every_error_and_status_is_in_the_reference():
    from rocecomm import enums, errors
    page = (DOCS / "reference/errors.md").read_text()
    for name in errors.__all__:
        assert name == "RocecommError" or f"| `{name}` |" in page
    for status in re.findall(r"^\| (\d+) `(IBV_WC_\w+)`", page, re.M):
        assert enums.WCStatus(int(status[0])).name == status[1]
