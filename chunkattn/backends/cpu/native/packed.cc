// Cuts packed products into tasks of threads, and reads rows of packed weights.
#include "packed.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "parallel.h"

namespace chunkattn {
namespace {

constexpr int kRowsAtOnce = 512;         // whose integers are held at a time
constexpr int kWrittenAlone = 1 << 15;   // values whose integers one thread makes sooner than two
constexpr int kLeastPanels = 2;          // of a task

struct Range {
  int weight, first, last;  // outputs
};

// Ranges of outputs of about the same size, pairs of panels where there are many rows.
std::vector<Range> cut(const PackedWeight *weights, int count, int threads) {
  int panels = 0;
  for (int i = 0; i < count; i++) panels += weights[i].outputs / kPanel;
  const int each = divided(std::max(kLeastPanels, divided(panels, threads * kTasksPerThread)), 2) * 2 * kPanel;
  std::vector<Range> ranges;
  for (int i = 0; i < count; i++)
    for (int first = 0; first < weights[i].outputs; first += each) ranges.push_back({i, first, std::min(weights[i].outputs, first + each)});
  return ranges;
}

float half(const uint8_t *from) {
  uint16_t bits;
  memcpy(&bits, from, sizeof bits);
  const float magnitude = bits & 0x7c00 ? std::ldexp(float((bits & 0x3ff) | 0x400), (bits >> 10 & 31) - 25) : std::ldexp(float(bits & 0x3ff), -24);
  return bits >> 15 ? -magnitude : magnitude;
}

// Row `output` of a packed weight.
template <class L> void read_row(const uint8_t *data, int output, int depth, float *to) {
  const int lane = output % kPanel;
  const uint8_t *piece = data + int64_t(output / kPanel) * (depth / L::kDepth) * L::kPiece;
  for (int k = 0; k < depth; k += L::kDepth, piece += L::kPiece) {
    const float scale = half(piece + lane * 2), minimum = L::kMinimum ? half(piece + 32 + lane * 2) : 0;
    for (int block = 0; block < L::kBlocks; block++, to += kBlock) {
      const uint8_t *codes = piece + L::kHead + block * L::kCodes, *factors = piece + L::kFactors + block * 32 + lane;
      float of[2] = {scale, scale}, least = minimum;
      if (L::kScales == Scales::factors) of[0] = of[1] = scale * factors[0], least = -(minimum * factors[16]);
      if (L::kScales == Scales::halves) of[0] = scale * int8_t(factors[0]), of[1] = scale * int8_t(factors[16]);
      for (int i = 0; i < kBlock; i++) {
        const int j = i / 4, at = lane * 4 + i % 4;
        int code = L::kBits == 8 ? codes[j * 64 + at] : codes[j % 4 * 64 + at] >> (j < 4 ? 0 : 4) & 15;
        if (L::kBits == 5) code |= (codes[256 + j * 8 + at / 8] >> at % 8 & 1) << 4;
        if (L::kBits == 6) code |= (codes[256 + j / 4 * 64 + at] >> 2 * (j % 4) & 3) << 4;
        const float value = of[i / 16] * float(L::kTable ? kTableValues[code & 15] : code - L::kZero);
        to[i] = L::kMinimum ? value + least : value;
      }
    }
  }
}

}  // namespace

int64_t packed_bytes(Packing packing, int outputs, int depth) {
  return with_layout(packing, [&](auto layout) { return int64_t(outputs / kPanel) * (depth / layout.kDepth) * layout.kPiece; });
}

void multiply(const float *x, int rows, int depth, int digits, const PackedWeight *weights, int count, const PackedKernel &kernel,
              Threads &threads) {
  const std::vector<Range> ranges = cut(weights, count, threads.count());
  std::vector<int64_t> begin(count, -1);  // place of the integers of each weight
  for (int row = 0; row < rows; row += kRowsAtOnce) {
    const int now = std::min(kRowsAtOnce, rows - row);
    const float *from = x + int64_t(row) * depth;
    int64_t bytes = 0;
    std::vector<int> writers;
    for (int i = 0; i < count; i++) {
      const Packing packing = weights[i].packing;
      int same = 0;
      while (kernel.kind(weights[same].packing) != kernel.kind(packing)) same++;
      begin[i] = same < i ? begin[same] : bytes;
      if (same < i) continue;
      bytes += kernel.tile_bytes(packing, now, digits, depth) * divided(now, kernel.tile_rows(packing, now));
      bytes = (bytes + 63) / 64 * 64, writers.push_back(i);
    }
    char *integers = memory_of_thread(bytes);
    for (int i : writers) {
      const Packing packing = weights[i].packing;
      const int size = kernel.tile_rows(packing, now), tiles = divided(now, size);
      const int64_t each = kernel.tile_bytes(packing, now, digits, depth);
      const int tasks = int64_t(now) * depth <= kWrittenAlone ? 1 : std::min(tiles, threads.count() * kTasksPerThread);
      const auto write = [&](int task) {
        for (int tile = int(int64_t(tiles) * task / tasks); tile < int(int64_t(tiles) * (task + 1) / tasks); tile++)
          kernel.write(packing, digits, from + int64_t(tile) * size * depth, now, std::min(size, now - tile * size), depth,
                       integers + begin[i] + tile * each);
      };
      parallel(threads, tasks, write, rows <= kShortRows);
    }
    const auto multiply_range = [&](int task) {
      const Range &range = ranges[task];
      PackedProduct part{weights[range.weight], integers + begin[range.weight], now, depth, digits};
      part.weight.out += int64_t(row) * part.weight.outputs;
      kernel.multiply(part, range.first, range.last);
    };
    parallel(threads, int(ranges.size()), multiply_range, rows <= kShortRows);
  }
}

void gather(Packing packing, const uint8_t *data, int outputs, int depth, const int32_t *ids, int count, float *to, Threads &threads) {
  constexpr int kEach = 16;
  parallel(threads, divided(count, kEach), [&](int task) {
    for (int i = task * kEach; i < std::min(count, (task + 1) * kEach); i++) {
      float *row = to + int64_t(i) * depth;
      if (ids[i] < 0 || ids[i] >= outputs)
        std::fill_n(row, depth, std::numeric_limits<float>::quiet_NaN());
      else
        with_layout(packing, [&](auto layout) { read_row<decltype(layout)>(data, ids[i], depth, row); });
    }
  });
}

}  // namespace chunkattn
