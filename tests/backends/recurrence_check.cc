// Compares the gated delta rule of every kernel that runs here with a recurrence in double precision, and parts that are computed
// at once on one thread with the same parts in random pieces on several, bit by bit. A program of its own, so that the sanitizers
// see our code alone; tests/backends/test_cpu_backend.py builds and runs it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "check_pool.h"
#include "recurrence.h"

using namespace chunkattn;

namespace {

std::mt19937 randoms(1);
int draw(int low, int high) { return low + int(randoms() % uint32_t(high - low + 1)); }
using List = std::vector<float>;
List floats(size_t count, float size) {
  List made(count);
  for (float &x : made) x = std::uniform_real_distribution<float>(-size, size)(randoms);
  return made;
}

// Random parts, one after the other in the inputs. Part i has slot i and seat i, and its last state is kept in a slot behind those.
struct Case {
  Recurrence given{};
  std::vector<int> counts, firsts;
  List inputs[3], conv[3], a, b, a_log, dt_bias;
  int rows = 0;

  Case() {
    given.key_heads = draw(1, 3), given.value_heads = given.key_heads * draw(1, 4), given.taps = draw(2, 5);
    given.key_dim = draw(1, 9) * (draw(0, 1) ? 16 : 5), given.value_dim = draw(1, 9) * (draw(0, 1) ? 16 : 3);
    for (int parts = draw(1, 4); parts; parts--) firsts.push_back(rows), counts.push_back(draw(1, 150)), rows += counts.back();
    given.seats = int(counts.size()), given.slots = 2 * given.seats;
    for (int i = 0; i < 3; i++) inputs[i] = floats(size_t(rows) * given.channels(i), 2), conv[i] = floats(size_t(given.channels(i)) * given.taps, 1);
    a = floats(size_t(rows) * given.value_heads, 4), b = floats(a.size(), 4);
    a_log = floats(given.value_heads, 2), dt_bias = floats(given.value_heads, 1);
    for (int i = 0; i < 3; i++) given.conv[i] = conv[i].data();
    given.a_log = a_log.data(), given.dt_bias = dt_bias.data();
    if (draw(0, 1)) inputs[draw(0, 2)][draw(0, given.key_dim - 1)] = INFINITY;
  }

  struct Found {
    List out, states;  // of all parts: outputs, and last states
    bool refused = false;
  };

  // Computes all parts, at most `most` tokens of one in a step.
  Found computed(const Kernel &kernel, int threads, int most) const {
    Recurrence step = given;
    const int wide = step.value_heads * step.value_dim, parts = int(counts.size());
    List caches[10];
    const int64_t state = int64_t(wide) * step.key_dim;
    const auto cache = [&](int i, int64_t size) { return (caches[i] = List(size_t(size), NAN)).data(); };
    step.state = cache(0, step.slots * state), step.keys = cache(1, step.seats * step.keys_size());
    step.values = cache(2, int64_t(step.seats) * kRecurrentBlock * wide);
    step.decay = cache(3, int64_t(step.seats) * kRecurrentBlock * step.value_heads);
    for (int i = 0; i < 3; i++) {
      step.slot_window[i] = cache(4 + i, int64_t(step.slots) * (step.taps - 1) * step.channels(i));
      step.seat_window[i] = cache(7 + i, int64_t(step.seats) * (step.taps - 1) * step.channels(i));
    }
    Found found{List(size_t(rows) * wide, 0.f), {}};
    std::vector<int> done(parts);
    Pool pool(threads);
    for (bool more = true; more;) {
      std::vector<Walk> walks;
      std::vector<int> of;  // row of the inputs for each row of the step; -1 for a row in no walk
      for (int p = 0; p < parts; p++) {
        const int count = std::min(counts[p] - done[p], most >= 150 ? most : draw(0, most));
        if (draw(0, 3) == 0) of.push_back(-1);
        const bool ends = done[p] + count == counts[p];
        walks.push_back({int(of.size()), count, done[p], done[p] ? p : -1, p, p, ends ? counts[p] : 0, parts + p});
        for (int i = 0; i < count; i++) of.push_back(firsts[p] + done[p] + i);
        done[p] += count;
      }
      List own[3], own_a, own_b, out(of.size() * wide, NAN);
      const auto add = [&](List &to, const List &from, int row, int size) {
        if (row < 0)
          to.insert(to.end(), size, INFINITY);
        else
          to.insert(to.end(), from.begin() + int64_t(row) * size, from.begin() + int64_t(row + 1) * size);
      };
      for (int row : of) {
        for (int i = 0; i < 3; i++) add(own[i], inputs[i], row, step.channels(i));
        add(own_a, a, row, step.value_heads), add(own_b, b, row, step.value_heads);
      }
      step.rows = int(of.size()), step.walks = walks.data(), step.num_walks = parts, step.out = out.data();
      for (int i = 0; i < 3; i++) step.inputs[i] = own[i].data();
      step.a = own_a.data(), step.b = own_b.data();
      if (const char *why = wrong_walks(step)) printf("%s\n", why), found.refused = true;
      recur(step, kernel, pool);
      for (size_t r = 0; r < of.size(); r++) {
        if (of[r] >= 0)
          std::copy_n(out.begin() + r * wide, wide, found.out.begin() + int64_t(of[r]) * wide);
        else if (std::count(out.begin() + r * wide, out.begin() + (r + 1) * wide, 0.f) != wide)
          found.refused = true;
      }
      more = false;
      for (int p = 0; p < parts; p++) more |= done[p] < counts[p];
    }
    found.states.assign(step.state + parts * state, step.state + 2 * parts * state);
    return found;
  }

  // The largest difference from a recurrence in double precision.
  double error(const Found &found) const {
    double worst = 0;
    const int dk = given.key_dim, dv = given.value_dim, wide = given.value_heads * dv;
    const auto check = [&](double value, double expected) {
      const double error = std::isnan(expected) && std::isnan(value) ? 0 : std::fabs(value - expected) / (1 + std::fabs(expected));
      if (!(error <= worst)) worst = error;
    };
    std::vector<bool> wrong(rows);
    for (int i = 0; i < 3; i++)
      for (size_t at = 0; at < inputs[i].size(); at++)
        if (!std::isfinite(inputs[i][at])) wrong[at / given.channels(i)] = true;
    for (size_t p = 0; p < counts.size(); p++)
      for (int h = 0; h < given.value_heads; h++) {
        const auto bad = [&](int token) { return bool(wrong[firsts[p] + token]); };
        std::vector<double> state(size_t(dk) * dv);
        for (int i = 0; i < counts[p]; i++) {
          const auto head = [&](int in, int first, int size) {
            std::vector<double> made(size);
            for (int t = 0; t < given.taps; t++) {
              const int token = i - (given.taps - 1) + t;
              if (token < 0 || bad(token)) continue;
              for (int c = 0; c < size; c++)
                made[c] += double(inputs[in][int64_t(firsts[p] + token) * given.channels(in) + first + c]) *
                           conv[in][int64_t(first + c) * given.taps + t];
            }
            double squares = 1e-6;
            for (double &x : made) x /= 1 + std::exp(-x), squares += x * x;
            if (in < 2)
              for (double &x : made) x /= std::sqrt(squares);
            return made;
          };
          const int64_t row = firsts[p] + i, at = row * given.value_heads + h;
          const float *out = found.out.data() + row * wide + h * dv;
          if (bad(i)) {
            for (int c = 0; c < dv; c++) check(out[c], NAN);
            continue;
          }
          const int key = h / given.group() * dk;
          const auto q = head(0, key, dk), k = head(1, key, dk), v = head(2, h * dv, dv);
          const double decay = std::exp(-std::exp(double(a_log[h])) * std::log1p(std::exp(double(a[at]) + dt_bias[h])));
          for (int c = 0; c < dv; c++) {
            double read = 0, product = 0;
            for (int t = 0; t < dk; t++) state[t * dv + c] *= decay, read += state[t * dv + c] * k[t];
            const double own = (v[c] - read) / (1 + std::exp(-double(b[at])));
            for (int t = 0; t < dk; t++) state[t * dv + c] += k[t] * own, product += state[t * dv + c] * q[t];
            check(out[c], product / std::sqrt(double(dk)));
          }
        }
        for (int t = 0; t < dk * dv; t++) check(found.states[(p * given.value_heads + h) * dk * dv + t], state[t]);
      }
    return worst;
  }
};

bool same(const List &a, const List &b) { return a.size() == b.size() && !memcmp(a.data(), b.data(), a.size() * sizeof(float)); }

}  // namespace

int main(int argc, char **argv) {
  const int cases = argc > 1 ? atoi(argv[1]) : 20;
  bool failed = false;
  for (const char *name : {"portable", "avx2", "avx512_bf16", "amx"}) {
    const char *why;
    const Kernel *kernel = kernel_named(name, &why);
    if (!kernel) {
      printf("%-12s not run: %s\n", name, why);
      continue;
    }
    double worst = 0;
    for (int i = 0; i < cases; i++) {
      const Case made;
      const Case::Found whole = made.computed(*kernel, 1, 150);
      const double error = made.error(whole);
      if (!(error <= 2e-5)) printf("%s, case %d: error %g\n", name, i, error), failed = true;
      worst = std::max(worst, error);
      for (int most : {150, 1, 9, 60}) {
        const Case::Found other = made.computed(*kernel, draw(2, 7), most);
        if (!same(whole.out, other.out) || !same(whole.states, other.states))
          printf("%s, case %d: the ends of steps of %d tokens, or threads, change the result\n", name, i, most), failed = true;
        failed |= other.refused;
      }
      failed |= whole.refused;
    }
    printf("%-12s largest error %.2g\n", name, worst);
  }
  return failed;
}
