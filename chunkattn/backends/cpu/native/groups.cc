// Cuts products of groups into tasks of threads.
#include "groups.h"

#include <cstring>
#include <vector>

#include "parallel.h"
#include "rounding.h"

namespace chunkattn {
namespace {

constexpr int kPairsAtOnce = 4096;  // whose rows are held in the order of their groups
constexpr int kMostRows = 512;      // of a segment
constexpr int kLeastRows = 8;       // whose product takes as long as their weight takes to arrive
constexpr int kRowsOfPiece = 64;    // that a task copies; a multiple of the rows of a panel
constexpr int kMostPanelRows = 16;
constexpr int kChain = 16 * kShortRows;  // pairs up to which more short calls follow
constexpr int kGranule = 32;        // outputs of a task are a multiple

// Pairs [begin, begin + rows) of one group.
struct Segment {
  int group, begin, rows;
  int64_t place = 0;  // of its rows, in bytes
};

// The segments of all pairs, in batches that are computed one after the other.
template <class T> std::vector<std::vector<Segment>> batches_of(const GroupedRows<T> &given) {
  std::vector<std::vector<Segment>> batches;
  int held = kPairsAtOnce;
  for (int group = 0, begin = 0; group < given.groups; group++)
    for (const int end = begin + given.sizes[group]; begin < end;) {
      const int rows = std::min(kMostRows, end - begin);
      if (held + rows > kPairsAtOnce) batches.emplace_back(), held = 0;
      batches.back().push_back({group, begin, rows});
      begin += rows, held += rows;
    }
  return batches;
}

// A product of a segment with a piece of one of several weights.
struct Task {
  int weight, segment, first, last;
};

// Tasks of about the same work, at least several for each thread.
template <class W> std::vector<Task> tasks_of(const std::vector<Segment> &segments, const W *weights, int count, int threads) {
  int64_t outputs = 0, rows = 0;
  for (int i = 0; i < count; i++) outputs += weights[i].outputs;
  for (const Segment &segment : segments) rows += std::max(kLeastRows, segment.rows);
  const int64_t work = rows * outputs / (threads * kTasksPerThread) + 1;
  std::vector<Task> tasks;
  for (int s = 0; s < int(segments.size()); s++) {
    const int64_t pieces = std::max<int64_t>(2, work / std::max(kLeastRows, segments[s].rows) / kGranule);
    for (int i = 0; i < count; i++)
      for (int64_t first = 0; first < weights[i].outputs; first += pieces * kGranule)
        tasks.push_back({i, s, int(first), int(std::min<int64_t>(weights[i].outputs, first + pieces * kGranule))});
  }
  return tasks;
}

}  // namespace

void multiply_groups(const GroupedRows<uint16_t> &given, const GroupWeight *weights, int count, const Kernel &kernel, Threads &threads) {
  const PanelKernel *const panels = kernel.panels;
  const bool in_chain = given.pairs <= kChain;
  const int64_t row_bytes = int64_t(given.in) * sizeof(uint16_t);
  for (std::vector<Segment> &segments : batches_of(given)) {
    std::vector<std::pair<int, int>> pieces;  // segment, and first of the rows that are copied together
    int64_t bytes = 0;
    const auto in_panels = [&](const Segment &segment) { return panels && segment.rows > kernel.rows; };
    for (int s = 0; s < int(segments.size()); s++) {
      const int unit = in_panels(segments[s]) ? panels->rows : 1;
      segments[s].place = bytes, bytes += divided(segments[s].rows, unit) * unit * row_bytes;
      bytes = (bytes + 63) / 64 * 64;
      for (int first = 0; first < segments[s].rows; first += kRowsOfPiece) pieces.push_back({s, first});
    }
    char *const held = memory_of_thread(bytes);
    parallel(threads, int(pieces.size()), [&](int task) {
      const Segment &segment = segments[pieces[task].first];
      const int first = pieces[task].second, last = std::min(segment.rows, first + kRowsOfPiece);
      const auto row = [&](int i) { return given.x + int64_t(given.rows[segment.begin + i]) * given.in; };
      for (int i = first; i < last;) {
        char *to = held + segment.place + i * row_bytes;
        if (!in_panels(segment)) {
          memcpy(to, row(i++), row_bytes);
          continue;
        }
        const uint16_t *rows[kMostPanelRows];
        const int some = std::min(panels->rows, last - i);
        for (int r = 0; r < some; r++) rows[r] = row(i + r);
        panels->pack(rows, some, given.in, reinterpret_cast<uint32_t *>(to));
        i += some;
      }
    }, in_chain);
    const std::vector<Task> tasks = tasks_of(segments, weights, count, threads.count());
    parallel(threads, int(tasks.size()), [&](int number) {
      const Task &task = tasks[number];
      const Segment &segment = segments[task.segment];
      const GroupWeight &weight = weights[task.weight];
      const char *from = held + segment.place;
      RowProduct part{reinterpret_cast<const uint16_t *>(from), weight.data + int64_t(segment.group) * weight.outputs * given.in,
                      weight.out + int64_t(segment.begin) * weight.outputs, segment.rows, given.in, weight.outputs, false, kOneBlock};
      if (in_panels(segment)) return panels->multiply(part, reinterpret_cast<const uint32_t *>(from), task.first, task.last);
      for (int done = 0; done < segment.rows; done += kernel.rows) {
        part.rows = std::min(kernel.rows, segment.rows - done);
        for (int first = task.first; first < task.last; first += kernel.outputs)
          kernel.multiply(part, first, std::min(task.last, first + kernel.outputs));
        part.x += int64_t(part.rows) * given.in, part.out += int64_t(part.rows) * weight.outputs;
      }
    }, in_chain);
  }
}

void add_factors(const GroupedRows<uint16_t> &given, const GroupFactors *factors, int count, const Kernel &kernel, Threads &threads) {
  const bool in_chain = given.pairs <= kChain;
  thread_local std::vector<float> inner, outer;  // grow and stay
  thread_local std::vector<uint16_t> rounded;
  thread_local std::vector<int32_t> numbers;
  int64_t ranks = 0;
  for (int i = 0; i < count; i++) ranks += factors[i].rank;
  inner.resize(std::max<size_t>(inner.size(), size_t(ranks * given.pairs)));
  std::vector<GroupWeight> first;
  int64_t place = 0;
  for (int i = 0; i < count; place += int64_t(factors[i++].rank) * given.pairs)
    first.push_back({factors[i].inner, factors[i].rank, inner.data() + place});
  multiply_groups(given, first.data(), count, kernel, threads);
  numbers.resize(std::max<size_t>(numbers.size(), 2 * size_t(given.pairs)));
  for (int i = 0; i < 2 * given.pairs; i++) numbers[i] = i;
  std::vector<int32_t> twice(given.sizes, given.sizes + given.groups);
  for (int32_t &size : twice) size *= 2;
  for (int i = 0; i < count; i++) {
    const GroupFactors &of = factors[i];
    // Two outputs of depth 16 share a line of the weight, so each row is multiplied once for its first half and once for the other.
    const int halves = of.depth % 32 ? 2 : 1, depth = of.depth * halves, outputs = of.outputs / halves, rows = given.pairs * halves;
    rounded.assign(size_t(depth) * rows, 0);
    for (int row = 0; row < rows; row++)
      for (int k = 0; k < of.rank; k++)
        rounded[size_t(row) * depth + row % halves * of.depth + k] = rounded_bf16(first[i].out[int64_t(row / halves) * of.rank + k]);
    outer.resize(std::max<size_t>(outer.size(), size_t(of.outputs) * given.pairs));
    const GroupedRows<uint16_t> next{rounded.data(), rows, depth, numbers.data(), halves == 2 ? twice.data() : given.sizes, rows, given.groups};
    const GroupWeight second{of.outer, outputs, outer.data()};
    multiply_groups(next, &second, 1, kernel, threads);
    const float *const products = outer.data();
    constexpr int kRowsOfTask = 16;
    parallel(threads, divided(given.pairs, kRowsOfTask), [&, products](int task) {
      for (int pair = task * kRowsOfTask; pair < std::min(given.pairs, (task + 1) * kRowsOfTask); pair++) {
        float *const to = of.out + int64_t(given.rows[pair]) * of.outputs;
        const float *const from = products + int64_t(pair) * of.outputs;
        if (halves == 1)
          for (int k = 0; k < outputs; k++) to[k] += from[k];
        else
          for (int k = 0; k < outputs; k++) to[2 * k] += from[k], to[2 * k + 1] += from[outputs + k];
      }
    }, in_chain);
  }
}

void multiply_groups(const GroupedRows<float> &given, int digits, const PackedWeight *weights, int count, const PackedKernel &kernel,
                     Threads &threads) {
  const bool in_chain = given.pairs <= kChain;
  const int depth = given.in;
  // The integers of a row, for each kind of weights: the weight that stands for the kind, and their place.
  std::vector<int> kind(count);
  std::vector<int64_t> rows_at(count), row_bytes(count);
  int64_t all_rows = 0;
  const auto aligned = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  for (int i = 0; i < count; i++) {
    while (kernel.kind(weights[kind[i]].packing) != kernel.kind(weights[i].packing)) kind[i]++;
    row_bytes[i] = kernel.tile_bytes(weights[i].packing, 1, digits, depth);
    if (kind[i] == i) rows_at[i] = all_rows, all_rows += aligned(row_bytes[i] * given.count);
  }
  std::vector<std::vector<Segment>> batches = batches_of(given);
  std::vector<std::vector<int64_t>> places;  // of each batch: of a segment's integers of each kind
  int64_t most = 0;
  for (const std::vector<Segment> &segments : batches) {
    int64_t bytes = 0;
    places.emplace_back();
    for (const Segment &segment : segments)
      for (int i = 0; i < count; i++) {
        places.back().push_back(bytes);
        if (kind[i] != i) continue;
        const Packing packing = weights[i].packing;
        bytes += aligned(kernel.tile_bytes(packing, segment.rows, digits, depth) * divided(segment.rows, kernel.tile_rows(packing, segment.rows)));
      }
    most = std::max(most, bytes);
  }
  char *const rows = memory_of_thread(all_rows + most), *const held = rows + all_rows;
  constexpr int kRowsOfTask = 16;
  const int writes = divided(given.count, kRowsOfTask);
  for (int i = 0; i < count; i++)
    if (kind[i] == i)
      parallel(threads, writes, [&](int task) {
        for (int row = task * kRowsOfTask; row < std::min(given.count, (task + 1) * kRowsOfTask); row++)
          kernel.write(weights[i].packing, digits, given.x + int64_t(row) * depth, 1, 1, depth, rows + rows_at[i] + row * row_bytes[i]);
      }, in_chain);
  for (size_t b = 0; b < batches.size(); b++) {
    const std::vector<Segment> &segments = batches[b];
    const auto place = [&](int segment, int weight) { return held + places[b][size_t(segment) * count + kind[weight]]; };
    parallel(threads, int(segments.size()), [&](int s) {
      const Segment &segment = segments[s];
      for (int i = 0; i < count; i++) {
        if (kind[i] != i) continue;
        const Packing packing = weights[i].packing;
        const int size = kernel.tile_rows(packing, segment.rows);
        const int64_t each = kernel.tile_bytes(packing, segment.rows, digits, depth);
        for (int row = 0; row < segment.rows; row += size)
          kernel.collect(packing, digits, rows + rows_at[i], given.rows + segment.begin + row, segment.rows,
                         std::min(size, segment.rows - row), depth, place(s, i) + row / size * each);
      }
    }, in_chain);
    const std::vector<Task> tasks = tasks_of(segments, weights, count, threads.count());
    parallel(threads, int(tasks.size()), [&](int number) {
      const Task &task = tasks[number];
      const Segment &segment = segments[task.segment];
      PackedProduct part{weights[task.weight], place(task.segment, task.weight), segment.rows, depth, digits};
      part.weight.data += packed_bytes(part.weight.packing, part.weight.outputs, depth) * segment.group;
      part.weight.out += int64_t(segment.begin) * part.weight.outputs;
      kernel.multiply(part, task.first, task.last);
    }, in_chain);
  }
}

}  // namespace chunkattn
