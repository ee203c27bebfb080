// The gated delta rule over states in slots: values and names as in backends/recurrence.py, whose axes the comments use.
//
// The three inputs of the convolution are numbered: 0 queries, 1 keys, 2 values.
#pragma once
#include <algorithm>

#include "attention.h"

namespace chunkattn {

constexpr int kRecurrentBlock = 64;  // tokens of a block of the chunkwise form
constexpr int kMostTaps = 16;

// Tokens `at` to `at + count - 1` of a part.
struct Walk {
  int32_t row, count, at, source, slot, seat, keep_at, keep_slot;

  bool keeps() const { return keep_at && keep_slot >= 0; }
  // Whether the rows of the open block, and the window, come from the seat.
  bool continues() const { return slot >= 0 && source == slot && at > 0; }
  // Whether it ends in another block than one of which the seat has rows.
  bool leaves_block() const { return continues() && at % kRecurrentBlock && closed(); }
  // Rows of the open block behind the walk.
  int open() const { return (at + count) % kRecurrentBlock; }
  // Tokens of the walk up to the last end of a block; 0 for none.
  int closed() const { return std::max(0, int((int64_t(at) + count) / kRecurrentBlock * kRecurrentBlock - at)); }
};

// One layer in one step.
struct Recurrence {
  int rows, key_heads, value_heads, key_dim, value_dim, taps;
  int slots, seats;
  const Walk *walks;
  int num_walks;
  const float *inputs[3], *b, *a;  // [T, channels], [T, Hv]
  const float *conv[3];            // [channels, taps]
  const float *a_log, *dt_bias;    // [Hv]
  float *out;                      // [T, Hv, dv]
  float *state;                    // [N, Hv, dk, dv]
  float *slot_window[3];           // [N, taps - 1, channels]
  float *keys, *values, *decay;    // [M, block, Hk, dk], [M, block, Hv, dv], [M, block, Hv]
  float *seat_window[3];           // [M, taps - 1, channels]

  int channels(int input) const { return input < 2 ? key_heads * key_dim : value_heads * value_dim; }
  int group() const { return value_heads / key_heads; }
  int64_t state_size() const { return int64_t(key_dim) * value_dim; }
  float *state_of(int slot, int head) const { return state + (int64_t(slot) * value_heads + head) * state_size(); }
  int64_t keys_size() const { return int64_t(kRecurrentBlock) * key_heads * key_dim; }  // of a seat
  float *keys_of(int seat) const { return keys + seat * keys_size(); }
  float *window(float *const (&windows)[3], int input, int place) const {
    return windows[input] + int64_t(place) * (taps - 1) * channels(input);
  }
  // The window before a walk; null for zeros.
  const float *window_before(const Walk &walk, int input) const {
    if (walk.continues()) return window(seat_window, input, walk.seat);
    return walk.source < 0 ? nullptr : window(slot_window, input, walk.source);
  }
  // An input of a walk's token, [channels]; from -(taps - 1) on, those before the walk. Null for zeros.
  const float *input(const Walk &walk, const uint8_t *finite, int input, int token) const {
    const int64_t size = channels(input);
    if (token >= 0) return finite[walk.row + token] ? inputs[input] + (walk.row + token) * size : nullptr;
    const float *before = window_before(walk, input);
    return before ? before + (taps - 1 + token) * size : nullptr;
  }
};

// The value heads [first, last) of a key head, over one walk.
struct RecurrentTask {
  const Walk *walk;
  int key_head, first, last;
  const uint8_t *finite;  // [T]: whether all inputs of a row are finite
  const float *taps[3];   // [taps, channels]
  float *open_keys;       // [block, Hk, dk]: gets the keys of the open block's new rows; null for none
};

struct RecurrenceKernel {
  // Finds whether all inputs of the rows [first, last) are finite.
  void (*check)(const Recurrence &, int first, int last, uint8_t *finite);
  // Computes outputs, states, and the rows of the open block.
  void (*compute)(const Recurrence &, const RecurrentTask &);
};

// Returns why the walks are wrong, or null.
const char *wrong_walks(const Recurrence &given);

// Computes a layer. Rows in no walk become zero.
void recur(const Recurrence &given, const Kernel &kernel, Threads &threads);

}  // namespace chunkattn
