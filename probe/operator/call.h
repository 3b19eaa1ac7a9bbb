// What Python hands over: one attention call, its buffers and its results. `one_pass.py` mirrors these records field by field.
//
// Letters: B batch, H query heads, K key/value heads, Q query positions, S key positions, D head width, V value width.
#pragma once
#include <cstdint>

namespace advantage_probe {

// A (B,heads,rows,·) tensor whose last axis is contiguous; strides in elements. data 0: absent.
struct Planes {
  int64_t data, batch, head, row;
};

struct Call {
  int64_t batch, heads, owners, queries, keys, width, value_width;
  Planes query, key, value, upstream, output;
  Planes normalizer;  // the kernel's log-sum-exp (B,H,Q): `row` is the stride from one query to the next
  Planes grad_query, grad_key, grad_value;
  Planes own;       // m (B,H,S,V): written by products of its own; absent where grad_value is m
  Planes mask;      // added to the scores, hides where it is at most HIDES
  Planes bias;      // added to the scores, hides nothing
  Planes weights;   // w (B,H,Q,S), after dropout
  int64_t sinks;    // (H,) scores of the hidden column
  Planes usable;    // bool (B,H,Q), `row` unused: rows that count and see a key; absent: all of them
  Planes seen;      // int64 (B,H,Q), `row` unused: n_i
  int64_t causal, offset, window;  // Structure; window -1: none
  int64_t precise;  // E = u·o
  int64_t reach, first_position, tokens;  // Σ α |distance|: position of query 0; keys from `tokens` on have none
  int64_t capacity, by_knockout;          // edges per direction and head; what they are ranked by
  // results: (12,B,H,Q), bool (B,H,Q), (B,H,Q), (B,H,S), (B,H,S)
  int64_t rows, aligned, distances, usage, user_norm;
  int64_t edge_places, edge_numbers;  // int64 (2,2,B,H,k): query, key by direction; (5,2,B,H,k): D, alpha, A, b, knockout
  double scale, softcap;              // softcap 0: none
};

constexpr double HIDES = -9e3;     // as visibility.shows: what is added to a score and lies at or below this hides the key
constexpr double HIDDEN = -1e30;   // finite, so that 0 · HIDDEN is 0
constexpr int64_t ROW_COLUMNS = 12;  // in the order of row_sums.ROWS

template <typename T>
struct Plane {  // one (rows,·) matrix of Planes
  T* data;
  int64_t stride;
  T* row(int64_t index) const { return data + index * stride; }
};

template <typename T>
inline Plane<T> plane(const Planes& planes, int64_t batch, int64_t head) {
  T* data = reinterpret_cast<T*>(planes.data);
  return {data ? data + batch * planes.batch + head * planes.head : nullptr, planes.row};
}

}  // namespace advantage_probe
