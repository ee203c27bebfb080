// Normaliser of a row of logits: one walk for the maximum, one for the sum. Compiled once per instruction set.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "vectors.h"

namespace chunkattn {
namespace {

// Writes the maximum of `count` logits, and the logarithm of the sum of their exponentials relative to the maximum. Both are NaN
// where a logit is not finite. The order of additions follows `count` alone: blocks of kBlock, so that float32 loses little.
void normalise(const float *logits, int count, float *to) {
  constexpr int kBlock = 1024, kLanes = 4;  // kLanes independent sums, since each waits for its last addition
  constexpr float kLog2E = 1.44269504f, kLeast = std::numeric_limits<float>::lowest();
  const int whole = count / (kLanes * kWidth) * kLanes * kWidth;
  Floats most[kLanes], odd[kLanes] = {};  // odd: 0 times every logit, NaN for those that are not finite
  for (Floats &m : most) m = splat(kLeast);
  for (int i = 0; i < whole; i += kLanes * kWidth)
    for (int j = 0; j < kLanes; j++) {
      const Floats x = read<Floats>(logits + i + j * kWidth);
      most[j] = larger(x, most[j]), odd[j] += x * 0.f;
    }
  float maximum = kLeast, wrong = 0;
  for (int i = whole; i < count; i++) maximum = std::max(maximum, logits[i]), wrong += logits[i] * 0.f;
  for (int j = 0; j < kLanes; j++) maximum = std::max(maximum, largest_of(most[j])), wrong += sum_of(odd[j]);
  const Floats least = splat(maximum), by = splat(kLog2E);
  float total = 0;
  for (int begin = 0; begin < count; begin += kBlock) {
    const int end = std::min(count, begin + kBlock);
    Floats sums[kLanes] = {};
    int i = begin;
    for (; i + kLanes * kWidth <= end; i += kLanes * kWidth)
      for (int j = 0; j < kLanes; j++) sums[j] += exp2_of((read<Floats>(logits + i + j * kWidth) - least) * by);
    float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < end; i++) sum += exp2_of(splat((logits[i] - maximum) * kLog2E))[0];
    total += sum;
  }
  to[0] = maximum + wrong, to[1] = std::log(total) + wrong;
}

}  // namespace
}  // namespace chunkattn
