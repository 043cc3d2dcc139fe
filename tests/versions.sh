#!/usr/bin/env bash
# Builds and tests the library with several Pythons and releases of torch, one after the other, each in an environment
# of its own that is removed again: 6 GB and 10 minutes each, as torch comes from PyPI with CUDA. The kernels are the
# CPU's only.
#
#     tests/versions.sh [PYTHON:TORCH...]      3.10:2.6.0, or 3.14:newest; without arguments, the list below
#
# pytest gets ARGS, by default nothing, which is the whole suite: ARGS='test_values.py -x' asks for less.
set -uo pipefail
cd "$(dirname "$0")/.."

oldest=2.6.0   # what csrc/torch_versions.h reaches back to: before it there are no packages of AOTInductor
pinned=2.13.0  # the Makefile's
matrix=("$@")
[ $# -gt 0 ] || matrix=(3.{10,13}:$oldest 3.{10,11,12,13,14}:$pinned 3.{10,14,14t}:newest)

find_python() {  # VERSION: its interpreter, where pyenv has it or on PATH
  local found
  for found in "$(pyenv root 2>/dev/null)"/versions/"$1".*/bin/python "python$1"; do
    "$found" -c '' 2>/dev/null && echo "$found" && return
  done
}

try() {  # FOLDER PYTHON TORCH
  local here=$1
  rm -rf "$here" && mkdir -p "$here"
  "$2" -m venv "$here/venv" || return
  "$here/venv/bin/pip" --disable-pip-version-check --no-input install -q \
    "$3" ninja 'setuptools>=77' wheel numpy pytest hypothesis || return
  "$here/venv/bin/python" -c 'import sys, torch; print("Python", sys.version, "torch", torch.__version__)' || return
  ROPE_EXT_CUDA=0 "$here/venv/bin/python" setup.py build --build-base "$here" --build-lib "$here/lib" \
    >"$here/log" 2>&1 || { tail -40 "$here/log"; return 1; }
  # not from the root, where the sources are first on the path of every `python -c`; ARGS are words
  (cd tests && PYTHONPATH=$here/lib "$here/venv/bin/pytest" -q -o pythonpath= -p no:cacheprovider ${ARGS-})
}

results=() failed=0
for pair in "${matrix[@]}"; do
  python=$(find_python "${pair%%:*}") torch=torch==${pair#*:} verdict=ok
  printf '\n==== Python %s, %s\n' "${pair%%:*}" "$torch"
  if [ -z "$python" ]; then
    verdict="SKIPPED: no such Python on this machine"
  else
    folder=$PWD/build/versions/${pair/:/-}
    try "$folder" "$python" "${torch/==newest/}" || { verdict=FAILED failed=1; }
    rm -rf "$folder/venv"
  fi
  results+=("$(printf '%-12s %s' "$pair" "$verdict")")
done
printf '\n==== summary\n'
printf '%s\n' "${results[@]}"
exit $failed
