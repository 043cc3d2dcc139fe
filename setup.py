"""Builds two libraries: rope_ext/librope_ext.so, the operators without a Python symbol in them, and rope_ext/_C, the
Python module that links it. Facts about the project are in pyproject.toml; here is only what depends on the machine.

ROPE_EXT_CUDA=1 demands CUDA kernels and fails without them, ROPE_EXT_CUDA=0 leaves them out; unset, they are built where
a CUDA build of torch and nvcc are found. TORCH_CUDA_ARCH_LIST and MAX_JOBS work as for any torch extension.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
CSRC = Path("csrc")
VERSION = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
INSTALL = "pip install --no-build-isolation ."
LIBRARY, MODULE = "rope_ext.librope_ext", "rope_ext._C"

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    sys.exit(
        f"rope_ext is compiled against the torch that it will run with, and this build cannot see one: {error}.\n"
        f"Install torch and the build tools first, then build without isolation:\n"
        f"    pip install torch ninja setuptools wheel && {INSTALL}"
    )


def say(text):
    print(f"rope_ext: {text}", file=sys.stderr, flush=True)


# ---- CUDA, or not

# Turing to Blackwell; the last one also as PTX, for what comes after
DEFAULT_ARCHS = ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]


def cuda_home():
    """The toolkit's own folder. torch's guess follows the first nvcc on PATH, which may be a wrapper far from it."""
    for home in (os.environ.get("CUDA_HOME"), cpp_extension.CUDA_HOME, "/usr/local/cuda"):
        if home and Path(home, "bin", "nvcc").exists() and Path(home, "include", "cuda_runtime.h").exists():
            return home
    return None


def wants_cuda():
    forced = os.environ.get("ROPE_EXT_CUDA")
    if forced not in (None, "", "0", "1"):
        sys.exit(f"ROPE_EXT_CUDA must be 0 or 1, found {forced!r}")
    if forced == "0":
        return False
    missing = []
    if torch.version.cuda is None:
        missing.append(f"torch {torch.__version__} is a build without CUDA")
    if cuda_home() is None:
        missing.append("no CUDA toolkit with nvcc was found (set CUDA_HOME to its folder)")
    if not missing:
        return True
    if forced == "1":
        sys.exit(f"ROPE_EXT_CUDA=1, but {' and '.join(missing)}")
    say(f"building for the CPU only: {' and '.join(missing)}")
    return False


def supported_archs(nvcc):
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    archs = [arch for arch in DEFAULT_ARCHS if f"compute_{arch.replace('.', '')}" in listed.split()]
    return ";".join(archs) + "+PTX"


def arch_names(arch_list):
    names = []
    for arch in re.split("[; ]+", arch_list):
        number, ptx = arch.removesuffix("+PTX").replace(".", ""), arch.endswith("+PTX")
        names += [f"sm_{number}"] + [f"compute_{number}"] * ptx
    return names


# ---- extensions

# No contraction to FMA: results are the same bits on every instruction set. -fopenmp only makes at::parallel_for
# parallel (it is a header); nothing links an OpenMP runtime, so the symbols resolve to the one torch has loaded.
CXX = ["-O3", "-g0", "-ffp-contract=off", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wno-psabi", "-Wno-unknown-pragmas"]
NVCC = ["-O3", "--fmad=false", "--compress-mode=size", "-Xptxas", "-warn-spills,-warn-lmem-usage,-Werror"]


def sources(folder, pattern="*.cpp"):
    return sorted(str(path) for path in folder.glob(pattern))


def extensions():
    macros = [("ROPE_VERSION", VERSION)]
    files = sources(CSRC) + sources(CSRC / "cpu")
    flags = {"cxx": CXX}
    make = cpp_extension.CppExtension
    if wants_cuda():
        cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"] = home = cuda_home()
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", supported_archs(Path(home, "bin", "nvcc")))
        toolkit = torch.version.cuda
        say(f"building CUDA kernels for {os.environ['TORCH_CUDA_ARCH_LIST']} with {home}")
        macros += [("ROPE_CUDA_TOOLKIT", toolkit)]
        macros += [("ROPE_CUDA_ARCHS", "|".join(arch_names(os.environ["TORCH_CUDA_ARCH_LIST"])))]
        files += sources(CSRC / "cuda") + sources(CSRC / "cuda", "*.cu")
        flags["nvcc"] = NVCC
        make = cpp_extension.CUDAExtension
    library = make(
        LIBRARY,
        files,
        define_macros=macros,
        extra_compile_args=flags,
        extra_link_args=["-Wl,-soname,librope_ext.so"],
        depends=[str(path) for path in CSRC.rglob("*.*") if path.suffix in (".h", ".inl", ".cuh")],
    )
    library.libraries = [name for name in library.libraries if name != "torch_python"]
    module = cpp_extension.CppExtension(
        MODULE,
        sources(CSRC / "python"),
        libraries=["rope_ext"],
        extra_compile_args=["-g0", "-fvisibility=hidden"],
        extra_link_args=["-Wl,-rpath,$ORIGIN"],
    )
    return [library, module]


class Build(cpp_extension.BuildExtension):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{"use_ninja": shutil.which("ninja") is not None, **kwargs})

    def get_ext_filename(self, fullname):
        if fullname.split(".")[-1] == LIBRARY.split(".")[-1]:
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def build_extension(self, ext):
        if ext.name == MODULE:
            ext.library_dirs.append(os.path.dirname(self.get_ext_fullpath(LIBRARY)))
        super().build_extension(ext)

    def run(self):
        super().run()
        # read before _C is loaded, so that another torch meets one sentence instead of an undefined symbol
        note = Path(self.get_ext_fullpath(MODULE)).with_name("_built_for.py")
        note.write_text(f'"""Written by setup.py."""\n\nTORCH = "{torch.__version__}"\n')


setup(ext_modules=extensions(), cmdclass={"build_ext": Build})
