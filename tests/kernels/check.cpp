// The CPU kernels without torch, for compilers and machines that have none: every instruction set that this machine
// runs against a scalar reference in double or float, bit for bit, with the bytes around the outputs. Prints a digest
// of all results, which must be the same from every compiler and on every architecture.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "../../csrc/cpu/isa.h"

namespace {

using namespace rope;

std::mt19937_64 random_bits(1234);  // the standard fixes its sequence; distributions it leaves open
int64_t below(int64_t n) { return static_cast<int64_t>(random_bits() % static_cast<uint64_t>(n)); }

// ---- numbers: any of the four types as double, exactly; and back, rounded as torch does

int64_t size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

double from_half(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const double magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(1024 + fraction, exponent - 25);
  return h >> 15 ? -magnitude : magnitude;
}

// To `digits` fraction bits, the smallest number being 2^least: round to nearest even, in double, which is exact.
double rounded_to(float f, int digits, int least) {
  if (f == 0 || !std::isfinite(f)) return f;
  const int quantum = std::max(std::ilogb(f) - digits, least);
  return std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(f), -quantum)), quantum);
}

uint16_t to_half(float f) {
  const double v = std::fabs(rounded_to(f, 10, -24));
  const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
  if (std::isnan(v)) return 0x7e00;
  if (v >= 65536) return sign | 0x7c00;
  if (v < 0x1p-14) return sign | static_cast<uint16_t>(std::ldexp(v, 24));
  const int exponent = std::ilogb(v);
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) + std::ldexp(v, 10 - exponent));
}

uint16_t to_bfloat16(float f) {
  const float v = static_cast<float>(rounded_to(f, 7, -133));
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return static_cast<uint16_t>(bits >> 16);
}

double read(DType dtype, const uint8_t* p) {
  uint16_t h;
  float f;
  double d;
  std::memcpy(&h, p, 2);
  if (dtype == DType::f16) return from_half(h);
  const uint32_t upper = static_cast<uint32_t>(h) << 16;
  if (dtype == DType::bf16) return std::memcpy(&f, &upper, 4), f;
  if (dtype == DType::f32) return std::memcpy(&f, p, 4), f;
  return std::memcpy(&d, p, 8), d;
}

void write(DType dtype, double v, uint8_t* p) {
  const float f = static_cast<float>(v);
  const uint16_t h = dtype == DType::f16 ? to_half(f) : to_bfloat16(f);
  if (dtype == DType::f64) {
    std::memcpy(p, &v, 8);
  } else if (dtype == DType::f32) {
    std::memcpy(p, &f, 4);
  } else {
    std::memcpy(p, &h, 2);
  }
}

// Mostly near 1, as after a norm; one in 16 is anything at all: NaN, infinities, subnormals.
std::vector<uint8_t> random_numbers(DType dtype, int64_t count) {
  std::vector<uint8_t> bytes(count * size_of(dtype));
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* p = &bytes[i * size_of(dtype)];
    const uint64_t bits = random_bits();
    write(dtype, std::ldexp(static_cast<double>(below(1 << 24) - (1 << 23)), -22), p);
    if (below(16) == 0) std::memcpy(p, &bits, size_of(dtype));
  }
  return bytes;
}

// ---- the formula

template <class A>
void rotate(double& a, double& b, double c, double s) {
  volatile A ac = static_cast<A>(a) * static_cast<A>(c), bs = static_cast<A>(b) * static_cast<A>(s);
  volatile A as = static_cast<A>(a) * static_cast<A>(s), bc = static_cast<A>(b) * static_cast<A>(c);
  volatile A re = ac - bs, im = as + bc;
  a = re;
  b = im;
}

double factor(const Params& p, const Factor& f, int64_t batch, int64_t row, int64_t pair) {
  const int64_t at = batch * f.stride[0] + row * f.stride[1] + pair * f.stride[2];
  const double v = read(p.table_dtype, static_cast<const uint8_t*>(f.data) + at * size_of(p.table_dtype));
  return f.negate ? -v : v;
}

void reference(const Params& p, const Heads& x, uint8_t* out) {
  const int64_t size = size_of(x.dtype), half = p.rotary_dim / 2;
  const auto* in = static_cast<const uint8_t*>(x.in);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t t = 0; t < p.seqlen; ++t) {
      const int64_t at = b * p.positions_stride[0] + t * p.positions_stride[1];
      const int64_t row = p.positions ? static_cast<const int32_t*>(p.positions)[at] : t;
      for (int64_t h = 0; h < x.heads; ++h) {
        const uint8_t* from = in + size * (b * x.in_stride[0] + t * x.in_stride[1] + h * x.in_stride[2]);
        uint8_t* to = out + size * (b * x.out_stride[0] + t * x.out_stride[1] + h * x.out_stride[2]);
        for (int64_t j = 0; j < half; ++j) {
          const int64_t re = p.interleaved ? 2 * j : j, im = p.interleaved ? 2 * j + 1 : j + half;
          double u = read(x.dtype, from + size * re * x.in_stride[3]);
          double v = read(x.dtype, from + size * im * x.in_stride[3]);
          const double c = factor(p, p.cos, b, row, j), s = factor(p, p.sin, b, row, j);
          rotates_in_f64(x.dtype, p.table_dtype) ? rotate<double>(u, v, c, s) : rotate<float>(u, v, c, s);
          write(x.dtype, u, to + size * re * x.out_stride[3]);
          write(x.dtype, v, to + size * im * x.out_stride[3]);
        }
        for (int64_t d = p.rotary_dim; d < p.head_dim; ++d) {
          std::memcpy(to + size * d * x.out_stride[3], from + size * d * x.in_stride[3], size);
        }
      }
    }
  }
}

// ---- cases

uint64_t digest = 14695981039346656037u;  // FNV-1a
int64_t wrong = 0, calls = 0;

void compare(const char* level, const Params& p, DType dtype, const std::vector<uint8_t>& actual,
             const std::vector<uint8_t>& expected, bool count) {
  const int64_t size = size_of(dtype);
  for (int64_t i = 0; i < static_cast<int64_t>(actual.size()); i += size) {
    const double a = read(dtype, &actual[i]), e = read(dtype, &expected[i]);
    uint64_t bits = 0;
    if (!std::isnan(e)) std::memcpy(&bits, &expected[i], size);
    if (count) digest = (digest ^ bits) * 1099511628211u;
    if (std::memcmp(&actual[i], &expected[i], size) == 0 || (std::isnan(a) && std::isnan(e))) continue;
    if (++wrong <= 10) {
      std::printf("%s: dtype %d, table %d, D %lld, R %lld, %s: number %lld is %a, should be %a\n", level,
                  static_cast<int>(dtype), static_cast<int>(p.table_dtype), static_cast<long long>(p.head_dim),
                  static_cast<long long>(p.rotary_dim), p.interleaved ? "neighbours" : "halves",
                  static_cast<long long>(i / size), a, e);
    }
  }
}

struct Level {
  const char* name;
  cpu::RotateRows rotate_rows;
};

void run(const std::vector<Level>& levels, DType dtype, DType table, bool interleaved, int64_t head_dim) {
  Params p{};
  p.table_dtype = table;
  p.interleaved = interleaved;
  p.batch = 1 + below(2);
  p.seqlen = 1 + below(4);
  p.head_dim = head_dim;
  p.rotary_dim = below(2) ? head_dim : 2 * (1 + below(head_dim / 2));
  p.rows = p.seqlen + 3;
  const int64_t pairs = p.rotary_dim / 2, complex = 1 + below(2), samples = below(2);
  const auto cos = random_numbers(table, p.batch * p.rows * pairs * complex);
  const auto sin = random_numbers(table, p.batch * p.rows * pairs * complex);
  p.cos = {cos.data(), {samples * p.rows * pairs * complex, pairs * complex, complex}, below(4) == 0};
  p.sin = {sin.data(), {p.cos.stride[0], pairs * complex, complex}, below(4) == 0};
  std::vector<int32_t> positions(p.batch * p.seqlen);
  for (auto& position : positions) position = static_cast<int32_t>(below(p.rows));
  if (below(2)) p.positions = positions.data();
  p.positions_stride[0] = p.seqlen;
  p.positions_stride[1] = 1;

  const int64_t step = below(4) ? 1 : 2;  // between features
  const bool in_place = below(3) == 0;
  std::vector<uint8_t> in[2], before[2];
  for (int i = 0; i < 2; ++i) {
    Heads& x = p.x[i];
    x.dtype = dtype;
    x.heads = below(4) || i == 0 ? 1 + below(5) : 0;
    const int64_t gap = below(3), head = head_dim * step + gap, token = x.heads * head + below(3);
    const int64_t strides[4] = {p.seqlen * token, token, head, step};
    std::memcpy(x.in_stride, strides, sizeof(strides));
    std::memcpy(x.out_stride, strides, sizeof(strides));
    in[i] = random_numbers(dtype, p.batch * p.seqlen * token);
    before[i] = in_place ? in[i] : std::vector<uint8_t>(in[i].size(), 0xa5);
    x.in = in[i].data();
  }
  const int64_t rows = p.batch * p.seqlen * (p.x[0].heads + p.x[1].heads);
  const int64_t cut = below(rows + 1);  // between two threads
  std::vector<uint8_t> expected[2] = {before[0], before[1]};
  for (int i = 0; i < 2; ++i) reference(p, p.x[i], expected[i].data());
  for (const auto& level : levels) {
    for (const bool stream : {false, true}) {
      std::vector<uint8_t> out[2] = {before[0], before[1]};
      Params call = p;
      for (int i = 0; i < 2; ++i) {
        call.x[i].out = out[i].data();
        if (in_place) call.x[i].in = out[i].data();
      }
      level.rotate_rows(call, 0, cut, stream);
      level.rotate_rows(call, cut, rows, stream);
      ++calls;
      for (int i = 0; i < 2; ++i) compare(level.name, p, dtype, out[i], expected[i], &level == &levels[0] && !stream);
    }
  }
}

}  // namespace

int main() {
  std::vector<Level> levels = {{"default", cpu::isa_default::rotate_rows}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) levels.push_back({"avx2", cpu::isa_avx2::rotate_rows});
  if (__builtin_cpu_supports("avx512vl")) levels.push_back({"avx512", cpu::isa_avx512::rotate_rows});
#endif
  const DType dtypes[] = {DType::f16, DType::bf16, DType::f32, DType::f64};
  for (const int64_t head_dim : {2, 4, 6, 8, 16, 24, 46, 64, 66, 80, 96, 128, 160, 192, 256, 576, 1030}) {
    for (const DType dtype : dtypes) {
      for (const DType table : dtypes) {
        for (const bool interleaved : {true, false}) {
          for (int i = 0; i < 3; ++i) run(levels, dtype, table, interleaved, head_dim);
        }
      }
    }
  }
  for (const auto& level : levels) std::printf("%s ", level.name);
  std::printf("%lld calls, %lld wrong numbers, digest %016llx\n", static_cast<long long>(calls),
              static_cast<long long>(wrong), static_cast<unsigned long long>(digest));
  return wrong != 0;
}
