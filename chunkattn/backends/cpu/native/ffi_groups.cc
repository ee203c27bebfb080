// Operators on packed weights and on groups of rows as calls of XLA's foreign function interface.
#include <algorithm>
#include <cstring>
#include <vector>

#include "ffi.h"

namespace chunkattn {
namespace {

constexpr const char *kWrongProducts = "products must have a row for each row or pair";

// Sets packed weights, each of `groups` matrices, whose products have `rows` rows; returns why they are wrong, or null.
const char *packed_weights(const ffi::RemainingArgs &data, ffi::RemainingRets &out, ffi::Span<const int32_t> packings, int rows,
                           int depth, int groups, std::vector<PackedWeight> &to) {
  for (size_t i = 0; i < data.size(); i++) {
    const auto from = data.get<Codes>(i);
    auto product = out.get<Factors>(i);
    if (!from || !product) return "packed weights are uint8, and their products float32";
    if ((*product)->dimensions().size() != 2 || (*product)->dimensions()[0] != rows) return kWrongProducts;
    const Packing packing = Packing(packings[i]);
    const int outputs = int((*product)->dimensions()[1]);
    if (packed_bytes(packing, outputs, depth) * groups != int64_t(from->element_count()))
      return "a packed weight has another number of bytes than its shape takes";
    to.push_back({packing, from->typed_data(), outputs, (*product)->typed_data()});
  }
  return nullptr;
}

// Products of the same rows with one or several packed weights.
ffi::Error multiply_packed(ffi::ThreadPool pool, Factors x, ffi::RemainingArgs data, ffi::RemainingRets out,
                           ffi::Span<const int32_t> packings, int32_t digits) {
  const int rows = int(x.dimensions()[0]), depth = int(x.dimensions()[1]);
  std::vector<PackedWeight> weights;
  if (const char *why = packed_weights(data, out, packings, rows, depth, 1, weights)) return ffi::Error::InvalidArgument(why);
  XlaThreads threads(pool);
  multiply(x.typed_data(), rows, depth, digits, weights.data(), int(weights.size()), current_packed(), threads);
  return ffi::Error::Success();
}

ffi::Error gather_packed(ffi::ThreadPool pool, Codes data, Numbers ids, ffi::Result<Factors> out, int32_t packing, int32_t outputs) {
  const int depth = int(out->dimensions()[1]);
  if (packed_bytes(Packing(packing), outputs, depth) != int64_t(data.element_count()))
    return ffi::Error::InvalidArgument("a packed weight has another number of bytes than its shape takes");
  XlaThreads threads(pool);
  gather(Packing(packing), data.typed_data(), outputs, depth, ids.typed_data(), int(ids.element_count()), out->typed_data(), threads);
  return ffi::Error::Success();
}

// Sets the pairs of groups; returns why they are wrong, or null.
template <class T> const char *group(GroupedRows<T> &given, const Numbers &rows, const Numbers &sizes) {
  given.rows = rows.typed_data(), given.sizes = sizes.typed_data();
  given.pairs = int(rows.element_count()), given.groups = int(sizes.element_count());
  int64_t all = 0;
  for (int i = 0; i < given.groups; i++) {
    if (given.sizes[i] < 0) return "a group has a negative size";
    all += given.sizes[i];
  }
  if (all > given.pairs) return "the sizes of the groups add up to more than the pairs";
  given.pairs = int(all);
  for (int i = 0; i < given.pairs; i++)
    if (given.rows[i] < 0 || given.rows[i] >= given.count) return "a pair has no row";
  return nullptr;
}

// Writes zeros to the products of pairs that have no group.
void clear(ffi::Result<Factors> out, int pairs) {
  const int64_t written = int64_t(pairs) * out->dimensions()[1];
  std::fill_n(out->typed_data() + written, int64_t(out->element_count()) - written, 0.f);
}

ffi::Error multiply_group_rows(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x, Numbers rows, Numbers sizes,
                               ffi::RemainingArgs weights, ffi::RemainingRets out) {
  GroupedRows<uint16_t> given{};
  given.x = static_cast<const uint16_t *>(x.untyped_data()), given.count = int(x.dimensions()[0]), given.in = int(x.dimensions()[1]);
  if (const char *why = group(given, rows, sizes)) return ffi::Error::InvalidArgument(why);
  if (strcmp(current().name, "amx") && given.in % 32)
    return ffi::Error::InvalidArgument("rows must have a multiple of 32 inputs for kernels other than amx");
  std::vector<GroupWeight> of;
  for (size_t i = 0; i < weights.size(); i++) {
    const auto weight = weights.get<ffi::Buffer<ffi::BF16>>(i);
    auto product = out.get<Factors>(i);
    if (!weight || !product) return ffi::Error::InvalidArgument("weights must be bfloat16, and their products float32");
    const auto shape = weight->dimensions(), written = (*product)->dimensions();
    if (shape.size() != 3 || shape[0] != given.groups || shape[2] != given.in)
      return ffi::Error::InvalidArgument("weights must have a matrix for each group, and the inputs of the rows");
    if (written.size() != 2 || written[0] != int64_t(rows.element_count())) return ffi::Error::InvalidArgument(kWrongProducts);
    if (written[1] != shape[1]) return ffi::Error::InvalidArgument("products must have the outputs of their weights");
    of.push_back({static_cast<const uint16_t *>(weight->untyped_data()), int(shape[1]), (*product)->typed_data()});
    clear(*product, given.pairs);
  }
  XlaThreads threads(pool);
  multiply_groups(given, of.data(), int(of.size()), current(), threads);
  return ffi::Error::Success();
}

// The arguments behind the sizes: the inner factors of all matrices, their outer factors, and what the products are added to.
ffi::Error add_group_factors(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x, Numbers rows, Numbers sizes, ffi::RemainingArgs args,
                             ffi::RemainingRets out) {
  GroupedRows<uint16_t> given{};
  given.x = static_cast<const uint16_t *>(x.untyped_data()), given.count = int(x.dimensions()[0]), given.in = int(x.dimensions()[1]);
  if (const char *why = group(given, rows, sizes)) return ffi::Error::InvalidArgument(why);
  if (given.in % 32) return ffi::Error::InvalidArgument("rows must have a multiple of 32 inputs");
  const size_t count = out.size();
  if (args.size() != 3 * count) return ffi::Error::InvalidArgument("each sum needs two factors and what they are added to");
  std::vector<GroupFactors> factors;
  for (size_t i = 0; i < count; i++) {
    const auto inner = args.get<ffi::Buffer<ffi::BF16>>(i), outer = args.get<ffi::Buffer<ffi::BF16>>(count + i);
    const auto before = args.get<Factors>(2 * count + i);
    auto sums = out.get<Factors>(i);
    if (!inner || !outer || !before || !sums) return ffi::Error::InvalidArgument("factors are bfloat16, and sums float32");
    const auto a = inner->dimensions(), b = outer->dimensions(), to = (*sums)->dimensions();
    if (a.size() != 3 || b.size() != 3 || a[0] != given.groups || b[0] != given.groups || a[2] != given.in || b[2] < a[1] ||
        (b[2] % 32 && (b[2] != 16 || b[1] % 2)))
      return ffi::Error::InvalidArgument("factors must be [groups, rank, in] and [groups, outputs, depth]");
    if (to.size() != 2 || to[0] != given.count || to[1] != b[1]) return ffi::Error::InvalidArgument(kWrongProducts);
    if ((*sums)->typed_data() != before->typed_data())
      std::copy_n(before->typed_data(), before->element_count(), (*sums)->typed_data());
    factors.push_back({static_cast<const uint16_t *>(inner->untyped_data()), static_cast<const uint16_t *>(outer->untyped_data()),
                       int(a[1]), int(b[1]), int(b[2]), (*sums)->typed_data()});
  }
  if (!given.pairs) return ffi::Error::Success();
  XlaThreads threads(pool);
  add_factors(given, factors.data(), int(count), current(), threads);
  return ffi::Error::Success();
}

ffi::Error multiply_packed_groups(ffi::ThreadPool pool, Factors x, Numbers rows, Numbers sizes, ffi::RemainingArgs data,
                                  ffi::RemainingRets out, ffi::Span<const int32_t> packings, int32_t digits) {
  GroupedRows<float> given{};
  given.x = x.typed_data(), given.count = int(x.dimensions()[0]), given.in = int(x.dimensions()[1]);
  if (const char *why = group(given, rows, sizes)) return ffi::Error::InvalidArgument(why);
  const int pairs = int(rows.element_count());
  std::vector<PackedWeight> weights;
  if (const char *why = packed_weights(data, out, packings, pairs, given.in, given.groups, weights))
    return ffi::Error::InvalidArgument(why);
  for (size_t i = 0; i < out.size(); i++) clear(*out.get<Factors>(i), given.pairs);
  XlaThreads threads(pool);
  multiply_groups(given, digits, weights.data(), int(weights.size()), current_packed(), threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace chunkattn

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnPackedMultiply, chunkattn::multiply_packed,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<chunkattn::Factors>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int32_t>>("packings")
                                  .Attr<int32_t>("digits"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnPackedGather, chunkattn::gather_packed,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<chunkattn::Codes>()
                                  .Arg<chunkattn::Numbers>()
                                  .Ret<chunkattn::Factors>()
                                  .Attr<int32_t>("packing")
                                  .Attr<int32_t>("outputs"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnGroups, chunkattn::multiply_group_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>().Arg<chunkattn::Numbers>().Arg<chunkattn::Numbers>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnFactors, chunkattn::add_group_factors,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>().Arg<chunkattn::Numbers>().Arg<chunkattn::Numbers>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ChunkattnPackedGroups, chunkattn::multiply_packed_groups,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<chunkattn::Factors>().Arg<chunkattn::Numbers>().Arg<chunkattn::Numbers>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int32_t>>("packings").Attr<int32_t>("digits"));
#pragma GCC visibility pop
