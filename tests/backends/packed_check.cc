// Compares every kernel of packed products that runs here with double precision, and with the portable kernel bit by bit, over random
// weights. The last line is a digest of all products, which is the same on every processor. A program of its own, so that the
// sanitizers see our code alone; tests/backends/test_cpu_backend.py builds and runs it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check_pool.h"
#include "groups.h"

using namespace chunkattn;

namespace {

std::mt19937 randoms(1);
int draw(int low, int high) { return low + int(randoms() % uint32_t(high - low + 1)); }
const int kSourceBytes[] = {34, 18, 20, 22, 24, 18, 144, 176, 210};

struct Case {
  Packing packing;
  int outputs, depth, rows, digits;
  std::vector<uint8_t> data;
  std::vector<float> x, dense;

  explicit Case(Packing packing) : packing(packing) {
    const int block = packing >= Packing::q4_k ? 256 : 32, bytes = kSourceBytes[int(packing)];
    outputs = kPanel * draw(1, 7), depth = block * draw(1, draw(0, 3) ? 6 : 2600 / block), rows = draw(1, draw(0, 1) ? 16 : 60), digits = draw(1, 2);
    std::vector<uint8_t> source(size_t(outputs) * (depth / block) * bytes);
    for (uint8_t &byte : source) byte = uint8_t(randoms());
    for (size_t at = 0; at < source.size(); at += bytes) {  // scales of about 2^-8, either sign
      source[at + (packing == Packing::q6_k ? 209 : 1)] = uint8_t(0x1c | (randoms() & 0x83));
      if (packing == Packing::q4_1 || packing == Packing::q5_1 || packing == Packing::q4_k || packing == Packing::q5_k)
        source[at + 3] = uint8_t(0x1c | (randoms() & 0x83));
    }
    data.resize(packed_bytes(packing, outputs, depth));
    const int64_t stride = int64_t(depth / block) * bytes;
    if (!pack(packing, source.data(), stride, outputs, depth, data.data(), draw(1, 3))) abort();
    source[draw(0, int(source.size()) / bytes - 1) * bytes + (packing == Packing::q6_k ? 209 : 1)] |= 0x7c;
    std::vector<uint8_t> other(data.size());
    if (pack(packing, source.data(), stride, outputs, depth, other.data(), 2)) abort();
    for (int i = 0; i < rows * depth; i++) {
      const float value = float(int32_t(randoms()));
      x.push_back(std::ldexp(value, draw(-31, -29)));
    }
    std::vector<int32_t> ids(outputs);
    for (int i = 0; i < outputs; i++) ids[i] = i;
    dense.resize(size_t(outputs) * depth);
    Pool pool(draw(1, 3));
    gather(packing, data.data(), outputs, depth, ids.data(), outputs, dense.data(), pool);
  }

  std::vector<float> product(const PackedKernel &kernel, int first, int count, int threads) const {
    std::vector<float> out(size_t(count) * outputs, std::nanf("")), again = out;
    const PackedWeight weights[2] = {{packing, data.data(), outputs, out.data()}, {packing, data.data(), outputs, again.data()}};
    Pool pool(threads);
    multiply(x.data() + int64_t(first) * depth, count, depth, digits, weights, draw(1, 2), kernel, pool);
    return out;
  }

  // Largest error, relative to the sum of magnitudes.
  double error(const std::vector<float> &out) const {
    double worst = 0;
    for (int row = 0; row < rows; row++)
      for (int o = 0; o < outputs; o++) {
        double expected = 0, size = 0;
        for (int k = 0; k < depth; k++) {
          const double term = double(x[size_t(row) * depth + k]) * dense[size_t(o) * depth + k];
          expected += term, size += std::fabs(term);
        }
        const double error = std::fabs(out[size_t(row) * outputs + o] - expected) / size;
        if (!(error <= worst)) worst = error;
      }
    return worst;
  }
};

// Whether rows in groups have the bits of products of their own, on any number of threads.
bool groups_agree(const Case &made, const PackedKernel &kernel, const std::vector<float> &whole) {
  const int groups = draw(1, 5);
  std::vector<int32_t> sizes(groups), rows;
  for (int32_t &size : sizes) size = draw(0, draw(0, 2) ? 4 : 40);
  for (int32_t size : sizes)
    for (int i = 0; i < size; i++) rows.push_back(draw(0, made.rows - 1));
  std::vector<uint8_t> data;  // the same weight for every group
  for (int i = 0; i < groups; i++) data.insert(data.end(), made.data.begin(), made.data.end());
  std::vector<float> out(rows.size() * made.outputs, std::nanf(""));
  const PackedWeight weight{made.packing, data.data(), made.outputs, out.data()};
  Pool pool(draw(1, 4));
  multiply_groups({made.x.data(), made.rows, made.depth, rows.data(), sizes.data(), int(rows.size()), groups}, made.digits, &weight, 1, kernel, pool);
  for (size_t pair = 0; pair < rows.size(); pair++)
    if (memcmp(&out[pair * made.outputs], &whole[size_t(rows[pair]) * made.outputs], made.outputs * sizeof(float))) return false;
  return true;
}

bool same(const std::vector<float> &a, const float *b) { return !memcmp(a.data(), b, a.size() * sizeof(float)); }

// Whether a row with NaN or infinity gives NaN, and changes no other.
bool keeps_others(Case made, const PackedKernel &kernel, const std::vector<float> &whole) {
  const int bad = draw(0, made.rows - 1);
  const float values[] = {std::nanf(""), INFINITY, -INFINITY};
  made.x[size_t(bad) * made.depth + draw(0, made.depth - 1)] = values[draw(0, 2)];
  const std::vector<float> out = made.product(kernel, 0, made.rows, 2);
  for (int row = 0; row < made.rows; row++)
    for (int o = 0; o < made.outputs; o++) {
      const size_t at = size_t(row) * made.outputs + o;
      if (row == bad ? out[at] == out[at] : memcmp(&out[at], &whole[at], sizeof(float)) != 0) return false;
    }
  return true;
}

}  // namespace

int main(int argc, char **argv) {
  const int cases = argc > 1 ? atoi(argv[1]) : 20;
  std::vector<const PackedKernel *> kernels = {&kPackedPortable};
  const PackedKernel *best = &best_packed_kernel();
#ifdef __x86_64__
  if (best == &kPackedAvx512) kernels.push_back(&kPackedAvx2);
#endif
  if (best != kernels[0]) kernels.push_back(best);
  bool failed = false;
  double worst[2] = {0, 0};
  uint64_t digest = 0;
  for (int i = 0; i < cases; i++)
    for (int p = 0; p < kPackings; p++) {
      randoms.seed(i * kPackings + p);  // for the digest: kernels draw, too
      const Case made{Packing(p)};
      const std::vector<float> whole = made.product(kPackedPortable, 0, made.rows, 1);
      const double error = made.error(whole);
      worst[made.digits - 1] = std::max(worst[made.digits - 1], error);
      const auto told = [&](bool good, const char *what, const char *kernel) {
        if (!good) printf("%s, case %d, packing %d: %s\n", kernel, i, p, what), failed = true;
      };
      told(error <= (made.digits == 1 ? 2e-2 : 2e-4), "the error is too large", "portable");
      for (const PackedKernel *kernel : kernels) {
        told(same(whole, made.product(*kernel, 0, made.rows, draw(1, 5)).data()), "bits differ from one thread of the portable kernel", kernel->name);
        const int count = draw(1, made.rows), first = draw(0, made.rows - count);
        told(same(made.product(*kernel, first, count, draw(1, 3)), &whole[size_t(first) * made.outputs]), "fewer rows have other bits", kernel->name);
        told(groups_agree(made, *kernel, whole), "rows in groups have other bits", kernel->name);
        told(keeps_others(made, *kernel, whole), "NaN or infinity leaves its row, or disappears", kernel->name);
      }
      for (float value : whole) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        digest = (digest ^ bits) * 0x100000001b3;
      }
    }
  printf("kernels");
  for (const PackedKernel *kernel : kernels) printf(" %s", kernel->name);
  printf(", largest error %.2g with one digit, %.2g with two\ndigest %016llx\n", worst[0], worst[1], static_cast<unsigned long long>(digest));
  return failed;
}
