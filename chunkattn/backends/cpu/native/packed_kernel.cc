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

#include "packed_vectors.h"

namespace chunkattn {
namespace {

constexpr int32_t kInfinity = 0x7f800000, kSmallest = (127 - 60) << 23;  // bits of float32

#if defined(__AVX512F__)
template <class L> constexpr int kTileRows = L::kGroups == 2 ? 4 : 6;  // rows and vectors of outputs whose sums fit the registers
constexpr int kFewTileRows = 8, kParts = 2;
#else
template <class L> constexpr int kTileRows = 4;
constexpr int kFewTileRows = 4, kParts = kWidth < 16 ? 2 : 1;
#endif
constexpr int kMostTileRows = std::max(kFewTileRows, 6);
constexpr int kFewRows = 16;  // up to which the codes are unpacked in registers, for each tile again
constexpr int kAhead = 4096;  // bytes from the codes in use to those that are called from memory
constexpr int kDeep = 1024;   // of many rows, depth of the codes that are unpacked once for all tiles

// Integers of a block of ROWS rows.
template <class L, int DIGITS, int ROWS> struct Tile {
  int8_t digits[ROWS][DIGITS][kBlock];  // the high digit first
  float scale[ROWS], scaled_sum[ROWS];
  int32_t begin[L::kGroups][ROWS];  // minus the zero of the codes times the sum of the integers
};

template <class F> void with_digits(int digits, F f) {
  if (digits == 1) return f(std::integral_constant<int, 1>());
  f(std::integral_constant<int, 2>());
}

template <int N = kMostTileRows, class F> void with_rows(int rows, F f) {
  if constexpr (N > 1)
    if (rows < N) return with_rows<N - 1>(rows, f);
  f(std::integral_constant<int, N>());
}

// Row `r` of a tile's integers.
template <class L, int DIGITS, int ROWS> void write_row(const float *x, int depth, Tile<L, DIGITS, ROWS> *to, int r) {
  constexpr float kMost = DIGITS == 1 ? 127 : 127 * 128, kRound = 12582912;  // adding 1.5 * 2^23 rounds to an integer
  constexpr int kEach = kBlock / kWidth;
  for (int k = 0; k < depth; k += kBlock, x += kBlock, to++) {
    Ints most = {};
    for (int i = 0; i < kEach; i++) most = larger(most, read<Ints>(x + i * kWidth) & 0x7fffffff);
    const int32_t bits = largest_of(most);
    const bool finite = bits < kInfinity, zero = !finite || bits < kSmallest;
    float largest;
    memcpy(&largest, &bits, sizeof bits);
    const float by = zero ? 0 : kMost / largest, unit = !finite ? std::numeric_limits<float>::quiet_NaN() : zero ? 0 : largest / kMost;
    int32_t sums[2] = {0, 0};
    for (int i = 0; i < kEach; i++) {
      Ints whole = {};
      if (!zero) whole = (Ints)(read<Floats>(x + i * kWidth) * by + kRound) - (Ints)splat(kRound);
      sums[i * 2 / kEach] += sum_of(whole);
      const Ints high = DIGITS == 1 ? whole : (whole + 64) >> 7;
      write_bytes(to->digits[r][0] + i * kWidth, high);
      if (DIGITS == 2) write_bytes(to->digits[r][DIGITS - 1] + i * kWidth, whole - (high << 7));
    }
    to->scale[r] = unit, to->scaled_sum[r] = unit * float(sums[0] + sums[1]);
    to->begin[0][r] = -kZeroOf<L> * (L::kGroups == 2 ? sums[0] : sums[0] + sums[1]);
    if (L::kGroups == 2) to->begin[L::kGroups - 1][r] = -kZeroOf<L> * sums[1];
  }
}

void write(Packing packing, int digits, const float *x, int count, int depth, char *to) {
  with_layout(packing, [&](auto layout) {
    with_digits(digits, [&](auto d) {
      with_rows(count, [&](auto rows) {
        for (int r = 0; r < rows; r++)
          write_row(x + int64_t(r) * depth, depth, reinterpret_cast<Tile<decltype(layout), d, rows> *>(to), r);
      });
    });
  });
}

int64_t row_bytes(Packing packing, int depth, int digits) {
  int64_t bytes = 0;
  with_layout(packing, [&](auto layout) {
    with_digits(digits, [&](auto d) { bytes = int64_t(depth / kBlock) * sizeof(Tile<decltype(layout), d, 1>); });
  });
  return bytes;
}

int tile_rows(Packing packing, int rows) {
  if (rows <= kFewRows) return kFewTileRows;
  return with_layout(packing, [](auto layout) { return kTileRows<decltype(layout)>; });
}

// Scales and minima of a block, for kWidth outputs.
template <class L> struct Scale { Floats of[L::kGroups], minimum; };
template <class L> inline Scale<L> scale_of(const uint8_t *piece, int block, int lane) {
  Scale<L> s = {};
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

// Adds the products of codes and digit `digit` of a block. `codes(p, j)`: vector j of part p.
template <class L, int DIGITS, int ROWS, int PARTS, class C>
inline void add_digit(Ints (&sums)[L::kGroups][ROWS][PARTS], const Tile<L, DIGITS, ROWS> &x, int digit, C codes) {
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) {
    Codes c[PARTS];
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) c[p] = codes(p, j);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; p++) {
        Ints &sum = sums[j * L::kGroups / 8][r][p];
        sum = dot(sum, c[p], x.digits[r][digit] + j * 4);
      }
  }
#else
#pragma GCC unroll 8
  for (int first = 0; first < 8; first += kTogether<L>) {
    Shorts some[ROWS][PARTS];
#pragma GCC unroll 8
    for (int j = first; j < first + kTogether<L>; j++) {
      Codes c[PARTS];
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; p++) c[p] = codes(p, j);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; p++) {
          const Shorts now = products<kSignedCodes<L>>(c[p], x.digits[r][digit] + j * 4);
          some[r][p] = j == first ? now : some[r][p] + now;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; p++) sums[first * L::kGroups / 8][r][p] += widened(some[r][p]);
  }
#endif
}

// Adds a block to the outputs of ROWS rows and PARTS vectors. All products go through this function, and no sum depends on ROWS or
// PARTS.
template <class L, int DIGITS, int ROWS, int PARTS, class C>
inline void add_block(Floats (&totals)[ROWS][PARTS], const Scale<L> *const (&scales)[PARTS], const Tile<L, DIGITS, ROWS> &x, C codes) {
  Ints sums[L::kGroups][ROWS][PARTS];
  constexpr int kGroups = L::kGroups;
#pragma GCC unroll 2
  for (int digit = 0; digit < DIGITS; digit++) {
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; g++)
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; p++) {
          Ints &sum = sums[g][r][p];
          sum = digit ? sum << 7 : Ints{};
          if (kZeroOf<L> && digit == DIGITS - 1) sum += x.begin[g][r];
        }
    add_digit<L, DIGITS, ROWS, PARTS>(sums, x, digit, codes);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) {
      const Scale<L> &s = *scales[p];
      const Floats unit = splat(x.scale[r]);
      Floats &total = totals[r][p];
      if constexpr (kGroups == 1) {
        total = fused(floats_of(sums[0][r][p]), s.of[0] * unit, total);
      } else {
        const Floats both = fused(floats_of(sums[1][r][p]), s.of[1], floats_of(sums[0][r][p]) * s.of[0]);
        total = fused(both, unit, total);
      }
      if constexpr (L::kMinimum) total = fused(s.minimum, splat(x.scaled_sum[r]), total);
    }
}

template <class L> const uint8_t *panel(const PackedProduct &given, int output) {
  return given.weight.data + int64_t(output / kPanel) * (given.depth / L::kDepth) * L::kPiece;
}
template <class L, int DIGITS, int ROWS> const Tile<L, DIGITS, ROWS> *tile(const PackedProduct &given, int row) {
  return reinterpret_cast<const Tile<L, DIGITS, ROWS> *>(given.integers + row * row_bytes(L::kPacking, given.depth, DIGITS));
}

// A panel of a tile, straight from the packed weight. The first tile of a panel calls the weight from memory.
template <class L, int DIGITS, int ROWS> void few(const PackedProduct &given, int row, int output) {
  constexpr int kVectors = kPanel / kWidth, kEach = L::kPiece / L::kBlocks, kLines = (kEach + 63) / 64;
  const uint8_t *piece = panel<L>(given, output);
  const auto *x = tile<L, DIGITS, ROWS>(given, row);
  Floats totals[kVectors][ROWS][1] = {};
  for (int k = 0; k < given.depth; k += L::kDepth, piece += L::kPiece)
    for (int block = 0; block < L::kBlocks; block++, x++) {
      if (!row)
#pragma GCC unroll 16
        for (int i = 0; i < kLines; i++) __builtin_prefetch(piece + block * kEach + i * 64 + kAhead, 0, 2);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        Codes codes[8];
        unpack<L>(piece + L::kHead + block * L::kCodes, v * kWidth, codes);
        const Scale<L> s = scale_of<L>(piece, block, v * kWidth);
        add_block<L, DIGITS, ROWS, 1>(totals[v], {&s}, *x, [&](int, int j) { return codes[j]; });
      }
    }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < kVectors; v++)
      chunkattn::write(given.weight.out + int64_t(row + r) * given.weight.outputs + output + v * kWidth, totals[v][r][0]);
}

// A part of the depth of PARTS vectors of outputs, unpacked.
template <class L, int PARTS> struct Unpacked {
  alignas(64) Codes codes[PARTS][kDeep / kBlock][8];
  Scale<L> scale[PARTS][kDeep / kBlock];
};

// Adds `blocks` blocks from depth `begin` on to a tile's outputs, which hold the sum of the blocks before.
template <class L, int DIGITS, int ROWS, int PARTS>
void add_part(const PackedProduct &given, const Unpacked<L, PARTS> &w, int row, int output, int begin, int blocks) {
  const auto *x = tile<L, DIGITS, ROWS>(given, row) + begin / kBlock;
  const int64_t stride = given.weight.outputs;
  float *out = given.weight.out + row * stride + output;
  Floats totals[ROWS][PARTS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PARTS; p++) totals[r][p] = begin ? read<Floats>(out + r * stride + p * kWidth) : Floats{};
  for (int b = 0; b < blocks; b++, x++) {
    const Scale<L> *scales[PARTS];
    for (int p = 0; p < PARTS; p++) scales[p] = &w.scale[p][b];
    add_block<L, DIGITS, ROWS, PARTS>(totals, scales, *x, [&](int p, int j) { return w.codes[p][b][j]; });
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PARTS; p++) chunkattn::write(out + r * stride + p * kWidth, totals[r][p]);
}

// PARTS vectors of outputs of many rows.
template <class L, int DIGITS, int PARTS> void many(const PackedProduct &given, int output) {
  thread_local Unpacked<L, PARTS> w;
  const int size = tile_size(given.rows, kTileRows<L>);
  for (int begin = 0; begin < given.depth; begin += kDeep) {
    const int blocks = std::min(kDeep, given.depth - begin) / kBlock;
    for (int p = 0; p < PARTS; p++) {
      const int at = output + p * kWidth;
      const uint8_t *first = panel<L>(given, at) + int64_t(begin / L::kDepth) * L::kPiece;
      for (int b = 0; b < blocks; b++) {
        const uint8_t *piece = first + b / L::kBlocks * L::kPiece;
        unpack<L>(piece + L::kHead + b % L::kBlocks * L::kCodes, at % kPanel, w.codes[p][b]);
        w.scale[p][b] = scale_of<L>(piece, b % L::kBlocks, at % kPanel);
      }
    }
    for (int row = 0; row < given.rows; row += size)
      with_rows<kTileRows<L>>(std::min(size, given.rows - row), [&](auto rows) {
        add_part<L, DIGITS, rows, PARTS>(given, w, row, output, begin, blocks);
      });
  }
}

template <class L, int DIGITS> void multiply_as(const PackedProduct &given, int first, int last) {
  int output = first;
  if (given.rows > kFewRows) {
    for (; output + kParts * kWidth <= last; output += kParts * kWidth) many<L, DIGITS, kParts>(given, output);
    for (; output < last; output += kWidth) many<L, DIGITS, 1>(given, output);
    return;
  }
  const int size = tile_size(given.rows, kFewTileRows);
  for (; output < last; output += kPanel)
    for (int row = 0; row < given.rows; row += size)
      with_rows<kFewTileRows>(std::min(size, given.rows - row), [&](auto rows) {
        few<L, DIGITS, rows>(given, row, output);
      });
}

void multiply(const PackedProduct &given, int first, int last) {
  with_layout(given.weight.packing, [&](auto layout) {
    with_digits(given.digits, [&](auto d) { multiply_as<decltype(layout), d>(given, first, last); });
  });
}

}  // namespace

#if defined(__AVX512F__)
const PackedKernel kPackedAvx512 = {"avx512", tile_rows, row_bytes, write, multiply};
#elif defined(__AVX2__)
const PackedKernel kPackedAvx2 = {"avx2", tile_rows, row_bytes, write, multiply};
#elif defined(__ARM_FEATURE_DOTPROD)
const PackedKernel kPackedNeon = {"neon", tile_rows, row_bytes, write, multiply};
#else
const PackedKernel kPackedPortable = {"portable", tile_rows, row_bytes, write, multiply};
#endif

}  // namespace chunkattn
