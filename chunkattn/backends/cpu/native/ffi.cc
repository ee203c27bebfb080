// The operators as calls of XLA's foreign function interface, and the functions that Python reads by ctypes.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "attention.h"
#include "ffi.h"

namespace chunkattn {
namespace {

std::atomic<const Kernel *> chosen{nullptr};
std::atomic<const PackedKernel *> chosen_packed{nullptr};

}  // namespace

const Kernel &current() {
  const Kernel *kernel = chosen.load(std::memory_order_relaxed);
  return kernel ? *kernel : *best_kernel();
}

const PackedKernel &current_packed() {
  const PackedKernel *kernel = chosen_packed.load(std::memory_order_relaxed);
  return kernel ? *kernel : best_packed_kernel();
}

namespace {

using Buffer = ffi::AnyBuffer;

// Sets `format` to that of a buffer; false for other types.
bool find_format(const Buffer &buffer, Format *format) {
  switch (buffer.element_type()) {
    case ffi::F32: *format = Format::f32; return true;
    case ffi::BF16: *format = Format::bf16; return true;
    case ffi::F16: *format = Format::f16; return true;
    default: return false;
  }
}

const ffi::Error kWrongType = ffi::Error::InvalidArgument("values must be float32, bfloat16 or float16");

const ffi::Error kCopied = ffi::Error::Internal("XLA copied the pool, which must be written in place");

// Sets what the attention operators share; false where the pool was copied. `out` is [T, H, D].
bool fill(Step &step, const Buffer &keys, const Buffer &values, const Numbers &num_rows, const Numbers &row_seq,
          const Numbers &row_slot, const Numbers &row_start, const Numbers &prefix_end, const Numbers &tables,
          const Numbers &page_len, const ffi::RemainingArgs &others, int weighing, ffi::Result<Buffer> &out,
          ffi::Result<Buffer> &new_keys, ffi::Result<Buffer> &new_values) {
  if (keys.untyped_data() != new_keys->untyped_data() || values.untyped_data() != new_values->untyped_data()) return false;
  step.keys = new_keys->untyped_data(), step.values = new_values->untyped_data(), step.out = out->untyped_data();
  step.padded_rows = int(out->dimensions()[0]), step.heads = int(out->dimensions()[1]), step.head_dim = int(out->dimensions()[2]);
  step.kv_heads = int(keys.dimensions()[1]), step.block_size = int(keys.dimensions()[2]);
  step.width = int(tables.dimensions()[1]), step.num_rows = num_rows.typed_data()[0];
  step.row_seq = row_seq.typed_data(), step.row_slot = row_slot.typed_data(), step.row_start = row_start.typed_data();
  step.prefix_end = prefix_end.typed_data(), step.block_tables = tables.typed_data(), step.page_len = page_len.typed_data();
  if (int(others.size()) == weighing + 3) {
    step.question_start = others.get<Numbers>(weighing)->typed_data();
    step.temperature = others.get<Factors>(weighing + 1)->typed_data();
    step.chunk_scale = others.get<Factors>(weighing + 2)->typed_data();
  }
  return true;
}

ffi::Error attend(ffi::ThreadPool pool, Buffer q, Buffer k, Buffer v, Buffer keys, Buffer values, Numbers num_rows,
                  Numbers row_seq, Numbers row_slot, Numbers row_start, Numbers prefix_end, Numbers tables, Numbers page_len,
                  ffi::RemainingArgs more, ffi::Result<Buffer> out, ffi::Result<Buffer> new_keys,
                  ffi::Result<Buffer> new_values, float scale, int32_t window) {
  Step step{};
  if (!find_format(q, &step.format)) return kWrongType;
  step.cache_format = keys.element_type() == ffi::U8 ? Format::fp8 : step.format;
  if (!fill(step, keys, values, num_rows, row_seq, row_slot, row_start, prefix_end, tables, page_len, more, 0, out, new_keys,
            new_values))
    return kCopied;
  if (window) {
    if (more.size() != 1) return ffi::Error::InvalidArgument("a window needs the positions of pages");
    step.page_position = more.get<Numbers>(0)->typed_data();
  }
  step.q = q.untyped_data(), step.k = k.untyped_data(), step.v = v.untyped_data(), step.scale = scale, step.window = window;
  XlaThreads threads(pool);
  attention(step, current(), threads);
  return ffi::Error::Success();
}

// As `attend`, of products: `others` begins with the scales of queries and keys if `norms`.
ffi::Error attend_heads(ffi::ThreadPool pool, Factors q, Factors k, Factors v, Buffer keys, Buffer values, Factors cos, Factors sin,
                        Numbers num_rows, Numbers row_seq, Numbers row_slot, Numbers row_start, Numbers prefix_end,
                        Numbers tables, Numbers page_len, ffi::RemainingArgs others, ffi::Result<Buffer> out,
                        ffi::Result<Buffer> new_keys, ffi::Result<Buffer> new_values, float scale, float epsilon, bool norms,
                        bool in_chain, int32_t format) {
  Step step{};
  Heads heads{};
  step.format = Format(format), step.cache_format = keys.element_type() == ffi::U8 ? Format::fp8 : step.format;
  if (!fill(step, keys, values, num_rows, row_seq, row_slot, row_start, prefix_end, tables, page_len, others, norms ? 2 : 0, out, new_keys,
            new_values))
    return kCopied;
  step.scale = scale, step.in_chain = in_chain;
  heads.q = q.typed_data(), heads.k = k.typed_data(), heads.v = v.typed_data();
  heads.cos = cos.typed_data(), heads.sin = sin.typed_data(), heads.epsilon = epsilon;
  if (norms) {
    const auto q_scale = others.get<Buffer>(0), k_scale = others.get<Buffer>(1);
    if (!find_format(*q_scale, &heads.scale_format)) return kWrongType;
    heads.q_scale = q_scale->untyped_data(), heads.k_scale = k_scale->untyped_data();
  }
  XlaThreads threads(pool);
  attention_of_heads(step, heads, current(), threads);
  return ffi::Error::Success();
}

ffi::Error norm_rows(ffi::ThreadPool pool, Factors x, Buffer scale, ffi::RemainingArgs delta, ffi::Result<Buffer> out,
                     ffi::RemainingRets sum, float epsilon) {
  Norm given{};
  if (!find_format(scale, &given.scale_format) || !find_format(*out, &given.format)) return kWrongType;
  given.x = x.typed_data(), given.scale = scale.untyped_data(), given.out = out->untyped_data(), given.epsilon = epsilon;
  given.features = int(scale.element_count()), given.rows = int(x.element_count() / scale.element_count());
  if (delta.size()) given.delta = delta.get<Factors>(0)->typed_data(), given.sum = (*sum.get<Factors>(0))->typed_data();
  XlaThreads threads(pool);
  norm(given, current(), threads);
  return ffi::Error::Success();
}

ffi::Error gate_rows(ffi::ThreadPool pool, Factors gates, Factors up, ffi::Result<Buffer> out) {
  Gate given{gates.typed_data(), up.typed_data(), Format::f32, out->untyped_data(), int64_t(gates.element_count())};
  if (!find_format(*out, &given.format)) return kWrongType;
  XlaThreads threads(pool);
  gate(given, current(), threads);
  return ffi::Error::Success();
}

ffi::Error largest_of_rows(ffi::ThreadPool pool, Factors logits, ffi::Result<Numbers> index, ffi::Result<ffi::Buffer<ffi::PRED>> finite) {
  XlaThreads threads(pool);
  largest(logits.typed_data(), int(logits.dimensions()[0]), int(logits.dimensions()[1]), index->typed_data(), finite->typed_data(),
          current(), threads);
  return ffi::Error::Success();
}

RowProduct product_of(const ffi::Buffer<ffi::BF16> &x, const ffi::Buffer<ffi::BF16> &weight, float *out, bool ascending, int block) {
  return {static_cast<const uint16_t *>(x.untyped_data()), static_cast<const uint16_t *>(weight.untyped_data()), out,
          int(x.dimensions()[0]), int(x.dimensions()[1]), int(weight.dimensions()[0]), ascending, block};
}

ffi::Error multiply_several(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x, ffi::RemainingArgs weights, ffi::RemainingRets out,
                            bool ascending, int32_t block) {
  std::vector<RowProduct> given;
  for (size_t i = 0; i < weights.size(); i++) {
    const auto weight = weights.get<ffi::Buffer<ffi::BF16>>(i);
    if (!weight) return ffi::Error::InvalidArgument("weights must be bfloat16");
    given.push_back(product_of(x, *weight, (*out.get<Factors>(i))->typed_data(), ascending, block));
  }
  XlaThreads threads(pool);
  multiply(given.data(), int(given.size()), current(), threads);
  return ffi::Error::Success();
}

ffi::Error multiply_rows(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::BF16> weight,
                         ffi::Result<ffi::Buffer<ffi::F32>> out, bool ascending, int32_t block) {
  XlaThreads threads(pool);
  const RowProduct given = product_of(x, weight, out->typed_data(), ascending, block);
  multiply(given, current(), threads);
  return ffi::Error::Success();
}

ffi::Error read_rows(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::BF16> weight, Numbers labels,
                     ffi::Result<Factors> logits, ffi::Result<Factors> normalisers) {
  const Kernel &kernel = current();
  if (!kernel.read) return ffi::Error::InvalidArgument("only the kernel amx reads rows in one call");
  XlaThreads threads(pool);
  const int num_labels = int(labels.dimensions()[1]);
  const int32_t *from = labels.typed_data(), *to = from + labels.element_count();
  while (to != from && to[-1] < 0) to--;
  RowProduct given{};
  given.x = static_cast<const uint16_t *>(x.untyped_data()), given.weight = static_cast<const uint16_t *>(weight.untyped_data());
  given.rows = num_labels ? int((to - from + num_labels - 1) / num_labels) : 0;
  given.in = int(x.dimensions()[1]), given.outputs = int(weight.dimensions()[0]);
  std::fill_n(logits->typed_data(), logits->element_count(), std::nanf(""));
  std::fill_n(normalisers->typed_data(), normalisers->element_count(), std::nanf(""));
  read_labels(given, from, num_labels, logits->typed_data(), normalisers->typed_data(), kernel, threads);
  return ffi::Error::Success();
}

ffi::Error normalise_rows(ffi::ThreadPool pool, Factors logits, ffi::Result<Factors> out) {
  XlaThreads threads(pool);
  normalise(logits.typed_data(), int(logits.dimensions()[0]), int(logits.dimensions()[1]), out->typed_data(), current(), threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace chunkattn

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnAttention, chunkattn::attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                                  .Arg<chunkattn::Numbers>().Arg<chunkattn::Numbers>().Arg<chunkattn::Numbers>()
                                  .Arg<chunkattn::Numbers>().Arg<chunkattn::Numbers>().Arg<chunkattn::Numbers>()
                                  .Arg<chunkattn::Numbers>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale").Attr<int32_t>("window"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnAttendHeads, chunkattn::attend_heads,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<chunkattn::Factors>().Arg<chunkattn::Factors>().Arg<chunkattn::Factors>()
                                  .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                                  .Arg<chunkattn::Factors>().Arg<chunkattn::Factors>()
                                  .Arg<chunkattn::Numbers>().Arg<chunkattn::Numbers>().Arg<chunkattn::Numbers>()
                                  .Arg<chunkattn::Numbers>().Arg<chunkattn::Numbers>().Arg<chunkattn::Numbers>()
                                  .Arg<chunkattn::Numbers>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale").Attr<float>("epsilon")
                                  .Attr<bool>("norms").Attr<bool>("in_chain").Attr<int32_t>("format"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnNorm, chunkattn::norm_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<chunkattn::Factors>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<float>("epsilon"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnGate, chunkattn::gate_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<chunkattn::Factors>()
                                  .Arg<chunkattn::Factors>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnLargest, chunkattn::largest_of_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<chunkattn::Factors>()
                                  .Ret<chunkattn::Numbers>()
                                  .Ret<ffi::Buffer<ffi::PRED>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnMultiplySeveral, chunkattn::multiply_several,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("ascending")
                                  .Attr<int32_t>("block"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnMultiply, chunkattn::multiply_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("ascending")
                                  .Attr<int32_t>("block"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnNormalise, chunkattn::normalise_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnRead, chunkattn::read_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<chunkattn::Numbers>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

// Uses the kernel called `name`, or the best one if `name` is empty. Returns null, or why it cannot.
extern "C" const char *chunkattn_use(const char *name) {
  const char *why = nullptr;
  const chunkattn::Kernel *kernel = *name ? chunkattn::kernel_named(name, &why) : chunkattn::best_kernel();
  if (kernel) chunkattn::chosen.store(kernel), chunkattn::chosen_packed.store(*name ? &chunkattn::packed_kernel_of(*kernel) : nullptr);
  return why;
}

extern "C" const char *chunkattn_kernel() {
  return chunkattn::current().name;
}

extern "C" const char *chunkattn_packed_kernel() {
  return chunkattn::current_packed().name;
}

extern "C" int64_t chunkattn_packed_bytes(int packing, int outputs, int depth) {
  return chunkattn::packed_bytes(chunkattn::Packing(packing), outputs, depth);
}

extern "C" bool chunkattn_pack(int packing, const uint8_t *rows, int64_t stride, int outputs, int depth, uint8_t *to, int threads) {
  return chunkattn::pack(chunkattn::Packing(packing), rows, stride, outputs, depth, to, threads);
}

extern "C" void chunkattn_quantize_q8_0(const void *from, bool bf16, int64_t blocks, uint8_t *to, int threads) {
  chunkattn::quantize_q8_0(from, bf16, blocks, to, threads);
}

// Digest of the sources that the library was compiled from (`build.sources_digest`).
extern "C" const char *chunkattn_sources() {
  return CHUNKATTN_SOURCES;
}
#pragma GCC visibility pop
