// One call of an operator, and the interface between scheduling and the kernels of an instruction set.
//
// Axes as in backends/base.py: T rows, H query heads, G KV heads, D head size, S sequences, W entries of a page table, P
// pages. A row folded with a query head is called a line: the query heads of a KV head are lines of one matrix.
#pragma once
#include <cstdint>

namespace chunkattn {

enum class Format : int { f32, bf16, f16, fp8 };  // fp8: e4m3fn

struct Step {
  Format format, cache_format;  // of q, and of k, v and the pools
  const void *q, *k, *v;        // [T, H, D], [T, G, D]
  void *keys, *values;          // pools, [P, G, block_size, D]
  void *out;                    // [T, H, D]: bf16 where q is, else float32
  int padded_rows, num_rows, heads, kv_heads, head_dim, block_size, width;
  const int32_t *row_seq, *row_slot, *row_start;         // [T]
  const int32_t *prefix_end, *block_tables, *page_len;   // [S], [S, W], [S, W]
  const int32_t *question_start;                         // [S]; null in engines without a weighing
  const float *temperature, *chunk_scale;                // [S]
  const int32_t *page_position;                          // [S, W]; null without a window
  int window;                                            // in positions; 0: none
  float scale;
  bool in_chain;  // native products follow at once

  int position(int sequence, int slot) const {
    return page_position[int64_t(sequence) * width + slot / block_size] + slot % block_size;
  }
  int lines_per_row() const { return heads / kv_heads; }
  // Lines are padded to whole pairs of 16 values.
  int padded_dim() const { return (head_dim + 31) / 32 * 32; }
};

// Rows [row, row + rows) of one sequence, and one KV head. Rows of an item are all weighed or all left as they are.
struct Item {
  int row, rows, kv_head;
  bool weighed;
};

// A portion of the slots that rows [row, row + rows) of an item see: of the slots [begin, end), a row sees the valid ones up to
// its own that lie in its window. `chunks`: the rows are weighed, and the slots are the chunks'.
struct Portion {
  int row, rows, kv_head, begin, end;
  bool chunks;
};

// Softmax over some slots, before the division: scores are in units of log2, and a line that saw no slot has total 0.
struct State {
  float *maximum, *total, *values;  // [lines], [lines], [lines, padded_dim]
};

// A row's softmax is summed portion by portion, and a portion tile by tile. Portions begin at slot 0, at the start of the row's
// own part and every kPortionSlots from there, so that no neighbour and no number of threads changes a bit.
constexpr int kTileSlots = 256;
constexpr int kPortionSlots = 2048;
constexpr int kMaxLines = 256;    // of an item
constexpr int kLineGranule = 16;  // lines of a state are padded to a multiple, as those of the widest product are

// out [rows, outputs] = x [rows, in] * weight [outputs, in], bfloat16 to float32. Other kernels than `amx` compute at most 16 rows,
// whose `in` is a multiple of 32.
struct RowProduct {
  const uint16_t *x, *weight;
  float *out;
  int rows, in, outputs;
  // The order of a sum, for kernels that have several.
  bool ascending;  // value by value, or the second value of each pair first
  int block;       // depth of the sums that are added in order; a multiple of 32
};
constexpr int kOneBlock = 1 << 30;  // a block that holds every depth

// The product of rows with a head, of which only the logits of `labels` are kept, and sums over parts of the outputs.
struct RowReading {
  RowProduct product;     // its `out` is not written
  const int32_t *labels;  // [rows, num_labels]
  int num_labels;
  float *logits;     // [rows, num_labels]; of labels beyond the outputs as they were
  float *parts;      // [rows, parts_of_row, 2]: maximum, and the sum of exponentials relative to it
  int parts_of_row;
};

// out [rows, features] = RMSNorm of x, or of `sum` = x + delta where delta is given, times `scale` [features].
struct Norm {
  const float *x, *delta;
  float *sum;
  const void *scale;
  Format scale_format, format;  // of scale, and of out
  void *out;
  int rows, features;
  float epsilon;
};

// out = silu(gate) * up, value by value.
struct Gate {
  const float *gate, *up;
  Format format;  // of out
  void *out;
  int64_t values;
};

// Queries, keys and values as the products of a layer have them. Heads of queries and keys are normalised, unless their scale is
// null, and rotated.
struct Heads {
  const float *q, *k, *v;          // [T, H, D], [T, G, D]
  const void *q_scale, *k_scale;   // [D]
  Format scale_format;
  const float *cos, *sin;          // [T, D / 2]
  float epsilon;
  void *queries;                   // [T, H, D] in the format of the step
  uint8_t *finite;                 // [T, G]: whether all values of keys and values are finite
};

struct RowKernel {
  // These compute rows, or values, [first, last).
  void (*norm)(const Norm &, int first, int last);
  void (*gate)(const Gate &, int64_t first, int64_t last);
  // Finds the first of the largest logits of a row, and whether all are finite.
  void (*largest)(const float *logits, int count, int32_t *index, bool *finite);
  // Writes queries, and keys and values to the pools, with zeros for what is not finite.
  void (*prepare)(const Step &, const Heads &, int first, int last);
};

// Products of many rows, which lie in panels of `rows` rows. The `in` of a product is a multiple of 32.
struct PanelKernel {
  int rows;
  // Packs `count` rows of `in` values as a panel, which takes as much memory as `rows` rows.
  void (*pack)(const uint16_t *const *rows, int count, int in, uint32_t *to);
  // Computes the outputs [first, last) of all rows, as `Kernel::multiply` does in one block. The `x` of the product is not read.
  void (*multiply)(const RowProduct &, const uint32_t *panels, int first, int last);
};

struct RecurrenceKernel;  // recurrence.h

struct Kernel {
  const char *name;
  // Adds a portion to the empty state of its rows' lines.
  void (*attend)(const Step &, const Portion &, const State &);
  // Computes the outputs [first, last) of all rows.
  void (*multiply)(const RowProduct &, int first, int last);
  int rows, outputs;  // of a call of `multiply` at most
  // Writes two values for a row of logits; see normaliser.h.
  void (*normalise)(const float *logits, int count, float *to);
  // Computes the parts [first, last) of `outputs` outputs each, and the logits of their labels. Null in other kernels than `amx`.
  void (*read)(const RowReading &, int first, int last);
  const RowKernel &rows_alone;
  const PanelKernel *panels;  // null in kernels other than `avx512_bf16`
  const RecurrenceKernel &recurrence;
};

extern const Kernel kPortable;
#ifdef __x86_64__
extern const Kernel kAvx2, kAvx512Bf16, kAmx;
#endif

}  // namespace chunkattn
