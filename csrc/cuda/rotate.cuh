// The CUDA kernels: every pair (a, b) of every head of every token becomes (a*c - b*s, a*s + b*c).
//
// A block belongs to one token and some of its heads: blockIdx is (token, group of heads, batch), the groups of xq
// before those of xk, so one launch serves both and no index needs a division. A thread (lane, row) has the same lane
// in `HeadsPerThread` heads, and both vectors that hold its pairs: lane j takes vectors j and j + lanes of the rotated
// features. With halves they pair up element by element, with neighbours each holds its own pairs. So every element is
// read and written by one thread only, which makes in place safe, and a thread reads its factors once for all its
// heads.
//
// Memory is the limit: x is read once and written once (4 bytes an element at 16 bits), a table row serves all heads of
// a token. Hence vectors of 16 bytes, loads of x before those of the table, and few instructions.
#pragma once

// Positions are checked in release builds too: a wrong one would read past the table.
#undef NDEBUG
#include <cassert>
#include <type_traits>

#include "../rope_params.h"
#include "vectors.cuh"

#if defined(__HIP__) && !defined(__grid_constant__)
#define __grid_constant__
#endif

namespace rope {

constexpr int kMaxThreads = 256;  // of a block
constexpr int kManyHeads = 4;     // of a thread, in large calls

// How the factors of neighbouring pairs lie in a table row.
enum class TableForm {
  complex_f32,  // c, s, c, s ... in float32: a complex64 table
  split_f32,    // c, c ... and s, s ... in float32
  split_x,      // the same in the dtype of x
};

// Strides of one tensor: in bytes for rotate_any; in 16-byte vectors, and within 32 bits, for rotate_vectors.
struct Steps {
  int64_t batch, token, head;
  // Within a head, for rotate_any only:
  int64_t lane;       // from a lane's first vector to that of the next lane
  int64_t partner;    // from a lane's first vector to its second
  int64_t tail;       // to the features that pass through
  int64_t tail_lane;  // from one vector of those to the next
};

struct Tensor {
  const char* in;
  char* out;
  Steps from, to;
  int heads;
};

// Strides in bytes; within 32 bits for rotate_vectors.
struct FactorSteps {
  const char* data;
  int64_t batch, row, pair;
};

// The one argument of every kernel.
struct Work {
  Tensor x[2];            // xq and xk
  unsigned first_groups;  // groups of heads of x[0]; the rest of gridDim.y belongs to x[1]
  int lanes;              // that rotate a head, two vectors each
  int tail_lanes;         // that copy its other features, one vector each; 0 in place
  bool interleaved;

  FactorSteps cos, sin;
  DType table_dtype;
  float sin_sign;   // -1: the conjugate
  bool negate_cos;  // for rotate_any only

  const char* positions;
  int position_bytes;                        // 4 or 8; 0: the row is the index of the token
  int64_t positions_batch, positions_token;  // in bytes
  int64_t rows;
};

__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }

// a + b or a - b in one rounding: the product with sign = +-1 is exact, so this fma rounds once, as an addition does.
__device__ __forceinline__ float signed_sum(float a, float b, float sign) { return __fmaf_rn(b, sign, a); }
__device__ __forceinline__ double signed_sum(double a, double b, double sign) { return __fma_rn(b, sign, a); }

// Products and sums round one by one, whatever the compiler flags: the CPU gives the same bits.
template <typename A>
__device__ __forceinline__ void rotate_pair(A& a, A& b, A c, A s, A sin_sign) {
  const A real = signed_sum(product(a, c), product(b, s), -sin_sign);
  b = signed_sum(product(b, c), product(a, s), sin_sign);
  a = real;
}

// The pairs of a lane's two vectors. With neighbours, c and s are those of the first vector, then those of the second.
template <bool Neighbours, typename A, int N>
__device__ __forceinline__ void rotate_lane(A (&first)[N], A (&second)[N], const A (&c)[N], const A (&s)[N], A sign) {
  if constexpr (Neighbours && N > 1) {
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

// The address of a vector of x. nvcc must be told again that it is global memory, or it emits generic accesses.
__device__ __forceinline__ char* vector_at(const char* first, int vectors) {
#if defined(__CUDA_ARCH__)
  const int64_t address = add_product(static_cast<int64_t>(__cvta_generic_to_global(first)), vectors, 16);
  return static_cast<char*>(__cvta_global_to_generic(address));
#else
  return const_cast<char*>(first) + int64_t{vectors} * 16;
#endif
}

// The offset of this block's token. Index is the type that indices and strides are known to fit in.
template <typename Index>
__device__ __forceinline__ int64_t token_offset(int64_t batch_stride, int64_t token_stride) {
  const int64_t offset = add_product(0, static_cast<Index>(blockIdx.z), static_cast<Index>(batch_stride));
  return add_product(offset, static_cast<Index>(blockIdx.x), static_cast<Index>(token_stride));
}

// The table row of this block's token, unchecked: its low and its high half. The loads are issued early, `checked`
// waits for them. Without a branch around them, and in halves, they cost the fewest instructions.
template <typename Index>
__device__ __forceinline__ uint2 position(const Work& work) {
  const char* address = work.positions + token_offset<Index>(work.positions_batch, work.positions_token);
  uint2 row = make_uint2(blockIdx.x, 0);
  if (work.position_bytes != 0) row.x = *reinterpret_cast<const unsigned*>(address);
  if (work.position_bytes == 8) row.y = *reinterpret_cast<const unsigned*>(address + 4);
  return row;
}

template <typename Index>
__device__ __forceinline__ int64_t checked(uint2 row, const Work& work) {
  if constexpr (sizeof(Index) == 4) {  // work.rows fits too, so a negative int32 is seen as too large
    assert(row.y == 0 && row.x < static_cast<unsigned>(work.rows) && "a position lies outside the table");
    return row.x;
  } else {
    const int64_t wide = static_cast<int64_t>(static_cast<uint64_t>(row.y) << 32 | row.x);
    const int64_t value = work.position_bytes == 4 ? static_cast<int>(row.x) : wide;
    assert(value >= 0 && value < work.rows && "a position lies outside the table");
    return value;
  }
}

template <typename Index>
__device__ __forceinline__ const char* row_of(const FactorSteps& factor, int64_t row) {
  const int64_t offset = add_product(0, static_cast<Index>(blockIdx.z), static_cast<Index>(factor.batch));
  return factor.data + add_product(offset, static_cast<Index>(row), static_cast<Index>(factor.row));
}

// Factors of `Count` neighbouring pairs, the first of them `pair`.
template <typename T, TableForm Form, int Count>
__device__ __forceinline__ void load_factors(const char* cos, const char* sin, unsigned pair, float* c, float* s) {
  if constexpr (Form == TableForm::complex_f32) {
    float factors[2 * Count];
    load_table<float, 2 * Count>(cos + pair * 8, factors);
#pragma unroll
    for (int i = 0; i < Count; ++i) c[i] = factors[2 * i], s[i] = factors[2 * i + 1];
  } else {
    using Element = std::conditional_t<Form == TableForm::split_f32, float, T>;
    load_table<Element, Count>(cos + pair * sizeof(Element), c);
    load_table<Element, Count>(sin + pair * sizeof(Element), s);
  }
}

// The kernel of nearly all calls: 16-byte vectors, a table that vectors can read, float32 arithmetic.
template <typename T, TableForm Form, bool Interleaved, int HeadsPerThread>
__global__ void __launch_bounds__(kMaxThreads) rotate_vectors(const __grid_constant__ Work work) {
  constexpr int N = 16 / sizeof(T);
  const bool second_tensor = blockIdx.y >= work.first_groups;
  const Tensor& x = work.x[second_tensor];
  const int group = blockIdx.y - (second_tensor ? work.first_groups : 0);
  const int rows = blockDim.y;
  const int head = group * HeadsPerThread * rows + threadIdx.y;
  if (head >= x.heads) return;
  const uint2 unchecked = position<int>(work);

  // The lanes beyond those that rotate have one vector of the other features; they move it as if it were two. A head
  // beyond the last leaves its words undefined; they are rotated like the others, without a branch, and never stored.
  const int lane = threadIdx.x;
  const bool rotated = lane < work.lanes;
  const int vector = rotated ? lane : lane + work.lanes;
  const unsigned partner = rotated ? work.lanes * 16 : 0;

  const char* token_in = x.in + token_offset<int>(x.from.batch, x.from.token) * 16;
  int at = head * static_cast<int>(x.from.head) + vector;
  uint4 words[HeadsPerThread][2];
#pragma unroll
  for (int u = 0; u < HeadsPerThread; ++u) {
    if (u == 0 || head + u * rows < x.heads) {
      const char* in = vector_at(token_in, at);
      words[u][0] = load<16>(in);
      words[u][1] = load<16>(in + partner);
    }
    at += rows * static_cast<int>(x.from.head);
  }

  if (rotated) {
    const int64_t row = checked<int>(unchecked, work);
    const char* cos = row_of<int>(work.cos, row);
    const char* sin = row_of<int>(work.sin, row);
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

  char* token_out = x.out + token_offset<int>(x.to.batch, x.to.token) * 16;
  at = head * static_cast<int>(x.to.head) + vector;
#pragma unroll
  for (int u = 0; u < HeadsPerThread; ++u) {
    if (u == 0 || head + u * rows < x.heads) {
      char* out = vector_at(token_out, at);
      store<16>(out, words[u][0]);
      store<16>(out + partner, words[u][1]);
    }
    at += rows * static_cast<int>(x.to.head);
  }
}

// One factor of a table of any dtype.
template <typename A>
__device__ __forceinline__ A factor_at(DType dtype, const char* address) {
  switch (dtype) {
    case DType::f16:
      return static_cast<A>(__half2float(*reinterpret_cast<const __half*>(address)));
    case DType::bf16:
      return static_cast<A>(__bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(address)));
    case DType::f32:
      return static_cast<A>(*reinterpret_cast<const float*>(address));
    default:
      return static_cast<A>(*reinterpret_cast<const double*>(address));
  }
}

// Everything else: vectors of N elements, down to one; any table; float64; heads of any width, strides of 64 bits.
// Two blocks a multiprocessor are asked for because, left to itself, ptxas spills registers to fit in more.
template <typename T, typename A, int N>
__global__ void __launch_bounds__(kMaxThreads, 2) rotate_any(const __grid_constant__ Work work) {
  constexpr int bytes = sizeof(T) * N;
  const bool second_tensor = blockIdx.y >= work.first_groups;
  const Tensor& x = work.x[second_tensor];
  const int group = blockIdx.y - (second_tensor ? work.first_groups : 0);
  const int64_t head = group * blockDim.y + threadIdx.y;
  if (head >= x.heads) return;

  const int64_t row = checked<int64_t>(position<int64_t>(work), work);
  const char* in = x.in + token_offset<int64_t>(x.from.batch, x.from.token) + head * x.from.head;
  char* out = x.out + token_offset<int64_t>(x.to.batch, x.to.token) + head * x.to.head;
  const char* cos = row_of<int64_t>(work.cos, row);
  const char* sin = row_of<int64_t>(work.sin, row);
  const bool neighbours = work.interleaved && N > 1;  // two vectors of one element are a pair, in either pairing

#pragma unroll 1  // nvcc would divide to find the number of rounds
  for (int lane = threadIdx.x; lane < work.lanes + work.tail_lanes; lane += blockDim.x) {
    if (lane >= work.lanes) {
      const int vector = lane - work.lanes;
      store<bytes>(out + x.to.tail + vector * x.to.tail_lane,
                   load<bytes>(in + x.from.tail + vector * x.from.tail_lane));
      continue;
    }
    A first[N], second[N], c[N], s[N];
    widen<T>(load<bytes>(in + lane * x.from.lane), first);
    widen<T>(load<bytes>(in + lane * x.from.lane + x.from.partner), second);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int within = lane * (N / 2) + i;
      const int64_t pair = !neighbours ? lane * N + i : i < N / 2 ? within : within + (work.lanes - 1) * (N / 2);
      c[i] = factor_at<A>(work.table_dtype, cos + pair * work.cos.pair);
      s[i] = factor_at<A>(work.table_dtype, sin + pair * work.sin.pair);
      if (work.negate_cos) c[i] = -c[i];
    }
    const A sin_sign = work.sin_sign;
    if (neighbours) {
      rotate_lane<true>(first, second, c, s, sin_sign);
    } else {
      rotate_lane<false>(first, second, c, s, sin_sign);
    }
    store<bytes>(out + lane * x.to.lane, narrow<T>(first));
    store<bytes>(out + lane * x.to.lane + x.to.partner, narrow<T>(second));
  }
}

}  // namespace rope
