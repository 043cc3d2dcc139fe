#!/usr/bin/env bash
# Compiles the CPU kernels without torch by every compiler that is here and compares their results: c++, clang++, and
# g++ for aarch64 under qemu (Debian: clang, g++-aarch64-linux-gnu, qemu-user). KERNEL_COMPILERS=all insists on all three.
set -euo pipefail
cd "$(dirname "$0")/../.."
built=build/kernels status=0 digests=()
mkdir -p "$built"

check() {  # COMPILER [RUNNER...]
  local compiler=$1 program=$built/check-$1 report
  for tool in "$1" ${2:+"$2"}; do
    command -v "$tool" >/dev/null && continue
    echo "$compiler: left out, there is no $tool"
    [ "${KERNEL_COMPILERS:-}" != all ] || status=1
    return 0
  done
  "$compiler" -std=c++17 -O3 -ffp-contract=off -Wall -Wno-psabi -Wno-unknown-warning-option -Wno-unknown-pragmas \
    tests/kernels/check.cpp csrc/cpu/rotate_*.cpp -o "$program"
  report=$("${@:2}" "$program") || status=1
  echo "$compiler: $report"
  digests+=("${report##* }")
}

check c++
check clang++
check aarch64-linux-gnu-g++ qemu-aarch64 -L /usr/aarch64-linux-gnu
for digest in "${digests[@]}"; do
  [ "$digest" = "${digests[0]}" ] || { echo "the digests differ"; status=1; }
done
exit $status
