#!/bin/bash
# Boots a virtual machine with kernel Soft-RoCE and runs a command in it:
#
#     tools/vm.sh [--timeout SECONDS] [--out DIR] [--copy 'NAME...'] -- COMMAND [ARG...]
#
# The guest sees this host's file system read-only, starts in the current folder with
# .venv/bin first in PATH, and has rxe0 up on 10.9.0.1 (a dummy interface, MTU 9000; GID
# index 1 is the IPv4 one). /tmp and /dev/shm are its own and writable; $OUT is a folder
# that outlives it (--out, default: a temporary one, removed). Variables ROCECOMM_*,
# PYTEST_* and HYPOTHESIS_* are passed on. --copy names entries of site-packages that the
# command imports besides numpy and pytest: they are copied into the guest's memory, which
# reads them much faster than from the host.
#
# Exit status: that of COMMAND; 124 on timeout; 125 if the machine did not get as far as
# COMMAND. Software emulation, no KVM: code runs 10 to 20 times slower than on the host.

main() { # read as a whole before it runs: an edit of this file cannot reach a running one
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
limit=600 out="" keep="" copy=""
while [ $# -gt 0 ]; do
    case $1 in
        --timeout) limit=$2; shift 2 ;;
        --out) out=$2; keep=1; shift 2 ;;
        --copy) copy=$2; shift 2 ;;
        --) shift; break ;;
        -h | --help) sed -n '2,17s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) break ;;
    esac
done
if [ $# -eq 0 ]; then
    echo "usage: tools/vm.sh [--timeout SECONDS] [--out DIR] [--copy 'NAME...'] -- COMMAND [ARG...]" >&2
    exit 2
fi
fail() { echo "vm.sh: $*" >&2; exit 125; }

PATH=$root/.venv/bin:$PATH:/usr/sbin:/sbin
command -v vng >/dev/null || fail "virtme-ng not found; run: tools/setup.sh roce"
command -v qemu-system-x86_64 >/dev/null || fail "qemu not found; run: tools/setup.sh roce"

# the newest kernel that has the Soft-RoCE module
kernel=""
for modules in $(ls -d /lib/modules/* 2>/dev/null | sort -V); do
    version=${modules##*/}
    if [ -r "/boot/vmlinuz-$version" ] && ls "$modules"/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko* >/dev/null 2>&1; then
        kernel=/boot/vmlinuz-$version
    fi
done
[ -n "$kernel" ] || fail "no kernel with rdma_rxe in /boot and /lib/modules; run: tools/setup.sh roce"

if [ -n "$out" ]; then mkdir -p "$out" && out=$(cd "$out" && pwd); else out=$(mktemp -d); fi
rm -f "$out/status" "$out/booted"
qemu_log=$out/machine.log
trap '[ -n "$keep" ] || rm -rf "$out"' EXIT

# The guest has file systems of its own at these places. A tree that lies there is handed in at
# /mnt, and put back piece by piece around $OUT, which is mounted first.
tree=()
case $root/ in
    /tmp/* | /var/tmp/* | /run/* | /dev/shm/* | /var/log/*) tree=("--rodir=/mnt=$root") ;;
esac

# Copies of what every Python process reads, for the guest's memory: over 9p each read is a
# round trip to the host. Mounted over the originals, whose other files stay visible.
fast=() layers=()
if [ -x "$root/.venv/bin/python" ]; then
    mapfile -t places < <("$root/.venv/bin/python" -c '
import os, sys, sysconfig
base = os.path.realpath(sysconfig.get_path("stdlib"))
print(base, sysconfig.get_path("purelib"), sep="\n")')
    stdlib=${places[0]} site=${places[1]}
    fast=("${stdlib#/}")
    names=(numpy numpy.libs ml_dtypes _pytest pytest pytest_timeout.py pluggy iniconfig packaging
        pygments hypothesis sortedcontainers $copy)
    for name in "${names[@]}"; do
        [ -e "$site/$name" ] && fast+=("${site#/}/$name")
    done
    for path in "$site"/{pytest,pytest_timeout,hypothesis,pluggy}-*.dist-info "$site"/*.pth; do
        [ -e "$path" ] && fast+=("${path#/}")
    done
    layers=("$stdlib" "$site")
    for path in "$root/rocecomm" "$root/tests" "$root/examples"; do
        [ -d "$path" ] && fast+=("${path#/}") && layers+=("$path")
    done
    tar -C / -cf "$out/fast.tar" --exclude="${stdlib#/}/site-packages" --exclude="${stdlib#/}/test" \
        --exclude="${stdlib#/}/idlelib" --exclude="${stdlib#/}/ensurepip" --exclude='lib2to3' \
        --exclude='*.a' --exclude='*.h' --exclude='*/numpy/*/tests' --exclude='*/numpy/f2py' \
        --exclude='*/torch/bin' --exclude='*/torch/include' --exclude='*/torch/test' \
        --exclude='*/scipy/*/tests' --exclude='*/sklearn/*/tests' "${fast[@]}" ||
        fail "could not pack the guest's files"
    [ -n "$keep" ] && trap 'rm -f "$out/fast.tar"' EXIT
fi

{
    echo "export PATH='$PATH' HOME='${HOME:-/root}' LANG=C.UTF-8 OUT='$out' PYTHONDONTWRITEBYTECODE=1 OPENBLAS_NUM_THREADS=1"
    echo "export ROCECOMM_TEST_DEVICE=rxe0 ROCECOMM_TEST_SLOW=10 ROCECOMM_TEST_SIZES=small"
    env -0 | grep -zE '^(ROCECOMM|PYTEST|HYPOTHESIS)_[A-Z_]*=' | while IFS= read -r -d '' pair; do
        printf 'export %q\n' "$pair"
    done
    if [ ${#tree[@]} -gt 0 ]; then
        echo "mkdir -p '$root' && cd '$root' || exit 125"
        cat <<'GUEST'
for entry in /mnt/* /mnt/.venv /mnt/.ci; do
    name=${entry#/mnt/}
    if [ -d "$entry" ] && [ "$name" != build ]; then
        mkdir -p "$name" && mount --bind "$entry" "$name" || exit 125
    elif [ -f "$entry" ]; then
        cp "$entry" "$name" || exit 125
    fi
done
GUEST
    fi
    printf 'cd %q || exit 125\n' "$PWD"
    cat <<'GUEST'
mkdir -p /tmp; ulimit -l unlimited; ulimit -c 0
{
    ip link set lo up &&
    modprobe rdma_rxe && modprobe ib_uverbs &&
    ip link add eth9 type dummy && ip addr add 10.9.0.1/24 dev eth9 &&
    ip link set eth9 mtu 9000 up && rdma link add rxe0 type rxe netdev eth9
} || { echo "vm.sh: could not set up rxe0 in the guest" >&2; exit 125; }
# the IPv4 GID and the device node appear a moment later
for i in $(seq 100); do
    [ -e /dev/infiniband/uverbs0 ] &&
        grep -qs 'ffff' /sys/class/infiniband/rxe0/ports/1/gids/1 && break
    sleep 0.1
done
GUEST
    if [ ${#layers[@]} -gt 0 ]; then
        echo "mkdir -p /run/fast && mount -t tmpfs -o size=2g fast /run/fast && tar -C /run/fast -xf \"\$OUT/fast.tar\""
        for layer in "${layers[@]}"; do
            echo "[ ! -d /run/fast$layer ] || mount -t overlay -o ro,lowerdir='/run/fast$layer:$layer' fast '$layer'"
        done
    fi
    echo 'touch "$OUT/booted"'
    printf '%q ' "$@"
    echo
    echo 'rc=$?; echo $rc >"$OUT/status"; sync; exit $rc'
} >"$out/guest.sh"

memory=$(awk '/MemAvailable/ {m = int($2 / 1048576 / 2); print (m > 4 ? 4 : m < 1 ? 1 : m) "G"}' /proc/meminfo)
cpus=$(nproc)
timeout --kill-after=10 "$limit" vng --run "$kernel" --disable-kvm --force-9p --disable-microvm \
    --qemu-opts=-cpu --qemu-opts=Nehalem --append mitigations=off \
    --cpus "$((cpus > 4 ? 4 : cpus))" --memory "$memory" --rwdir="$out" "${tree[@]}" \
    --exec "bash $out/guest.sh" ${VM_OPTIONS:-} </dev/null 2> >(tee "$qemu_log" >&2) | cat
rc=${PIPESTATUS[0]} # the pipe: QEMU truncates and overwrites a stdout that is a file

if [ -s "$out/status" ]; then exit "$(cat "$out/status")"; fi
if [ "$rc" -eq 124 ] || [ "$rc" -eq 137 ]; then
    echo "vm.sh: no end within $limit s" >&2
    exit 124
fi
[ -e "$out/booted" ] || fail "the machine did not boot (vng ended with $rc); VM_OPTIONS=--verbose shows the console"
fail "the machine ended before the command did (vng ended with $rc)"
}

main "$@"
