// What is added up along one query row, and the numbers of `vectors.Vectors` that follow from it.
//
// Entries are passed over while the row lies in the cache: once where α is made, once where b − E is known. Whatever a mask
// hides is blended away, never multiplied, so that nothing becomes NaN on the way.
#pragma once
#include <limits>

#include "call.h"
#include "edges.h"
#include "vectors.h"

namespace advantage_probe {

// Sums over the visible keys of one row; `less` is b − E = −A.
struct RowSums {
  double entropy, mass, sink, variation;                           // of α
  double score_square, advantage_square, spread, less_mean;        // of D, α A², |D|, α (b − E)
  double less_sum, less_square, least_less, reach;              // of b − E; α |distance|
  double best, worst, largest, block_mass, block_mean;  // of a block of keys: ranks of its edges, largest α, Σ α, Σ D
  void clear() {
    *this = RowSums();
    mass = 1;
    least_less = std::numeric_limits<double>::infinity();
  }
};

// What is known of a row before its entries are.
template <typename T>
struct Row {
  int64_t query;
  double n;         // visible keys, at least 1
  double expected;  // E
  double deviation; // Σ w b − u·o, where it is not Σ α (b − E)
  bool precise;
  double norm;      // ‖u‖
};

// Which of the sums beside the usual ones are wanted of an entry.
struct Extras {
  bool reach, edges, by_knockout;
  double own;      // position of the row
  int64_t tokens;  // keys from here on have no position
  int64_t key;     // of the first entry
};

// the first `count` lanes, 0 in the others
template <typename T>
inline Vec<T> only(const Vec<T>& v, int64_t count) {
  return count == Vec<T>::size() ? v : Vec<T>::blendv(Vec<T>(0), v, lanes<T>(count));
}

template <typename T>
inline Vec<T> visible(const T* mask, int64_t count) {  // all bits set where the mask shows the key
  return load(mask, count) > Vec<T>(static_cast<T>(HIDES));
}

// Sums of one row once α (in `a`) is known: D goes to `g`, which holds b; usage and Σ α ‖u‖ per key are added to.
// MASKED: `mask` hides entries. EXTRA: distances or edges are wanted.
template <typename T, bool MASKED, bool EXTRA>
inline void gradient_row(const T* a, T* g, int64_t count, T expected, T norm, const T* mask, T* usage, T* user_norm,
                         const Extras& extras, RowSums& sums) {
  using V = Vec<T>;
  const V e(expected), u(norm), zero(0), infinite(std::numeric_limits<T>::infinity());
  V square = zero, advantage = zero, spread = zero, less_sum = zero, less_square = zero, mean = zero, least_less = infinite;
  V reach = zero, best = zero, worst = zero, largest = zero, mass = zero;
  for (int64_t j = 0; j < count; j += V::size()) {
    const int64_t n = std::min<int64_t>(V::size(), count - j);
    V alpha = load(a + j, n), less = load(g + j, n) - e;
    V gradient = alpha * less;
    save(gradient, g + j, n);
    V candidate = less;
    if (MASKED) {
      const V shown = visible(mask + j, n);
      alpha = V::blendv(zero, alpha, shown), gradient = V::blendv(zero, gradient, shown);
      candidate = V::blendv(infinite, less, shown), less = V::blendv(zero, less, shown);
    }
    if (n < V::size()) {
      const V there = lanes<T>(n);
      candidate = V::blendv(infinite, candidate, there), less = V::blendv(zero, less, there);
    }
    least_less = at::vec::clamp_max(candidate, least_less);
    square = at::vec::fmadd(gradient, gradient, square);
    advantage = at::vec::fmadd(gradient, less, advantage);
    spread = spread + gradient.abs();
    mean = mean + gradient;
    less_sum = less_sum + less;
    less_square = at::vec::fmadd(less, less, less_square);
    save(load(usage + j, n) + alpha, usage + j, n);
    save(at::vec::fmadd(alpha, u, load(user_norm + j, n)), user_norm + j, n);
    if (EXTRA) {
      if (extras.reach && extras.key + j < extras.tokens) {
        const int64_t known = std::min<int64_t>(n, extras.tokens - extras.key - j);
        const V apart = (V::arange(static_cast<T>(extras.key + j), static_cast<T>(1)) - V(static_cast<T>(extras.own))).abs();
        reach = at::vec::fmadd(alpha, only<T>(apart, known), reach);
      }
      if (extras.edges) {
        V rank = gradient;
        if (extras.by_knockout) rank = V::blendv(gradient / (V(1) - alpha), zero, alpha > V(T(0.5)));
        largest = at::vec::clamp_min(alpha, largest), mass = mass + alpha;
        best = at::vec::clamp_min(rank, best), worst = at::vec::clamp_max(rank, worst);
      }
    }
  }
  sums.score_square += total(square), sums.advantage_square += total(advantage), sums.spread += total(spread);
  sums.less_mean += total(mean), sums.less_sum += total(less_sum), sums.less_square += total(less_square);
  sums.least_less = std::min(sums.least_less, least(least_less));
  if (EXTRA) {
    sums.reach += total(reach);
    sums.best = -least(zero - best), sums.worst = least(worst), sums.largest = -least(zero - largest);
    sums.block_mass = total(mass), sums.block_mean = total(mean);
  }
}

// From the sums of a row to its column of the table; `at` is its place among B·H·Q.
template <typename T>
inline void finish_row(const Call& call, int64_t at, const Row<T>& row, const RowSums& x) {
  const int64_t plane = call.batch * call.heads * call.queries;
  T* rows = reinterpret_cast<T*>(call.rows) + at;
  const double n = row.n, e = row.expected, eps = std::numeric_limits<T>::epsilon();
  const double deviation = row.precise ? x.less_mean : row.deviation;
  const double varied = std::max(0.0, x.less_square - x.less_sum * x.less_sum / n);
  const double covariance = x.mass * x.less_sum / n - x.less_mean;
  const bool aligned = n >= 3 && x.variation > eps * (x.variation + x.mass * x.mass / n) &&
                       varied > eps * (x.less_square + 2 * e * x.less_sum + n * e * e);
  const double columns[ROW_COLUMNS] = {
      x.entropy,
      x.sink,
      e,
      x.advantage_square,
      0.0 - x.least_less,
      aligned ? covariance / std::sqrt(x.variation * varied) : 0.0,
      x.score_square,
      0.5 * x.spread,
      x.less_sum / n,
      row.norm,
      deviation * deviation,
      x.advantage_square + e * (2 * x.less_mean + x.mass * e),
  };
  for (int64_t c = 0; c < ROW_COLUMNS; c++) rows[c * plane] = static_cast<T>(columns[c]);
  reinterpret_cast<bool*>(call.aligned)[at] = aligned;
  if (call.reach) reinterpret_cast<T*>(call.distances)[at] = static_cast<T>(x.reach);
}

// A row that does not count, or sees nothing, holds 0 everywhere.
template <typename T>
inline void blank_row(const Call& call, int64_t at) {
  const int64_t plane = call.batch * call.heads * call.queries;
  for (int64_t c = 0; c < ROW_COLUMNS; c++) reinterpret_cast<T*>(call.rows)[c * plane + at] = 0;
  reinterpret_cast<bool*>(call.aligned)[at] = false;
  if (call.reach) reinterpret_cast<T*>(call.distances)[at] = 0;
}

// Which rows of one head count, and how many keys they see.
struct Counting {
  const bool* usable;
  const int64_t* seen;
  Counting(const Call& call, int64_t batch, int64_t head)
      : usable(plane<const bool>(call.usable, batch, head).data), seen(plane<const int64_t>(call.seen, batch, head).data) {}
  bool counts(int64_t row) const { return !usable || usable[row]; }
  double n(int64_t row) const { return std::max<int64_t>(1, seen[row]); }
};

}  // namespace advantage_probe
