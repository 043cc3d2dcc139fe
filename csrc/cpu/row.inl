// The table row of a token: converted once, laid in the order in which vectors take it, shared by all heads of q and k.
// Part of rotate.inl: compiled once per instruction set, inside its target region.

template <class T, class A>
constexpr bool vectorised(int width) {
  return std::is_same<A, typename AccumulatorOf<T>::type>::value && width <= ROPE_VECTOR_BYTES;
}

constexpr int64_t kChunk = 512;  // pairs of a table row held at once

// The factors of a token: pair by pair, and in the order of lanes. With room for a vector past the last one.
template <class A>
struct Row {
  alignas(64) A c[kChunk + 16], s[kChunk + 16], lane_c[2 * kChunk + 32], lane_s[2 * kChunk + 32];
};

// One NaN for all, so that rounding to bfloat16 cannot carry out of it; and the signs of conj and neg views.
template <int known_stride, class E, class A>
ROPE_INLINE void load_factor(const E* p, int64_t stride, bool negate, A* to, int64_t n) {
  if (known_stride) stride = known_stride;
  const A sign = negate ? A(-1) : A(1);
  for (int64_t j = 0; j < n; ++j) {
    const A v = sign * static_cast<A>(widen(p[j * stride]));
    to[j] = v == v ? v : static_cast<A>(__builtin_nanf(""));
  }
}

template <class E, class A>
void load_factor(const Factor& factor, int64_t offset, int64_t first, A* to, int64_t n) {
  const int64_t stride = factor.stride[2];
  const E* p = static_cast<const E*>(factor.data) + offset + first * stride;
  if (stride == 1) return load_factor<1>(p, stride, factor.negate, to, n);
  if (stride == 2) return load_factor<2>(p, stride, factor.negate, to, n);  // half of a complex table
  load_factor<0>(p, stride, factor.negate, to, n);
}

template <class A>
void load_factor(const Factor& factor, DType dtype, int64_t batch, int64_t row, int64_t first, A* to, int64_t n) {
  const int64_t offset = batch * factor.stride[0] + row * factor.stride[1];
  switch (dtype) {
    case DType::f16:
      return load_factor<Half>(factor, offset, first, to, n);
    case DType::bf16:
      return load_factor<BFloat16>(factor, offset, first, to, n);
    case DType::f32:
      return load_factor<float>(factor, offset, first, to, n);
    case DType::f64:
      if constexpr (std::is_same<A, double>::value) return load_factor<double>(factor, offset, first, to, n);
  }
}

// Lanes of the vectors that two vectors of factors, laid end to end, become.
template <class P, int N>
struct LaneOrder {
  template <int vector>
  struct Of {
    static constexpr int at(int l) { return P::order(vector * N + l); }
  };
};

// Two vectors of lanes at a time: from one vector of factors where a pair has two lanes, else from two. The last one
// may reach past the last pair, where rows have room.
template <class P, class A>
ROPE_INLINE int64_t arrange_span(const A* from, A* to, A odd, int64_t j, int64_t n) {
  using V = typename P::V;
  constexpr int N = sizeof(V) / sizeof(A);
  using Order = LaneOrder<P, N>;
  V sign;
  for (int l = 0; l < N; ++l) sign[l] = P::kTwoLanes && l % 2 ? odd : 1;
  for (; j + P::kPairs <= n; j += P::kTwoLanes ? N : 2 * N) {
    const V first = load_vector<V>(from + j), last = load_vector<V>(from + j + (P::kTwoLanes ? 0 : N));
    A* lanes = to + (P::kTwoLanes ? 2 * j : j);
    store_vector(lanes, sign * shuffle<typename Order::template Of<0>, N>(first, last));
    store_vector(lanes + N, sign * shuffle<typename Order::template Of<1>, N>(first, last));
  }
  return j;
}

template <class T, bool interleaved, class A>
ROPE_INLINE void arrange(A* from, A* to, A odd, int64_t n) {
  store_vector(from + n, Vec<A, 64 / sizeof(A)>{});  // whatever lies there may be slow to multiply
  int64_t j = 0;
  if constexpr (vectorised<T, A>(64)) j = arrange_span<Pairs<T, interleaved, 64 / sizeof(A)>>(from, to, odd, j, n);
  if constexpr (vectorised<T, A>(32)) j = arrange_span<Pairs<T, interleaved, 32 / sizeof(A)>>(from, to, odd, j, n);
  if constexpr (vectorised<T, A>(16)) j = arrange_span<Pairs<T, interleaved, 16 / sizeof(A)>>(from, to, odd, j, n);
}
