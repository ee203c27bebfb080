// Readouts: the logits of a few labels of every row and the normaliser of all its logits, which are never written to memory.
//
// Tiles hold an output of 16 rows side by side, so that maxima and sums of exponentials need no transposing. They are kept for
// every kOutputsOfCall outputs, whatever a call computes, so that no number of threads changes a bit.
// Source: online softmax, arXiv:1805.02867.
#pragma once
#include <limits>
#include <vector>

#include "tile_rows.h"

namespace chunkattn {
namespace {

// Adds the outputs [count][16 rows] of up to two tiles, `apart` floats from each other, to the maxima and to the sums of the
// exponentials relative to them. The sums become NaN where an output is not finite.
inline void add_outputs(const float *tiles, int apart, int count, float *maximum, float *total) {
  constexpr int kSumsAtOnce = 4;  // since each waits for its last addition
  const auto output = [&](int i) { return read<Floats>(tiles + i / kTile * apart + i % kTile * kTile); };
  const Floats before = read<Floats>(maximum), by = splat(1.44269504f);
  Floats most = before, odd = {}, sums[kSumsAtOnce] = {};
  for (int i = 0; i < count; i++) most = larger(output(i), most), odd += output(i) * 0.f;
  for (int i = 0; i < count; i++) sums[i % kSumsAtOnce] += exp2_of((output(i) - most) * by);
  const Floats sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  write(total, read<Floats>(total) * exp2_of((before - most) * by) + sum + odd);
  write(maximum, most);
}

struct Label {
  int id, row, place;  // place: in `RowReading::logits`
};

// Returns the labels in [first, last) of the rows, ascending.
inline std::vector<Label> labels_of(const RowReading &given, int first, int last) {
  std::vector<Label> found;
  for (int row = 0, place = 0; row < given.product.rows; row++)
    for (int i = 0; i < given.num_labels; i++, place++)
      if (given.labels[place] >= first && given.labels[place] < last) found.push_back({given.labels[place], row, place});
  std::sort(found.begin(), found.end(), [](const Label &a, const Label &b) { return a.id < b.id; });
  return found;
}

// Reads the outputs of the parts [first, last).
void read_outputs(const RowReading &given, int first, int last) {
  TileRegisters registers;
  const RowProduct &product = given.product;
  const int in = product.in, groups = (product.rows + kTile - 1) / kTile, pairs = (groups + 1) / 2, padded_rows = groups * kTile;
  const int depth = std::max(1, (in + 31) / 32) * 32;
  const size_t group = size_t(depth) / 2 * kTile;
  Arena arena(Arena::bytes<uint32_t>(group * groups) + Arena::bytes<uint16_t>(size_t(depth) * kPair) + Arena::bytes<float>(kSums) +
              2 * Arena::bytes<float>(padded_rows));
  uint32_t *rows = arena.take<uint32_t>(group * groups);
  uint16_t *copy = arena.take<uint16_t>(size_t(depth) * kPair);
  float *sums = arena.take<float>(kSums), *maximum = arena.take<float>(padded_rows), *total = arena.take<float>(padded_rows);
  for (int g = 0; g < groups; g++) pack_rows<kTile>(product, g * kTile, 0, in, rows + g * group);
  const int end = std::min(product.outputs, last * kOutputsOfCall);
  const std::vector<Label> labels = labels_of(given, first * kOutputsOfCall, end);
  auto label = labels.begin();
  for (int part = first; part < last; part++) {
    std::fill_n(maximum, padded_rows, std::numeric_limits<float>::lowest());
    std::fill_n(total, padded_rows, 0.f);
    for (int output = part * kOutputsOfCall; output < std::min(end, (part + 1) * kOutputsOfCall); output += kPair) {
      const int left = std::min(kPair, end - output);
      Part weight = part_of(product, 0, in, output, end, pairs, true, copy);
      auto after = label;
      while (after != labels.end() && after->id < output + left) after++;
      for (int g = 0; g < groups; g += 2) {
        const bool both = g + 1 < groups;
        sum_pairs(weight, rows + g * group, left > kTile, both, sums);
        for (int r = 0; r <= both; r++) {
          const int row = (g + r) * kTile;
          add_outputs(sums + r * kTile * kTile, 2 * kTile * kTile, left, maximum + row, total + row);
          for (auto l = label; l != after; l++) {
            const int o = l->id - output, of = l->row - row;
            if (of >= 0 && of < kTile) given.logits[l->place] = sums[(o / kTile * 2 + r) * kTile * kTile + o % kTile * kTile + of];
          }
        }
      }
      label = after;
    }
    for (int row = 0; row < product.rows; row++) {
      float *to = given.parts + 2 * (int64_t(row) * given.parts_of_row + part);
      to[0] = maximum[row], to[1] = total[row];
    }
  }
}

}  // namespace
}  // namespace chunkattn
