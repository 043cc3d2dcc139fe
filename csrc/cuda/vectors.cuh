// One vector of a tensor in registers: loads, stores and conversions. A vector is N elements of T, moved by one
// instruction; the arithmetic sees them as N values of A (float or double).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace rope {

template <int Bytes>
struct WordOf;
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<4> {
  using type = unsigned int;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<16> {
  using type = uint4;
};
template <int Bytes>
using Word = typename WordOf<Bytes>::type;

template <int Bytes>
__device__ __forceinline__ Word<Bytes> load(const char* address) {
  return *reinterpret_cast<const Word<Bytes>*>(address);
}

template <int Bytes>
__device__ __forceinline__ void store(char* address, Word<Bytes> word) {
  *reinterpret_cast<Word<Bytes>*>(address) = word;
}

// Two 16-bit values share a 32-bit register, the first in the low half.
template <typename T>
struct Pair;

template <>
struct Pair<__half> {
  static __device__ __forceinline__ float2 widen(unsigned int bits) {
    __half2 pair;
    memcpy(static_cast<void*>(&pair), &bits, 4);
    return __half22float2(pair);
  }
  static __device__ __forceinline__ unsigned int narrow(float first, float second) {
    const __half2 pair = __floats2half2_rn(first, second);
    unsigned int bits;
    memcpy(&bits, &pair, 4);
    return bits;
  }
};

template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ float2 widen(unsigned int bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  }

  static __device__ __forceinline__ unsigned int narrow(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    unsigned int bits;
    memcpy(&bits, &pair, 4);
    return bits;
#else
    return rounded(first) >> 16 | (rounded(second) & 0xffff0000u);
#endif
  }

  // Round to nearest even in the upper 16 bits, without a branch: sm_75 has no such instruction. A NaN stays one,
  // even if its payload lies in the lower bits only.
  static __device__ __forceinline__ unsigned int rounded(float value) {
    const unsigned int bits = __float_as_uint(value);
    const unsigned int nearest = bits + 0x7fffu + (bits >> 16 & 1u);
    return value == value ? nearest : bits | 0x00400000u;
  }
};

// The elements of a vector, exactly.
template <typename T, typename W, typename A>
__device__ __forceinline__ void widen(const W& word, A* values) {
  constexpr int N = sizeof(W) / sizeof(T);
  if constexpr (sizeof(T) == 2) {
    unsigned int bits[(N + 1) / 2] = {};
    memcpy(bits, &word, sizeof(W));
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 pair = Pair<T>::widen(bits[i / 2]);
      values[i] = pair.x;
      if (i + 1 < N) values[i + 1] = pair.y;
    }
  } else {
    T elements[N];
    memcpy(elements, &word, sizeof(W));
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = elements[i];
  }
}

// N neighbouring values of a table, which no kernel writes, by loads of up to 16 bytes.
template <typename T, int N>
__device__ __forceinline__ void load_table(const char* address, float* values) {
  constexpr int bytes = sizeof(T) * N < 16 ? sizeof(T) * N : 16;
  constexpr int per_load = bytes / sizeof(T);
#pragma unroll
  for (int i = 0; i < N; i += per_load) {
    widen<T>(__ldg(reinterpret_cast<const Word<bytes>*>(address + i * sizeof(T))), values + i);
  }
}

// The one rounding of a result. A double goes to 16 bits through float32, as torch converts it.
template <typename T, typename A, int N>
__device__ __forceinline__ Word<sizeof(T) * N> narrow(const A (&values)[N]) {
  Word<sizeof(T) * N> word;
  if constexpr (sizeof(T) == 2) {
    unsigned int bits[(N + 1) / 2];
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float second = i + 1 < N ? static_cast<float>(values[i + 1 < N ? i + 1 : i]) : 0.0f;
      bits[i / 2] = Pair<T>::narrow(static_cast<float>(values[i]), second);
    }
    memcpy(&word, bits, sizeof(T) * N);
  } else {
    T elements[N];
#pragma unroll
    for (int i = 0; i < N; ++i) elements[i] = static_cast<T>(values[i]);
    memcpy(&word, elements, sizeof(T) * N);
  }
  return word;
}

}  // namespace rope
