// How pairs of features come into vectors and go back, for each element type and pairing.
// Part of rotate.inl: compiled once per instruction set, inside its target region.
//
// Pairs<T, interleaved, N> moves kPairs pairs at once as kVectors vectors a (real parts) and b (imaginary parts) of N
// lanes. `x` is the head, `j` its first pair, `half` the distance between the members of a pair when they are halves.
// Lane l of these vectors belongs to pair j + order(l), and a pair has one lane or two: the table row is laid in the
// same order once per token (kInOrder: it is already), which is cheaper than to shuffle every head of it.

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
  static constexpr bool kInOrder = true, kTwoLanes = false;
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

// Neighbours stay where they are, (a b a b ...): with the partner in the other vector, (b a b a ...), each factor in
// two lanes and sin negated in the second, the real part of the product is what belongs in either lane. One shuffle a
// vector; to take evens and odds apart and to join them again would be two.
template <class T, int N>
struct Pairs<T, true, N> {
  using V = Vec<typename AccumulatorOf<T>::type, N>;
  static constexpr int kVectors = 1;
  static constexpr int kPairs = N / 2;
  static constexpr bool kInOrder = false, kTwoLanes = true;
  static constexpr int order(int l) { return l / 2; }

  struct Partner {
    static constexpr int at(int l) { return l ^ 1; }
  };

  static ROPE_INLINE void load(const T* x, int64_t j, int64_t, V* a, V* b) {
    a[0] = widen_vector<N>(x + 2 * j);
    b[0] = shuffle<Partner, N>(a[0], a[0]);
  }
  static ROPE_INLINE void store(T* x, int64_t j, int64_t, const V* a, const V*) { narrow_vector<N>(a[0], x + 2 * j); }
};

// bfloat16 neighbours share a 32-bit lane.
template <int N>
struct Pairs<BFloat16, true, N> {
  using V = Vec<float, N>;
  using Lanes = Vec<uint32_t, N>;
  static constexpr int kVectors = 1;
  static constexpr int kPairs = N;
  static constexpr bool kInOrder = true, kTwoLanes = false;
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
  static constexpr bool kInOrder = false, kTwoLanes = false;
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
