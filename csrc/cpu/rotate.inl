// The rotation: (a + ib) * (c + is) for every pair (a, b) of a head and its table factor (c, s).
//
// Layout: a row is one head of one token, head_dim features at a fixed stride, nearly always contiguous. All heads of a
// token share one table row, which is converted and laid in lane order once and then stays in L1.
//
// Bound: memory. x is read once and written once, 2 * sizeof(T) bytes per feature; the table adds 8 bytes per pair and
// token, shared by all heads.
//
// Bits: each product and each sum is rounded on its own. With the compiler's default contraction to FMA a quarter of
// all float32 results would change from one instruction set to the next, and differ from the reference.
//
// Included once per instruction set by rotate_<isa>.cpp, which defines ROPE_ISA, ROPE_VECTOR_BYTES and ROPE_TARGET.
// The target is a region of this file, not a flag of the build: headers above it stay baseline code, so that no inline
// function of theirs compiled for AVX-512 can be the copy that the linker keeps for everybody. Below it nothing of
// std:: is called, for the same reason.
#include <cstdint>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC's own header
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

#include "isa.h"

#ifdef ROPE_TARGET
#define ROPE_PRAGMA(x) _Pragma(#x)
#define ROPE_TARGET_REGION(t) ROPE_PRAGMA(GCC target(t))
#if defined(__clang__)
#define ROPE_CLANG_REGION(t) ROPE_PRAGMA(clang attribute push(__attribute__((target(t))), apply_to = function))
ROPE_CLANG_REGION(ROPE_TARGET)
#else
ROPE_TARGET_REGION(ROPE_TARGET)
#endif
#endif

#define ROPE_INLINE inline __attribute__((always_inline))

namespace rope::cpu::ROPE_ISA {
namespace {

#include "vectors.inl"

#include "pairs.inl"

#include "row.inl"

// A product that no later pass can fuse with its sum. -ffp-contract=off is enough for vectors; GCC 12.2's vectoriser
// turns a scalar pair into vfmaddsub in spite of it (GCC bug 107647).
template <class A>
ROPE_INLINE A rounded(A product) {
#if defined(__x86_64__)
  if constexpr (std::is_floating_point<A>::value) __asm__("" : "+x"(product));
#elif defined(__aarch64__)
  if constexpr (std::is_floating_point<A>::value) __asm__("" : "+w"(product));
#endif
  return product;
}

template <class A>
ROPE_INLINE void rotate_pair(A& a, A& b, A c, A s) {
  const A re = rounded(a * c) - rounded(b * s);
  b = rounded(b * c) + rounded(a * s);
  a = re;
}

// ---- one head

template <class P, class T, class A>
ROPE_INLINE int64_t rotate_span(const T* in, T* out, int64_t half, const Row<A>& row, int64_t j, int64_t n) {
  using V = typename P::V;
  const A* c = P::kInOrder ? row.c : row.lane_c;
  const A* s = P::kInOrder ? row.s : row.lane_s;
  for (; j + P::kPairs <= n; j += P::kPairs) {
    V a[P::kVectors], b[P::kVectors];
    P::load(in, j, half, a, b);
    for (int k = 0; k < P::kVectors; ++k) {
      const int64_t lane = (P::kTwoLanes ? 2 * j : j) + k * (sizeof(V) / sizeof(A));
      rotate_pair(a[k], b[k], load_vector<V>(c + lane), load_vector<V>(s + lane));
    }
    P::store(out, j, half, a, b);
  }
  return j;
}

template <class T, bool interleaved, class A>
ROPE_INLINE void rotate_scalar(const T* in, int64_t in_stride, T* out, int64_t out_stride, int64_t half,
                               const Row<A>& row, int64_t j, int64_t n) {
  for (; j < n; ++j) {
    const int64_t re = interleaved ? 2 * j : j;
    const int64_t im = interleaved ? 2 * j + 1 : j + half;
    A a = widen(in[re * in_stride]), b = widen(in[im * in_stride]);
    rotate_pair(a, b, row.c[j], row.s[j]);
    narrow(a, out + re * out_stride);
    narrow(b, out + im * out_stride);
  }
}

// Heads from..to of one token. N is n where it is known at compile time, so that the loops over a head unroll and its
// table row stays in registers, else 0.
template <class T, bool interleaved, int N, class A>
ROPE_INLINE void rotate_heads(const T* in, int64_t in_stride, T* out, int64_t out_stride, int64_t count, int64_t half,
                              const Row<A>& row, int64_t n) {
  if (N > 0) n = N;
  for (int64_t h = 0; h < count; ++h, in += in_stride, out += out_stride) {
    int64_t j = 0;
    if constexpr (vectorised<T, A>(64))
      j = rotate_span<Pairs<T, interleaved, 64 / sizeof(A)>>(in, out, half, row, j, n);
    if constexpr (vectorised<T, A>(32))
      j = rotate_span<Pairs<T, interleaved, 32 / sizeof(A)>>(in, out, half, row, j, n);
    if constexpr (vectorised<T, A>(16))
      j = rotate_span<Pairs<T, interleaved, 16 / sizeof(A)>>(in, out, half, row, j, n);
    if (N == 0 || !vectorised<T, A>(16)) rotate_scalar<T, interleaved>(in, 1, out, 1, half, row, j, n);
  }
}

// The same by way of a buffer in L1 that is written to memory in whole lines, around the caches: an ordinary store
// first reads the line it will overwrite, a third more traffic.
template <class T, bool interleaved, class A>
void stream_heads(const T* in, int64_t in_stride, T* out, int64_t out_stride, int64_t count, const Row<A>& row,
                  int64_t n) {
  alignas(64) T head[2 * kChunk];
  for (int64_t h = 0; h < count; ++h, in += in_stride, out += out_stride) {
    rotate_heads<T, interleaved, 0>(in, 0, head, 0, 1, n, row, n);
    stream_copy(head, out, 2 * n * sizeof(T));
  }
}

// ---- all rows of a call

int64_t table_row(const Params& p, int64_t batch, int64_t token) {
  if (!p.positions) return token;
  const int64_t at = batch * p.positions_stride[0] + token * p.positions_stride[1];
  return p.positions_are_int64 ? static_cast<const int64_t*>(p.positions)[at]
                               : static_cast<const int32_t*>(p.positions)[at];
}

template <class T>
T* at(T* x, const int64_t (&stride)[4], int64_t batch, int64_t token, int64_t head) {
  return x + batch * stride[0] + token * stride[1] + head * stride[2];
}

// Features rotary_dim .. head_dim-1 of some heads, bit for bit. A vector at a time: too few for a call of memcpy each.
template <class T>
void pass_through(const Params& p, const Heads& x, const T* in, T* out, int64_t count) {
  using Block = Vec<uint8_t, ROPE_VECTOR_BYTES>;
  constexpr int64_t kBlock = sizeof(Block) / sizeof(T);
  const bool contiguous = x.in_stride[3] == 1 && x.out_stride[3] == 1;
  for (; count > 0; --count, in += x.in_stride[2], out += x.out_stride[2]) {
    int64_t d = p.rotary_dim;
    for (; contiguous && d + kBlock <= p.head_dim; d += kBlock) store_vector(out + d, load_vector<Block>(in + d));
    for (; d < p.head_dim; ++d) out[d * x.out_stride[3]] = in[d * x.in_stride[3]];
  }
}

bool features_contiguous(const Heads& x) { return x.heads == 0 || (x.in_stride[3] == 1 && x.out_stride[3] == 1); }

// Heads that are whole and lie at multiples of a store.
template <class T>
bool can_stream(const Params& p, const Heads& x, const T* out) {
  return p.rotary_dim == p.head_dim && p.rotary_dim <= 2 * kChunk && p.head_dim * sizeof(T) % 16 == 0 &&
         x.out_stride[2] * sizeof(T) % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
}

template <class T, bool interleaved, class A>
void rotate_rows(const Params& p, int64_t begin, int64_t end, bool stream) {
  const int64_t heads = p.x[0].heads + p.x[1].heads;
  const int64_t half = p.rotary_dim / 2;
  const bool contiguous = features_contiguous(p.x[0]) && features_contiguous(p.x[1]);
  Row<A> factors;
  int64_t held_row = -1, held_batch = -1;  // whose they are; a decode batch at one position converts it once

  for (int64_t done = begin; done < end;) {
    const int64_t index = done / heads;
    const int64_t batch = index / p.seqlen, token = index % p.seqlen;
    const int64_t row = table_row(p, batch, token);
    const int64_t table_batch = p.cos.stride[0] || p.sin.stride[0] ? batch : 0;
    const int64_t first_head = done - index * heads;
    const int64_t last_head = heads < first_head + end - done ? heads : first_head + end - done;

    for (int64_t first = 0; first < half; first += kChunk) {
      const int64_t n = half - first < kChunk ? half - first : kChunk;
      if (row != held_row || table_batch != held_batch || half > kChunk) {
        load_factor(p.cos, p.table_dtype, batch, row, first, factors.c, n);
        load_factor(p.sin, p.table_dtype, batch, row, first, factors.s, n);
        if (contiguous && !Pairs<T, interleaved, 16 / sizeof(A)>::kInOrder) {
          arrange<T, interleaved>(factors.c, factors.lane_c, A(1), n);
          arrange<T, interleaved>(factors.s, factors.lane_s, A(-1), n);
        }
        held_row = row;
        held_batch = table_batch;
      }
      for (int i = 0; i < 2; ++i) {
        const Heads& x = p.x[i];
        const int64_t offset = i == 0 ? 0 : p.x[0].heads;
        const int64_t from = first_head > offset ? first_head - offset : 0;
        const int64_t to = last_head - offset < x.heads ? last_head - offset : x.heads;
        if (from >= to) continue;
        const T* in = at(static_cast<const T*>(x.in), x.in_stride, batch, token, from);
        T* out = at(static_cast<T*>(x.out), x.out_stride, batch, token, from);
        if (first == 0 && x.in != x.out && p.rotary_dim < p.head_dim) pass_through(p, x, in, out, to - from);

        const int64_t feature = interleaved ? 2 * first : first;
        in += feature * x.in_stride[3];
        out += feature * x.out_stride[3];
        if (!contiguous) {
          for (int64_t h = from; h < to; ++h, in += x.in_stride[2], out += x.out_stride[2]) {
            rotate_scalar<T, interleaved>(in, x.in_stride[3], out, x.out_stride[3], half, factors, 0, n);
          }
        } else if (stream && can_stream(p, x, out)) {
          stream_heads<T, interleaved>(in, x.in_stride[2], out, x.out_stride[2], to - from, factors, n);
        } else if (n == 64 && half == 64) {
          rotate_heads<T, interleaved, 64>(in, x.in_stride[2], out, x.out_stride[2], to - from, 64, factors, n);
        } else if (n == 32 && half == 32) {
          rotate_heads<T, interleaved, 32>(in, x.in_stride[2], out, x.out_stride[2], to - from, 32, factors, n);
        } else {
          rotate_heads<T, interleaved, 0>(in, x.in_stride[2], out, x.out_stride[2], to - from, half, factors, n);
        }
      }
    }
    done += last_head - first_head;
  }
  if (stream) stream_fence();
}

template <class T, bool interleaved>
void rotate_rows(const Params& p, int64_t begin, int64_t end, bool stream) {
  const DType x = std::is_same<T, double>::value ? DType::f64 : DType::f32;
  return rotates_in_f64(x, p.table_dtype)
             ? rotate_rows<T, interleaved, double>(p, begin, end, stream)
             : rotate_rows<T, interleaved, typename AccumulatorOf<T>::type>(p, begin, end, stream);
}

template <class T>
void rotate_rows(const Params& p, int64_t begin, int64_t end, bool stream) {
  return p.interleaved ? rotate_rows<T, true>(p, begin, end, stream) : rotate_rows<T, false>(p, begin, end, stream);
}

}  // namespace

void rotate_rows(const Params& p, int64_t begin, int64_t end, bool stream) {
  switch (p.x[0].heads ? p.x[0].dtype : p.x[1].dtype) {
    case DType::f16:
      return rotate_rows<Half>(p, begin, end, stream);
    case DType::bf16:
      return rotate_rows<BFloat16>(p, begin, end, stream);
    case DType::f32:
      return rotate_rows<float>(p, begin, end, stream);
    case DType::f64:
      return rotate_rows<double>(p, begin, end, stream);
  }
}

}  // namespace rope::cpu::ROPE_ISA

#if defined(ROPE_TARGET) && defined(__clang__)
#pragma clang attribute pop
#endif
