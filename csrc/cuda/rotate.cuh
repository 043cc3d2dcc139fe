// The CUDA kernels: every head of every token, in its pairs (a, b), becomes (a*c - b*s, a*s + b*c).
//
// A block belongs to one token and some of its heads: blockIdx is (token, group of heads, batch), the groups of xq
// before those of xk, so one launch serves both and no index needs a division. A thread (lane, row) owns the same lane
// in `HeadsPerThread` heads, and both vectors that hold its pairs: lane j has vectors j and j + lanes of the rotated
// features, with either pairing (halves pair them element by element, neighbours lie within each). So every element
// is read and written by one thread, which makes in place safe, and a table row is read once for several heads.
//
// Bytes limit it: x is read once and written once, 4 bytes an element at 16 bits, and a table row serves all heads.
// The vectors are 16 bytes where alignment allows; that and few instructions is all there is to win.
#pragma once

// Positions are checked in release builds too: a wrong one would read past the table.
#undef NDEBUG
#include <cassert>

#include "../rope_params.h"
#include "vectors.cuh"

#if defined(__HIP__) && !defined(__grid_constant__)
#define __grid_constant__
#endif

namespace rope {

constexpr int kMaxThreads = 256;  // per block

// How the factors of neighbouring pairs lie in a table row.
enum class TableForm {
  complex_f32,  // c, s, c, s ... in float32: a complex64 table
  split_f32,    // c, c ... and s, s ... in float32
  split_x,      // the same in the dtype of x
};

// Strides of one tensor: bytes for rotate_any, 16-byte vectors that fit in 32 bits for rotate_vectors.
struct Steps {
  int64_t batch, token, head;
  int64_t lane;       // from a lane's first vector to the next lane's
  int64_t partner;    // from a lane's first vector to its second
  int64_t tail;       // from the start of a head to the features that pass through
  int64_t tail_lane;  // from one vector of those to the next
};

struct Tensor {
  const char* in;
  char* out;
  Steps from, to;
  int32_t heads;
};

// Strides in bytes; within 32 bits for rotate_vectors.
struct FactorSteps {
  const char* data;
  int64_t batch, row, pair;
};

// The one argument of every kernel.
struct Work {
  Tensor x[2];           // xq and xk
  unsigned first_groups;  // groups of heads in x[0]; the rest of gridDim.y belongs to x[1]
  int lanes;              // that rotate a head, two vectors each
  int tail_lanes;         // that copy its other features: 0 in place
  int vectors;            // of a head, so that the last tail lane knows whether it has a second one
  bool interleaved;

  FactorSteps cos, sin;
  DType table_dtype;
  float sin_sign;   // -1: conj
  bool negate_cos;  // only rotate_any knows it

  const char* positions;
  int position_bytes;  // 4 or 8; 0: the row is the index of the token
  int64_t positions_batch, positions_token;  // bytes
  int64_t rows;
};

__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }

// a + b or a - b in one rounding: the product with sign = +-1 is exact, so the fma rounds once, as an addition does.
__device__ __forceinline__ float signed_sum(float a, float b, float sign) { return __fmaf_rn(b, sign, a); }
__device__ __forceinline__ double signed_sum(double a, double b, double sign) { return __fma_rn(b, sign, a); }

// Products and sums round one by one, so no flag and no compiler may fuse them: the CPU gives the same bits.
template <typename A>
__device__ __forceinline__ void rotate_pair(A& a, A& b, A c, A s, A sin_sign) {
  const A real = signed_sum(product(a, c), product(b, s), -sin_sign);
  b = signed_sum(product(b, c), product(a, s), sin_sign);
  a = real;
}

// The pairs of a lane's two vectors. c and s are those of the first vector, then of the second, if neighbours pair up.
template <bool Interleaved, typename A, int N>
__device__ __forceinline__ void rotate_lane(A (&first)[N], A (&second)[N], const A (&c)[N], const A (&s)[N], A sign) {
  if constexpr (Interleaved && N > 1) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      rotate_pair(first[2 * i], first[2 * i + 1], c[i], s[i], sign);
      rotate_pair(second[2 * i], second[2 * i + 1], c[N / 2 + i], s[N / 2 + i], sign);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) rotate_pair(first[i], second[i], c[i], s[i], sign);
  }
}

// sum + index * stride. Where both factors fit in 32 bits that is one instruction instead of five, which nvcc does not
// find by itself.
__device__ __forceinline__ int64_t add_product(int64_t sum, int64_t index, int64_t stride) {
  return sum + index * stride;
}
__device__ __forceinline__ int64_t add_product(int64_t sum, int index, int stride) {
#if defined(__CUDA_ARCH__)
  int64_t result;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(result) : "r"(index), "r"(stride), "l"(sum));
  return result;
#else
  return sum + static_cast<int64_t>(index) * stride;
#endif
}

// The offset of this block's token in a tensor.
template <typename Index>
__device__ __forceinline__ int64_t token_offset(const Steps& steps) {
  const int64_t offset = add_product(0, static_cast<Index>(blockIdx.z), static_cast<Index>(steps.batch));
  return add_product(offset, static_cast<Index>(blockIdx.x), static_cast<Index>(steps.token));
}

// The table row of this block's token, unchecked: the load is issued early, and `checked` waits for it.
template <typename Index>
__device__ __forceinline__ int64_t position(const Work& work) {
  int64_t offset = add_product(0, static_cast<Index>(blockIdx.z), static_cast<Index>(work.positions_batch));
  offset = add_product(offset, static_cast<Index>(blockIdx.x), static_cast<Index>(work.positions_token));
  int64_t row = blockIdx.x;
  if (work.position_bytes == 8) row = *reinterpret_cast<const int64_t*>(work.positions + offset);
  if (work.position_bytes == 4) row = *reinterpret_cast<const int32_t*>(work.positions + offset);
  return row;
}

__device__ __forceinline__ int64_t checked(int64_t row, const Work& work) {
  assert(static_cast<uint64_t>(row) < static_cast<uint64_t>(work.rows) && "a position lies outside the table");
  return row;
}

template <typename Index>
__device__ __forceinline__ const char* row_of(const FactorSteps& factor, int64_t row) {
  const int64_t offset = add_product(0, static_cast<Index>(blockIdx.z), static_cast<Index>(factor.batch));
  return factor.data + add_product(offset, static_cast<Index>(row), static_cast<Index>(factor.row));
}

// `Count` neighbouring factors from pair `first` on.
template <typename T, TableForm Form, int Count>
__device__ __forceinline__ void load_factors(const char* cos, const char* sin, unsigned first, float* c, float* s) {
  if constexpr (Form == TableForm::complex_f32) {
    float both[2 * Count];
    load_table(cos + first * 8, both);
#pragma unroll
    for (int i = 0; i < Count; ++i) c[i] = both[2 * i], s[i] = both[2 * i + 1];
  } else if constexpr (Form == TableForm::split_f32) {
    float one[Count], other[Count];
    load_table(cos + first * 4, one);
    load_table(sin + first * 4, other);
#pragma unroll
    for (int i = 0; i < Count; ++i) c[i] = one[i], s[i] = other[i];
  } else {
    Word<sizeof(T) * Count> one, other;
    one = __ldg(reinterpret_cast<const Word<sizeof(T) * Count>*>(cos + first * sizeof(T)));
    other = __ldg(reinterpret_cast<const Word<sizeof(T) * Count>*>(sin + first * sizeof(T)));
    float wide_one[Count], wide_other[Count];
    widen<T>(one, wide_one);
    widen<T>(other, wide_other);
#pragma unroll
    for (int i = 0; i < Count; ++i) c[i] = wide_one[i], s[i] = wide_other[i];
  }
}

// The kernel of nearly all calls: 16-byte vectors and a table that vectors can read, in float32 arithmetic.
template <typename T, TableForm Form, bool Interleaved, int HeadsPerThread>
__global__ void __launch_bounds__(kMaxThreads) rotate_vectors(const __grid_constant__ Work work) {
  constexpr int N = 16 / sizeof(T);
  const bool second_tensor = blockIdx.y >= work.first_groups;
  const Tensor& x = work.x[second_tensor];
  const int group = blockIdx.y - (second_tensor ? work.first_groups : 0);
  const int head = group * HeadsPerThread * blockDim.y + threadIdx.y;
  if (head >= x.heads) return;
  const int64_t unchecked = position<int>(work);

  // Lanes beyond those that rotate copy one vector each of the other features.
  const int lane = threadIdx.x;
  const bool rotated = lane < work.lanes;
  const int vector = rotated ? lane : lane + work.lanes;
  const unsigned partner = rotated ? work.lanes * 16 : 0;

  const char* token_in = x.in + token_offset<int>(x.from) * 16;
  int at = head * static_cast<int>(x.from.head) + vector;
  uint4 words[HeadsPerThread][2];
#pragma unroll
  for (int u = 0; u < HeadsPerThread; ++u) {
    if (u == 0 || head + u * static_cast<int>(blockDim.y) < x.heads) {
      const char* in = token_in + add_product(0, at, 16);
      words[u][0] = load<16>(in);
      words[u][1] = load<16>(in + partner);
      at += blockDim.y * static_cast<int>(x.from.head);
    }
  }

  if (rotated) {
    const int64_t row = checked(unchecked, work);
    const char* cos = row_of<int>(work.cos, row);
    const char* sin = Form == TableForm::complex_f32 ? nullptr : row_of<int>(work.sin, row);
    float c[N], s[N];
    if constexpr (Interleaved) {
      load_factors<T, Form, N / 2>(cos, sin, lane * (N / 2), c, s);
      load_factors<T, Form, N / 2>(cos, sin, (lane + work.lanes) * (N / 2), c + N / 2, s + N / 2);
    } else {
      load_factors<T, Form, N>(cos, sin, lane * N, c, s);
    }
#pragma unroll
    for (int u = 0; u < HeadsPerThread; ++u) {
      float first[N], second[N];
      widen<T>(words[u][0], first);
      widen<T>(words[u][1], second);
      rotate_lane<Interleaved>(first, second, c, s, work.sin_sign);
      words[u][0] = narrow<T>(first);
      words[u][1] = narrow<T>(second);
    }
  }

  char* token_out = x.out + token_offset<int>(x.to) * 16;
  at = head * static_cast<int>(x.to.head) + vector;
#pragma unroll
  for (int u = 0; u < HeadsPerThread; ++u) {
    if (u == 0 || head + u * static_cast<int>(blockDim.y) < x.heads) {
      char* out = token_out + add_product(0, at, 16);
      store<16>(out, words[u][0]);
      store<16>(out + partner, words[u][1]);
      at += blockDim.y * static_cast<int>(x.to.head);
    }
  }
}

// One factor of a table of any dtype and stride.
template <typename A>
__device__ __forceinline__ A any_factor(DType dtype, const char* row, int64_t offset) {
  switch (dtype) {
    case DType::f16:
      return static_cast<A>(__half2float(__ldg(reinterpret_cast<const __half*>(row + offset))));
    case DType::bf16:
      return static_cast<A>(__bfloat162float(__ldg(reinterpret_cast<const __nv_bfloat16*>(row + offset))));
    case DType::f32:
      return static_cast<A>(__ldg(reinterpret_cast<const float*>(row + offset)));
    default:
      return static_cast<A>(__ldg(reinterpret_cast<const double*>(row + offset)));
  }
}

// Everything else: vectors of N elements, down to one; any table; float64; heads of any width.
template <typename T, typename A, int N>
__global__ void __launch_bounds__(kMaxThreads) rotate_any(const __grid_constant__ Work work) {
  constexpr int bytes = sizeof(T) * N;
  const bool second_tensor = blockIdx.y >= work.first_groups;
  const Tensor& x = work.x[second_tensor];
  const int group = blockIdx.y - (second_tensor ? work.first_groups : 0);
  const int head = group * blockDim.y + threadIdx.y;
  if (head >= x.heads) return;

  const char* in = x.in + token_offset<int64_t>(x.from) + head * x.from.head;
  char* out = x.out + token_offset<int64_t>(x.to) + head * x.to.head;
  const int64_t row = checked(position<int64_t>(work), work);
  const char* cos = row_of<int64_t>(work.cos, row);
  const char* sin = row_of<int64_t>(work.sin, row);
  const bool neighbours = work.interleaved && N > 1;  // in a vector of one, either pairing is that of the halves

  for (int64_t lane = threadIdx.x; lane < work.lanes + work.tail_lanes; lane += blockDim.x) {
    const char* from = in + lane * x.from.lane;
    A first[N], second[N], c[N], s[N];
    widen<T>(load<bytes>(from), first);
    widen<T>(load<bytes>(from + x.from.partner), second);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int64_t pair = !neighbours   ? lane * N + i
                           : i < N / 2 ? lane * (N / 2) + i
                                       : (work.lanes + lane) * (N / 2) + i - N / 2;
      c[i] = any_factor<A>(work.table_dtype, cos, pair * work.cos.pair);
      s[i] = any_factor<A>(work.table_dtype, sin, pair * work.sin.pair);
      if (work.negate_cos) c[i] = -c[i];
    }
    if (neighbours) {
      rotate_lane<true>(first, second, c, s, static_cast<A>(work.sin_sign));
    } else {
      rotate_lane<false>(first, second, c, s, static_cast<A>(work.sin_sign));
    }
    char* to = out + lane * x.to.lane;
    store<bytes>(to, narrow<T>(first));
    store<bytes>(to + x.to.partner, narrow<T>(second));
  }
}

}  // namespace rope
