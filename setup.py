"""Builds two libraries: rope_ext/librope_ext.so, the operators without a Python symbol in them, and rope_ext/_C, the
Python module that links it. Facts about the project are in pyproject.toml; here is only what depends on the machine.

ROPE_EXT_CUDA=1 demands CUDA kernels and fails without them, ROPE_EXT_CUDA=0 leaves them out; unset, they are built
where a CUDA build of torch and nvcc are found. ROPE_EXT_SANITIZE=1 adds AddressSanitizer and UBSan. CXX, CUDA_HOME,
TORCH_CUDA_ARCH_LIST and MAX_JOBS work as for any torch extension.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools

ROOT = Path(__file__).parent
CSRC = Path("csrc")
PROJECT = (ROOT / "pyproject.toml").read_text()
VERSION = re.search(r'^version = "(.+)"', PROJECT, re.MULTILINE).group(1)
OLDEST_TORCH = re.search(r'"torch>=([\d.]+)"', PROJECT).group(1)
INSTALL = "pip install --no-build-isolation ."
LIBRARY, MODULE = "rope_ext.librope_ext", "rope_ext._C"

try:
    import torch
    from torch.utils import cpp_extension
except (ImportError, OSError) as error:  # OSError: a library that torch loads
    sys.exit(
        f"rope_ext is compiled against the torch that it will run with, and this build cannot see one: {error}.\n"
        f"Install torch and the build tools first, then build without isolation:\n"
        f"    pip install torch ninja 'setuptools>=77' && {INSTALL}"
    )
if int(setuptools.__version__.split(".")[0]) < 77:  # would say that pyproject.toml is invalid
    sys.exit(
        f"rope_ext is built by setuptools 77 or later, found {setuptools.__version__}: pip install 'setuptools>=77'"
    )
if sys.platform != "linux":
    sys.exit("rope_ext builds on Linux, with g++ or clang, and on nothing else yet")
if torch.__version__ < OLDEST_TORCH:  # pip would build with it and then replace it
    sys.exit(
        f"rope_ext needs torch {OLDEST_TORCH} or later, found {torch.__version__}: pip install 'torch>={OLDEST_TORCH}'"
    )

# ninja of this environment, activated or not
os.environ["PATH"] = os.environ.get("PATH", os.defpath) + os.pathsep + sysconfig.get_path("scripts")


def say(text):
    print(f"rope_ext: {text}", file=sys.stderr, flush=True)


def output(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout + done.stderr


# ---- the C++ compiler

DUMP = ("-dM", "-E", "-x", "c++", os.devnull)


def compiler_macros():
    """What the compiler defines by itself, or the end of the build with a sentence instead of distutils' traceback."""
    # torch compiles with CXX or c++, distutils links with what Python was built with: let it be one compiler
    command = os.environ.setdefault("CXX", "c++")
    words = shlex.split(command) or [command]  # "ccache g++" is two
    if shutil.which(words[0]) is None:
        sys.exit(f"rope_ext needs a C++ compiler, and {words[0]!r} was not found: install g++ or set CXX to one")

    def defined(*options):
        return dict(re.findall(r"^#define (\S+) (.*)$", output(*words, *options, *DUMP), re.MULTILINE))

    macros, include = defined(), sysconfig.get_path("include")
    if "__clang__" not in macros and int(macros.get("__GNUC__", 0)) < 10:
        sys.exit(
            f"rope_ext needs g++ 10 or later, or clang, as torch's headers do, and {command!r} is older, or neither: "
            "install one of them and set CXX to it"
        )
    if "PY_VERSION" not in defined(f"-I{include}", "-include", "Python.h"):  # or it ends so after two minutes
        sys.exit(
            f"rope_ext is compiled with Python's headers, and {command!r} finds no Python.h, nor is one in {include}: "
            f"install python{sysconfig.get_python_version()}-dev, on Fedora -devel"
        )
    return macros


# ---- CUDA, or not

# Turing to Blackwell; the last one also as PTX, for what comes after
DEFAULT_ARCHS = ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]


def cuda_home():
    """The toolkit's folder, as nvcc tells it: the one on PATH, torch's guess, may be a wrapper far from its toolkit."""
    homes = (os.environ.get("CUDA_HOME"), cpp_extension.CUDA_HOME, "/usr/local/cuda")
    for nvcc in [Path(home, "bin", "nvcc") for home in homes if home]:
        told = nvcc.exists() and re.search("_HERE_=(.+)", output(nvcc, "--dryrun", "-c", "-x", "cu", os.devnull))
        home = Path(told.group(1)).parent if told else nvcc.parent.parent
        if nvcc.exists() and (home / "include" / "cuda_runtime.h").exists():
            return str(home)
    return None


def wants_cuda():
    forced = os.environ.get("ROPE_EXT_CUDA")
    if forced not in (None, "", "0", "1"):
        sys.exit(f"ROPE_EXT_CUDA must be 0 or 1, found {forced!r}")
    if forced == "0":
        return False
    missing, home = [], cuda_home()
    if torch.version.cuda is None:
        missing.append(f"torch {torch.__version__} is a build without CUDA")
    if home is None:
        missing.append("no CUDA toolkit with nvcc was found (set CUDA_HOME to its folder)")
    if not missing:
        theirs, ours = torch.version.cuda, release(Path(home, "bin", "nvcc"))
        if theirs.split(".")[0] != ours.split(".")[0]:
            sys.exit(
                f"torch {torch.__version__} is of CUDA {theirs}, the nvcc in {home} of CUDA {ours}: set CUDA_HOME to "
                f"a toolkit {theirs}, or ROPE_EXT_CUDA=0 to build for the CPU only"
            )
        return True
    if forced == "1":
        sys.exit(f"ROPE_EXT_CUDA=1, but {' and '.join(missing)}: install what is missing, or unset ROPE_EXT_CUDA")
    say(f"building for the CPU only: {' and '.join(missing)}")
    return False


def release(nvcc):
    return re.search(r"release ([\d.]+)", output(nvcc, "--version")).group(1)


def supported_archs(nvcc):
    listed = output(nvcc, "--list-gpu-arch")
    archs = [arch for arch in DEFAULT_ARCHS if f"compute_{arch.replace('.', '')}" in listed.split()]
    return ";".join(archs) + "+PTX"


def arch_names():
    """What TORCH_CUDA_ARCH_LIST means to torch: sm_90 and compute_90 for "9.0+PTX", and for "Hopper"."""
    try:
        flags = cpp_extension._get_cuda_arch_flags()
    except (ValueError, IndexError) as error:  # a name it does not know; "native" without a GPU
        sys.exit(
            f"TORCH_CUDA_ARCH_LIST={os.environ['TORCH_CUDA_ARCH_LIST']!r} cannot be used ({error}): unset it, or list "
            "architectures such as '8.0;9.0+PTX'"
        )
    names = re.findall(r",code=(\w+)", " ".join(flags))
    return sorted(names, key=lambda name: (name.startswith("compute"), len(name), name))


# ---- extensions

# No contraction to FMA: results are the same bits on every instruction set.
CXX = ["-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wno-psabi", "-Wno-unknown-pragmas"]
SANITIZE = ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
NVCC = ["-O3", "--fmad=false"]


def cxx_flags():
    flags = list(CXX)
    if "__clang__" in compiler_macros():
        say("clang's OpenMP needs a runtime that torch does not load: this build uses one thread, one by g++ uses all")
    else:
        # Only makes at::parallel_for, a header, parallel: nothing links an OpenMP runtime, so that its symbols resolve
        # to the one that torch has loaded.
        flags.append("-fopenmp")
    return flags + SANITIZE * sanitized()


def nvcc_flags(toolkit):
    knows_compression = [int(part) for part in toolkit.split(".")] >= [12, 8]
    return NVCC + ["--compress-mode=size"] * knows_compression


def sanitized():
    return os.environ.get("ROPE_EXT_SANITIZE", "0") not in ("", "0")


def sources(folder, pattern="*.cpp"):
    return sorted(str(path) for path in folder.glob(pattern))


def extensions():
    # ROPE_TORCH is read by nobody: it makes ninja recompile when torch changes under the same path
    macros = [("ROPE_VERSION", VERSION), ("ROPE_TORCH", torch.__version__)]
    files = sources(CSRC) + sources(CSRC / "cpu")
    flags = {"cxx": cxx_flags()}
    make = cpp_extension.CppExtension
    if wants_cuda():
        cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"] = home = cuda_home()
        nvcc = Path(home, "bin", "nvcc")
        if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
            os.environ["TORCH_CUDA_ARCH_LIST"] = supported_archs(nvcc)
        macros += [("ROPE_CUDA_TOOLKIT", release(nvcc)), ("ROPE_CUDA_ARCHS", "|".join(arch_names()))]
        say(f"building CUDA kernels for {os.environ['TORCH_CUDA_ARCH_LIST']} with {home}")
        files += sources(CSRC / "cuda") + sources(CSRC / "cuda", "*.cu")
        flags["nvcc"] = nvcc_flags(release(nvcc))
        make = cpp_extension.CUDAExtension
    library = make(
        LIBRARY,
        files,
        define_macros=macros,
        extra_compile_args=flags,
        extra_link_args=["-Wl,-soname,librope_ext.so", *SANITIZE * sanitized()],
    )
    library.libraries = [name for name in library.libraries if name != "torch_python"]
    module = cpp_extension.CppExtension(
        MODULE,
        sources(CSRC / "python"),
        define_macros=macros,
        libraries=["rope_ext"],
        extra_compile_args=["-g0", "-fvisibility=hidden"],
        extra_link_args=["-Wl,-rpath,$ORIGIN"],
    )
    return [library, module]


class Build(cpp_extension.BuildExtension):
    def __init__(self, *args, **kwargs):
        ninja = shutil.which("ninja") is not None
        if not ninja:
            say("ninja was not found, so that files are compiled one after the other: pip install ninja")
        super().__init__(*args, **{"use_ninja": ninja, **kwargs})

    def finalize_options(self):
        super().finalize_options()
        # ninja knows what is out of date; distutils, by the times of sources, would miss another torch or other flags
        self.force = True

    def get_ext_filename(self, fullname):
        if fullname.split(".")[-1] == LIBRARY.split(".")[-1]:
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def build_extension(self, ext):
        if ext.name == MODULE:
            ext.library_dirs.append(os.path.dirname(self.get_ext_fullpath(LIBRARY)))
        super().build_extension(ext)

    def run(self):
        if self.editable_mode:  # not in pip's temporary folder: the next build compiles only what has changed
            self.build_temp = os.path.join("build", f"temp.{self.plat_name}-{sys.implementation.cache_tag}")
        super().run()
        # read before _C is loaded, so that another torch meets one sentence instead of an undefined symbol
        note = Path(self.get_ext_fullpath(MODULE)).with_name("_built_for.py")
        note.write_text(f'"""Written by setup.py."""\n\nTORCH = "{torch.__version__}"\n')


setuptools.setup(ext_modules=extensions(), cmdclass={"build_ext": Build})
