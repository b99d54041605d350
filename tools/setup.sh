#!/bin/bash
# Set-up for the Makefile: Debian packages that are missing, .venv, and the build.
#
#     tools/setup.sh [GROUP...]       groups: demo test stock torch mpi roce perftest bench plot lint
#
# Idempotent, and quick when nothing is to be done. PYTHON=/path/to/python3 chooses the
# interpreter (3.10 to 3.13); it counts when .venv is made. TORCH=0 leaves torch out.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
mkdir -p build
exec 9>build/.setup.lock
flock 9 # one set-up of a tree at a time

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }
wants() { [[ " $groups " == *" $1 "* ]]; }
groups=" $* "

# --- Debian packages ------------------------------------------------------------------

missing=()
need() { # need PACKAGE TEST...: notes the package if the test fails
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || missing+=("$package")
}
has() { PATH=$PATH:/usr/sbin:/sbin command -v "$1"; }
can_make_venv() { "$1" -c 'import sys, venv, ensurepip, sysconfig, os
assert sys.version_info >= (3, 10)
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))'; }
kernel_with_rxe() { compgen -G '/lib/modules/*/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*' && compgen -G '/boot/vmlinuz-*'; }
venv_works() { [ -x .venv/bin/python ] && .venv/bin/python -c 'import pip' 2>/dev/null; }

need gcc has "${CC:-gcc}"
need libc6-dev test -e /usr/include/stdio.h
need make has make
need libibverbs-dev test -e /usr/include/infiniband/verbs.h
python=${PYTHON:-python3}
if ! venv_works && ! can_make_venv "$python" >/dev/null 2>&1; then
    # an interpreter of the user's own choice is the user's to complete
    [ -z "${PYTHON:-}" ] || fail "$PYTHON lacks venv, ensurepip or Python.h, or is older than 3.10"
    python=/usr/bin/python3
    can_make_venv $python >/dev/null 2>&1 || missing+=(python3 python3-dev python3-venv)
fi
if wants roce; then
    need qemu-system-x86 has qemu-system-x86_64
    need linux-image-amd64 kernel_with_rxe
    need busybox-static has busybox
    need zstd has zstd
    need kmod has modprobe
    need iproute2 has rdma
    need rdma-core test -d /usr/share/doc/rdma-core
    need ibverbs-providers compgen -G '/usr/lib/*/libibverbs/librxe-rdmav*.so'
    need ibverbs-utils has ibv_rc_pingpong
    need python3-pyverbs test -d /usr/lib/python3/dist-packages/pyverbs
fi

if wants roce || wants perftest; then need perftest has ib_send_lat; fi

# Programs that tests run if they are there: without them those tests are skipped, and say why.
required=(${missing[@]+"${missing[@]}"})
missing=()
if wants stock; then
    need ibverbs-utils has ibv_rc_pingpong
    need perftest has ib_send_lat
    need rdma-core test -d /usr/share/doc/rdma-core/tests
    need python3-pyverbs test -d /usr/lib/python3/dist-packages/pyverbs
fi

install() { # install PACKAGE...: where that cannot be done it fails, and `why` says the reason
    command -v apt-get >/dev/null || { why="please install what Debian calls: $* (no apt-get here)"; return 1; }
    local sudo=()
    if [ "$(id -u)" -ne 0 ]; then
        local hint="as root: apt-get install --no-install-recommends $*"
        command -v sudo >/dev/null || { why="packages are missing and there is no sudo; $hint"; return 1; }
        sudo=(sudo)
        [ -t 0 ] || sudo=(sudo -n)
        "${sudo[@]}" true || { why="packages are missing and sudo refuses; $hint"; return 1; }
    fi
    say "installing $*"
    apt() { "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 "$@" </dev/null; }
    apt update || say "apt-get update failed; trying with the package lists at hand"
    apt install -y --no-install-recommends "$@" || { why="apt-get could not install $*"; return 1; }
}
if [ ${#required[@]} -gt 0 ]; then install "${required[@]}" || fail "$why"; fi
if wants stock; then
    rm -f build/setup.missing # tests/stock quotes it
    if [ ${#missing[@]} -gt 0 ] && ! install "${missing[@]}"; then
        say "$why; the tests that run them will be skipped"
        echo "$why" >build/setup.missing
    fi
fi

# --- .venv ----------------------------------------------------------------------------

if ! venv_works; then
    rm -rf .venv
    "$python" -m venv .venv || fail "$python could not make .venv"
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check -q "$@"; }

group() { # group NAME REQUIREMENT...: installs them once
    local stamp=.venv/.rocecomm-$1
    shift
    if [ "$(cat "$stamp" 2>/dev/null)" != "$*" ]; then
        say "installing $*"
        pip install "$@" || fail "pip could not install $*"
        echo "$*" >"$stamp"
    fi
}
group build 'setuptools>=77' wheel 'Cython>=3.1,<4' 'numpy>=1.24'
if wants demo; then group demo 'scikit-learn>=1.3'; fi
if wants test; then group test 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100' 'scikit-learn>=1.3' ml_dtypes 'uvloop>=0.19'; fi
if wants torch && [ "${TORCH:-1}" != 0 ]; then
    # this release exactly: a bare name may bring several GB of GPU libraries
    group torch 'torch==2.13.0'
fi
if wants mpi; then group mpi 'mpi4py>=4' openmpi; fi
if wants bench; then
    # further competitors of `make bench`, which leaves out what is not there
    (group zmq 'pyzmq>=26') || say "the benchmarks run without pyzmq"
    (group ucxx 'ucxx-cu12>=0.45') || say "the benchmarks run without UCXX"
fi
if wants roce; then group roce 'virtme-ng>=1.33'; fi
if wants plot; then group plot 'matplotlib>=3.8'; fi
if wants lint; then group lint 'ruff>=0.6' 'mypy>=1.11'; fi

# the tree itself is importable from everywhere, and `rocecomm` is a command
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ "$(cat "$site/rocecomm-tree.pth" 2>/dev/null)" != "$root" ]; then echo "$root" >"$site/rocecomm-tree.pth"; fi
if [ ! -x .venv/bin/rocecomm ]; then
    cat >.venv/bin/rocecomm <<SCRIPT
#!$root/.venv/bin/python
import sys
from rocecomm.__main__ import main
sys.exit(main())
SCRIPT
    chmod +x .venv/bin/rocecomm
fi

# --- build ----------------------------------------------------------------------------

log=build/setup.log
if ! .venv/bin/python setup.py build_ext --inplace >"$log" 2>&1; then
    { grep -iE -A3 'error' "$log" | grep -v ^gcc || tail -n 40 "$log"; } | head -n 60 >&2
    fail "the build failed; all of its output is in $log"
fi
