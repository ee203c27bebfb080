// The operators over any pool of threads.
#pragma once
#include <functional>

#include "step.h"

namespace chunkattn {

class Threads {
 public:
  virtual int count() const = 0;  // threads that run tasks beside the caller's, and the caller's
  virtual void schedule(std::function<void()> task) = 0;
  virtual ~Threads() = default;
};

// Writes the rows' K/V to the pools, then attends to the pools. Padding rows become zero.
void attention(const Step &step, const Kernel &kernel, Threads &threads);

// As `attention`, of heads that are prepared here. A row with K or V that is not finite gets NaN, and the pools get zeros.
void attention_of_heads(Step step, Heads heads, const Kernel &kernel, Threads &threads);

void norm(const Norm &given, const Kernel &kernel, Threads &threads);
void gate(const Gate &given, const Kernel &kernel, Threads &threads);
// Finds the first of the largest logits of each row, and whether all are finite.
void largest(const float *logits, int rows, int count, int32_t *index, bool *finite, const Kernel &kernel, Threads &threads);

// Writes two values for each of `rows` rows of logits; see normaliser.h.
void normalise(const float *logits, int rows, int count, float *to, const Kernel &kernel, Threads &threads);

// Computes products. Those of several weights have one input.
void multiply(const RowProduct &given, const Kernel &kernel, Threads &threads);
void multiply(const RowProduct *given, int count, const Kernel &kernel, Threads &threads);

// Computes the logits of labels, [rows, num_labels], and the normaliser of every row, [rows, 2], as `normalise` but for rounding.
// Labels beyond the outputs keep the logit that is there. The kernel must have `read`.
void read_labels(const RowProduct &given, const int32_t *labels, int num_labels, float *logits, float *normalisers,
                 const Kernel &kernel, Threads &threads);

// The best kernel that this processor and operating system run.
const Kernel *best_kernel();
// The kernel called `name`; null where it is unknown or cannot run here, and then `*why` says so.
const Kernel *kernel_named(const char *name, const char **why);

}  // namespace chunkattn
