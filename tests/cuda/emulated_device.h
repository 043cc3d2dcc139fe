// What nvcc and the device supply, for g++: the CUDA headers parse as they are without nvcc, but declare no built-in
// variables and no arithmetic intrinsics. The source of the kernels is compiled as it is.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define __launch_bounds__(...)

// Of the thread that is being run; emulate.cpp sets them.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

inline float __uint_as_float(unsigned int bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline unsigned int __float_as_uint(float value) {
  unsigned int bits;
  memcpy(&bits, &value, 4);
  return bits;
}

template <typename T>
inline T __ldg(const T* address) {
  return *address;
}
