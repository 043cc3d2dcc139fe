// Vectors of N lanes by the compilers' vector extensions: one source for SSE2, AVX2, AVX-512 and NEON. Operators work
// lane by lane; + and * are never fused, because the build says -ffp-contract=off.
// Part of rotate.inl: compiled once per instruction set, inside its target region.

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class Element, int N>
struct VecOf {
  typedef Element type __attribute__((vector_size(sizeof(Element) * N)));
};
template <class Element, int N>
using Vec = typename VecOf<Element, N>::type;

template <class To, class From>
ROPE_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <class V>
ROPE_INLINE V load_vector(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

template <class V>
ROPE_INLINE void store_vector(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

// Lane i of the result is lane Index::at(i) of a and b laid end to end.
template <class Index, class V, int... I>
ROPE_INLINE V shuffle(V a, V b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Index::at(I)...);
#else
  using Int = std::conditional_t<sizeof(a[0]) == 8, int64_t, std::conditional_t<sizeof(a[0]) == 4, int32_t, int16_t>>;
  return __builtin_shuffle(a, b, Vec<Int, sizeof...(I)>{Index::at(I)...});
#endif
}
template <class Index, int N, class V>
ROPE_INLINE V shuffle(V a, V b) {
  return shuffle<Index>(a, b, std::make_integer_sequence<int, N>());
}

// Non-temporal stores; both ends at multiples of 16 bytes.
ROPE_INLINE void stream_copy(const void* from, void* to, int64_t bytes) {
#if defined(__x86_64__)
  const auto* source = static_cast<const __m128i*>(from);
  auto* target = static_cast<__m128i*>(to);
  for (int64_t i = 0; i < bytes / 16; ++i) _mm_stream_si128(target + i, _mm_load_si128(source + i));
#else
  __builtin_memcpy(to, from, bytes);
#endif
}
ROPE_INLINE void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// ---- float16: exact both ways, round to nearest even, subnormals kept, in integers (I: int32_t or a vector of it)

ROPE_INLINE float to_float(int32_t i) { return static_cast<float>(i); }
template <class I>
ROPE_INLINE auto to_float(I i) {
  return __builtin_convertvector(i, Vec<float, sizeof(I) / 4>);
}

template <class I>
ROPE_INLINE auto half_to_float(I h) {
  const I magnitude = h & 0x7fff;
  auto f = to_float(magnitude) * 0x1p-24f;  // what a subnormal is worth
  using F = decltype(f);
  const I normal = (magnitude << 13) + (112 << 23);  // the exponent's bias grows from 15 to 127
  const I infinite = normal | 0x7f800000;
  I bits = magnitude < 0x400 ? bit_cast<I>(f) : normal;
  bits = magnitude >= 0x7c00 ? infinite : bits;
  return bit_cast<F>(bits | ((h & 0x8000) << 16));
}

template <class F>
ROPE_INLINE auto float_to_half(F f) {
  using I = std::conditional_t<sizeof(F) == 4, int32_t, Vec<int32_t, sizeof(F) / 4>>;
  const I bits = bit_cast<I>(f);
  const I magnitude = bits & 0x7fffffff;
  // adding 0.5, whose last bit is worth 2^-24, rounds a subnormal where float16 would
  const I subnormal = bit_cast<I>(bit_cast<F>(magnitude) + 0.5f) - 0x3f000000;
  const I normal = (magnitude + (0xfff - (112 << 23)) + ((magnitude >> 13) & 1)) >> 13;
  const I zero = magnitude ^ magnitude;
  I h = magnitude < 0x38800000 ? subnormal : normal;
  h = magnitude >= 0x47800000 ? (magnitude > 0x7f800000 ? zero + 0x7e00 : zero + 0x7c00) : h;
  return h | ((bits >> 16) & 0x8000);
}

// ---- bfloat16: the upper half of a float32

// Round to nearest even into the upper 16 bits. A NaN stays one as long as its lower 16 bits are not all ones: products
// with a widened bfloat16 never have such bits unless the table brings them, and load_factor makes its NaNs canonical.
template <class U, class F>
ROPE_INLINE U round_to_bfloat16(F f) {
  const U bits = bit_cast<U>(f);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

// ---- one element

ROPE_INLINE double widen(double x) { return x; }
ROPE_INLINE float widen(float x) { return x; }
ROPE_INLINE float widen(Half x) { return half_to_float(static_cast<int32_t>(x.bits)); }
ROPE_INLINE float widen(BFloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

ROPE_INLINE void narrow(double x, double* to) { *to = x; }
ROPE_INLINE void narrow(double x, float* to) { *to = static_cast<float>(x); }
ROPE_INLINE void narrow(float x, float* to) { *to = x; }
ROPE_INLINE void narrow(float x, Half* to) { to->bits = static_cast<uint16_t>(float_to_half(x)); }
ROPE_INLINE void narrow(float x, BFloat16* to) {
  to->bits = static_cast<uint16_t>(round_to_bfloat16<uint32_t>(x) >> 16);
}
// float64 to 16 bits goes through float32, as in torch
ROPE_INLINE void narrow(double x, Half* to) { narrow(static_cast<float>(x), to); }
ROPE_INLINE void narrow(double x, BFloat16* to) { narrow(static_cast<float>(x), to); }

// ---- N elements in memory order

template <int N>
ROPE_INLINE Vec<double, N> widen_vector(const double* p) {
  return load_vector<Vec<double, N>>(p);
}
template <int N>
ROPE_INLINE Vec<float, N> widen_vector(const float* p) {
  return load_vector<Vec<float, N>>(p);
}
template <int N>
ROPE_INLINE Vec<float, N> widen_vector(const Half* p) {
#if ROPE_VECTOR_BYTES >= 32  // the levels that have F16C
  if constexpr (N == 4) {
    return bit_cast<Vec<float, N>>(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  } else if constexpr (N == 8) {
    return bit_cast<Vec<float, N>>(_mm256_cvtph_ps(load_vector<__m128i>(p)));
  }
#if ROPE_VECTOR_BYTES == 64
  else {
    return bit_cast<Vec<float, N>>(_mm512_cvtph_ps(load_vector<__m256i>(p)));
  }
#endif
#elif defined(__x86_64__)
  const auto words = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return half_to_float(bit_cast<Vec<int32_t, N>>(_mm_unpacklo_epi16(words, _mm_setzero_si128())));
#else
  return half_to_float(__builtin_convertvector(load_vector<Vec<uint16_t, N>>(p), Vec<int32_t, N>));
#endif
}

template <int N>
ROPE_INLINE void narrow_vector(Vec<double, N> v, double* p) {
  store_vector(p, v);
}
template <int N>
ROPE_INLINE void narrow_vector(Vec<float, N> v, float* p) {
  store_vector(p, v);
}
template <int N>
ROPE_INLINE void narrow_vector(Vec<float, N> v, Half* p) {
#if ROPE_VECTOR_BYTES >= 32
  constexpr int kNearestEven = 0;
  if constexpr (N == 4) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_cvtps_ph(bit_cast<__m128>(v), kNearestEven));
  } else if constexpr (N == 8) {
    store_vector(p, _mm256_cvtps_ph(bit_cast<__m256>(v), kNearestEven));
  }
#if ROPE_VECTOR_BYTES == 64
  else {
    store_vector(p, _mm512_cvtps_ph(bit_cast<__m512>(v), kNearestEven));
  }
#endif
#elif defined(__x86_64__)
  const auto lanes = bit_cast<__m128i>((float_to_half(v) << 16) >> 16);  // packing saturates: make it a signed word
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(lanes, lanes));
#else
  store_vector(p, __builtin_convertvector(float_to_half(v), Vec<uint16_t, N>));
#endif
}

// Two bfloat16 in each 32-bit lane: the even elements and the odd ones, split without a shuffle.
template <int N>
ROPE_INLINE void split_lanes(Vec<uint32_t, N> lanes, Vec<float, N>& even, Vec<float, N>& odd) {
  even = bit_cast<Vec<float, N>>(lanes << 16);
  odd = bit_cast<Vec<float, N>>(lanes & 0xffff0000u);
}

// The way back, rounded to nearest even: the kept half of a float goes up where the lost half is above 0x8000, or equal
// to it and the kept one is odd. Where 16-bit lanes can be shuffled, both vectors are rounded at once, which halves the
// work: the top bit of lost - even(kept), without a wrap below zero, says who goes up.
#if ROPE_VECTOR_BYTES >= 32
// Words of two vectors of floats, interleaved: the upper ones (what bfloat16 keeps) or the lower ones (what it loses).
template <int N, int upper>
struct Words {
  static constexpr int at(int i) { return (i & ~1) + upper + (i & 1) * 2 * N; }
};

ROPE_INLINE Vec<uint16_t, 8> subtract_to_zero(Vec<uint16_t, 8> a, Vec<uint16_t, 8> b) {
  return bit_cast<Vec<uint16_t, 8>>(_mm_subs_epu16(bit_cast<__m128i>(a), bit_cast<__m128i>(b)));
}
ROPE_INLINE Vec<uint16_t, 16> subtract_to_zero(Vec<uint16_t, 16> a, Vec<uint16_t, 16> b) {
  return bit_cast<Vec<uint16_t, 16>>(_mm256_subs_epu16(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
}

template <int N>
ROPE_INLINE Vec<uint32_t, N> join_lanes(Vec<float, N> even, Vec<float, N> odd) {
  using W = Vec<uint16_t, 2 * N>;
  const W kept = shuffle<Words<N, 1>, 2 * N>(bit_cast<W>(even), bit_cast<W>(odd));
  const W lost = shuffle<Words<N, 0>, 2 * N>(bit_cast<W>(even), bit_cast<W>(odd));
  return bit_cast<Vec<uint32_t, N>>(kept + (subtract_to_zero(lost, ~kept & 1) >> 15));
}

#if ROPE_VECTOR_BYTES == 64
// The same in five instructions. A merging byte shuffle is one of one micro-operation; vpermt2w, which a compiler takes
// for a shuffle of words, has three on Intel.
template <>
ROPE_INLINE Vec<uint32_t, 16> join_lanes<16>(Vec<float, 16> even, Vec<float, 16> odd) {
  const __m512i e = bit_cast<__m512i>(even), o = bit_cast<__m512i>(odd);
  const __m512i lane = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
  const __m512i upper = lane + _mm512_set1_epi32(0x03020302), lower = lane + _mm512_set1_epi32(0x01000100);
  const __m512i kept = _mm512_mask_shuffle_epi8(o, 0x3333333333333333, e, upper);
  const __m512i lost = _mm512_mask_shuffle_epi8(e, 0xcccccccccccccccc, o, lower);
  // 0x8000, and one more where the kept half is even
  const __m512i bound = (~kept & _mm512_set1_epi16(1)) | _mm512_set1_epi16(-0x8000);
  const __mmask32 up = _mm512_cmpge_epu16_mask(lost, bound);
  return bit_cast<Vec<uint32_t, 16>>(_mm512_mask_sub_epi16(kept, up, kept, _mm512_set1_epi16(-1)));
}
#endif
#else
template <int N>
ROPE_INLINE Vec<uint32_t, N> join_lanes(Vec<float, N> even, Vec<float, N> odd) {
  using U = Vec<uint32_t, N>;
  return (round_to_bfloat16<U>(even) >> 16) | (round_to_bfloat16<U>(odd) & 0xffff0000u);
}
#endif
