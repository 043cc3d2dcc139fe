// The host side of the CUDA kernels: which kernel a call gets, and its blocks and grid.
#include "rotate.h"

#include <algorithm>
#include <cstdlib>

#include "rotate.cuh"

namespace rope {
namespace {

constexpr int64_t kInt32Max = 2147483647;

using Kernel = void (*)(Work);

struct Choice {
  Kernel kernel;
  int64_t unit;  // of the strides of x, in bytes
  int heads_per_thread;
  dim3 block;  // (lanes, heads)
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// A stride in bytes, in a dimension where it matters.
int64_t stride_bytes(int64_t stride, int64_t extent, int64_t size) { return extent > 1 ? stride * size : 0; }

Steps steps(const Params& p, const Heads& x, const int64_t (&stride)[4], int64_t vector) {
  const int64_t size = size_of(x.dtype), feature = stride[3] * size, elements = vector / size;
  const bool pair_of_elements = p.interleaved && elements == 1;
  Steps s;
  s.batch = stride_bytes(stride[0], p.batch, size);
  s.token = stride_bytes(stride[1], p.seqlen, size);
  s.head = stride_bytes(stride[2], x.heads, size);
  s.lane = feature * (pair_of_elements ? 2 : elements);
  s.partner = feature * (pair_of_elements ? 1 : p.rotary_dim / 2);
  s.tail = feature * p.rotary_dim;
  s.tail_lane = feature * elements;
  return s;
}

FactorSteps factor_steps(const Params& p, const Factor& factor) {
  const int64_t size = size_of(p.table_dtype);
  return {static_cast<const char*>(factor.data), stride_bytes(factor.stride[0], p.batch, size),
          stride_bytes(factor.stride[1], p.rows, size), factor.stride[2] * size};
}

// The call in terms of vectors of `vector` bytes.
Work describe(const Params& p, DType dtype, int64_t vector) {
  const int64_t size = size_of(dtype), position_size = p.positions_are_int64 ? 8 : 4;
  Work work = {};
  bool in_place = true;
  for (int i = 0; i < 2; ++i) {
    const Heads& x = p.x[i];
    if (x.heads == 0) continue;
    work.x[i].in = static_cast<const char*>(x.in);
    work.x[i].out = static_cast<char*>(x.out);
    work.x[i].from = steps(p, x, x.in_stride, vector);
    work.x[i].to = steps(p, x, x.out_stride, vector);
    in_place = in_place && x.in == x.out;
  }
  work.lanes = static_cast<int>(p.rotary_dim / 2 * size / vector);
  work.tail_lanes = in_place ? 0 : static_cast<int>((p.head_dim - p.rotary_dim) * size / vector);
  work.interleaved = p.interleaved;
  work.cos = factor_steps(p, p.cos);
  work.sin = factor_steps(p, p.sin);
  work.table_dtype = p.table_dtype;
  work.sin_sign = p.sin.negate ? -1.0f : 1.0f;
  work.negate_cos = p.cos.negate;
  work.positions = static_cast<const char*>(p.positions);
  work.position_bytes = p.positions ? static_cast<int>(position_size) : 0;
  if (p.positions) {
    work.positions_batch = stride_bytes(p.positions_stride[0], p.batch, position_size);
    work.positions_token = stride_bytes(p.positions_stride[1], p.seqlen, position_size);
  }
  work.rows = p.rows;
  return work;
}

// The widest vector that is aligned everywhere in both tensors.
int64_t vector_bytes(const Params& p, DType dtype) {
  const int64_t size = size_of(dtype);
  if (dtype != DType::f64 && rotates_in_f64(dtype, p.table_dtype)) return size;  // too rare for kernels of its own
  for (int64_t bytes = 16; bytes > size; bytes /= 2) {
    bool fits = p.rotary_dim / 2 * size % bytes == 0 && p.head_dim * size % bytes == 0;
    for (const Heads& x : p.x) {
      if (x.heads == 0) continue;
      fits = fits && x.in_stride[3] == 1 && x.out_stride[3] == 1 && aligned(x.in, bytes) && aligned(x.out, bytes);
      for (const Steps& s : {steps(p, x, x.in_stride, bytes), steps(p, x, x.out_stride, bytes)}) {
        fits = fits && s.batch % bytes == 0 && s.token % bytes == 0 && s.head % bytes == 0;
      }
    }
    if (fits) return bytes;
  }
  return size;
}

// Whether rotate_vectors can read the table, and in which form, where a vector of x has `pairs` neighbouring factors.
bool table_form(const Params& p, DType dtype, const Work& work, int64_t pairs, TableForm& form) {
  const FactorSteps &cos = work.cos, &sin = work.sin;
  const int64_t size = size_of(p.table_dtype);
  const auto readable = [](const FactorSteps& factor, int64_t bytes) {
    return aligned(factor.data, bytes) && factor.batch % bytes == 0 && factor.row % bytes == 0;
  };
  if (p.cos.negate) return false;
  if (p.table_dtype == DType::f32 && cos.pair == 8 && sin.pair == 8) {
    form = TableForm::complex_f32;
    return cos.data + 4 == sin.data && cos.batch == sin.batch && cos.row == sin.row && readable(cos, 16);
  }
  form = p.table_dtype == DType::f32 ? TableForm::split_f32 : TableForm::split_x;
  const int64_t bytes = std::min<int64_t>(16, size * pairs);
  return (p.table_dtype == DType::f32 || p.table_dtype == dtype) && cos.pair == size && sin.pair == size &&
         readable(cos, bytes) && readable(sin, bytes);
}

// Strides of rotate_vectors are 32 bits: vectors of x up to 32 GiB apart, bytes of the table and the positions.
// Within a token it adds up a few heads more than there are.
bool to_vectors(const Params& p, Work& work) {
  bool fits = p.rows <= kInt32Max;
  for (int64_t stride :
       {work.cos.batch, work.cos.row, work.sin.batch, work.sin.row, work.positions_batch, work.positions_token}) {
    fits = fits && std::llabs(stride) <= kInt32Max;
  }
  for (int i = 0; i < 2; ++i) {
    for (Steps* s : {&work.x[i].from, &work.x[i].to}) {
      s->batch /= 16, s->token /= 16, s->head /= 16;
      const int64_t heads = p.x[i].heads + kManyHeads * kMaxThreads;
      fits = fits && std::llabs(s->batch) <= kInt32Max && std::llabs(s->token) <= kInt32Max &&
             std::llabs(s->head) <= (kInt32Max - kMaxThreads * 2) / heads;
    }
  }
  return fits;
}

template <typename T, TableForm Form>
Kernel vectors_kernel(bool interleaved, bool many_heads) {
  if (interleaved) return many_heads ? rotate_vectors<T, Form, true, kManyHeads> : rotate_vectors<T, Form, true, 1>;
  return many_heads ? rotate_vectors<T, Form, false, kManyHeads> : rotate_vectors<T, Form, false, 1>;
}

template <typename T>
Kernel vectors_kernel(TableForm form, bool interleaved, bool many_heads) {
  if (form == TableForm::complex_f32) return vectors_kernel<T, TableForm::complex_f32>(interleaved, many_heads);
  if constexpr (sizeof(T) == 2) {
    if (form == TableForm::split_x) return vectors_kernel<T, TableForm::split_x>(interleaved, many_heads);
  }
  return vectors_kernel<T, TableForm::split_f32>(interleaved, many_heads);
}

Kernel vectors_kernel(DType dtype, TableForm form, bool interleaved, bool many_heads) {
  switch (dtype) {
    case DType::f16:
      return vectors_kernel<__half>(form, interleaved, many_heads);
    case DType::bf16:
      return vectors_kernel<__nv_bfloat16>(form, interleaved, many_heads);
    default:
      return vectors_kernel<float>(form, interleaved, many_heads);
  }
}

template <typename T>
Kernel any_kernel(bool in_f64, int64_t elements) {
  if (in_f64) return rotate_any<T, double, 1>;
  if constexpr (sizeof(T) == 2) {
    if (elements == 8) return rotate_any<T, float, 8>;
  }
  return elements == 4 ? rotate_any<T, float, 4> : elements == 2 ? rotate_any<T, float, 2> : rotate_any<T, float, 1>;
}

Kernel any_kernel(DType dtype, bool in_f64, int64_t elements) {
  switch (dtype) {
    case DType::f16:
      return any_kernel<__half>(in_f64, elements);
    case DType::bf16:
      return any_kernel<__nv_bfloat16>(in_f64, elements);
    case DType::f32:
      return any_kernel<float>(in_f64, elements);
    default:
      return elements == 2 ? rotate_any<double, double, 2> : rotate_any<double, double, 1>;
  }
}

// Blocks of as many heads as the tensor with fewer heads fills, or of more where they would be too small to keep a
// multiprocessor busy.
dim3 block_of(const Params& p, int64_t lanes, int heads_per_thread) {
  const int64_t most = std::max(p.x[0].heads, p.x[1].heads);
  const int64_t fewest = p.x[0].heads && p.x[1].heads ? std::min(p.x[0].heads, p.x[1].heads) : most;
  const int64_t width = std::min<int64_t>(lanes, kMaxThreads);
  int64_t rows = ceil_div(fewest, heads_per_thread);
  while (rows * width < 64 && rows * heads_per_thread < most) rows *= 2;
  return dim3(width, std::min(rows, kMaxThreads / width));
}

int64_t blocks_of(const Params& p, const dim3& block, int heads_per_thread) {
  const int64_t group = block.y * heads_per_thread;
  return p.batch * p.seqlen * (ceil_div(p.x[0].heads, group) + ceil_div(p.x[1].heads, group));
}

// May rewrite the strides of `work` to suit the kernel.
Choice choose(const Params& p, DType dtype, int64_t vector, int multiprocessors, Work& work) {
  const int64_t lanes = work.lanes + work.tail_lanes, elements = vector / size_of(dtype);
  const bool in_f64 = rotates_in_f64(dtype, p.table_dtype);
  TableForm form;
  Work in_vectors = work;
  if (vector < 16 || in_f64 || lanes > kMaxThreads || !to_vectors(p, in_vectors) ||
      !table_form(p, dtype, work, p.interleaved ? elements / 2 : elements, form)) {
    return {any_kernel(dtype, in_f64, elements), 1, 1, block_of(p, lanes, 1)};
  }
  work = in_vectors;
  // Once every multiprocessor is busy, more heads a thread save instructions; a block must still fill a warp.
  const dim3 block = block_of(p, lanes, kManyHeads);
  const bool many = block.x * block.y >= 32 && blocks_of(p, block, kManyHeads) > 2 * multiprocessors;
  if (many) return {vectors_kernel(dtype, form, p.interleaved, true), 16, kManyHeads, block};
  return {vectors_kernel(dtype, form, p.interleaved, false), 16, 1, block_of(p, lanes, 1)};
}

// The part of `work` from this batch, token and head on.
Work part_of(Work work, int64_t unit, int64_t batch, int64_t token, int64_t head) {
  for (Tensor& x : work.x) {
    x.in += (batch * x.from.batch + token * x.from.token + head * x.from.head) * unit;
    x.out += (batch * x.to.batch + token * x.to.token + head * x.to.head) * unit;
  }
  for (FactorSteps* factor : {&work.cos, &work.sin}) {
    factor->data += batch * factor->batch + (work.position_bytes ? 0 : token * factor->row);
  }
  work.positions += batch * work.positions_batch + token * work.positions_token;
  return work;
}

// One launch, or several where the grid would be too large.
cudaError_t launch(const Params& p, const Choice& choice, const Work& work, cudaStream_t stream,
                   const GridLimits& limits) {
  const int64_t group = choice.block.y * choice.heads_per_thread;
  const int64_t heads_at_once = limits.y / 2 * group;  // of each tensor
  for (int64_t head = 0; head < std::max(p.x[0].heads, p.x[1].heads); head += heads_at_once) {
    for (int64_t batch = 0; batch < p.batch; batch += limits.z) {
      for (int64_t token = 0; token < p.seqlen; token += limits.x) {
        Work part = part_of(work, choice.unit, batch, token, head);
        unsigned groups[2];
        for (int i = 0; i < 2; ++i) {
          part.x[i].heads = static_cast<int>(std::clamp<int64_t>(p.x[i].heads - head, 0, heads_at_once));
          groups[i] = static_cast<unsigned>(ceil_div(part.x[i].heads, group));
        }
        part.first_groups = groups[0];
        const dim3 grid(static_cast<unsigned>(std::min(p.seqlen - token, limits.x)), groups[0] + groups[1],
                        static_cast<unsigned>(std::min(p.batch - batch, limits.z)));
        void* arguments[] = {&part};
        const void* kernel = reinterpret_cast<const void*>(choice.kernel);
        const cudaError_t error = cudaLaunchKernel(kernel, grid, choice.block, arguments, 0, stream);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

// Tensors of one dtype. An absent one has no heads, so no groups in the grid.
cudaError_t rotate_one_dtype(const Params& p, DType dtype, cudaStream_t stream, const GridLimits& limits) {
  if (p.head_dim > kInt32Max) return cudaErrorInvalidValue;  // lanes are counted in 32 bits
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const int64_t vector = vector_bytes(p, dtype);
  Work work = describe(p, dtype, vector);
  const Choice choice = choose(p, dtype, vector, multiprocessors, work);
  return launch(p, choice, work, stream, limits);
}

}  // namespace

cudaError_t rotate_cuda(const Params& params, cudaStream_t stream, const GridLimits& limits) {
  if (params.batch == 0 || params.seqlen == 0) return cudaSuccess;
  const Heads &q = params.x[0], &k = params.x[1];
  if (q.heads && k.heads && q.dtype == k.dtype) return rotate_one_dtype(params, q.dtype, stream, limits);
  for (int i = 0; i < 2; ++i) {
    Params one = params;
    one.x[1 - i].heads = 0;
    if (one.x[i].heads == 0) continue;
    const cudaError_t error = rotate_one_dtype(one, one.x[i].dtype, stream, limits);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace rope
