// Checks the walks of a step and cuts them into tasks of threads.
#include "recurrence.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "parallel.h"

namespace chunkattn {
namespace {

constexpr int kRowsOfCheck = 16;       // of a task
constexpr int kChannelsOfPiece = 512;  // whose taps a task transposes

enum class Use : uint8_t { none, read, written };

// Notes a use of a slot; returns whether it goes with the uses before it.
bool note(std::vector<Use> &uses, int slot, Use use) {
  Use &of = uses[slot];
  if (of == Use::written || (of == Use::read && use == Use::written)) return false;
  of = use;
  return true;
}

// Writes taps [channels, taps] as [taps, channels], for the channels from `first` on.
void transpose_taps(const float *from, int channels, int taps, int first, float *to) {
  const int last = std::min(channels, first + kChannelsOfPiece);
  for (int t = 0; t < taps; t++)
    for (int c = first; c < last; c++) to[int64_t(t) * channels + c] = from[int64_t(c) * taps + t];
}

// Writes the windows of one input that a walk leaves behind.
void write_windows(const Recurrence &given, const Walk &walk, const uint8_t *finite, int input) {
  const int channels = given.channels(input);
  const auto write = [&](float *to, int tokens) {  // rows are written in ascending order, so `to` may be the window before
    for (int i = 0; i < given.taps - 1; i++, to += channels) {
      const float *from = given.input(walk, finite, input, tokens - (given.taps - 1) + i);
      if (from)
        memmove(to, from, channels * sizeof(float));
      else
        memset(to, 0, channels * sizeof(float));
    }
  };
  if (walk.keeps()) write(given.window(given.slot_window, input, walk.keep_slot), walk.keep_at - walk.at);
  if (walk.slot < 0) return;
  const auto write_slot = [&] {
    if (walk.closed() || walk.source != walk.slot) write(given.window(given.slot_window, input, walk.slot), walk.closed());
  };
  if (walk.continues()) write_slot();
  write(given.window(given.seat_window, input, walk.seat), walk.count);
  if (!walk.continues()) write_slot();
}

}  // namespace

const char *wrong_walks(const Recurrence &given) {
  std::vector<Use> slots(given.slots), seats(given.seats), rows(given.rows);
  const auto within = [](int place, int count) { return place >= -1 && place < count; };
  for (const Walk *walk = given.walks; walk != given.walks + given.num_walks; walk++) {
    if (walk->count < 0) return "a walk has a negative number of tokens";
    if (!walk->count) continue;
    const int64_t end = int64_t(walk->at) + walk->count;
    if (walk->at < 0 || end > INT32_MAX - kRecurrentBlock) return "a walk's tokens are out of range";
    if (walk->row < 0 || int64_t(walk->row) + walk->count > given.rows) return "a walk's rows are out of range";
    for (int row = walk->row; row < walk->row + walk->count; row++)
      if (!note(rows, row, Use::written)) return "a row is in two walks";
    if (!within(walk->source, given.slots) || !within(walk->slot, given.slots)) return "a slot is out of range";
    if (!within(walk->seat, given.seats)) return "a seat is out of range";
    if ((walk->slot < 0) != (walk->seat < 0)) return "a walk has a slot without a seat, or a seat without a slot";
    if (walk->at % kRecurrentBlock && !walk->continues()) return "a walk begins within a block that it does not continue";
    if (walk->seat >= 0 && !note(seats, walk->seat, Use::written)) return "a seat is in two walks";
    if (walk->keep_slot < -1 || walk->keep_slot >= given.slots) return "a slot is out of range";
    if (!walk->keeps()) continue;
    if (walk->keep_at <= walk->at || walk->keep_at > end || (walk->keep_at % kRecurrentBlock && walk->keep_at != end))
      return "a state is kept neither at the end of a block nor at the end of the walk";
  }
  for (const Walk *walk = given.walks; walk != given.walks + given.num_walks; walk++) {
    if (!walk->count) continue;
    bool fits = walk->source < 0 || walk->source == walk->slot || note(slots, walk->source, Use::read);
    fits = fits && (walk->slot < 0 || note(slots, walk->slot, Use::written));
    fits = fits && (!walk->keeps() || note(slots, walk->keep_slot, Use::written));
    if (!fits) return "a slot is written, and used by something else";
  }
  return nullptr;
}

void recur(const Recurrence &given, const Kernel &kernel, Threads &threads) {
  const bool in_chain = given.rows <= kShortRows;
  std::vector<const Walk *> walks;
  for (int i = 0; i < given.num_walks; i++)
    if (given.walks[i].count) walks.push_back(given.walks + i);
  std::stable_sort(walks.begin(), walks.end(), [](const Walk *a, const Walk *b) { return a->count > b->count; });

  const int groups = int(walks.size()) * given.key_heads;
  const int parts = std::min(given.group(), divided(threads.count(), std::max(1, groups)));  // of a key head
  // One part of a key head must not write the keys of a new block while another reads those of the old one.
  std::vector<const Walk *> later;
  for (const Walk *walk : walks)
    if (parts > 1 && walk->leaves_block()) later.push_back(walk);

  int64_t all = 0;
  for (int input = 0; input < 3; input++) all += given.channels(input);
  const int64_t keys = int64_t(later.size()) * given.keys_size();
  const int64_t bytes = (all * given.taps + keys) * int64_t(sizeof(float));
  float *const taps = reinterpret_cast<float *>(memory_of_thread(bytes + given.rows));
  float *const later_keys = taps + all * given.taps;
  uint8_t *const finite = reinterpret_cast<uint8_t *>(later_keys + keys);
  RecurrentTask shared{};
  shared.finite = finite;
  std::vector<std::pair<int, int>> pieces;  // input, and its first channel; -1 and the first row to check
  float *next = taps, *transposed[3];
  for (int input = 0; input < 3; next += int64_t(given.channels(input++)) * given.taps) {
    shared.taps[input] = transposed[input] = next;
    for (int first = 0; first < given.channels(input); first += kChannelsOfPiece) pieces.push_back({input, first});
  }
  for (int row = 0; row < given.rows; row += kRowsOfCheck) pieces.push_back({-1, row});
  const int64_t row_size = int64_t(given.value_heads) * given.value_dim;
  parallel(threads, int(pieces.size()), [&](int number) {
    const auto [input, first] = pieces[number];
    if (input >= 0)
      return transpose_taps(given.conv[input], given.channels(input), given.taps, first, transposed[input]);
    kernel.recurrence.check(given, first, std::min(given.rows, first + kRowsOfCheck), finite);
  }, in_chain);

  std::vector<bool> used(given.rows);
  for (const Walk *walk : walks) std::fill_n(used.begin() + walk->row, walk->count, true);
  for (int row = 0; row < given.rows; row++)
    if (!used[row]) std::fill_n(given.out + row * row_size, row_size, 0.f);

  const int heads = divided(given.group(), parts);  // of a task
  std::vector<RecurrentTask> tasks;
  for (const Walk *walk : walks) {
    const auto place = std::find(later.begin(), later.end(), walk);
    float *const own = walk->seat < 0 ? nullptr : given.keys_of(walk->seat);
    float *const open_keys = place == later.end() ? own : later_keys + (place - later.begin()) * given.keys_size();
    for (int key_head = 0; key_head < given.key_heads; key_head++) {
      shared.walk = walk, shared.key_head = key_head, shared.open_keys = open_keys;
      const int end = (key_head + 1) * given.group();
      for (shared.first = key_head * given.group(); shared.first < end; shared.first = shared.last) {
        shared.last = std::min(end, shared.first + heads);
        tasks.push_back(shared);
        shared.open_keys = nullptr;
      }
    }
  }
  parallel(threads, int(tasks.size()), [&](int number) { kernel.recurrence.compute(given, tasks[number]); }, in_chain);
  for (size_t i = 0; i < later.size(); i++) {
    const int64_t size = given.keys_size();
    std::copy_n(later_keys + i * size, size / kRecurrentBlock * later[i]->open(), given.keys_of(later[i]->seat));
  }
  const auto leave = [&](int number) { write_windows(given, *walks[number / 3], finite, number % 3); };
  parallel(threads, 3 * int(walks.size()), leave, in_chain);
}

}  // namespace chunkattn
