#!/bin/sh
# A command as a stranger's machine runs it: no browser, no GPU, no git, no data beside the checkout, a home that cannot be
# written, and as many busy processes beside it as LOAD says. Installing comes before: only that needs a network.
#   scripts/bare.sh                  make test
#   LOAD=20 scripts/bare.sh          make test on a busy machine
#   scripts/bare.sh make demo        another command
#   PYTHON=python3.13 scripts/bare.sh
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -gt 0 ] || set -- make test
bare=$(mktemp -d)
busy=""
trap 'kill $busy 2>/dev/null || true; rm -rf "$bare"' EXIT
trap 'exit 130' INT TERM

mkdir "$bare/bin" "$bare/tmp" "$bare/checkout"
for tool in sh env make touch rm; do
    ln -s "$(command -v "$tool")" "$bare/bin/$tool"
done
tar -C "$root" --exclude=./.git --exclude=./.venv --exclude=./runs -cf - . | tar -C "$bare/checkout" -xf -
cd "$bare/checkout"
make .venv/.test PYTHON="${PYTHON:-python3}"

i=0
while [ "$i" -lt "${LOAD:-0}" ]; do
    (while :; do :; done) &
    busy="$busy $!"
    i=$((i + 1))
done
echo "bare: $(.venv/bin/python --version), $(nproc 2>/dev/null || echo some) cores, load ${LOAD:-0}, PATH has $(ls "$bare/bin" | tr '\n' ' ')"
# not even root can write to /proc
env -i PATH="$bare/bin" HOME=/proc TMPDIR="$bare/tmp" CUDA_VISIBLE_DEVICES= "$@"
