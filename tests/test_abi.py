"""libsoftnic.so in libibverbs' place: every public symbol is ours, under the same version."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools/abi_check.py"


def tool_module():
    spec = importlib.util.spec_from_file_location("abi_check", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_public_symbols_are_ours_or_listed():
    done = subprocess.run([sys.executable, str(TOOL)], text=True, capture_output=True)
    if "no libibverbs" in done.stdout:
        pytest.skip("libibverbs is not installed: nothing to compare with")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_finds_what_is_missing_and_what_has_another_version():
    differences = tool_module().differences
    real = {"ibv_a@@IBVERBS_1.1", "ibv_b@@IBVERBS_1.6", "ibv_a@IBVERBS_1.0", "ibv_cmd@@IBVERBS_PRIVATE_34"}
    assert not list(differences(real, {"ibv_a@@IBVERBS_1.1", "ibv_b@@IBVERBS_1.6"},
                                {"ibv_a@IBVERBS_1.0": "old"}))
    found = list(differences(real, {"ibv_a@@IBVERBS_1.1", "ibv_b@@IBVERBS_1.7"},
                             {"ibv_c@@IBVERBS_1.1": "gone"}))
    assert [line.split(":")[0] for line in found] == ["ibv_a@IBVERBS_1.0", "ibv_b@@IBVERBS_1.6",
                                                      "ibv_c@@IBVERBS_1.1"]
    assert "as ibv_b@@IBVERBS_1.7" in found[1]


def test_every_function_that_the_header_declares_is_exported():
    """Also without libibverbs on the machine: what <infiniband/verbs.h> declares and does not define."""
    header = subprocess.run(["gcc", "-E", "-P", "-include", "infiniband/verbs.h", "-"], input="", text=True,
                            capture_output=True, check=True).stdout
    declared = set(re.findall(r"\b(_?ibv_\w+)\([^;{}]*\)(?:\s*__attribute__\(\([^;]*\)\))?;", header))
    defined = set(re.findall(r"\b(_?ibv_\w+)\([^;{}]*\)\s*{", header))
    calls = {name for name in declared if re.search(rf"^[\w\s*]*[\s*]{name}\(", header, re.MULTILINE)}
    out = subprocess.run(["nm", "-D", "--defined-only", str(ROOT / "rocecomm/softnic/libsoftnic.so")],
                         text=True, capture_output=True, check=True).stdout
    ours = {line.split()[-1].split("@")[0] for line in out.splitlines()}
    listed = (ROOT / "tools/abi_allowed.txt").read_text().splitlines()
    stays = {line.split("@")[0] for line in listed if "@@" in line}
    assert {"ibv_import_dm", "ibv_reg_mr_iova2", "ibv_query_ece"} <= calls - defined
    assert not calls - defined - ours - stays
