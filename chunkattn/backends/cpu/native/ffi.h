// What the sources of the operators as calls of XLA's foreign function interface share.
#pragma once
#include <functional>
#include <utility>

#include "groups.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace chunkattn {

// The kernels in use: those that `chunkattn_use` chose, or the best of this processor.
const Kernel &current();
const PackedKernel &current_packed();

class XlaThreads : public Threads {
 public:
  explicit XlaThreads(ffi::ThreadPool &pool) : pool_(pool) {}
  int count() const override { return int(pool_.num_threads()); }
  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool &pool_;
};

using Numbers = ffi::Buffer<ffi::S32>;
using Factors = ffi::Buffer<ffi::F32>;
using Codes = ffi::Buffer<ffi::U8>;

}  // namespace chunkattn
