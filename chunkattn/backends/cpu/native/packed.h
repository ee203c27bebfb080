// Products of float rows with weights that keep the codes of a GGUF file.
//
// A packed weight [outputs, depth] holds panels of 16 outputs one after the other. A panel holds pieces of its depth in ascending
// order: 32 values of each output, or 256 in K formats. A piece holds its scales (Layout::kHead bytes), then the codes of each block
// of 32 values (Layout::kCodes bytes). Codes of 8 bits are eight vectors, of which vector j holds the values 4j to 4j + 3 of output 0,
// then of output 1, and so on. Codes of 4 bits are four vectors of pairs: the values of vector j, and above them those of vector
// j + 4. Codes of 5 bits add the fifth bits of the eight vectors, 64 bits each; codes of 6 bits add two vectors, which hold the upper
// pairs of bits of the vectors 0 to 3 and 4 to 7.
//
// An output is the sum of its blocks in ascending order: the exact integer sum of codes and digits of the row, scaled in float32
// (packed_kernel.cc). So its bits depend on neither other rows, nor the number of threads, nor the kernel.
#pragma once
#include <cstdint>

#include "attention.h"

namespace chunkattn {

enum class Packing : int32_t { q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, q4_k, q5_k, q6_k };
constexpr int kPackings = 9;
constexpr int kPanel = 16;  // outputs
constexpr int kBlock = 32;  // values with one scale of the row

// Scales of a piece. one: f16. minimum: f16 scales, f16 minima. factors: f16 scales and minima of 256 values; of each block 16 scales
// and 16 minima, 8 bits each. halves: f16 scales of 256 values; of each block 16 signed scales of 8 bits for its first 16 values, and
// 16 for its others.
enum class Scales { one, minimum, factors, halves };

// Layout of one packing. `kZero` is subtracted from its codes; codes with `kTable` stand for kTableValues + 128.
template <Packing PACKING, int BITS, Scales SCALES, int ZERO, bool TABLE = false> struct LayoutOf {
  static constexpr Packing kPacking = PACKING;
  static constexpr int kBits = BITS, kZero = ZERO;
  static constexpr Scales kScales = SCALES;
  static constexpr bool kTable = TABLE, kMinimum = SCALES == Scales::minimum || SCALES == Scales::factors;
  static constexpr int kBlocks = SCALES == Scales::factors || SCALES == Scales::halves ? 8 : 1;  // of a piece
  static constexpr int kGroups = SCALES == Scales::halves ? 2 : 1;                               // scales of a block
  static constexpr int kFactors = kMinimum ? 64 : 32;                                            // place of the 8-bit scales
  static constexpr int kHead = kFactors + (kBlocks == 8 ? 8 * 32 : 0);
  static constexpr int kCodes = BITS * 64;
  static constexpr int kPiece = kHead + kBlocks * kCodes;
  static constexpr int kDepth = kBlocks * kBlock;  // of a piece
};
using Q8_0 = LayoutOf<Packing::q8_0, 8, Scales::one, 128>;
using Q4_0 = LayoutOf<Packing::q4_0, 4, Scales::one, 8>;
using Q4_1 = LayoutOf<Packing::q4_1, 4, Scales::minimum, 0>;
using Q5_0 = LayoutOf<Packing::q5_0, 5, Scales::one, 16>;
using Q5_1 = LayoutOf<Packing::q5_1, 5, Scales::minimum, 0>;
using Iq4Nl = LayoutOf<Packing::iq4_nl, 4, Scales::one, 128, true>;
using Q4K = LayoutOf<Packing::q4_k, 4, Scales::factors, 0>;
using Q5K = LayoutOf<Packing::q5_k, 5, Scales::factors, 0>;
using Q6K = LayoutOf<Packing::q6_k, 6, Scales::halves, 32>;

// Calls `f` with the layout of a packing.
template <class F> auto with_layout(Packing packing, F f) {
  switch (packing) {
    case Packing::q8_0: return f(Q8_0{});
    case Packing::q4_0: return f(Q4_0{});
    case Packing::q4_1: return f(Q4_1{});
    case Packing::q5_0: return f(Q5_0{});
    case Packing::q5_1: return f(Q5_1{});
    case Packing::iq4_nl: return f(Iq4Nl{});
    case Packing::q4_k: return f(Q4K{});
    case Packing::q5_k: return f(Q5K{});
    default: return f(Q6K{});
  }
}

constexpr int8_t kTableValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};  // of IQ4_NL

// Bytes of a packed weight.
int64_t packed_bytes(Packing packing, int outputs, int depth);

// One of several products of the same rows.
struct PackedWeight {
  Packing packing;
  const uint8_t *data;
  int outputs;
  float *out;  // [rows, outputs]
};

// A product as a kernel computes it.
struct PackedProduct {
  PackedWeight weight;
  const char *integers;  // tiles of the rows, as `PackedKernel::write` makes them
  int rows, depth, digits;
};

// Rows become integers in tiles of some rows each, which lie one after the other.
struct PackedKernel {
  const char *name;
  // Packings of one kind share the integers of rows.
  int (*kind)(Packing);
  // Rows of each tile but the last, of products of `rows` rows.
  int (*tile_rows)(Packing, int rows);
  // Bytes of a tile.
  int64_t (*tile_bytes)(Packing, int rows, int digits, int depth);
  // Writes the integers of a tile with `count` of `rows` rows.
  void (*write)(Packing, int digits, const float *x, int rows, int count, int depth, char *to);
  // Copies the integers of the rows `ids`, which were written as products of one row each, to a tile with `count` of `rows` rows.
  void (*collect)(Packing, int digits, const char *from, const int32_t *ids, int rows, int count, int depth, char *to);
  // Computes the outputs [first, last) of all rows; both are multiples of kPanel.
  void (*multiply)(const PackedProduct &, int first, int last);
};

// Rows of each tile but the last, where a tile has at most `most` of `rows` rows and all are about equal.
inline int tile_size(int rows, int most) {
  const int tiles = (rows + most - 1) / most;
  return (rows + tiles - 1) / tiles;
}

extern const PackedKernel kPackedPortable;
#ifdef __x86_64__
extern const PackedKernel kPackedAvx2, kPackedAvx512;
#elif defined(__aarch64__)
extern const PackedKernel kPackedNeon;
#endif

// The kernel of packed products that goes with a kernel of attention that was asked for by name.
const PackedKernel &packed_kernel_of(const Kernel &named);
// The best kernel of packed products that this processor and operating system run.
const PackedKernel &best_packed_kernel();

// Computes the products of rows [rows, depth] with `count` weights. `digits`: 1 or 2, of 8 bits each.
void multiply(const float *x, int rows, int depth, int digits, const PackedWeight *weights, int count, const PackedKernel &kernel,
              Threads &threads);

// Writes the dequantised rows `ids` of a packed weight, [count, depth]. An id outside [0, outputs) gives NaN.
void gather(Packing packing, const uint8_t *data, int outputs, int depth, const int32_t *ids, int count, float *to, Threads &threads);

// Packs rows as a GGUF file has them, on `threads` threads of its own. `stride`: bytes from a row to the next. Returns false where a
// scale is NaN or infinite.
bool pack(Packing packing, const uint8_t *rows, int64_t stride, int outputs, int depth, uint8_t *to, int threads);

// Rounds `blocks` blocks of 32 floats to Q8_0 as a GGUF file has it, on `threads` threads of its own. `bf16`: the floats are bfloat16, else float32.
void quantize_q8_0(const void *from, bool bf16, int64_t blocks, uint8_t *to, int threads);

}  // namespace chunkattn
