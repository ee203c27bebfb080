// The gated delta rule as a call of XLA's foreign function interface.
#include <algorithm>
#include <vector>

#include "ffi.h"
#include "recurrence.h"

namespace chunkattn {
namespace {

constexpr int kInputs = 10, kArrays = 10;  // of the layer, and of its cache

const ffi::Error kWrongShape = ffi::Error::InvalidArgument("an array of a recurrent layer has a wrong shape");

bool has_shape(const Factors &buffer, const std::vector<int64_t> &shape) {
  const auto found = buffer.dimensions();
  return found.size() == shape.size() && std::equal(shape.begin(), shape.end(), found.begin());
}

// The arguments behind the walks: `Inputs`, then the arrays of `RecurrentCache`, which the results behind the outputs alias.
ffi::Error recur_rows(ffi::ThreadPool pool, Numbers walks, ffi::RemainingArgs args, ffi::Result<Factors> out,
                      ffi::RemainingRets arrays) {
  if (args.size() != kInputs + kArrays || arrays.size() != kArrays)
    return ffi::Error::InvalidArgument("a recurrent layer has ten inputs, and ten arrays in its cache");
  const float *inputs[kInputs];
  float *cache[kArrays];
  for (int i = 0; i < kInputs; i++) {
    const auto from = args.get<Factors>(i);
    if (!from) return ffi::Error::InvalidArgument("inputs of a recurrent layer are float32");
    inputs[i] = from->typed_data();
  }
  for (int i = 0; i < kArrays; i++) {
    const auto from = args.get<Factors>(kInputs + i);
    auto to = arrays.get<Factors>(i);
    if (!from || !to) return ffi::Error::InvalidArgument("the cache of a recurrent layer is float32");
    if (from->typed_data() != (*to)->typed_data())
      return ffi::Error::Internal("XLA copied the cache, which must be written in place");
    cache[i] = (*to)->typed_data();
  }

  const auto shape = [&](int argument) { return args.get<Factors>(argument)->dimensions(); };
  const auto states = shape(kInputs), keys = shape(kInputs + 4), windows = shape(kInputs + 1), produced = out->dimensions();
  if (states.size() != 4 || keys.size() != 4 || windows.size() != 4 || produced.size() != 3)
    return ffi::Error::InvalidArgument("states, keys and windows must have four axes, and outputs three");
  const int64_t rows = produced[0], slots = states[0], value_heads = states[1], dk = states[2], dv = states[3], seats = keys[0];
  const int64_t key_heads = keys[2], before = windows[1], key_size = key_heads * dk, value_size = value_heads * dv;
  if (key_heads < 1 || value_heads < 1 || value_heads % key_heads || dk < 1 || dv < 1)
    return ffi::Error::InvalidArgument("value heads must be a multiple of the key heads");
  if (before < 1 || before >= kMostTaps) return ffi::Error::InvalidArgument("a convolution must have 2 to 16 taps");
  const std::vector<int64_t> expected[] = {
      {rows, key_size}, {rows, key_size}, {rows, value_size}, {rows, value_heads}, {rows, value_heads},
      {key_size, before + 1}, {key_size, before + 1}, {value_size, before + 1}, {value_heads}, {value_heads},
      {slots, value_heads, dk, dv},
      {slots, before, key_heads, dk}, {slots, before, key_heads, dk}, {slots, before, value_heads, dv},
      {seats, kRecurrentBlock, key_heads, dk}, {seats, kRecurrentBlock, value_heads, dv},
      {seats, kRecurrentBlock, value_heads},
      {seats, before, key_heads, dk}, {seats, before, key_heads, dk}, {seats, before, value_heads, dv}};
  for (int i = 0; i < kInputs + kArrays; i++)
    if (!has_shape(*args.get<Factors>(i), expected[i])) return kWrongShape;
  for (int i = 0; i < kArrays; i++)
    if (!has_shape(**arrays.get<Factors>(i), expected[kInputs + i])) return kWrongShape;
  if (!has_shape(*out, {rows, value_heads, dv})) return kWrongShape;
  if (walks.dimensions().size() != 2 || walks.dimensions()[1] != sizeof(Walk) / sizeof(int32_t))
    return ffi::Error::InvalidArgument("walks must be [walks, 8]");

  Recurrence given{};
  given.rows = int(rows), given.key_heads = int(key_heads), given.value_heads = int(value_heads), given.key_dim = int(dk);
  given.value_dim = int(dv), given.taps = int(before) + 1, given.slots = int(slots), given.seats = int(seats);
  given.walks = reinterpret_cast<const Walk *>(walks.typed_data()), given.num_walks = int(walks.dimensions()[0]);
  for (int i = 0; i < 3; i++) given.inputs[i] = inputs[i], given.conv[i] = inputs[5 + i];
  given.b = inputs[3], given.a = inputs[4], given.a_log = inputs[8], given.dt_bias = inputs[9], given.out = out->typed_data();
  given.state = cache[0], given.keys = cache[4], given.values = cache[5], given.decay = cache[6];
  for (int i = 0; i < 3; i++) given.slot_window[i] = cache[1 + i], given.seat_window[i] = cache[7 + i];
  if (const char *why = wrong_walks(given)) return ffi::Error::InvalidArgument(why);
  XlaThreads threads(pool);
  recur(given, current(), threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace chunkattn

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnRecurrence, chunkattn::recur_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<chunkattn::Numbers>()
                                  .RemainingArgs()
                                  .Ret<chunkattn::Factors>()
                                  .RemainingRets());
#pragma GCC visibility pop
