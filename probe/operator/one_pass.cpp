// The gradients of sdpa's CPU flash backward and every statistic, in one pass.
//
// The order of work is that of the kernel, block for block, so that its gradients come out bit for bit: blocks of 32, 64 or
// 256 queries (fewer than 192, fewer than 768, more) against 512 keys; per block five products by the same BLAS, with
// buffers laid out as the kernel's are. What it does between the products is followed too, for numbers that are not finite.
#include <ATen/Parallel.h>

#include "call.h"
#include "edges.h"
#include "row_sums.h"
#include "vectors.h"

namespace advantage_probe {
namespace {

// a ← exp(a + mask − normalizer) over `count` entries; with STATS also entropy and variation of the visible ones.
template <typename T, bool STATS, bool MASKED>
inline void attention_row(T* a, int64_t count, T normalizer, T even, const T* mask, RowSums& sums) {
  using V = Vec<T>;
  const V l(normalizer), mean(even), zero(0), floor(static_cast<T>(HIDES));
  V entropy = zero, variation = zero;
  for (int64_t j = 0; j < count; j += V::size()) {
    const int64_t n = std::min<int64_t>(V::size(), count - j);
    V score = load(a + j, n);
    if (MASKED) score = score + load(mask + j, n);
    V log = score - l, alpha = log.exp();
    save(alpha, a + j, n);
    if (!STATS) continue;
    V varied = alpha - mean;
    if (MASKED) {
      const V shown = visible(mask + j, n);
      alpha = V::blendv(zero, alpha, shown), varied = V::blendv(zero, varied, shown);
      log = at::vec::clamp_min(log, floor);  // 0 · −∞
    }
    if (n < V::size()) {
      const V there = lanes<T>(n);
      alpha = V::blendv(zero, alpha, there), varied = V::blendv(zero, varied, there), log = V::blendv(zero, log, there);
    }
    entropy = entropy - alpha * log;
    variation = at::vec::fmadd(varied, varied, variation);
  }
  if (STATS) sums.entropy += total(entropy), sums.variation += total(variation);
}

// g ← a · (g − δ), as the kernel does it and nothing else
template <typename T>
inline void plain_gradient_row(const T* a, T* g, int64_t count, T delta) {
  using V = Vec<T>;
  const V d(delta);
  for (int64_t j = 0; j < count; j += V::size()) {
    const int64_t n = std::min<int64_t>(V::size(), count - j);
    save(load(a + j, n) * (load(g + j, n) - d), g + j, n);
  }
}

template <typename T>
bool finite_rows(const Plane<const T>& matrix, int64_t rows, int64_t width) {
  T sum = 0;
  for (int64_t r = 0; r < rows; r++) sum += row_dot(matrix.row(r), matrix.row(r), width);
  return std::isfinite(sum) && sum < 1e18;
}

// Note a block of a row: its dominant key, whose place is returned, or none (−1), and what the others hold.
template <typename Entry>
int64_t meet(Dominant& dominant, const Entry& entry, const RowSums& block, int64_t count, int64_t first) {
  if (!(block.largest > 0.5)) {
    dominant.rest += block.block_mass, dominant.others += block.block_mean;
    return -1;
  }
  int64_t most = 0;
  for (int64_t j = 1; j < count; j++)
    if (entry(j).attention > entry(most).attention) most = j;
  for (int64_t j = 0; j < count; j++)
    if (j != most) dominant.rest += entry(j).attention, dominant.others += entry(j).gradient;
  const auto found = entry(most);
  dominant.key = first + most;
  dominant.attention = found.attention, dominant.gradient = found.gradient, dominant.less = found.less;
  return most;
}

template <typename T, bool MASKED, bool EXTRA>
void one_head(const Call& call, int64_t b, int64_t h, T* attention, T* gradient, int64_t query_block, int64_t key_block,
              HeadEdges& edges) {
  const int64_t queries = call.queries, keys = call.keys, width = call.width, owner = h / (call.heads / call.owners);
  const auto query = plane<const T>(call.query, b, h), key = plane<const T>(call.key, b, owner);
  const auto value = plane<const T>(call.value, b, owner), upstream = plane<const T>(call.upstream, b, h);
  const auto output = plane<const T>(call.output, b, h), normalizer = plane<const T>(call.normalizer, b, h);
  const auto mask = plane<const T>(call.mask, b, h);
  const auto grad_query = plane<T>(call.grad_query, b, h), grad_key = plane<T>(call.grad_key, b, owner);
  const auto grad_value = plane<T>(call.grad_value, b, owner), own = plane<T>(call.own, b, h);
  const Counting counting(call, b, h);
  const int64_t head = b * call.heads + h;
  T* usage = reinterpret_cast<T*>(call.usage) + head * keys;
  T* user_norm = reinterpret_cast<T*>(call.user_norm) + head * keys;
  std::fill(usage, usage + keys, T(0)), std::fill(user_norm, user_norm + keys, T(0));
  const T scale = static_cast<T>(call.scale);
  // the kernel multiplies the zeros behind the diagonal too: that shows only where something is not finite
  const bool tame = finite_rows<T>(value, keys, width) && finite_rows<T>(upstream, queries, width);
  std::vector<T> delta(query_block), norm(query_block), counted;
  std::vector<RowSums> sums(query_block);
  std::vector<Dominant> dominant(EXTRA ? query_block : 0);
  if (own.data) counted.resize(query_block * width);

  for (int64_t m = 0; m < queries; m += query_block) {
    const int64_t rows = std::min(query_block, queries - m);
    for (int64_t r = 0; r < rows; r++) {
      delta[r] = row_dot(upstream.row(m + r), output.row(m + r), width);
      norm[r] = std::sqrt(row_dot(upstream.row(m + r), upstream.row(m + r), width));
      sums[r].clear();
      if (EXTRA) dominant[r] = Dominant();
      if (own.data)
        for (int64_t c = 0; c < width; c++)
          counted[r * width + c] = counting.counts(m + r) ? upstream.row(m + r)[c] : T(0);
    }
    const int64_t last = call.causal ? std::min(m + rows, keys) : keys;
    for (int64_t n = 0; n < last; n += key_block) {
      const int64_t columns = std::min(key_block, keys - n);
      product<T>('T', 'N', columns, rows, width, scale, key.row(n), key.stride, query.row(m), query.stride, 0, attention,
                 columns);
      const auto seen = [&](int64_t r) {
        return call.causal ? std::clamp<int64_t>(m + r - n + 1, 0, columns) : columns;
      };
      for (int64_t r = 0; r < rows; r++) {
        T* a = attention + r * columns;
        const T* shown = MASKED ? mask.row(m + r) + n : nullptr;
        const T l = normalizer.data[(m + r) * normalizer.stride], even = static_cast<T>(1 / counting.n(m + r));
        if (counting.counts(m + r))
          attention_row<T, true, MASKED>(a, seen(r), l, even, shown, sums[r]);
        else
          attention_row<T, false, MASKED>(a, seen(r), l, even, shown, sums[r]);
        std::fill(a + seen(r), a + columns, T(0));
      }
      product<T>('N', 'T', width, columns, rows, 1, upstream.row(m), upstream.stride, attention, columns, 1, grad_value.row(n),
                 grad_value.stride);
      if (own.data)
        product<T>('N', 'T', width, columns, rows, 1, counted.data(), width, attention, columns, 1, own.row(n), own.stride);
      product<T>('T', 'N', columns, rows, width, 1, value.row(n), value.stride, upstream.row(m), upstream.stride, 0, gradient,
                 columns);
      for (int64_t r = 0; r < rows; r++) {
        const T* a = attention + r * columns;
        T* g = gradient + r * columns;
        const int64_t count = seen(r), i = m + r;
        if (counting.counts(i)) {
          const Extras extras{call.reach != 0, call.capacity != 0, call.by_knockout != 0,
                              static_cast<double>(call.first_position + i), call.tokens, n};
          gradient_row<T, MASKED, EXTRA>(a, g, count, delta[r], norm[r], MASKED ? mask.row(i) + n : nullptr, usage + n,
                                         user_norm + n, extras, sums[r]);
          if (EXTRA && call.capacity && counting.n(i) > 1) {
            const auto entry = [&](int64_t j) {
              struct { double gradient, attention, less; } found{g[j], a[j], a[j] != 0 ? double(g[j]) / a[j] : 0.0};
              return found;
            };
            const int64_t most = meet(dominant[r], entry, sums[r], count, n);
            if (most >= 0 || sums[r].best > edges.anti_routed.threshold() || -sums[r].worst > edges.routed.threshold())
              edges.row(entry, delta[r], count, i, n, call.by_knockout, most);
          }
        } else {
          plain_gradient_row(a, g, count, delta[r]);
        }
        if (tame && std::isfinite(delta[r]))
          std::fill(g + count, g + columns, T(0));
        else
          plain_gradient_row(a + count, g + count, columns - count, delta[r]);
      }
      product<T>('N', 'N', width, rows, columns, scale, key.row(n), key.stride, gradient, columns, 1, grad_query.row(m),
                 grad_query.stride);
      product<T>('N', 'T', width, columns, rows, scale, query.row(m), query.stride, gradient, columns, 1, grad_key.row(n),
                 grad_key.stride);
    }
    for (int64_t r = 0; r < rows; r++) {
      const int64_t at = head * queries + m + r;
      if (EXTRA && call.capacity && counting.counts(m + r) && dominant[r].key >= 0) {
        Dominant& d = dominant[r];
        d.knockout = d.rest > 0 ? d.attention * (d.others / d.rest - d.less) : std::nan("");
        edges.row(d, delta[r], m + r, call.by_knockout);
      }
      if (counting.counts(m + r))
        finish_row<T>(call, at, {m + r, counting.n(m + r), double(delta[r]), 0.0, true, double(norm[r])}, sums[r]);
      else
        blank_row<T>(call, at);
    }
  }
}

template <typename T, bool MASKED, bool EXTRA>
void all_heads(const Call& call) {
  const int64_t query_block = std::min<int64_t>(call.queries >= 768 ? 256 : call.queries >= 192 ? 64 : 32, call.queries);
  const int64_t key_block = std::min<int64_t>(512, call.keys), entries = query_block * key_block;
  if (entries == 0) return;
  const Buffer<T> buffer(at::get_num_threads() * 2 * entries);
  // query heads that share a key head add to the same gradients, one after the other
  const int64_t group = call.heads / call.owners;
  at::parallel_for(0, call.batch * call.owners, 1, [&](int64_t begin, int64_t end) {
    T* attention = buffer.data + at::get_thread_num() * 2 * entries;
    HeadEdges edges(call.capacity);
    for (int64_t z = begin * group; z < end * group; z++) {
      edges.clear();
      one_head<T, MASKED, EXTRA>(call, z / call.heads, z % call.heads, attention, attention + entries, query_block, key_block,
                                 edges);
      if (EXTRA && call.capacity) edges.write<T>(call, z);
    }
  });
}

template <typename T>
void choose(const Call& call) {
  const bool extra = call.reach || call.capacity;
  if (call.mask.data)
    extra ? all_heads<T, true, true>(call) : all_heads<T, true, false>(call);
  else
    extra ? all_heads<T, false, true>(call) : all_heads<T, false, false>(call);
}

}  // namespace
}  // namespace advantage_probe

// 0, or 1 when memory ran out. `grad_*` (and `own`) come in as zeros.
extern "C" __attribute__((visibility("default"))) int advantage_probe_one_pass(const advantage_probe::Call* call, int wide) {
  try {
    wide ? advantage_probe::choose<double>(*call) : advantage_probe::choose<float>(*call);
  } catch (...) {
    return 1;
  }
  return 0;
}
