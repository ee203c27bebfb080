// Compares every kernel that runs here with a plain computation in double precision, over random steps. It is a program of its
// own, so that the sanitizers see our code alone; tests/backends/test_cpu_backend.py builds and runs it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "groups.h"
#include "check_pool.h"

using namespace chunkattn;

namespace {

using Bytes = std::vector<unsigned char>;
std::mt19937 randoms(1);
int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(randoms); }
bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(randoms) < p; }

int bytes_of(Format format) { return format == Format::f32 ? 4 : format == Format::fp8 ? 1 : 2; }

// The value of a number stored in `format`, by the definition of the format.
double value_of(Format format, const void *at) {
  if (format == Format::f32) return *static_cast<const float *>(at);
  const bool byte = format == Format::fp8;
  const int mantissa = byte ? 3 : format == Format::f16 ? 10 : 7, exponent = byte ? 4 : format == Format::f16 ? 5 : 8;
  const unsigned bits = byte ? *static_cast<const uint8_t *>(at) : *static_cast<const uint16_t *>(at);
  const int power = bits >> mantissa & ((1 << exponent) - 1), fraction = bits & ((1 << mantissa) - 1);
  const int bias = (1 << (exponent - 1)) - 1;
  const double size = power ? std::ldexp(1 + std::ldexp(fraction, -mantissa), power - bias)
                            : std::ldexp(fraction, 1 - bias - mantissa);
  return bits >> (mantissa + exponent) ? -size : size;
}

// Random finite numbers of about 1 in `format`, subnormals among them.
Bytes numbers(Format format, size_t count) {
  Bytes made(count * bytes_of(format));
  for (size_t i = 0; i < count; i++) {
    void *at = made.data() + i * bytes_of(format);
    const float x = std::uniform_real_distribution<float>(-2, 2)(randoms);
    if (format == Format::f32) memcpy(at, &x, 4);
    if (format == Format::bf16) {
      uint32_t bits;
      memcpy(&bits, &x, 4);
      const uint16_t high = bits >> 16;
      memcpy(at, &high, 2);
    }
    if (format == Format::f16) {
      const uint16_t bits = (draw(0, 1) << 15) | draw(0, 0x3fff);
      memcpy(at, &bits, 2);
    }
    if (format == Format::fp8) *static_cast<uint8_t *>(at) = (draw(0, 1) << 7) | draw(0, 0x3f);
  }
  return made;
}

// A random step, with everything it points to.
struct Case {
  Step step{};
  Bytes q, k, v, keys, values;
  std::vector<unsigned char> out;
  std::vector<int32_t> row_seq, row_slot, row_start, prefix_end, tables, page_len, page_position, question;
  std::vector<float> temperature, chunk_scale;

  Case(Format format, Format cache_format) {
    step.format = format, step.cache_format = cache_format;
    step.kv_heads = draw(1, 3), step.heads = step.kv_heads * draw(1, 5), step.head_dim = 16 * draw(1, chance(0.2) ? 16 : 5);
    step.block_size = chance(0.5) ? 16 : draw(1, 70);
    step.window = chance(0.2) ? draw(1, 400) : 0;
    step.in_chain = chance(0.5);
    step.scale = chance(0.1) ? 0 : 1 / std::sqrt(float(step.head_dim));
    const int sequences = draw(1, 4), longest = chance(0.2) ? 5000 : chance(0.5) ? 700 : 60;
    step.width = (longest + step.block_size - 1) / step.block_size + 1;
    std::vector<int> pages(sequences * step.width);
    for (size_t i = 0; i < pages.size(); i++) pages[i] = int(i);
    std::shuffle(pages.begin(), pages.end(), randoms);
    tables.assign(pages.begin(), pages.end());
    const bool weighs = !step.window && chance(0.5);
    for (int s = 0; s < sequences; s++) {
      for (int w = 0; w < step.width; w++) {
        page_len.push_back(draw(1, step.block_size));
        page_position.push_back(chance(0.5) ? w * step.block_size : draw(0, longest));
      }
      const int end = draw(1, longest), rows = std::min(end, chance(0.3) ? 1 : draw(1, longest > 1000 ? 70 : 300));
      prefix_end.push_back(draw(0, end));
      question.push_back(weighs && chance(0.7) ? draw(prefix_end[s], end) : std::numeric_limits<int32_t>::max());
      temperature.push_back(chance(0.3) ? 1 : 0.3f + draw(0, 20) / 10.f), chunk_scale.push_back(0.3f + draw(0, 20) / 10.f);
      int start = 0;
      std::vector<int> taken;
      for (int slot = end - 1; slot >= 0 && int(taken.size()) < rows; slot--)
        if (slot % step.block_size < page_len[s * step.width + slot / step.block_size]) taken.push_back(slot);
      std::reverse(taken.begin(), taken.end());
      for (int slot : taken) {
        if (chance(0.1)) start = slot;
        const bool asks = slot >= question[s];
        row_seq.push_back(s), row_slot.push_back(slot), row_start.push_back(asks ? 0 : start);
      }
    }
    step.num_rows = int(row_seq.size()), step.padded_rows = step.num_rows + draw(0, 5);
    for (auto *list : {&row_seq, &row_slot, &row_start}) list->resize(step.padded_rows);
    q = numbers(format, size_t(step.padded_rows) * step.heads * step.head_dim);
    k = numbers(cache_format, size_t(step.padded_rows) * step.kv_heads * step.head_dim);
    v = numbers(cache_format, size_t(step.padded_rows) * step.kv_heads * step.head_dim);
    const size_t head = size_t(step.head_dim) * bytes_of(cache_format);
    keys = numbers(cache_format, pages.size() * step.kv_heads * step.block_size * step.head_dim), values = keys;
    for (int s = 0; s < sequences; s++)  // all bits set is NaN in every format
      for (int w = 0; w < step.width; w++)
        for (int g = 0; g < step.kv_heads; g++)
          for (int slot = page_len[s * step.width + w]; slot < step.block_size; slot++)
            for (auto *pool : {&keys, &values})
              memset(pool->data() + (size_t(tables[s * step.width + w] * step.kv_heads + g) * step.block_size + slot) * head,
                     0xff, head);
    out.resize(size_t(step.padded_rows) * step.heads * step.head_dim * (format == Format::bf16 ? 2 : 4));
    step.q = q.data(), step.k = k.data(), step.v = v.data(), step.keys = keys.data(), step.values = values.data();
    step.out = out.data(), step.row_seq = row_seq.data(), step.row_slot = row_slot.data(), step.row_start = row_start.data();
    step.prefix_end = prefix_end.data(), step.block_tables = tables.data(), step.page_len = page_len.data();
    if (step.window) step.page_position = page_position.data();
    if (weighs) step.question_start = question.data(), step.temperature = temperature.data(), step.chunk_scale = chunk_scale.data();
  }

  double stored(const void *pool, int page, int g, int slot, int d) const {
    const size_t at = (size_t(page * step.kv_heads + g) * step.block_size + slot) * step.head_dim + d;
    return value_of(step.cache_format, static_cast<const unsigned char *>(pool) + at * bytes_of(step.cache_format));
  }

  // The largest difference between `out` and the definition of the operator, after a call.
  double error() const {
    double worst = 0;
    const Format kept = step.format == Format::bf16 ? Format::bf16 : Format::f32;
    for (int row = 0; row < step.num_rows; row++) {
      const int s = row_seq[row], own = row_slot[row];
      const bool weighed = step.question_start && own >= question[s];
      for (int h = 0; h < step.heads; h++) {
        const int g = h / step.lines_per_row();
        std::vector<int> seen;
        std::vector<double> scores;
        double chunks = 0;
        for (int slot = 0; slot <= own; slot++) {
          const int page = slot / step.block_size;
          if (slot % step.block_size >= page_len[s * step.width + page]) continue;
          if (slot >= prefix_end[s] && slot < row_start[row]) continue;
          if (step.window && step.position(s, slot) <= step.position(s, own) - step.window) continue;
          double score = 0;
          for (int d = 0; d < step.head_dim; d++)
            score += value_of(step.format, q.data() + ((size_t(row) * step.heads + h) * step.head_dim + d) * bytes_of(step.format)) *
                     stored(step.keys, tables[s * step.width + page], g, slot % step.block_size, d);
          score *= step.scale;
          const bool chunk = weighed && slot >= prefix_end[s] && slot < question[s];
          if (chunk) chunks += std::exp(score /= temperature[s]);
          seen.push_back(slot), scores.push_back(score);
        }
        double total = 0;
        for (size_t i = 0; i < seen.size(); i++) {
          if (weighed && seen[i] >= prefix_end[s] && seen[i] < question[s]) scores[i] += (chunk_scale[s] - 1) * std::log(chunks);
          total += std::exp(scores[i]);
        }
        for (int d = 0; d < step.head_dim; d++) {
          double expected = 0;
          for (size_t i = 0; i < seen.size(); i++)
            expected += std::exp(scores[i]) / total *
                        stored(step.values, tables[s * step.width + seen[i] / step.block_size], g, seen[i] % step.block_size, d);
          const double found = value_of(kept, out.data() + ((size_t(row) * step.heads + h) * step.head_dim + d) * bytes_of(kept));
          if (!(std::fabs(found - expected) <= worst)) worst = std::fabs(found - expected);
        }
      }
    }
    return worst;
  }
};

// The largest error of a random product at a depth of 400, or infinity where the cut into tasks changes a bit.
double product_error(Kernel kernel) {
  const bool tiles = !strcmp(kernel.name, "amx");
  const int rows = draw(1, tiles && chance(0.5) ? 150 : 16), outputs = draw(1, 90);
  const int in = !tiles ? 32 * draw(1, 12) : chance(0.1) ? draw(2000, 5000) : draw(0, 400);
  const Bytes x = numbers(Format::bf16, rows * in), weight = numbers(Format::bf16, outputs * in);
  const auto halves = [](const Bytes &from) { return reinterpret_cast<const uint16_t *>(from.data()); };
  const bool ascending = chance(0.5);
  const int block = chance(0.5) ? 32 * draw(1, 4) : 1 << 30;
  const auto computed = [&](int threads) {
    std::vector<float> out(rows * outputs, std::nanf(""));
    Pool pool(threads);
    multiply({halves(x), halves(weight), out.data(), rows, in, outputs, ascending, block}, kernel, pool);
    return out;
  };
  const std::vector<float> out = computed(1);
  if (tiles) kernel.rows = 32 * draw(1, 3), kernel.outputs = 32 * draw(1, 3);
  if (memcmp(out.data(), computed(draw(1, 5)).data(), out.size() * sizeof(float))) return INFINITY;
  double worst = 0;
  for (int row = 0; row < rows; row++)
    for (int o = 0; o < outputs; o++) {
      double expected = 0;
      for (int k = 0; k < in; k++)
        expected += value_of(Format::bf16, halves(x) + row * in + k) * value_of(Format::bf16, halves(weight) + o * in + k);
      const double error = std::fabs(out[row * outputs + o] - expected);
      if (!(error <= worst)) worst = error;
    }
  return worst * 400 / std::max(400, in);
}

// The largest error of both values of a row of logits, whatever the number of threads.
double normaliser_error(const Kernel &kernel) {
  const int rows = draw(1, 40), count = draw(1, 5000);
  std::vector<float> logits(rows * count);
  for (float &x : logits) x = std::uniform_real_distribution<float>(-20, 20)(randoms);
  const auto computed = [&](int threads) {
    std::vector<float> to(2 * rows);
    Pool pool(threads);
    normalise(logits.data(), rows, count, to.data(), kernel, pool);
    return to;
  };
  const std::vector<float> found = computed(1);
  if (memcmp(found.data(), computed(draw(2, 5)).data(), found.size() * sizeof(float))) return INFINITY;
  double worst = 0;
  for (int row = 0; row < rows; row++) {
    const float *of = &logits[row * count], most = *std::max_element(of, of + count);
    double total = 0;
    for (int i = 0; i < count; i++) total += std::exp(double(of[i]) - most);
    const double error = std::max(std::fabs(double(found[2 * row]) - most), std::fabs(found[2 * row + 1] - std::log(total)));
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

// The largest error of random products of groups at a depth of at most 384, or infinity where the cut into tasks, or the company of
// a pair, changes a bit.
double groups_error(const Kernel &kernel) {
  const int groups = draw(1, 9), count = draw(1, 40), outputs = draw(1, 90), in = 32 * draw(1, 12);
  std::vector<int32_t> sizes(groups), rows;
  for (int32_t &size : sizes) size = draw(0, chance(0.3) ? 60 : 5);
  for (int32_t size : sizes)
    for (int i = 0; i < size; i++) rows.push_back(draw(0, count - 1));
  const int pairs = int(rows.size());
  const Bytes x = numbers(Format::bf16, count * in), weight = numbers(Format::bf16, groups * outputs * in);
  const auto halves = [](const Bytes &from) { return reinterpret_cast<const uint16_t *>(from.data()); };
  const auto computed = [&](const std::vector<int32_t> &rows, const std::vector<int32_t> &sizes, int threads) {
    std::vector<float> out(2 * rows.size() * outputs, std::nanf(""));
    const GroupWeight weights[2] = {{halves(weight), outputs, out.data()}, {halves(weight), outputs, out.data() + rows.size() * outputs}};
    Pool pool(threads);
    multiply_groups({halves(x), count, in, rows.data(), sizes.data(), int(rows.size()), groups}, weights, 2, kernel, pool);
    return out;
  };
  const std::vector<float> out = computed(rows, sizes, 1);
  if (out != computed(rows, sizes, draw(2, 5))) return INFINITY;
  double worst = 0;
  for (int group = 0, pair = 0; group < groups; group++)
    for (int i = 0; i < sizes[group]; i++, pair++) {
      std::vector<int32_t> one(groups);
      one[group] = 1;
      const std::vector<float> alone = chance(0.1) ? computed({rows[pair]}, one, 1) : std::vector<float>();
      for (int o = 0; o < outputs; o++) {
        double expected = 0;
        for (int k = 0; k < in; k++)
          expected += value_of(Format::bf16, halves(x) + rows[pair] * in + k) *
                      value_of(Format::bf16, halves(weight) + (group * outputs + o) * in + k);
        const float found = out[pair * outputs + o];
        const bool same = found == out[(pairs + pair) * outputs + o] && (alone.empty() || found == alone[o]);
        const double error = same ? std::fabs(found - expected) : INFINITY;
        if (!(error <= worst)) worst = error;
      }
    }
  return worst;
}

// The largest error of the normalisers of products, or infinity where a label's logit is not the product's, or where the cut into
// tasks changes a bit.
double reading_error(Kernel kernel) {
  const int rows = draw(1, 90), outputs = draw(1, 2500), in = draw(1, 150), num_labels = draw(1, 4);
  const Bytes x = numbers(Format::bf16, rows * in), weight = numbers(Format::bf16, outputs * in);
  std::vector<int32_t> labels(rows * num_labels);
  for (int32_t &label : labels) label = draw(-1, outputs);
  RowProduct given{};
  given.x = reinterpret_cast<const uint16_t *>(x.data()), given.weight = reinterpret_cast<const uint16_t *>(weight.data());
  given.rows = rows, given.in = in, given.outputs = outputs;
  const auto computed = [&](int threads) {
    std::vector<float> out(rows * (num_labels + 2), -1e9f);
    Pool pool(threads);
    read_labels(given, labels.data(), num_labels, out.data() + 2 * rows, out.data(), kernel, pool);
    return out;
  };
  const std::vector<float> found = computed(1);
  kernel.rows = 32 * draw(1, 3);
  if (memcmp(found.data(), computed(draw(1, 5)).data(), found.size() * sizeof(float))) return INFINITY;
  std::vector<float> logits(rows * outputs);
  Pool alone(1);
  given.out = logits.data();
  multiply(given, kernel, alone);
  double worst = 0;
  for (int row = 0; row < rows; row++) {
    const float *of = &logits[row * outputs], most = *std::max_element(of, of + outputs);
    double total = 0;
    for (int i = 0; i < outputs; i++) total += std::exp(double(of[i]) - most);
    const double error = std::fabs(found[2 * row + 1] - std::log(total));
    if (found[2 * row] != most || !(error <= worst)) worst = found[2 * row] == most ? error : INFINITY;
    for (int i = 0; i < num_labels; i++) {
      const int label = labels[row * num_labels + i];
      const float expected = label < 0 || label == outputs ? -1e9f : of[label];
      if (found[2 * rows + row * num_labels + i] != expected) return INFINITY;
    }
  }
  return worst;
}

std::vector<float> floats(size_t count, float size) {
  std::vector<float> made(count);
  for (float &x : made) x = std::uniform_real_distribution<float>(-size, size)(randoms);
  return made;
}

// The largest error of norms and gates, or infinity where the largest logit is another one, or where the cut into tasks changes a
// bit.
double rows_error(const Kernel &kernel) {
  const int rows = draw(1, 40), features = draw(1, 300), most = draw(1, 9000);
  const auto x = floats(rows * features, 3), delta = floats(rows * features, 3), scale = floats(features, 2), logits = floats(most, 9);
  const bool adds = chance(0.5);
  const auto computed = [&](int threads) {
    std::vector<float> out(3 * rows * features);
    float *normed = out.data(), *sum = normed + x.size(), *gated = sum + x.size();
    Pool pool(threads);
    norm({x.data(), adds ? delta.data() : nullptr, sum, scale.data(), Format::f32, Format::f32, normed, rows, features, 1e-3f}, kernel, pool);
    gate({x.data(), delta.data(), Format::f32, gated, int64_t(x.size())}, kernel, pool);
    return out;
  };
  const std::vector<float> found = computed(1);
  if (memcmp(found.data(), computed(draw(2, 5)).data(), found.size() * sizeof(float))) return INFINITY;
  double worst = 0;
  const auto check = [&](double value, double expected) {
    const double error = std::fabs(value - expected) / (1 + std::fabs(expected));
    if (!(error <= worst)) worst = error;
  };
  for (int row = 0; row < rows; row++) {
    double squares = 0;
    const auto value = [&](int i) { return adds ? x[row * features + i] + delta[row * features + i] : x[row * features + i]; };
    for (int i = 0; i < features; i++) squares += double(value(i)) * value(i);
    for (int i = 0; i < features; i++) {
      const size_t at = row * features + i;
      check(found[at], value(i) / std::sqrt(squares / features + 1e-3) * scale[i]);
      check(found[2 * x.size() + at], x[at] / (1 + std::exp(-double(x[at]))) * delta[at]);
    }
  }
  Pool alone(1);
  int32_t index;
  bool finite;
  largest(logits.data(), 1, most, &index, &finite, kernel, alone);
  return finite && index == std::max_element(logits.begin(), logits.end()) - logits.begin() ? worst : INFINITY;
}

// Whether heads that are prepared here have the same attention with any number of threads.
bool heads_agree(Case &made, const Kernel &kernel) {
  const Step &step = made.step;
  const size_t rows = step.padded_rows, dim = step.head_dim;
  const auto q = floats(rows * step.heads * dim, 2), k = floats(rows * step.kv_heads * dim, 2), v = floats(k.size(), 2);
  const auto turn = floats(rows * dim, 1), scale = floats(dim, 2);
  Heads heads{};
  heads.q = q.data(), heads.k = k.data(), heads.v = v.data(), heads.epsilon = 1e-3f;
  heads.cos = turn.data(), heads.sin = turn.data() + rows * dim / 2, heads.scale_format = Format::f32;
  if (chance(0.5)) heads.q_scale = heads.k_scale = scale.data();
  const auto computed = [&](int threads) {
    Pool pool(threads);
    attention_of_heads(step, heads, kernel, pool);
    return made.out;
  };
  const auto alone = computed(1);
  return alone == computed(5);
}

}  // namespace

int main(int argc, char **argv) {
  const int cases = argc > 1 ? atoi(argv[1]) : 20;
  const std::pair<Format, Format> formats[] = {{Format::f32, Format::f32},   {Format::f32, Format::fp8},
                                               {Format::bf16, Format::bf16}, {Format::bf16, Format::fp8},
                                               {Format::f16, Format::f16},   {Format::f16, Format::fp8}};
  bool failed = false;
  for (const char *name : {"portable", "avx2", "avx512_bf16", "amx"}) {
    const char *why;
    const Kernel *kernel = kernel_named(name, &why);
    if (!kernel) {
      printf("%-12s not run: %s\n", name, why);
      continue;
    }
    double worst[2] = {0, 0};
    for (int i = 0; i < cases; i++)
      for (auto [format, cache_format] : formats) {
        Case made(format, cache_format);
        Pool alone(1), pool(5);
        attention(made.step, *kernel, alone);
        const double error = made.error(), allowed = format == Format::bf16 ? 3e-2 : 2e-5;
        const Bytes first = made.out;
        attention(made.step, *kernel, pool);
        if (first != made.out) printf("%s, case %d: the number of threads changes the result\n", name, i), failed = true;
        if (!(error <= allowed)) printf("%s, case %d, formats %d and %d: error %g\n", name, i, int(format), int(cache_format), error), failed = true;
        double &of = worst[format == Format::bf16];
        of = std::max(of, error);
        if (!heads_agree(made, *kernel)) printf("%s, case %d: the number of threads changes prepared heads\n", name, i), failed = true;
      }
    double product = 0;
    for (int i = 0; i < 10 * cases; i++) {
      const double error = product_error(*kernel);
      if (!(error <= 1e-4)) printf("%s, product %d: error %g\n", name, i, error), failed = true;
      product = std::max(product, error);
    }
    for (int i = 0; i < 10 * cases; i++) {
      const double error = groups_error(*kernel);
      if (!(error <= 1e-4)) printf("%s, groups %d: error %g\n", name, i, error), failed = true;
    }
    for (int i = 0; i < 10 * cases; i++) {
      const double error = rows_error(*kernel);
      if (!(error <= 2e-6)) printf("%s, rows %d: error %g\n", name, i, error), failed = true;
    }
    double normaliser = 0;
    for (int i = 0; i < 10 * cases; i++) {
      const double error = normaliser_error(*kernel);
      if (!(error <= 1e-5)) printf("%s, normaliser %d: error %g\n", name, i, error), failed = true;
      normaliser = std::max(normaliser, error);
    }
    for (int i = 0; kernel->read && i < 10 * cases; i++) {
      const double error = reading_error(*kernel);
      if (!(error <= 1e-5)) printf("%s, reading %d: error %g\n", name, i, error), failed = true;
      normaliser = std::max(normaliser, error);
    }
    printf("%-12s largest error %.2g, bfloat16 %.2g, products %.2g, normalisers %.2g\n", name, worst[0], worst[1], product, normaliser);
  }
  return failed;
}
