"""Drives the emulation of the CUDA kernels: packs calls as the operators do, runs them, and judges every byte.

``build`` compiles emulate.cpp, which is the kernels' own source, in one of two ways: "sanitized" (ASan and UBSan) and
"race" (which records what every thread touches). ``run`` executes calls; ``plan`` only asks the launcher what it would
launch. The expected bits are those of the CPU operators.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from kernel_tools import leave_out
from torch import Tensor

from cases import Inputs
from harness import op, same_bits, whole_storage

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
FLAGS = ["-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-rdynamic", "-Wall", "-Wextra"]
FLAGS += ["-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
POISON = 0xA5  # in every byte of a fresh output
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def cuda_include() -> Path | None:
    """The folder of cuda_runtime.h: of a toolkit, or of the headers that come with a CUDA build of torch."""
    candidates = [Path(home, "include") for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    candidates += [Path(torch.__file__).parents[1] / "nvidia" / name / "include" for name in ("cu13", "cuda_runtime")]
    return next((folder for folder in candidates if (folder / "cuda_fp16.h").exists()), None)


def build(kind: str, folder: Path, csrc: Path = CSRC) -> Path:
    """Compiles the emulation of the kernels in ``csrc``, once for each folder, and returns the program."""
    program = folder / kind / "emulate"
    if program.exists():
        return program
    include, compiler = cuda_include(), shutil.which("g++")
    if include is None:
        leave_out("there are no CUDA headers: set CUDA_HOME to the CUDA toolkit")
    if compiler is None:
        leave_out("there is no g++")
    # emulate.cpp names ../../csrc: give it the place it expects beside the sources under test
    tree = folder / kind / "tests" / "cuda"
    tree.mkdir(parents=True)
    for file in HERE.glob("*"):
        if file.suffix in (".cpp", ".h"):
            shutil.copy(file, tree)
    (folder / kind / "csrc").symlink_to(csrc.resolve(), target_is_directory=True)
    flags = [*FLAGS, f"-I{include}"]
    objects = []
    for name, extra in (("emulate", SANITIZERS if kind == "sanitized" else ["-fsanitize=thread"]), ("race", [])):
        objects.append(str(folder / kind / f"{name}.o"))
        compile_one = [compiler, *flags, *extra, "-c", str(tree / f"{name}.cpp"), "-o", objects[-1]]
        done = subprocess.run(compile_one, capture_output=True, text=True)
        assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    link = [compiler, "-rdynamic", *(SANITIZERS if kind == "sanitized" else []), *objects, "-o", str(program), "-ldl"]
    subprocess.run(link, check=True)
    return program


# ---- csrc/rope_params.h, for ctypes


def struct_of(name: str, *fields: tuple) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


POINTER, I64, I32, BOOL = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_bool
Heads = struct_of(
    "Heads",
    *(("data_in", POINTER), ("data_out", POINTER), ("heads", I64)),
    *(("in_stride", I64 * 4), ("out_stride", I64 * 4), ("dtype", I32)),
)
Factor = struct_of("Factor", ("data", POINTER), ("stride", I64 * 3), ("negate", BOOL))
Params = struct_of(
    "Params",
    *(("x", Heads * 2), ("cos", Factor), ("sin", Factor), ("table_dtype", I32)),
    *(("batch", I64), ("seqlen", I64), ("head_dim", I64), ("rotary_dim", I64), ("interleaved", BOOL)),
    *(("positions", POINTER), ("positions_are_int64", BOOL), ("positions_stride", I64 * 2), ("rows", I64)),
)


# ---- calls


@dataclass
class Memory:
    """The storages of a call, in the order in which the emulation gets them."""

    storages: list[Tensor] = field(default_factory=list)  # as bytes

    def address(self, x: Tensor) -> int:
        """Where x starts: the number of its storage from 1 on, shifted by 48 bits, plus the offset in bytes.

        A tensor without memory starts at 0.
        """
        storage = whole_storage(x, torch.uint8)
        if storage.numel() == 0:
            return 0
        known = [each.data_ptr() for each in self.storages]
        if storage.data_ptr() not in known:
            self.storages.append(storage)
            known.append(storage.data_ptr())
        index = known.index(storage.data_ptr())
        return ((index + 1) << 48) + x.storage_offset() * x.element_size()

    def index(self, x: Tensor) -> int:
        return (self.address(x) >> 48) - 1


@dataclass
class Call:
    """One call of an operator. ``limits`` and ``multiprocessors`` describe the GPU it is planned for."""

    name: str
    inputs: Inputs
    in_place: bool = False
    limits: tuple[int, int, int] = (2147483647, 65535, 65535)
    multiprocessors: int = 100

    def __post_init__(self) -> None:
        self.xs = [self.inputs.xq, self.inputs.xk]
        self.outs = self.xs if self.in_place else [poisoned(x) for x in self.xs]
        self.memory = Memory()
        self.params = pack(self.inputs, self.xs, self.outs, self.memory)

    def expected(self) -> list[Tensor]:
        """The storages after the call, by the CPU operator."""
        after = [storage.clone() for storage in self.memory.storages]
        inputs = self.inputs
        table = inputs.table if isinstance(inputs.table, tuple) else (inputs.table,)
        rotated = op("apply" if len(table) == 1 else "apply_cos_sin")(*self.xs, *table, *inputs[3:])
        for out, result in zip(self.outs, rotated, strict=True):
            if result.numel():
                storage = after[self.memory.index(out)].view(out.dtype)
                storage.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(result)
        return after

    def judge(self, result: Result) -> None:
        """Raises AssertionError where any byte of any storage is not what it should be."""
        assert not result.complaint, f"{self.name}: {result.complaint}"
        dtypes = {self.memory.index(out): out.dtype for out in self.outs}
        for index, (actual, expected) in enumerate(zip(result.storages, self.expected(), strict=True)):
            dtype = dtypes.get(index, torch.float32)
            if expected.numel() % dtype.itemsize:
                same = torch.equal(actual, expected)
            else:
                same = bool(same_bits(actual.view(dtype), expected.view(dtype)).all())
            assert same, f"{self.name}: storage {index} ({'output' if index in dtypes else 'input'}) has wrong bytes"


def poisoned(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    whole_storage(out, torch.uint8).fill_(POISON)
    return out


def strides(x: Tensor, rank: int, scale: int = 1) -> list[int]:
    """Of the last ``rank`` dimensions, 0 where there is no such dimension or only one of it."""
    own = [stride * scale if size != 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]
    return [0] * (rank - x.ndim) + own


def pack(inputs: Inputs, xs: Sequence[Tensor], outs: Sequence[Tensor], memory: Memory) -> ctypes.Structure:
    """What csrc/pack.cpp makes of a call."""
    p = Params()
    for heads, x, out in zip(p.x, xs, outs, strict=True):
        heads.data_in, heads.data_out, heads.heads = memory.address(x), memory.address(out), x.shape[-2]
        heads.in_stride[:], heads.out_stride[:], heads.dtype = strides(x, 4), strides(out, 4), DTYPES[x.dtype]
    p.batch, p.seqlen, p.head_dim = xs[0].shape[0] if xs[0].ndim == 4 else 1, xs[0].shape[-3], xs[0].shape[-1]
    p.rotary_dim = p.head_dim if inputs.rotary_dim is None else inputs.rotary_dim
    p.interleaved = inputs.interleaved
    if isinstance(inputs.table, tuple):
        cos, sin = inputs.table
        for factor, half in ((p.cos, cos), (p.sin, sin)):
            factor.data, factor.stride[:], factor.negate = memory.address(half), strides(half, 3), half.is_neg()
        p.table_dtype = DTYPES[cos.dtype]
    else:
        cos = inputs.table
        p.table_dtype = DTYPES[REAL[cos.dtype]]
        for part, factor in enumerate((p.cos, p.sin)):
            factor.data = memory.address(cos) + part * cos.element_size() // 2
            factor.stride[:] = strides(cos, 3, 2)
        p.cos.negate, p.sin.negate = cos.is_neg(), cos.is_conj() != cos.is_neg()
    p.sin.negate ^= inputs.conj
    p.rows = cos.shape[-2]
    if inputs.positions is not None:
        p.positions = memory.address(inputs.positions)
        p.positions_are_int64 = inputs.positions.dtype == torch.int64
        p.positions_stride[:] = strides(inputs.positions, 2)
    return p


# ---- the program


@dataclass
class Launch:
    kernel: str  # mangled
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    argument: bytes


@dataclass
class Result:
    complaint: str
    storages: list[Tensor]
    launches: list[Launch]


@dataclass
class Segments:
    """A buffer of which only some parts have contents."""

    size: int
    parts: list[tuple[int, bytes]]


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self) -> int:
        self.at += 8
        return struct.unpack_from("<q", self.data, self.at - 8)[0]

    def bytes(self) -> bytes:
        size = self.number()
        self.at += size
        return self.data[self.at - size : self.at]


def execute(
    program: Path,
    folder: Path,
    jobs: Sequence[tuple[ctypes.Structure, Sequence[Segments], tuple, int]],
    environment: Mapping[str, str] | None = None,
) -> list[Result]:
    """Runs jobs of (params, buffers, grid limits, multiprocessors); without buffers a job is only planned."""
    parts = [struct.pack("<qq", ctypes.sizeof(Params), len(jobs))]
    for params, buffers, limits, multiprocessors in jobs:
        parts.append(struct.pack("<qqqqq", *limits, multiprocessors, len(buffers)))
        for buffer in buffers:
            parts.append(struct.pack("<qqq", buffer.size, 0, len(buffer.parts)))
            for offset, contents in buffer.parts:
                parts += [struct.pack("<qq", offset, len(contents)), contents]
        parts.append(bytes(params))
    (folder / "cases").write_bytes(b"".join(parts))
    command = [program, folder / "cases", folder / "results"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if done.returncode:
        raise EmulationError(done.stderr[-4000:])
    reader = Reader((folder / "results").read_bytes())
    assert reader.number() == ("race" in program.parts), "the wrong emulation records accesses"
    results = []
    for _, buffers, _, _ in jobs:
        complaint = reader.bytes().decode()
        storages = [torch.frombuffer(bytearray(b), dtype=torch.uint8) for b in (reader.bytes() for _ in buffers)]
        launches = [
            Launch(
                reader.bytes().decode(), *(tuple(reader.number() for _ in range(3)) for _ in range(2)), reader.bytes()
            )
            for _ in range(reader.number())
        ]
        results.append(Result(complaint, storages, launches))
    return results


class EmulationError(AssertionError):
    """The emulation stopped: a sanitizer report, a device assert, a CUDA error."""


def run(
    program: Path, folder: Path, calls: Sequence[Call], environment: Mapping[str, str] | None = None
) -> list[Result]:
    """Executes the calls on copies of their memory."""
    jobs = []
    for call in calls:
        contents = [storage.numpy().tobytes() for storage in call.memory.storages]
        buffers = [Segments(len(c), [(0, c)]) for c in contents]
        jobs.append((call.params, buffers, call.limits, call.multiprocessors))
    return execute(program, folder, jobs, environment)


def plan(program: Path, folder: Path, call: Call, params: ctypes.Structure) -> list[Launch]:
    """What the launcher makes of ``params``, whose pointers are addresses of any kind."""
    return execute(program, folder, [(params, [], call.limits, call.multiprocessors)])[0].launches


def relocated(params: ctypes.Structure, bases: Sequence[int]) -> ctypes.Structure:
    """A copy whose pointers are addresses, where storage i of the call lies at ``bases[i]``."""

    def move(code: int) -> int:
        return bases[(code >> 48) - 1] + (code & (1 << 48) - 1) if code >> 48 else code

    moved = Params.from_buffer_copy(params)
    for heads in moved.x:
        heads.data_in, heads.data_out = move(heads.data_in), move(heads.data_out)
    moved.cos.data, moved.sin.data, moved.positions = map(
        move, (params.cos.data, params.sin.data, params.positions or 0)
    )
    return moved
