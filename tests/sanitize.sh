#!/usr/bin/env bash
# Builds the library with AddressSanitizer and UBSan into build/sanitize and runs the suite on it: everything that
# reaches C++ at the machine's own instruction set, the tests of the arithmetic at each lower one.
#
#     tests/sanitize.sh BIN     BIN: the bin folder of an environment with torch, the build tools and pytest
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(cd "$1" && pwd) built=$PWD/build/sanitize
arithmetic=(tests/test_{values,precision,strides,shapes}.py)
everything=("${arithmetic[@]}" tests/test_{rows,inplace,refusals,gradients,transforms}.py)

echo "== building into $built"
mkdir -p "$built"
ROPE_EXT_SANITIZE=1 ROPE_EXT_CUDA=0 "$bin/python" setup.py build --build-base "$built" --build-lib "$built/lib" \
  >"$built/log" 2>&1 || { tail -40 "$built/log"; exit 1; }
nm -D "$built/lib/rope_ext/librope_ext.so" | grep __asan_report_store >/dev/null || { echo "not sanitized"; exit 1; }

# Python itself is not built with the sanitizers, so their runtime must be there first, and leaks are not ours to report.
# The levels run side by side: each takes one thread, and sleeps where a test asks for two.
sanitized() {
  LD_PRELOAD="$("${CXX:-c++}" -print-file-name=libasan.so) $("${CXX:-c++}" -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH="$built/lib" \
    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE "$@"
}

levels=$(cd "$built/lib" && sanitized "$bin/python" -c '
import rope_ext
assert "sanitize" in rope_ext.__file__, rope_ext.__file__
info = rope_ext.build_info()
print(*info["cpu_isa_built"][: info["cpu_isa_built"].index(info["cpu_isa"]) + 1])')
highest=${levels##* }

suite() {  # LEVEL FILE...; a report comes from below Python, and ends it: names before tests, and no capture of stderr
  ATEN_CPU_CAPABILITY=$1 PYTHONUNBUFFERED=1 sanitized "$bin/pytest" -v --capture=sys -x -o pythonpath= \
    -p no:cacheprovider "${@:2}" >"$built/$1.log" 2>&1
}

declare -A running
for level in $levels; do
  if [ "$level" = "$highest" ]; then files=("${everything[@]}"); else files=("${arithmetic[@]}"); fi
  echo "== ${#files[@]} test files at $level"
  suite "$level" "${files[@]}" &
  running[$level]=$!
done
status=0
for level in $levels; do
  if wait "${running[$level]}"; then
    echo "$level: $(tail -1 "$built/$level.log")"
  else
    status=1
    echo "== $level FAILED"
    tail -60 "$built/$level.log"
  fi
done
exit $status
