// Packs the blocks of a GGUF file, and rounds floats to such blocks. Threads of its own: loading runs outside of XLA.
//
// Source of the blocks: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "packed.h"
#include "rounding.h"

namespace chunkattn {
namespace {

constexpr int kTaskBytes = 1 << 18;  // of the rows of a task, at least

// Calls `work(0)` to `work(count - 1)` on `threads` threads.
template <class Work> void on_threads(int threads, int count, const Work &work) {
  std::atomic<int> next{0};
  const auto loop = [&] {
    for (int i; (i = next.fetch_add(1)) < count;) work(i);
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < std::min(count, threads); i++) helpers.emplace_back(loop);
  loop();
  for (auto &helper : helpers) helper.join();
}

uint32_t word(const uint8_t *from) {
  uint32_t x;
  memcpy(&x, from, sizeof x);
  return x;
}
void put(uint8_t *to, uint32_t x) { memcpy(to, &x, sizeof x); }

bool copy_half(const uint8_t *from, uint8_t *to) {  // returns whether it is finite
  memcpy(to, from, 2);
  return (from[1] & 0x7c) != 0x7c;
}

// Bit 0 of each byte, together.
uint32_t gathered(uint32_t x) { return (x & 0x01010101) * 0x01020408 >> 24; }

// Writes the fifth bits of four codes of an output. Its lane is never the first to write a byte that another wrote before: the bytes
// begin as zero.
void put_fifth(uint8_t *codes, int j, int lane, uint32_t bits) { codes[256 + j * 8 + lane / 2] |= bits << lane % 2 * 4; }

// A block of 32 codes of 4 bits and their fifth bits, as the formats of blocks of 32 values have them.
void put_nibbles(const uint8_t *from, uint8_t *codes, int lane) {
  for (int j = 0; j < 4; j++) put(codes + j * 64 + lane * 4, word(from + 4 * j));
}
void put_fifths(uint32_t bits, uint8_t *codes, int lane) {
  for (int j = 0; j < 8; j++) put_fifth(codes, j, lane, bits >> 4 * j & 15);
}

// Codes of 32 values that two runs of 16 bytes hold in their lower or upper halves.
void put_halves(const uint8_t *from, bool upper, uint8_t *codes, int lane) {
  constexpr uint32_t kLow = 0x0f0f0f0f;
  for (int j = 0; j < 4; j++) {
    const uint32_t first = word(from + 4 * j), second = word(from + 16 + 4 * j);
    put(codes + j * 64 + lane * 4, upper ? (first >> 4 & kLow) | (second & ~kLow) : (first & kLow) | (second & kLow) << 4);
  }
}

// Blocks of the file: 32 values.
template <class L> struct Source {
  static constexpr int kMinimumAt = 2, kFifths = L::kMinimum ? 4 : 2, kCodesAt = kFifths + (L::kBits == 5 ? 4 : 0);
  static constexpr int kBytes = kCodesAt + (L::kBits == 8 ? 32 : 16);
  static bool put_piece(const uint8_t *from, uint8_t *piece, int lane) {
    uint8_t *codes = piece + L::kHead;
    bool finite = copy_half(from, piece + lane * 2);
    if (L::kMinimum) finite &= copy_half(from + kMinimumAt, piece + 32 + lane * 2);
    if (L::kBits == 8)
      for (int j = 0; j < 8; j++) put(codes + j * 64 + lane * 4, word(from + kCodesAt + 4 * j) ^ 0x80808080);
    else
      put_nibbles(from + kCodesAt, codes, lane);
    if (L::kBits == 5) put_fifths(word(from + kFifths), codes, lane);
    return finite;
  }
};

// Blocks of 256 values of Q4_K and Q5_K: two f16, 12 bytes of scales and minima of 6 bits, the fifth bits, the codes.
template <class L> struct SourceOfFactors {
  static constexpr int kFifths = 16, kCodesAt = kFifths + (L::kBits == 5 ? 32 : 0), kBytes = kCodesAt + 128;
  static bool put_piece(const uint8_t *from, uint8_t *piece, int lane) {
    bool finite = copy_half(from, piece + lane * 2);
    finite &= copy_half(from + 2, piece + 32 + lane * 2);
    const uint8_t *six = from + 4;
    for (int block = 0; block < 8; block++) {
      uint8_t *factors = piece + L::kFactors + block * 32 + lane, *codes = piece + L::kHead + block * L::kCodes;
      factors[0] = block < 4 ? six[block] & 63 : (six[block + 4] & 15) | six[block - 4] >> 6 << 4;
      factors[16] = block < 4 ? six[block + 4] & 63 : six[block + 4] >> 4 | six[block] >> 6 << 4;
      put_halves(from + kCodesAt + block / 2 * 32, block % 2, codes, lane);
      if (L::kBits == 5)
        for (int j = 0; j < 8; j++) put_fifth(codes, j, lane, gathered(word(from + kFifths + 4 * j) >> block));
    }
    return finite;
  }
};
template <> struct Source<Q4K> : SourceOfFactors<Q4K> {};
template <> struct Source<Q5K> : SourceOfFactors<Q5K> {};

// Blocks of 256 values of Q6_K: lower 4 bits, upper 2 bits, 16 scales of 8 bits, f16.
template <> struct Source<Q6K> {
  static constexpr int kHigh = 128, kFactors = 192, kScale = 208, kBytes = 210;
  static bool put_piece(const uint8_t *from, uint8_t *piece, int lane) {
    for (int block = 0; block < 8; block++) {
      uint8_t *factors = piece + Q6K::kFactors + block * 32 + lane, *codes = piece + Q6K::kHead + block * Q6K::kCodes;
      factors[0] = from[kFactors + 2 * block], factors[16] = from[kFactors + 2 * block + 1];
      const int part = block % 4;  // of 128 values
      put_halves(from + block / 4 * 64 + part % 2 * 32, part >= 2, codes, lane);
      const uint8_t *high = from + kHigh + block / 4 * 32;
      for (int half = 0; half < 2; half++) {
        uint32_t bits = 0;
        for (int j = 0; j < 4; j++) bits |= (word(high + 16 * half + 4 * j) >> 2 * part & 0x03030303) << 2 * j;
        put(codes + 256 + half * 64 + lane * 4, bits);
      }
    }
    return copy_half(from + kScale, piece + lane * 2);
  }
};

template <class L> bool pack_panel(const uint8_t *rows, int64_t stride, int depth, uint8_t *piece) {
  bool finite = true;
  for (int k = 0; k < depth / L::kDepth; k++, piece += L::kPiece) {
    if (L::kBits == 5) memset(piece, 0, L::kPiece);
    for (int lane = 0; lane < kPanel; lane++) finite &= Source<L>::put_piece(rows + lane * stride + int64_t(k) * Source<L>::kBytes, piece, lane);
  }
  return finite;
}

void quantize_block(const float (&x)[kBlock], uint8_t *to) {
  int32_t bits[kBlock], most = 0;
  memcpy(bits, x, sizeof x);
  for (int i = 0; i < kBlock; i++) most = std::max(most, bits[i] & 0x7fffffff);
  const bool finite = most < 0x7f800000;
  float magnitude;
  memcpy(&magnitude, &most, sizeof most);
  const float scale = magnitude / 127, inverse = scale > 0 ? 1 / scale : 0, by = std::isfinite(inverse) && finite ? inverse : 0;
  const uint16_t half = finite ? rounded_f16(scale) : 0x7e00;
  memcpy(to, &half, sizeof half);
  if (!finite) return void(memset(to + 2, 0, kBlock));
  for (int i = 0; i < kBlock; i++) {  // rounds halves away from zero, as gguf does
    const float away = std::fabs(x[i]) * by;
    const int whole = int(away), rounded = whole + int(2 * (away - float(whole)));
    to[2 + i] = uint8_t(bits[i] < 0 ? -rounded : rounded);
  }
}

}  // namespace

bool pack(Packing packing, const uint8_t *rows, int64_t stride, int outputs, int depth, uint8_t *to, int threads) {
  std::atomic<bool> finite{true};
  const int panels = outputs / kPanel, each = int(std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, stride * kPanel)));
  const int64_t bytes = packed_bytes(packing, kPanel, depth);
  on_threads(threads, (panels + each - 1) / each, [&](int task) {
    bool all = true;
    for (int panel = task * each; panel < std::min(panels, (task + 1) * each); panel++)
      with_layout(packing, [&](auto layout) {
        all &= pack_panel<decltype(layout)>(rows + panel * kPanel * stride, stride, depth, to + panel * bytes);
      });
    if (!all) finite = false;
  });
  return finite;
}

void quantize_q8_0(const void *from, bool bf16, int64_t blocks, uint8_t *to, int threads) {
  constexpr int kEach = 4096;
  on_threads(threads, int((blocks + kEach - 1) / kEach), [&](int task) {
    for (int64_t block = int64_t(task) * kEach; block < std::min(blocks, int64_t(task + 1) * kEach); block++) {
      float x[kBlock];
      if (bf16)
        for (int i = 0; i < kBlock; i++) {
          const uint32_t bits = uint32_t(static_cast<const uint16_t *>(from)[block * kBlock + i]) << 16;
          memcpy(x + i, &bits, sizeof bits);
        }
      else
        memcpy(x, static_cast<const float *>(from) + block * kBlock, sizeof x);
      quantize_block(x, to + block * 34);
    }
  });
}

}  // namespace chunkattn
