// From the numbers of rows and keys to the sums of every sequence and head, and to the moments of the value gradients.
//
// Everything here is of the size of the inputs; it is done in one call because a dozen small tensor operations a sum cost
// more than the attention of a short sequence.
#include <ATen/Parallel.h>

#include <vector>

#include "call.h"
#include "vectors.h"

namespace advantage_probe {

// Mirrored by `records.Totals`.
struct Totals {
  int64_t batch, heads, owners, queries, keys, width;
  Planes m, value;                         // (B,H,S,V), (B,K,S,V)
  int64_t rows, aligned, distances, usage, user_norm;  // as in Call; distances 0: every key lies before its query
  Planes usable, used, uniform_entropy;    // bool (B,H,Q) or absent; bool (B,H,S); double (B,H): strides of b and h alone
  int64_t blind, first;                    // int64 (B,H), (B,)
  int64_t first_position;
  int64_t sums, total, moment;             // double (B,H,25), (H,V); T (H,V,V)
};

namespace {

constexpr int64_t SUMS = 25;
enum Sum {
  QUERIES, BLIND, ENTROPY, SINK, FIRST_KEY, DISTANCE, ADVANTAGE_SQUARE, MISSED, ALIGNMENT, ALIGNED, SCORE_SQUARE,
  VALUE_GRADIENT_SQUARE, GROUP_GRADIENT_SQUARE, VALUE_SQUARE, KEYS, USAGE_ENTROPY, UNIFORM_ENTROPY, OVER_UNIFORM,
  COHERENCE_SUM, COHERENCE_BOUND, COSINE_SUM, COSINE_BOUND, RESIDUAL, RESIDUAL_SCALE, HIDDEN_QUERIES
};
enum Column { C_ENTROPY, C_SINK, C_EXPECTED, C_ADVANTAGE, C_MISSED, C_ALIGNMENT, C_SCORE, C_SPREAD, C_UNIFORM, C_NORM,
              C_RESIDUAL, C_SCALE };

template <typename T>
double column(const T* data, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += data[i];
  return sum;
}

template <typename T>
void of_rows(const Totals& t, int64_t b, int64_t h, double* s) {
  const int64_t head = b * t.heads + h, plane_ = t.batch * t.heads * t.queries, from = head * t.queries;
  const T* rows = reinterpret_cast<const T*>(t.rows) + from;
  const bool* usable = plane<const bool>(t.usable, b, h).data;
  const bool* aligned = reinterpret_cast<const bool*>(t.aligned) + from;
  int64_t counted = 0, alike = 0;
  double place = 0;
  for (int64_t i = 0; i < t.queries; i++) {
    const bool counts = !usable || usable[i];
    counted += counts, alike += aligned[i];
    if (counts) place += (1 - rows[C_SINK * plane_ + i]) * static_cast<double>(t.first_position + i);
  }
  s[QUERIES] = counted, s[ALIGNED] = alike;
  s[BLIND] = reinterpret_cast<const int64_t*>(t.blind)[head];
  s[DISTANCE] = t.distances ? column(reinterpret_cast<const T*>(t.distances) + from, t.queries) : place;
  const std::pair<Sum, Column> same[] = {{ENTROPY, C_ENTROPY},       {SINK, C_SINK},         {ADVANTAGE_SQUARE, C_ADVANTAGE},
                                         {MISSED, C_MISSED},         {ALIGNMENT, C_ALIGNMENT}, {SCORE_SQUARE, C_SCORE},
                                         {OVER_UNIFORM, C_UNIFORM},  {RESIDUAL, C_RESIDUAL}, {RESIDUAL_SCALE, C_SCALE}};
  for (const auto& [sum, from_column] : same) s[sum] = column(rows + from_column * plane_, t.queries);
}

template <typename T>
void of_keys(const Totals& t, int64_t b, int64_t h, double* s) {
  const int64_t head = b * t.heads + h, owner = h / (t.heads / t.owners);
  const T* usage = reinterpret_cast<const T*>(t.usage) + head * t.keys;
  const T* user_norm = reinterpret_cast<const T*>(t.user_norm) + head * t.keys;
  const bool* used = plane<const bool>(t.used, b, h).data;
  const auto m = plane<const T>(t.m, b, h), value = plane<const T>(t.value, b, owner);
  double mass = 0;
  for (int64_t j = 0; j < t.keys; j++) mass += usage[j];
  const double whole = std::max(mass, std::numeric_limits<double>::min());
  double entropy = 0, place = 0;
  for (int64_t j = 0; j < t.keys; j++) {
    const double u = usage[j], share = u / whole;
    const T square = row_dot(m.row(j), m.row(j), t.width), v_square = row_dot(value.row(j), value.row(j), t.width);
    const double norm = std::sqrt(static_cast<double>(square)), v_norm = std::sqrt(static_cast<double>(v_square));
    if (share != 0) entropy -= share * std::log(share);
    place += u * j;
    s[VALUE_GRADIENT_SQUARE] += square, s[COHERENCE_SUM] += norm, s[COHERENCE_BOUND] += user_norm[j];
    if (used[j]) s[VALUE_SQUARE] += v_square, s[KEYS] += 1;
    if (norm > 0 && v_norm > 0 && u > 0) {
      s[COSINE_SUM] -= static_cast<double>(row_dot(m.row(j), value.row(j), t.width)) / (norm * v_norm) * u;
      s[COSINE_BOUND] += u;
    }
  }
  if (!t.distances) s[DISTANCE] -= place;
  s[FIRST_KEY] = t.keys ? usage[reinterpret_cast<const int64_t*>(t.first)[b]] : 0;
  s[USAGE_ENTROPY] = entropy * s[QUERIES];
  s[UNIFORM_ENTROPY] = *plane<const double>(t.uniform_entropy, b, h).data * s[QUERIES];
}

// What the heads of one group push together; a broken head spares its group.
template <typename T>
void of_group(const Totals& t, int64_t b, int64_t owner, double* sums) {
  const int64_t group = t.heads / t.owners, first = owner * group;
  double* s = sums + (b * t.heads + first) * SUMS;
  if (group == 1) {
    s[GROUP_GRADIENT_SQUARE] = s[VALUE_GRADIENT_SQUARE];
    return;
  }
  double square = 0;
  std::vector<T> together(t.width);
  for (int64_t j = 0; j < t.keys; j++) {
    std::fill(together.begin(), together.end(), T(0));
    for (int64_t h = 0; h < group; h++) {
      if (!std::isfinite(s[h * SUMS + VALUE_GRADIENT_SQUARE])) continue;
      const T* m = plane<const T>(t.m, b, first + h).row(j);
      for (int64_t c = 0; c < t.width; c++) together[c] += m[c];
    }
    square += row_dot<T>(together.data(), together.data(), t.width);
  }
  for (int64_t h = 0; h < group; h++) s[h * SUMS + GROUP_GRADIENT_SQUARE] = square;
}

// Σ −m_j and Σ m_j m_jᵀ of one head over the batch
template <typename T>
void of_updates(const Totals& t, int64_t h) {
  double* total = reinterpret_cast<double*>(t.total) + h * t.width;
  T* moment = reinterpret_cast<T*>(t.moment) + h * t.width * t.width;
  std::fill(total, total + t.width, 0.0), std::fill(moment, moment + t.width * t.width, T(0));
  for (int64_t b = 0; b < t.batch && t.keys > 0; b++) {
    const auto m = plane<const T>(t.m, b, h);
    for (int64_t j = 0; j < t.keys; j++)
      for (int64_t c = 0; c < t.width; c++) total[c] -= m.row(j)[c];
    product<T>('N', 'T', t.width, t.width, t.keys, 1, m.data, m.stride, m.data, m.stride, 1, moment, t.width);
  }
}

template <typename T>
void all(const Totals& t) {
  double* sums = reinterpret_cast<double*>(t.sums);
  const int64_t group = t.heads / t.owners;
  std::fill(sums, sums + t.batch * t.heads * SUMS, 0.0);
  at::parallel_for(0, t.batch * t.owners, 1, [&](int64_t begin, int64_t end) {
    for (int64_t z = begin; z < end; z++) {
      const int64_t b = z / t.owners, owner = z % t.owners;
      for (int64_t h = owner * group; h < (owner + 1) * group; h++) {
        double* s = sums + (b * t.heads + h) * SUMS;
        of_rows<T>(t, b, h, s);
        of_keys<T>(t, b, h, s);
      }
      of_group<T>(t, b, owner, sums);
    }
  });
  at::parallel_for(0, t.heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; h++) of_updates<T>(t, h);
  });
}

}  // namespace
}  // namespace advantage_probe

// 0, or 1 when memory ran out.
extern "C" __attribute__((visibility("default"))) int advantage_probe_totals(const advantage_probe::Totals* totals, int wide) {
  try {
    wide ? advantage_probe::all<double>(*totals) : advantage_probe::all<float>(*totals);
  } catch (...) {
    return 1;
  }
  return 0;
}
