// Every statistic beside a kernel that keeps its backward.
//
// Two products where the kernel's log-sum-exp and ∂L/∂v are known, three where they are not: rows then stand against all the
// keys that they can see, so that their normaliser is known before anything is added up. This pass knows caps, biases,
// windows, sinks and dropped weights; nothing that it computes goes back to the model.
#include <ATen/Parallel.h>

#include "call.h"
#include "edges.h"
#include "row_sums.h"
#include "vectors.h"

namespace advantage_probe {
namespace {

// The scores that enter the softmax, in place, and the largest of them.
template <typename T>
T scores_row(T* s, int64_t count, T cap, const T* bias, const T* mask) {
  using V = Vec<T>;
  const V hidden(static_cast<T>(HIDDEN));
  V largest = hidden;
  for (int64_t j = 0; j < count; j += V::size()) {
    const int64_t n = std::min<int64_t>(V::size(), count - j);
    V score = load(s + j, n);
    if (cap != 0) score = (score / V(cap)).tanh() * V(cap);
    if (bias) score = score + load(bias + j, n);
    if (mask) score = V::blendv(hidden, score + load(mask + j, n), visible(mask + j, n));
    if (cap != 0 || bias || mask) save(score, s + j, n);
    if (n < V::size()) score = V::blendv(hidden, score, lanes<T>(n));
    largest = at::vec::clamp_min(score, largest);
  }
  return -static_cast<T>(least(V(0) - largest));
}

struct Normalized {
  double sum, with_score;  // Σ e and Σ e · (s − largest), e = exp(s − largest)
};

// a ← exp(s − largest)
template <typename T>
Normalized exponentials_row(T* a, int64_t count, T largest) {
  using V = Vec<T>;
  const V top(largest), zero(0);
  V sum = zero, with_score = zero;
  for (int64_t j = 0; j < count; j += V::size()) {
    const int64_t n = std::min<int64_t>(V::size(), count - j);
    const V away = load(a + j, n) - top;
    V e = away.exp();
    save(e, a + j, n);
    e = only<T>(e, n);
    sum = sum + e;
    with_score = at::vec::fmadd(e, only<T>(away, n), with_score);
  }
  return {total(sum), total(with_score)};
}

// α ← e · factor; Σ (α − even)², and Σ α b where `b` is given. Hidden entries do not vary.
template <typename T>
void attention_row(T* a, int64_t count, T factor, T even, const T* mask, const T* b, RowSums& sums, double& expected) {
  using V = Vec<T>;
  const V f(factor), mean(even), zero(0);
  V variation = zero, along = zero;
  for (int64_t j = 0; j < count; j += V::size()) {
    const int64_t n = std::min<int64_t>(V::size(), count - j);
    const V alpha = load(a + j, n) * f;
    save(alpha, a + j, n);
    V varied = only<T>(alpha - mean, n);
    if (mask) varied = V::blendv(zero, varied, visible(mask + j, n));
    variation = at::vec::fmadd(varied, varied, variation);
    if (b) along = at::vec::fmadd(only<T>(alpha, n), load(b + j, n), along);
  }
  sums.variation = total(variation);
  if (b) expected = total(along);
}

template <typename T>
double dot(const T* x, const T* y, int64_t count) {
  Vec<T> sum(0);
  for (int64_t j = 0; j < count; j += Vec<T>::size()) {
    const int64_t n = std::min<int64_t>(Vec<T>::size(), count - j);
    sum = at::vec::fmadd(load(x + j, n), load(y + j, n), sum);
  }
  return total(sum);
}

// D = w b − α (Σ w b) of a row whose weights were partly dropped: its square and |D|, D in `d`; ‖u‖ goes with w.
template <typename T>
void dropped_row(const T* a, const T* w, const T* b, T* d, int64_t count, T reached, T norm, T* user_norm, RowSums& sums) {
  using V = Vec<T>;
  const V r(reached), u(norm);
  V square(0), spread(0);
  for (int64_t j = 0; j < count; j += V::size()) {
    const int64_t n = std::min<int64_t>(V::size(), count - j);
    const V kept = load(w + j, n), gradient = only<T>(kept * load(b + j, n) - load(a + j, n) * r, n);
    save(gradient, d + j, n);
    square = at::vec::fmadd(gradient, gradient, square), spread = spread + gradient.abs();
    save(at::vec::fmadd(kept, u, load(user_norm + j, n)), user_norm + j, n);
  }
  sums.score_square = total(square), sums.spread = total(spread);
}

template <typename T>
class Head {
 public:
  Head(const Call& call, int64_t b, int64_t h, int64_t block, T* buffers, HeadEdges& edges)
      : call(call), b(b), h(h), head(b * call.heads + h), block(block), edges(edges), counting(call, b, h),
        attention(buffers), compatibility(buffers + block * call.keys), spare(buffers + 2 * block * call.keys),
        upstream(spare + 2 * call.keys) {
    const int64_t owner = h / (call.heads / call.owners);
    query = plane<const T>(call.query, b, h), key = plane<const T>(call.key, b, owner);
    value = plane<const T>(call.value, b, owner), given = plane<const T>(call.upstream, b, h);
    output = plane<const T>(call.output, b, h), normalizer = plane<const T>(call.normalizer, b, h);
    mask = plane<const T>(call.mask, b, h), bias = plane<const T>(call.bias, b, h);
    weights = plane<const T>(call.weights, b, h), own = plane<T>(call.own, b, h);
    usage = reinterpret_cast<T*>(call.usage) + head * call.keys;
    user_norm = reinterpret_cast<T*>(call.user_norm) + head * call.keys;
  }

  static int64_t size(const Call& call, int64_t block) { return 2 * (block + 1) * call.keys + block * call.value_width; }

  void run() {
    std::fill(usage, usage + call.keys, T(0)), std::fill(user_norm, user_norm + call.keys, T(0));
    for (int64_t start = 0; start < call.queries; start += block) rows(start, std::min(start + block, call.queries));
  }

 private:
  int64_t low(int64_t i) const {
    return call.window < 0 ? 0 : std::clamp<int64_t>(i + call.offset - call.window + 1, 0, call.keys);
  }
  int64_t high(int64_t i) const {
    return call.causal ? std::clamp<int64_t>(i + call.offset + 1, 0, call.keys) : call.keys;
  }

  void rows(int64_t start, int64_t stop) {
    const int64_t left = low(start), columns = high(stop - 1) - left, count = stop - start, width = call.value_width;
    if (columns <= 0) {
      for (int64_t i = start; i < stop; i++) blank_row<T>(call, head * call.queries + i);
      return;
    }
    for (int64_t i = start; i < stop; i++)
      for (int64_t c = 0; c < width; c++)
        upstream[(i - start) * width + c] = counting.counts(i) ? given.row(i)[c] : T(0);
    product<T>('T', 'N', columns, count, call.width, static_cast<T>(call.scale), key.row(left), key.stride, query.row(start),
               query.stride, 0, attention, columns);
    product<T>('T', 'N', columns, count, width, 1, value.row(left), value.stride, upstream, width, 0, compatibility, columns);
    for (int64_t i = start; i < stop; i++) {
      const int64_t from = std::max<int64_t>(0, low(i) - left), to = std::max(from, high(i) - left);
      T* a = attention + (i - start) * columns;
      if (counting.counts(i)) {
        row(i, left + from, to - from, a + from, compatibility + (i - start) * columns + from, upstream + (i - start) * width);
        std::fill(a, a + from, T(0)), std::fill(a + to, a + columns, T(0));
      } else {
        blank_row<T>(call, head * call.queries + i), std::fill(a, a + columns, T(0));
      }
    }
    if (own.data)
      product<T>('N', 'T', width, columns, count, 1, upstream, width, attention, columns, 1, own.row(left), own.stride);
  }

  // One row that counts against `count` keys from `first` on; leaves w in `a` where the weights were dropped, else α.
  void row(int64_t i, int64_t first, int64_t count, T* a, T* b_row, const T* u) {
    const T* shown = mask.data ? mask.row(i) + first : nullptr;
    const T* added = bias.data ? bias.row(i) + first : nullptr;
    const T cap = static_cast<T>(call.softcap);
    const double n = counting.n(i), received = row_dot(u, output.row(i), call.value_width);
    Row<T> known{i, n, received, 0.0, call.precise != 0, std::sqrt(static_cast<double>(row_dot(u, u, call.value_width)))};
    RowSums sums;
    sums.clear();

    double factor = 1;
    if (normalizer.data) {
      if (shown || added || cap != 0) scores_row<T>(a, count, cap, added, shown);
      sums.entropy = -exponentials_row<T>(a, count, normalizer.data[i * normalizer.stride]).with_score;
    } else {
      const T largest = scores_row<T>(a, count, cap, added, shown);
      const Normalized found = exponentials_row<T>(a, count, largest);
      double whole = found.sum;
      if (call.sinks) {
        const double sink = reinterpret_cast<const T*>(call.sinks)[h];
        const double beside = std::exp(std::min(sink - largest, 700.0));
        whole += beside, sums.mass = found.sum / whole, sums.sink = beside / whole;
      }
      factor = 1 / whole;
      sums.entropy = sums.mass * std::log(whole) - found.with_score / whole;
    }
    const T even = static_cast<T>(sums.mass / n);
    attention_row<T>(a, count, static_cast<T>(factor), even, shown, call.precise ? nullptr : b_row, sums, known.expected);
    known.deviation = known.expected - received;

    const T norm = static_cast<T>(known.norm), expected = static_cast<T>(known.expected);
    const T* w = weights.data ? weights.row(i) + first : nullptr;
    T *d = spare, *kept = spare + call.keys;
    if (w) {
      std::copy(w, w + count, kept);
      if (shown)
        for (int64_t j = 0; j < count; j++)
          if (!(shown[j] > static_cast<T>(HIDES))) kept[j] = 0;
      const double reached = dot(kept, b_row, count);
      known.deviation = reached - received;
      dropped_row<T>(a, kept, b_row, d, count, static_cast<T>(reached), norm, user_norm + first, sums);
    }
    Dominant dominant;
    if (call.capacity) {  // here b is still there, and the whole row
      const int64_t most = std::max_element(a, a + count) - a;
      if (a[most] > T(0.5)) {
        const T* used = w ? kept : a;
        double rest = sums.sink, others = 0;
        for (int64_t j = 0; j < count; j++)
          if (j != most) rest += a[j], others += double(used[j]) * b_row[j];
        const double alpha = a[most], mixed = double(used[most]) * b_row[most], less = b_row[most] - known.expected;
        dominant = {first + most, alpha, w ? double(d[most]) : alpha * less, less, 0, rest, others};
        dominant.knockout = rest > 0 ? alpha * others / rest - mixed : std::nan("");
      }
    }
    const double square = sums.score_square, spread = sums.spread;
    const Extras extras{call.reach != 0, call.capacity != 0 && !w, call.by_knockout != 0,
                  static_cast<double>(call.first_position + i), call.tokens, first};
    add(a, b_row, count, expected, w ? T(0) : norm, shown, first, extras, sums);
    if (w) sums.score_square = square, sums.spread = spread;
    if (call.capacity && (n > 1 || call.sinks)) {  // a key that is seen alone has D = 0
      const T* gradient = w ? d : b_row;  // after the pass b_row holds α (b − E)
      const auto entry = [&](int64_t j) {
        struct { double gradient, attention, less; } found{gradient[j], a[j], a[j] != 0 ? double(b_row[j]) / a[j] : 0.0};
        return found;
      };
      const bool there = dominant.key >= 0;
      if (w || there || sums.best > edges.anti_routed.threshold() || -sums.worst > edges.routed.threshold())
        edges.row(entry, known.expected, count, i, first, call.by_knockout, there ? dominant.key - first : -1);
      edges.row(dominant, known.expected, i, call.by_knockout);
    }
    if (w) std::copy(kept, kept + count, a);
    finish_row<T>(call, head * call.queries + i, known, sums);
  }

  void add(const T* a, T* b_row, int64_t count, T expected, T norm, const T* shown, int64_t first, const Extras& extras,
           RowSums& sums) {
    const bool extra = extras.reach || extras.edges;
    T *used = usage + first, *users = user_norm + first;
    if (shown)
      extra ? gradient_row<T, true, true>(a, b_row, count, expected, norm, shown, used, users, extras, sums)
            : gradient_row<T, true, false>(a, b_row, count, expected, norm, shown, used, users, extras, sums);
    else
      extra ? gradient_row<T, false, true>(a, b_row, count, expected, norm, shown, used, users, extras, sums)
            : gradient_row<T, false, false>(a, b_row, count, expected, norm, shown, used, users, extras, sums);
  }

  const Call& call;
  const int64_t b, h, head, block;
  HeadEdges& edges;
  const Counting counting;
  T *attention, *compatibility, *spare, *upstream, *usage, *user_norm;
  Plane<const T> query, key, value, given, output, normalizer, mask, bias, weights;
  Plane<T> own;
};

template <typename T>
void all_heads(const Call& call) {
  if (call.queries == 0) return;
  constexpr int64_t CACHE = 1 << 20;  // bytes: the scores of a block and their compatibilities stay in the second level
  const int64_t fitting = CACHE / (2 * sizeof(T) * std::max<int64_t>(1, call.keys));
  const int64_t block = std::min(call.queries, std::clamp<int64_t>(fitting, 16, 128));
  at::parallel_for(0, call.batch * call.heads, 1, [&](int64_t begin, int64_t end) {
    const Buffer<T> buffer(Head<T>::size(call, block));
    HeadEdges edges(call.capacity);
    for (int64_t z = begin; z < end; z++) {
      edges.clear();
      Head<T>(call, z / call.heads, z % call.heads, block, buffer.data, edges).run();
      if (call.capacity) edges.write<T>(call, z);
    }
  });
}

}  // namespace
}  // namespace advantage_probe

// 0, or 1 when memory ran out. `own` comes in as zeros.
extern "C" __attribute__((visibility("default"))) int advantage_probe_sums(const advantage_probe::Call* call, int wide) {
  try {
    wide ? advantage_probe::all_heads<double>(*call) : advantage_probe::all_heads<float>(*call);
  } catch (...) {
    return 1;
  }
  return 0;
}
