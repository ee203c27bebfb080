// Work on single rows: RMS norms, gates, heads of queries and keys, and the largest logit. The bits of a row follow from the row
// alone. Compiled once per instruction set.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "rounding.h"
#include "vectors.h"

namespace chunkattn {
namespace {

constexpr int kLanes = 4;  // independent sums, since each waits for its last addition

// The first `count` values, at most kWidth, widened; zeros follow.
template <Format F> inline Floats take(const void *from, int64_t at, int count) {
  using T = typename Stored<F>::Type;
  const T *values = static_cast<const T *>(from) + at;
  if (count >= kWidth) return Stored<F>::load(values);
  T some[kWidth] = {};
  memcpy(some, values, count * sizeof(T));
  return Stored<F>::load(some);
}
inline Floats take(Format format, const void *from, int64_t at, int count) {
  if (format == Format::f32) return take<Format::f32>(from, at, count);
  return format == Format::bf16 ? take<Format::bf16>(from, at, count) : take<Format::f16>(from, at, count);
}

// Rounds to nearest, ties to even.
inline Halves rounded_bf16(Floats x) {
  const Words bits = (Words)x, up = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return __builtin_convertvector(x == x ? up : up * 0 + 0x7fc0u, Halves);
}
inline Halves rounded_f16(Floats x) {
#if defined(__AVX512F__)
  return (Halves)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (Halves)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#else
  Halves to;
  for (int i = 0; i < kWidth; i++) to[i] = rounded_f16(x[i]);
  return to;
#endif
}
// The e4m3fn number of a finite value; larger ones become the largest.
inline uint8_t rounded_fp8(float x) {
  uint32_t bits;
  x = std::min(std::max(x, -448.f), 448.f);
  memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude < 0x3c800000u) return sign | uint32_t(std::nearbyint(std::fabs(x) * 512.f));  // subnormal: below 2^-6
  return sign | (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
}

// Stores the first `count` values, at most kWidth.
template <class T, class V> inline void put(T *to, int count, const V &x) {
  if (count >= kWidth)
    write(to, x);
  else
    memcpy(to, &x, count * sizeof(T));
}
inline void put(Format format, void *to, int64_t at, int count, Floats x) {
  if (format == Format::f32)
    put(static_cast<float *>(to) + at, count, x);
  else
    put(static_cast<uint16_t *>(to) + at, count, format == Format::bf16 ? rounded_bf16(x) : rounded_f16(x));
}

// Calls `work(first, count)` for pieces of kWidth values, and for what is left.
template <class Work> inline __attribute__((always_inline)) void each_piece(int64_t count, const Work &work) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) work(i, kWidth);
  if (i < count) work(i, int(count - i));
}

inline float total_of(const Floats (&sums)[kLanes]) { return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])); }

void norm(const Norm &given, int first, int last) {
  for (int row = first; row < last; row++) {
    const int64_t begin = int64_t(row) * given.features;
    const float *x = given.x + begin;
    Floats sums[kLanes] = {};
    int lane = 0;
    each_piece(given.features, [&](int64_t i, int count) {
      Floats value = take<Format::f32>(x, i, count);
      if (given.delta) value += take<Format::f32>(given.delta + begin, i, count), put(Format::f32, given.sum + begin, i, count, value);
      sums[lane++ % kLanes] += value * value;
    });
    if (given.delta) x = given.sum + begin;
    const Floats factor = splat(1.f / std::sqrt(total_of(sums) / float(given.features) + given.epsilon));
    each_piece(given.features, [&](int64_t i, int count) {
      put(given.format, given.out, begin + i, count,
          take<Format::f32>(x, i, count) * factor * take(given.scale_format, given.scale, i, count));
    });
  }
}

inline Floats logistic(Floats x) {
  constexpr float kLog2E = 1.44269504f;
  const Floats power = x * kLog2E, least = splat(-126.f);
  return power < least ? Floats{} : 1.f / (exp2_of(-larger(power, least)) + 1.f);
}

void gate(const Gate &given, int64_t first, int64_t last) {
  each_piece(last - first, [&](int64_t at, int count) {
    const int64_t i = first + at;
    const Floats x = take<Format::f32>(given.gate, i, count);
    put(given.format, given.out, i, count, x * logistic(x) * take<Format::f32>(given.up, i, count));
  });
}

// Finds the first of the largest logits in the block whose maximum is the first that is largest.
void largest(const float *logits, int count, int32_t *index, bool *finite) {
  constexpr int kBlock = 4096;
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  Floats odd[kLanes] = {};  // 0 times every logit: NaN for those that are not finite
  float maximum = kLeast;
  int block = 0;
  for (int begin = 0; begin < count; begin += kBlock) {
    Floats most[kLanes];
    for (Floats &m : most) m = splat(kLeast);
    int lane = 0;
    each_piece(std::min(kBlock, count - begin), [&](int64_t i, int some) {
      Floats x = take<Format::f32>(logits + begin, i, some);
      odd[lane % kLanes] += x * 0.f;
      for (int j = some; j < kWidth; j++) x[j] = kLeast;
      most[lane % kLanes] = larger(x, most[lane % kLanes]), lane++;
    });
    const float found = largest_of(larger(larger(most[0], most[1]), larger(most[2], most[3])));
    if (found > maximum) maximum = found, block = begin;
  }
  int at = block;
  while (at + 1 < count && logits[at] != maximum) at++;
  *index = at, *finite = total_of(odd) == 0;
}

// Normalises a head of queries or keys, if `scale` is given, and rotates its two halves.
struct Halved {
  static constexpr int kMost = 128;  // values of a half
  Floats first[kMost / kWidth], second[kMost / kWidth];
};
inline void transform(const Heads &given, const Halved &turn, int half, const float *x, const void *scale, Format format, void *to) {
  const int pieces = (half + kWidth - 1) / kWidth;
  Halved head;
  const auto each = [&](auto work) {
    for (int p = 0; p < pieces; p++) work(p, p * kWidth, std::min(kWidth, half - p * kWidth));
  };
  each([&](int p, int i, int count) {
    head.first[p] = take<Format::f32>(x, i, count), head.second[p] = take<Format::f32>(x + half, i, count);
  });
  if (scale) {
    Floats sums[kLanes] = {};
    each([&](int p, int, int) {
      sums[2 * p % kLanes] += head.first[p] * head.first[p], sums[(2 * p + 1) % kLanes] += head.second[p] * head.second[p];
    });
    const Floats factor = splat(1.f / std::sqrt(total_of(sums) / float(2 * half) + given.epsilon));
    each([&](int p, int i, int count) {
      head.first[p] = head.first[p] * factor * take(given.scale_format, scale, i, count);
      head.second[p] = head.second[p] * factor * take(given.scale_format, scale, half + i, count);
    });
  }
  each([&](int p, int i, int count) {
    put(format, to, i, count, head.first[p] * turn.first[p] - head.second[p] * turn.second[p]);
    put(format, to, half + i, count, head.second[p] * turn.first[p] + head.first[p] * turn.second[p]);
  });
}

// Writes a head of keys or values to the pool, with zeros for values that are not finite. Returns whether all are.
inline bool write_head(const Step &step, const void *from, void *pool, int64_t at) {
  const int dim = step.head_dim;
  Floats odd = {};
  for (int i = 0; i < dim; i += kWidth) odd += take(step.format, from, i, dim - i) * 0.f;
  const bool finite = sum_of(odd) == 0;
  if (finite && step.cache_format == step.format) {
    const int bytes = step.format == Format::f32 ? 4 : 2;
    memcpy(static_cast<char *>(pool) + at * bytes, from, dim * bytes);
    return true;
  }
  for (int i = 0; i < dim; i += kWidth) {
    Floats x = take(step.format, from, i, dim - i);
    const Floats zero = x * 0.f;
    x = zero == zero ? x : Floats{};
    const int count = std::min(kWidth, dim - i);
    if (step.cache_format == Format::fp8)
      for (int j = 0; j < count; j++) static_cast<uint8_t *>(pool)[at + i + j] = rounded_fp8(x[j]);
    else
      put(step.cache_format, pool, at + i, count, x);
  }
  return finite;
}

void prepare(const Step &step, const Heads &given, int first, int last) {
  const int dim = step.head_dim, half = dim / 2, bytes = step.format == Format::f32 ? 4 : 2;
  alignas(64) char head[2 * Halved::kMost * sizeof(float)];
  for (int row = first; row < last; row++) {
    Halved turn;
    for (int p = 0; p * kWidth < half; p++) {
      const int64_t at = int64_t(row) * half + p * kWidth;
      const int count = std::min(kWidth, half - p * kWidth);
      turn.first[p] = take<Format::f32>(given.cos, at, count), turn.second[p] = take<Format::f32>(given.sin, at, count);
    }
    for (int h = 0; h < step.heads; h++) {
      const int64_t at = (int64_t(row) * step.heads + h) * dim;
      transform(given, turn, half, given.q + at, given.q_scale, step.format, static_cast<char *>(given.queries) + at * bytes);
    }
    const int slot = step.row_slot[row];
    const int64_t page = step.block_tables[int64_t(step.row_seq[row]) * step.width + slot / step.block_size];
    for (int g = 0; g < step.kv_heads; g++) {
      const int64_t from = (int64_t(row) * step.kv_heads + g) * dim;
      const int64_t to = ((page * step.kv_heads + g) * step.block_size + slot % step.block_size) * dim;
      transform(given, turn, half, given.k + from, given.k_scale, step.format, head);
      bool finite = write_head(step, head, step.keys, to);
      for (int i = 0; i < dim; i += kWidth)
        put(step.format, head, i, std::min(kWidth, dim - i), take<Format::f32>(given.v + from, i, dim - i));
      finite &= write_head(step, head, step.values, to);
      given.finite[int64_t(row) * step.kv_heads + g] = finite;
    }
  }
}

const RowKernel kRows = {norm, gate, largest, prepare};

}  // namespace
}  // namespace chunkattn
