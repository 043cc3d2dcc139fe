// How pairs of features come into vectors and go back, for each element type and pairing.
// Part of rotate.inl: compiled once per instruction set, inside its target region.
//
// Pairs<T, interleaved, N> moves kPairs pairs at once as kVectors vectors a (real parts) and b (imaginary parts) of N
// lanes. `x` is the head, `j` its first pair, `half` the distance between the members of a pair when they are halves.
// Lane l of vector k holds pair j + order(k * N + l): the table row is laid in the same order once per token, which is
// cheaper than to shuffle every head of it.

template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};

// Halves, memory order: float16, float32, float64.
template <class T, bool interleaved, int N>
struct Pairs {
  using V = Vec<typename AccumulatorOf<T>::type, N>;
  static constexpr int kVectors = 1;
  static constexpr int kPairs = N;
  static constexpr int order(int l) { return l; }

  static ROPE_INLINE void load(const T* x, int64_t j, int64_t half, V* a, V* b) {
    a[0] = widen_vector<N>(x + j);
    b[0] = widen_vector<N>(x + half + j);
  }
  static ROPE_INLINE void store(T* x, int64_t j, int64_t half, const V* a, const V* b) {
    narrow_vector<N>(a[0], x + j);
    narrow_vector<N>(b[0], x + half + j);
  }
};

// Neighbours: two vectors of neighbours become evens and odds within each 16-byte block, where a shuffle costs one
// instruction at every level.
template <class T, int N>
struct Pairs<T, true, N> {
  using V = Vec<typename AccumulatorOf<T>::type, N>;
  static constexpr int kVectors = 1;
  static constexpr int kPairs = N;
  static constexpr int kBlock = 16 / sizeof(typename AccumulatorOf<T>::type);  // lanes
  static constexpr int order(int l) {
    const int block = l / kBlock, r = l % kBlock;
    return block * (kBlock / 2) + (r < kBlock / 2 ? r : N / 2 + r - kBlock / 2);
  }

  template <int odd>
  struct Deinterleave {
    static constexpr int at(int l) {
      const int block = l / kBlock, r = l % kBlock;
      return block * kBlock + odd + (r < kBlock / 2 ? 2 * r : N + 2 * r - kBlock);
    }
  };
  template <int upper>
  struct Interleave {
    static constexpr int at(int l) {
      const int block = l / kBlock, r = l % kBlock;
      return block * kBlock + upper * (kBlock / 2) + r / 2 + (r % 2) * N;
    }
  };

  static ROPE_INLINE void load(const T* x, int64_t j, int64_t, V* a, V* b) {
    const V first = widen_vector<N>(x + 2 * j), second = widen_vector<N>(x + 2 * j + N);
    a[0] = shuffle<Deinterleave<0>, N>(first, second);
    b[0] = shuffle<Deinterleave<1>, N>(first, second);
  }
  static ROPE_INLINE void store(T* x, int64_t j, int64_t, const V* a, const V* b) {
    narrow_vector<N>(shuffle<Interleave<0>, N>(a[0], b[0]), x + 2 * j);
    narrow_vector<N>(shuffle<Interleave<1>, N>(a[0], b[0]), x + 2 * j + N);
  }
};

// bfloat16 neighbours share a 32-bit lane.
template <int N>
struct Pairs<BFloat16, true, N> {
  using V = Vec<float, N>;
  using Lanes = Vec<uint32_t, N>;
  static constexpr int kVectors = 1;
  static constexpr int kPairs = N;
  static constexpr int order(int l) { return l; }

  static ROPE_INLINE void load(const BFloat16* x, int64_t j, int64_t, V* a, V* b) {
    split_lanes<N>(load_vector<Lanes>(x + 2 * j), a[0], b[0]);
  }
  static ROPE_INLINE void store(BFloat16* x, int64_t j, int64_t, const V* a, const V* b) {
    store_vector(x + 2 * j, join_lanes<N>(a[0], b[0]));
  }
};

// bfloat16 halves: even and odd features of each half apart.
template <int N>
struct Pairs<BFloat16, false, N> {
  using V = Vec<float, N>;
  using Lanes = Vec<uint32_t, N>;
  static constexpr int kVectors = 2;
  static constexpr int kPairs = 2 * N;
  static constexpr int order(int l) { return l < N ? 2 * l : 2 * (l - N) + 1; }

  static ROPE_INLINE void load(const BFloat16* x, int64_t j, int64_t half, V* a, V* b) {
    split_lanes<N>(load_vector<Lanes>(x + j), a[0], a[1]);
    split_lanes<N>(load_vector<Lanes>(x + half + j), b[0], b[1]);
  }
  static ROPE_INLINE void store(BFloat16* x, int64_t j, int64_t half, const V* a, const V* b) {
    store_vector(x + j, join_lanes<N>(a[0], a[1]));
    store_vector(x + half + j, join_lanes<N>(b[0], b[1]));
  }
};
