#!/usr/bin/env bash
# Builds the library against a CUDA build of torch, for every architecture, and runs the tests of such a build that
# need no GPU. The environment takes several GB and is kept; nothing is written into rope_ext/.
#
#     tests/cuda/build.sh [VENV]      TORCH_CUDA=torch==2.14.1 (default: torch) where VENV is to be created
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:-.venv-cuda} built=build/cuda

if ! [ -x "$venv/bin/pytest" ]; then
  echo "== creating $venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" --disable-pip-version-check --no-input install -q \
    "${TORCH_CUDA:-torch}" ninja 'setuptools>=77' wheel numpy pytest hypothesis
fi

echo "== building $built"
mkdir -p "$built"
ROPE_EXT_CUDA=1 "$venv/bin/python" setup.py build --build-base "$built" --build-lib "$built/lib" >"$built/log" 2>&1 ||
  { tail -40 "$built/log"; exit 1; }

PYTHONPATH=$built/lib ROPE_EXT_REQUIRE_KERNEL_TOOLS=1 \
  "$venv/bin/pytest" -q -o pythonpath= -p no:cacheprovider tests/test_cuda_build.py
