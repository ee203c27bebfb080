// Products of groups of rows, each with a weight of its own: the experts of a layer.
//
// A pair is a row and its group. Pairs lie group by group, and an output of a pair is summed in one order for any size of its group,
// so that a row has the same bits in any company.
#pragma once
#include "packed.h"

namespace chunkattn {

// The rows of groups: pair i is the row `rows[i]` of x [count, in], and group g has the `sizes[g]` pairs after those of the groups
// before it.
template <class T> struct GroupedRows {
  const T *x;
  int count, in;
  const int32_t *rows;   // [pairs]
  const int32_t *sizes;  // [groups]
  int pairs, groups;
};

// One of several weights of the same pairs: [groups, outputs, in].
struct GroupWeight {
  const uint16_t *data;
  int outputs;
  float *out;  // [pairs, outputs]
};

// Computes the products of bfloat16 rows.
void multiply_groups(const GroupedRows<uint16_t> &given, const GroupWeight *weights, int count, const Kernel &kernel, Threads &threads);

// Two factors of each group, [groups, rank, in] and [groups, outputs, depth], whose product is added to a matrix. A depth is a multiple
// of 32, or 16 for an even number of outputs, and at least the rank: what lies behind the rank is multiplied by zero.
struct GroupFactors {
  const uint16_t *inner, *outer;
  int rank, outputs, depth;
  float *out;  // [count, outputs], to whose rows the products are added
};

// Adds the products of rows with both factors of their groups. No row is in two pairs.
void add_factors(const GroupedRows<uint16_t> &given, const GroupFactors *factors, int count, const Kernel &kernel, Threads &threads);

// Computes the products of rows with packed weights, whose `data` holds the groups one after the other. The integers of a row are made
// once for all its groups.
void multiply_groups(const GroupedRows<float> &given, int digits, const PackedWeight *weights, int count, const PackedKernel &kernel,
                     Threads &threads);

}  // namespace chunkattn
