// The kernels of packed products of one instruction set, chosen by the compiler's flags. Only the `PackedKernel` at the end leaves
// this file. The compiler must not contract products and sums (-ffp-contract=off): every kernel rounds at the same places.
//
// A block of 32 values of a row becomes integers and a scale: the largest magnitude becomes 127 with one digit, 127 * 128 with two,
// where a value is 128 * high + low. The integer sum of codes and digits of a block is exact in 32 bits:
// 32 * 255 * 127 * 128 < 2^31. An output adds `float(sum) * (scale of the weight * scale of the row)`, fused; Q6_K first adds its
// halves, each with its scale; then `minimum * (scale of the row * sum of the digits)`, fused.
//
// A block whose values are all below 2^-60 counts as zero. So no value above is subnormal, which some threads of XLA take for zero.
#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "arena.h"
#include "packed_vectors.h"

namespace chunkattn {
namespace {

constexpr int32_t kInfinity = 0x7f800000, kSmallest = (127 - 60) << 23;  // bits of float32

// Sizes of tiles of rows, ascending: of few rows, whose codes are unpacked in registers for each tile, and of many. Sums and what
// meets them fit the registers. kParts: vectors of outputs of a tile of many rows.
template <int... SIZES> using Sizes = std::integer_sequence<int, SIZES...>;
#if defined(__AVX512F__)
using FewSizes = Sizes<1, 2, 3, 4, 6, 8>;
template <class K> using ManySizes = std::conditional_t<K::kGroups == 2, Sizes<4>, Sizes<4, 6>>;
constexpr int kFewRows = 16, kParts = 2;
#else
using FewSizes = Sizes<>;
template <class K> using ManySizes = Sizes<1, 2, 4>;
constexpr int kFewRows = 0, kParts = 2;
#endif
constexpr int kDeep = 1024;   // of many rows, depth of the codes that are unpacked once for all tiles
constexpr int kLine = 64;

template <class F> auto with_digits(int digits, F f) {
  return digits == 1 ? f(std::integral_constant<int, 1>()) : f(std::integral_constant<int, 2>());
}

// Calls `f` with the smallest of the sizes that holds `rows`, which is at most the largest.
template <int SIZE, int... LARGER, class F> void with_size(Sizes<SIZE, LARGER...>, int rows, F f) {
  if constexpr (sizeof...(LARGER) > 0)
    if (rows > SIZE) return with_size(Sizes<LARGER...>(), rows, f);
  f(std::integral_constant<int, SIZE>());
}
template <int... SIZES> int padded(Sizes<SIZES...>, int rows) {
  int size = 0;
  ((size = size || SIZES < rows ? size : SIZES), ...);
  return size;
}
template <int... SIZES> constexpr int largest(Sizes<SIZES...>) { return std::max({0, SIZES...}); }

// Integers of a block of ROWS rows.
template <class K, int DIGITS, int ROWS> struct Tile {
  int8_t digits[ROWS][DIGITS][kBlock];  // the high digit first
  float scale[ROWS], scaled_sum[ROWS];
  int32_t begin[K::kGroups][ROWS];  // minus the zero of the codes times the sum of the integers
};

// Writes the integers of row `r` of a tile of `rows`.
void write_row(int zero, int groups, int digits, const float *x, int depth, char *to, int rows, int r) {
  constexpr float kRound = 12582912;  // adding 1.5 * 2^23 rounds to an integer
  constexpr int kEach = kBlock / kWidth;
  const float limit = digits == 1 ? 127 : 127 * 128;
  for (int k = 0; k < depth; k += kBlock, x += kBlock) {
    Ints most = {};
    for (int i = 0; i < kEach; i++) most = larger(most, read<Ints>(x + i * kWidth) & 0x7fffffff);
    const int32_t bits = largest_of(most);
    const bool finite = bits < kInfinity, none = !finite || bits < kSmallest;
    float magnitude;
    memcpy(&magnitude, &bits, sizeof bits);
    const float by = none ? 0 : limit / magnitude, unit = !finite ? std::numeric_limits<float>::quiet_NaN() : none ? 0 : magnitude / limit;
    int8_t *bytes = reinterpret_cast<int8_t *>(to) + r * digits * kBlock;
    float *scales = reinterpret_cast<float *>(to + rows * digits * kBlock) + r;
    int32_t *begin = reinterpret_cast<int32_t *>(scales + 2 * rows), sums[2] = {0, 0};
    for (int i = 0; i < kEach; i++) {
      Ints whole = {};
      if (!none) whole = (Ints)(read<Floats>(x + i * kWidth) * by + kRound) - (Ints)splat(kRound);
      sums[i * 2 / kEach] += sum_of(whole);
      const Ints high = digits == 1 ? whole : (whole + 64) >> 7;
      write_bytes(bytes + i * kWidth, high);
      if (digits == 2) write_bytes(bytes + kBlock + i * kWidth, whole - (high << 7));
    }
    scales[0] = unit, scales[rows] = unit * float(sums[0] + sums[1]);
    begin[0] = -zero * (groups == 2 ? sums[0] : sums[0] + sums[1]);
    if (groups == 2) begin[rows] = -zero * sums[1];
    to += rows * (digits * kBlock + 8 + 4 * groups);
  }
}

// Rows of each tile but the last.
template <class K> int tile_rows(int rows) { return tile_size(rows, rows <= kFewRows ? largest(FewSizes()) : largest(ManySizes<K>())); }
// Rows of a tile with those that only fill it.
template <class K> int padded_rows(int rows, int count) { return rows <= kFewRows ? padded(FewSizes(), count) : padded(ManySizes<K>(), count); }

int rows_of_tile(Packing packing, int rows) {
  return with_layout(packing, [&](auto layout) { return tile_rows<KindOf<decltype(layout)>>(rows); });
}

int64_t bytes_of_tile(Packing packing, int rows, int digits, int depth) {
  return with_layout(packing, [&](auto layout) {
    using K = KindOf<decltype(layout)>;
    return with_digits(digits, [&](auto d) {
      return int64_t(depth / kBlock) * padded_rows<K>(rows, tile_rows<K>(rows)) * int64_t(sizeof(Tile<K, d, 1>));
    });
  });
}

int kind_of(Packing packing) {
  return with_layout(packing, [](auto layout) { return 2 * kZeroOf<decltype(layout)> + layout.kGroups; });
}

void write(Packing packing, int digits, const float *x, int rows, int count, int depth, char *to) {
  const int padded = with_layout(packing, [&](auto layout) { return padded_rows<KindOf<decltype(layout)>>(rows, count); });
  const int zero = with_layout(packing, [](auto layout) { return kZeroOf<decltype(layout)>; });
  const int groups = with_layout(packing, [](auto layout) { return layout.kGroups; });
  if (padded > count) memset(to, 0, int64_t(depth / kBlock) * padded * (digits * kBlock + 8 + 4 * groups));
  for (int r = 0; r < count; r++) write_row(zero, groups, digits, x + int64_t(r) * depth, depth, to, padded, r);
}

void collect(Packing packing, int digits, const char *from, const int32_t *ids, int rows, int count, int depth, char *to) {
  const int padded = with_layout(packing, [&](auto layout) { return padded_rows<KindOf<decltype(layout)>>(rows, count); });
  const int groups = with_layout(packing, [](auto layout) { return layout.kGroups; });
  const int blocks = depth / kBlock, bytes = digits * kBlock, one = bytes + 8 + 4 * groups;
  if (padded > count) memset(to, 0, int64_t(blocks) * padded * one);
  for (int r = 0; r < count; r++) {
    const char *row = from + int64_t(ids[r]) * blocks * one;
    char *tile = to;
    for (int k = 0; k < blocks; k++, row += one, tile += padded * one) {
      memcpy(tile + r * bytes, row, bytes);
      for (int i = 0; i < 2 + groups; i++) memcpy(tile + padded * bytes + (i * padded + r) * 4, row + bytes + i * 4, 4);
    }
  }
}

// Scales and minima of a block, for kWidth outputs.
template <class K> struct Scale { Floats of[K::kGroups], minimum; };
template <class L> inline Scale<KindOf<L>> scale_of(const uint8_t *piece, int block, int lane) {
  Scale<KindOf<L>> s = {};
  const uint8_t *factors = piece + L::kFactors + block * 32 + lane;
  s.of[0] = read_halves(piece + lane * 2);
  if constexpr (L::kMinimum) s.minimum = read_halves(piece + 32 + lane * 2);
  if constexpr (L::kScales == Scales::factors) {
    s.of[0] = s.of[0] * read_factors<false>(factors);
    s.minimum = -(s.minimum * read_factors<false>(factors + 16));
  }
  if constexpr (L::kScales == Scales::halves) {
    s.of[1] = s.of[0] * read_factors<true>(factors + 16);
    s.of[0] = s.of[0] * read_factors<true>(factors);
  }
  return s;
}

// Calls `add(r, p, c)` with vector j of the codes of each part, for every row. `codes(p, j)`: vector j of part p.
template <int ROWS, int PARTS, class C, class A> [[gnu::always_inline]] inline void each_product(C codes, int j, A add) {
  Codes c[PARTS];
#pragma GCC unroll 2
  for (int p = 0; p < PARTS; p++) c[p] = codes(p, j);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) add(r, p, c[p]);
}

// Adds the products of codes and digit `digit` of a block; see `each_product`.
template <class K, int DIGITS, int ROWS, int PARTS, class C>
inline void add_digit(Ints (&sums)[K::kGroups][ROWS][PARTS], const Tile<K, DIGITS, ROWS> &x, int digit, C codes) {
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++)
    each_product<ROWS, PARTS>(codes, j, [&](int r, int p, Codes c) {
      Ints &sum = sums[j * K::kGroups / 8][r][p];
      sum = dot(sum, c, x.digits[r][digit] + j * 4);
    });
#else
#pragma GCC unroll 8
  for (int first = 0; first < 8; first += K::kTogether) {
    Shorts some[ROWS][PARTS];
#pragma GCC unroll 4
    for (int j = first; j < first + K::kTogether; j++)
      each_product<ROWS, PARTS>(codes, j, [&](int r, int p, Codes c) {
        const Shorts now = products<K::kSignedCodes>(c, x.digits[r][digit] + j * 4);
        some[r][p] = j == first ? now : some[r][p] + now;
      });
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; p++) sums[first * K::kGroups / 8][r][p] += widened(some[r][p]);
  }
#endif
}

// Adds a block to the outputs of ROWS rows and PARTS vectors. All products go through this function, and no sum depends on ROWS or
// PARTS.
template <class K, int DIGITS, int ROWS, int PARTS, class C>
inline void add_block(Floats (&totals)[ROWS][PARTS], const Scale<K> *const (&scales)[PARTS], const Tile<K, DIGITS, ROWS> &x, C codes) {
  Ints sums[K::kGroups][ROWS][PARTS];
#pragma GCC unroll 2
  for (int digit = 0; digit < DIGITS; digit++) {
#pragma GCC unroll 2
    for (int g = 0; g < K::kGroups; g++)
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; p++) {
          Ints &sum = sums[g][r][p];
          sum = digit ? sum << 7 : Ints{};
          if (K::kZero && digit == DIGITS - 1) sum += x.begin[g][r];
        }
    add_digit<K, DIGITS, ROWS, PARTS>(sums, x, digit, codes);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) {
      const Scale<K> &s = *scales[p];
      const Floats unit = splat(x.scale[r]);
      Floats &total = totals[r][p];
      if constexpr (K::kGroups == 1) {
        total = fused(floats_of(sums[0][r][p]), s.of[0] * unit, total);
      } else {
        const Floats both = fused(floats_of(sums[1][r][p]), s.of[1], floats_of(sums[0][r][p]) * s.of[0]);
        total = fused(both, unit, total);
      }
      if constexpr (K::kMinimum) total = fused(s.minimum, splat(x.scaled_sum[r]), total);
    }
}

template <class L> const uint8_t *panel(const PackedProduct &given, int output) {
  return given.weight.data + int64_t(output / kPanel) * (given.depth / L::kDepth) * L::kPiece;
}

#if defined(__AVX512F__)
constexpr int kAhead = 4096;  // bytes from the codes in use to those that are called from memory

// A panel of a tile of `count` rows, straight from the packed weight. The first tile of a panel calls the weight from memory.
template <class L, int DIGITS, int ROWS> void few(const PackedProduct &given, const char *integers, int row, int count, int output) {
  static_assert(kWidth == kPanel, "a vector holds a panel");
  constexpr int kEach = L::kPiece / L::kBlocks, kLines = (kEach + kLine - 1) / kLine;
  const uint8_t *piece = panel<L>(given, output);
  const auto *x = reinterpret_cast<const Tile<KindOf<L>, DIGITS, ROWS> *>(integers);
  Floats totals[ROWS][1] = {};
  for (int k = 0; k < given.depth; k += L::kDepth, piece += L::kPiece)
    for (int block = 0; block < L::kBlocks; block++, x++) {
      if (!row)
#pragma GCC unroll 16
        for (int i = 0; i < kLines; i++) __builtin_prefetch(piece + block * kEach + i * kLine + kAhead, 0, 2);
      Codes codes[8];
      unpack<L>(piece + L::kHead + block * L::kCodes, 0, codes);
      const Scale<KindOf<L>> s = scale_of<L>(piece, block, 0);
      add_block<KindOf<L>, DIGITS, ROWS, 1>(totals, {&s}, *x, [&](int, int j) { return codes[j]; });
    }
  float *out = given.weight.out + int64_t(row) * given.weight.outputs + output;
  for (int r = 0; r < count; r++) chunkattn::write(out + int64_t(r) * given.weight.outputs, totals[r][0]);
}
#endif

// A part of the depth of PARTS vectors of outputs, unpacked.
template <class K, int PARTS> struct Unpacked {
  alignas(kLine) Codes codes[PARTS][kDeep / kBlock][8];
  Scale<K> scale[PARTS][kDeep / kBlock];
  int blocks;
};

// Adds blocks to `count` rows of outputs, which hold the sum of the blocks before unless there are none. Meanwhile `lines` lines for
// each block are called from memory.
template <class K, int DIGITS, int ROWS, int PARTS>
void add_blocks(const Unpacked<K, PARTS> &w, const char *integers, int count, bool first, float *out, int64_t stride, const uint8_t *next, int lines) {
  const auto *x = reinterpret_cast<const Tile<K, DIGITS, ROWS> *>(integers);
  Floats totals[ROWS][PARTS] = {};
  for (int r = 0; r < count && !first; r++)
    for (int p = 0; p < PARTS; p++) totals[r][p] = read<Floats>(out + r * stride + p * kWidth);
  for (int b = 0; b < w.blocks; b++, x++) {
    for (int i = 0; i < lines; i++, next += kLine) __builtin_prefetch(next, 0, 2);
    const Scale<K> *scales[PARTS];
    for (int p = 0; p < PARTS; p++) scales[p] = &w.scale[p][b];
    add_block<K, DIGITS, ROWS, PARTS>(totals, scales, *x, [&](int p, int j) { return w.codes[p][b][j]; });
  }
  for (int r = 0; r < count; r++)
    for (int p = 0; p < PARTS; p++) chunkattn::write(out + r * stride + p * kWidth, totals[r][p]);
}

// Unpacks a part of the depth of the outputs from `output` on.
template <class L, int PARTS> void unpack_part(const PackedProduct &given, int output, int begin, Unpacked<KindOf<L>, PARTS> &to) {
  to.blocks = std::min(kDeep, given.depth - begin) / kBlock;
  for (int p = 0; p < PARTS; p++) {
    const int at = output + p * kWidth, lane = at % kPanel;
    const uint8_t *first = panel<L>(given, at) + int64_t(begin / L::kDepth) * L::kPiece;
    for (int b = 0; b < to.blocks; b++) {
      const uint8_t *piece = first + b / L::kBlocks * L::kPiece;
      unpack<L>(piece + L::kHead + b % L::kBlocks * L::kCodes, lane, to.codes[p][b]);
      to.scale[p][b] = scale_of<L>(piece, b % L::kBlocks, lane);
    }
  }
}

// A part of the depth of PARTS vectors of outputs of all rows.
template <class K, int DIGITS, int PARTS>
void many(const PackedProduct &given, const Unpacked<K, PARTS> &w, int output, int begin, const uint8_t *next, int64_t ahead) {
  const int size = tile_rows<K>(given.rows), tiles = (given.rows + size - 1) / size;
  const int64_t tile_bytes = int64_t(given.depth / kBlock) * padded_rows<K>(given.rows, size) * sizeof(Tile<K, DIGITS, 1>);
  const int64_t lines = (ahead / kLine + w.blocks) / w.blocks, each = tiles > 16 ? 0 : (lines + tiles - 1) / tiles;
  for (int tile = 0; tile < tiles; tile++) {
    const int row = tile * size, count = std::min(size, given.rows - row);
    float *out = given.weight.out + int64_t(row) * given.weight.outputs + output;
    with_size(ManySizes<K>(), count, [&](auto rows) {
      const char *integers = given.integers + tile * tile_bytes + int64_t(begin / kBlock) * sizeof(Tile<K, DIGITS, rows>);
      add_blocks<K, DIGITS, rows, PARTS>(w, integers, count, !begin, out, given.weight.outputs, next + tile * each * w.blocks * kLine, int(each));
    });
  }
}

// All rows of PARTS vectors of outputs.
template <class L, int PARTS> void all_rows(const PackedProduct &given, int output) {
  using Part = Unpacked<KindOf<L>, PARTS>;
  Arena arena(Arena::bytes<Part>(1));
  Part &w = *arena.take<Part>(1);
  const uint8_t *after = panel<L>(given, output + std::max(PARTS * kWidth, kPanel));
  for (int begin = 0; begin < given.depth; begin += kDeep) {
    unpack_part<L, PARTS>(given, output, begin, w);
    const int64_t bytes = int64_t(w.blocks) * L::kPiece / L::kBlocks * PARTS * kWidth / kPanel;
    const uint8_t *next = after + int64_t(begin / L::kDepth) * L::kPiece;
    with_digits(given.digits, [&](auto d) { many<KindOf<L>, d, PARTS>(given, w, output, begin, next, bytes); });
  }
}

template <class L> void multiply_as(const PackedProduct &given, int first, int last) {
  int output = first;
#if defined(__AVX512F__)
  if (given.rows <= kFewRows) {
    const int size = tile_rows<KindOf<L>>(given.rows);
    const int64_t tile_bytes = bytes_of_tile(L::kPacking, given.rows, given.digits, given.depth);
    for (; output < last; output += kPanel)
      for (int row = 0; row < given.rows; row += size) {
        const int count = std::min(size, given.rows - row);
        with_digits(given.digits, [&](auto d) {
          with_size(FewSizes(), count, [&](auto rows) { few<L, d, rows>(given, given.integers + row / size * tile_bytes, row, count, output); });
        });
      }
    return;
  }
#endif
  for (; output + kParts * kWidth <= last; output += kParts * kWidth) all_rows<L, kParts>(given, output);
  if constexpr (kParts * kWidth > kPanel)
    for (; output < last; output += kWidth) all_rows<L, 1>(given, output);
}

void multiply(const PackedProduct &given, int first, int last) {
  with_layout(given.weight.packing, [&](auto layout) { multiply_as<decltype(layout)>(given, first, last); });
}

}  // namespace

#if defined(__AVX512F__)
const PackedKernel kPackedAvx512 = {"avx512", kind_of, rows_of_tile, bytes_of_tile, write, collect, multiply};
#elif defined(__AVX2__)
const PackedKernel kPackedAvx2 = {"avx2", kind_of, rows_of_tile, bytes_of_tile, write, collect, multiply};
#elif defined(__ARM_FEATURE_DOTPROD)
const PackedKernel kPackedNeon = {"neon", kind_of, rows_of_tile, bytes_of_tile, write, collect, multiply};
#else
const PackedKernel kPackedPortable = {"portable", kind_of, rows_of_tile, bytes_of_tile, write, collect, multiply};
#endif

}  // namespace chunkattn
