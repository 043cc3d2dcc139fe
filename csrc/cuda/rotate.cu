// The host side of the CUDA kernels: which kernel a call gets, with which block and grid.
#include "rotate.h"

#include <algorithm>

#include "rotate.cuh"

namespace rope {
namespace {

using Kernel = void (*)(Work);

struct Choice {
  Kernel kernel;
  int heads_per_thread;
  dim3 block;
};

constexpr int64_t kWorthwhileThreads = 64;  // smaller blocks leave part of a multiprocessor empty

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::f32:
      return 4;
    default:
      return 8;
  }
}

bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Whether every vector of a tensor that starts at a multiple of `bytes` within its head is aligned.
bool aligned(const Params& p, const Heads& x, const void* data, const int64_t (&stride)[4], int64_t bytes) {
  const int64_t size = size_of(x.dtype);
  const int64_t extent[3] = {p.batch, p.seqlen, x.heads};
  if (stride[3] != 1 || !aligned(data, bytes)) return false;
  for (int i = 0; i < 3; ++i) {
    if (extent[i] > 1 && stride[i] * size % bytes != 0) return false;
  }
  return true;
}

// A float64 table with narrower x is rare enough for single elements.
bool single_elements(const Params& p, DType dtype) { return dtype != DType::f64 && rotates_in_f64(dtype, p.table_dtype); }

// The widest vector that both tensors and the split of a head into its parts allow.
int64_t vector_bytes(const Params& p, DType dtype) {
  const int64_t size = size_of(dtype);
  if (single_elements(p, dtype)) return size;
  for (int64_t bytes = 16; bytes > size; bytes /= 2) {
    bool fits = p.rotary_dim / 2 * size % bytes == 0 && p.head_dim * size % bytes == 0;
    for (const Heads& x : p.x) {
      fits = fits && (x.heads == 0 || (aligned(p, x, x.in, x.in_stride, bytes) && aligned(p, x, x.out, x.out_stride, bytes)));
    }
    if (fits) return bytes;
  }
  return size;
}

// Whether rotate_vectors can read the table, `pairs` neighbouring pairs at a time, and in which form.
bool table_form(const Params& p, DType dtype, int64_t pairs, TableForm& form) {
  if (p.cos.negate) return false;
  const int64_t size = size_of(p.table_dtype);
  bool same_strides = true;
  const auto readable = [&](const Factor& factor, int64_t bytes) {
    return aligned(factor.data, bytes) && (p.batch <= 1 || factor.stride[0] * size % bytes == 0) &&
           (p.rows <= 1 || factor.stride[1] * size % bytes == 0);
  };
  same_strides = (p.batch <= 1 || p.cos.stride[0] == p.sin.stride[0]) && (p.rows <= 1 || p.cos.stride[1] == p.sin.stride[1]);
  if (p.table_dtype == DType::f32 && p.cos.stride[2] == 2 && p.sin.stride[2] == 2) {
    form = TableForm::complex_f32;
    return same_strides && static_cast<const float*>(p.cos.data) + 1 == p.sin.data &&
           readable(p.cos, std::min<int64_t>(16, 2 * size * pairs));
  }
  form = p.table_dtype == DType::f32 ? TableForm::split_f32 : TableForm::split_x;
  const int64_t bytes = std::min<int64_t>(16, size * pairs);
  return (p.table_dtype == DType::f32 || p.table_dtype == dtype) && p.cos.stride[2] == 1 && p.sin.stride[2] == 1 &&
         readable(p.cos, bytes) && readable(p.sin, bytes);
}

template <typename T, TableForm Form>
Kernel vectors_kernel(bool interleaved, int heads_per_thread) {
  if (interleaved) {
    return heads_per_thread == 1 ? rotate_vectors<T, Form, true, 1> : rotate_vectors<T, Form, true, 4>;
  }
  return heads_per_thread == 1 ? rotate_vectors<T, Form, false, 1> : rotate_vectors<T, Form, false, 4>;
}

template <typename T>
Kernel vectors_kernel(TableForm form, bool interleaved, int heads_per_thread) {
  if (form == TableForm::complex_f32) return vectors_kernel<T, TableForm::complex_f32>(interleaved, heads_per_thread);
  if constexpr (sizeof(T) == 2) {
    if (form == TableForm::split_x) return vectors_kernel<T, TableForm::split_x>(interleaved, heads_per_thread);
  }
  return vectors_kernel<T, TableForm::split_f32>(interleaved, heads_per_thread);
}

Kernel vectors_kernel(DType dtype, TableForm form, bool interleaved, int heads_per_thread) {
  switch (dtype) {
    case DType::f16:
      return vectors_kernel<__half>(form, interleaved, heads_per_thread);
    case DType::bf16:
      return vectors_kernel<__nv_bfloat16>(form, interleaved, heads_per_thread);
    default:
      return vectors_kernel<float>(form, interleaved, heads_per_thread);
  }
}

template <typename T>
Kernel any_kernel(bool in_f64, int64_t bytes) {
  if (in_f64) return rotate_any<T, double, 1>;
  switch (bytes / sizeof(T)) {
    case 1:
      return rotate_any<T, float, 1>;
    case 2:
      return rotate_any<T, float, 2>;
    case 4:
      return rotate_any<T, float, 4>;
    default:
      if constexpr (sizeof(T) == 2) return rotate_any<T, float, 8>;
      return nullptr;  // no vector is longer than 16 bytes
  }
}

Kernel any_kernel(DType dtype, bool in_f64, int64_t bytes) {
  switch (dtype) {
    case DType::f16:
      return any_kernel<__half>(in_f64, bytes);
    case DType::bf16:
      return any_kernel<__nv_bfloat16>(in_f64, bytes);
    case DType::f32:
      return any_kernel<float>(in_f64, bytes);
    default:
      return bytes == 16 ? rotate_any<double, double, 2> : rotate_any<double, double, 1>;
  }
}

Steps steps(const int64_t (&stride)[4], const Params& p, int64_t size, int64_t vector) {
  const int64_t elements = vector / size;
  const bool neighbours = p.interleaved && elements == 1;  // two single elements, instead of two vectors half a head apart
  Steps s;
  s.batch = stride[0] * size;
  s.token = stride[1] * size;
  s.head = stride[2] * size;
  s.lane = (neighbours ? 2 : elements) * stride[3] * size;
  s.partner = (neighbours ? 1 : p.rotary_dim / 2) * stride[3] * size;
  s.tail = p.rotary_dim * stride[3] * size;
  s.tail_lane = elements * stride[3] * size;
  return s;
}

FactorSteps factor_steps(const Factor& factor, int64_t size) {
  return {static_cast<const char*>(factor.data), factor.stride[0] * size, factor.stride[1] * size,
          factor.stride[2] * size};
}

// `params` with tensors of one dtype: pointers and strides in bytes.
Work describe(const Params& p, DType dtype, int64_t vector) {
  const int64_t size = size_of(dtype), table_size = size_of(p.table_dtype);
  Work work = {};
  bool in_place = true;
  for (int i = 0; i < 2; ++i) {
    const Heads& x = p.x[i];
    if (x.heads == 0) continue;
    work.x[i].in = static_cast<const char*>(x.in);
    work.x[i].out = static_cast<char*>(x.out);
    work.x[i].from = steps(x.in_stride, p, size, vector);
    work.x[i].to = steps(x.out_stride, p, size, vector);
    in_place = in_place && x.in == x.out;
  }
  work.lanes = p.rotary_dim / 2 * size / vector;
  work.tail_lanes = in_place ? 0 : (p.head_dim - p.rotary_dim) * size / vector;
  work.interleaved = p.interleaved;
  work.cos = factor_steps(p.cos, table_size);
  work.sin = factor_steps(p.sin, table_size);
  work.table_dtype = p.table_dtype;
  work.sin_sign = p.sin.negate ? -1.0f : 1.0f;
  work.negate_cos = p.cos.negate;
  const int64_t position_size = p.positions_are_int64 ? 8 : 4;
  work.positions = static_cast<const char*>(p.positions);
  work.position_bytes = p.positions ? position_size : 0;
  work.positions_batch = p.positions_stride[0] * position_size;
  work.positions_token = p.positions_stride[1] * position_size;
  work.rows = p.rows;
  return work;
}

// Heads side by side in a block: few enough that the tensor with fewer heads fills its blocks.
dim3 block_of(int64_t lanes, const Params& p, int heads_per_thread) {
  const int64_t most = std::max(p.x[0].heads, p.x[1].heads);
  const int64_t fewest = p.x[0].heads && p.x[1].heads ? std::min(p.x[0].heads, p.x[1].heads) : most;
  const int64_t width = std::min<int64_t>(lanes, kMaxThreads);
  int64_t rows = ceil_div(fewest, heads_per_thread);
  while (rows * width < kWorthwhileThreads && rows * heads_per_thread < most) rows *= 2;
  return dim3(width, std::min(rows, kMaxThreads / width));
}

int64_t blocks(const Params& p, const Choice& choice) {
  const int64_t heads = choice.block.y * choice.heads_per_thread;
  return p.batch * p.seqlen * (ceil_div(p.x[0].heads, heads) + ceil_div(p.x[1].heads, heads));
}

Choice choose(const Params& p, DType dtype, const Work& work, int64_t vector, int multiprocessors) {
  const int64_t lanes = work.lanes + work.tail_lanes;
  const int64_t elements = vector / size_of(dtype);
  const bool in_f64 = rotates_in_f64(dtype, p.table_dtype);
  TableForm form;
  if (vector < 16 || in_f64 || lanes > kMaxThreads || !table_form(p, dtype, p.interleaved ? elements / 2 : elements, form)) {
    return {any_kernel(dtype, in_f64, vector), 1, block_of(lanes, p, 1)};
  }
  Choice choice = {vectors_kernel(dtype, form, p.interleaved, 1), 1, block_of(lanes, p, 1)};
  // Once every multiprocessor is busy, fewer instructions count for more than more threads.
  if (blocks(p, choice) > 2 * multiprocessors) {
    choice = {vectors_kernel(dtype, form, p.interleaved, 2), 2, block_of(lanes, p, 2)};
  }
  return choice;
}

// The part of `work` that starts at this batch, token and head.
Work part_of(Work work, int64_t batch, int64_t token, int64_t head) {
  for (Tensor& x : work.x) {
    x.in += batch * x.from.batch + token * x.from.token + head * x.from.head;
    x.out += batch * x.to.batch + token * x.to.token + head * x.to.head;
  }
  for (FactorSteps* factor : {&work.cos, &work.sin}) {
    factor->data += batch * factor->batch + (work.positions ? 0 : token * factor->row);
  }
  if (work.positions) work.positions += batch * work.positions_batch + token * work.positions_token;
  return work;
}

// One launch, or several where the grid would be too large.
cudaError_t launch(const Params& p, const Choice& choice, const Work& work, cudaStream_t stream, const GridLimits& limits) {
  const int64_t group = choice.block.y * choice.heads_per_thread;
  const int64_t most_heads = limits.y / 2 * group;  // of each tensor
  for (int64_t head = 0; head < std::max(p.x[0].heads, p.x[1].heads); head += most_heads) {
    for (int64_t batch = 0; batch < p.batch; batch += limits.z) {
      for (int64_t token = 0; token < p.seqlen; token += limits.x) {
        Work part = part_of(work, batch, token, head);
        int64_t groups[2];
        for (int i = 0; i < 2; ++i) {
          part.x[i].heads = static_cast<int32_t>(std::clamp<int64_t>(p.x[i].heads - head, 0, most_heads));
          groups[i] = ceil_div(part.x[i].heads, group);
        }
        part.first_groups = static_cast<unsigned>(groups[0]);
        const dim3 grid(std::min(p.seqlen - token, limits.x), groups[0] + groups[1], std::min(p.batch - batch, limits.z));
        void* arguments[] = {&part};
        const cudaError_t error =
            cudaLaunchKernel(reinterpret_cast<const void*>(choice.kernel), grid, choice.block, arguments, 0, stream);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

cudaError_t rotate_one_dtype(const Params& p, DType dtype, cudaStream_t stream, const GridLimits& limits) {
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const int64_t vector = vector_bytes(p, dtype);
  const Work work = describe(p, dtype, vector);
  return launch(p, choose(p, dtype, work, vector, multiprocessors), work, stream, limits);
}

}  // namespace

cudaError_t rotate_cuda(const Params& params, cudaStream_t stream, const GridLimits& limits) {
  if (params.batch == 0 || params.seqlen == 0) return cudaSuccess;
  if (params.x[0].heads && params.x[1].heads && params.x[0].dtype == params.x[1].dtype) {
    return rotate_one_dtype(params, params.x[0].dtype, stream, limits);
  }
  for (int i = 0; i < 2; ++i) {
    if (params.x[i].heads == 0) continue;
    Params one = params;
    one.x[1 - i].heads = 0;
    const cudaError_t error = rotate_one_dtype(one, one.x[i].dtype, stream, limits);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace rope
