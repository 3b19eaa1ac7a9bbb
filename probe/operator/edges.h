// The strongest score gradients of one head, kept by a threshold that rises while the rows pass by.
//
// A heap per direction holds the `capacity` largest so far. A row whose best entry does not reach the smallest of them is
// passed over without looking at its entries, so that edges cost two comparisons a vector and not a sort.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "call.h"

namespace advantage_probe {

struct Edge {
  double rank;
  int64_t query, key;
  double score_gradient, attention, advantage, compatibility, knockout;
};

// The one key of a row that may hold more than half of its attention: 1 − α cancels there, so that what its removal does to the
// loss comes from what the other keys hold, α (Σ_{k≠j} D_k / Σ_{k≠j} α_k − (b_j − E)), once the row is complete.
struct Dominant {
  int64_t key = -1;
  double attention = 0, gradient = 0, less = 0, knockout = 0;
  double rest = 0, others = 0;  // Σ α and Σ D of the other keys
};

class Strongest {
 public:
  explicit Strongest(int64_t capacity) : capacity_(capacity) { heap_.reserve(capacity); }
  void clear() { heap_.clear(); }
  double threshold() const { return static_cast<int64_t>(heap_.size()) < capacity_ ? 0.0 : heap_.front().rank; }
  void offer(const Edge& edge) {
    if (!(edge.rank > threshold())) return;
    if (static_cast<int64_t>(heap_.size()) == capacity_) {
      std::pop_heap(heap_.begin(), heap_.end(), weaker);
      heap_.back() = edge;
    } else {
      heap_.push_back(edge);
    }
    std::push_heap(heap_.begin(), heap_.end(), weaker);
  }
  // strongest first; of equals, the one that came first
  const std::vector<Edge>& sorted() {
    std::sort(heap_.begin(), heap_.end(), [](const Edge& a, const Edge& b) {
      return a.rank != b.rank ? a.rank > b.rank : a.query != b.query ? a.query < b.query : a.key < b.key;
    });
    return heap_;
  }

 private:
  static bool weaker(const Edge& a, const Edge& b) { return a.rank > b.rank; }
  int64_t capacity_;
  std::vector<Edge> heap_;
};

// Both directions of one head: routed (D < 0, attention will rise) and anti-routed (D > 0).
struct HeadEdges {
  Strongest routed, anti_routed;
  explicit HeadEdges(int64_t capacity) : routed(capacity), anti_routed(capacity) {}
  void clear() { routed.clear(), anti_routed.clear(); }

  void offer(int64_t query, int64_t key, double gradient, double attention, double less, double expected, double knockout,
             bool by_knockout) {
    const double rank = by_knockout ? std::abs(knockout) : std::abs(gradient);
    if (gradient == 0 || !std::isfinite(rank)) return;
    (gradient < 0 ? routed : anti_routed)
        .offer({rank, query, key, gradient, attention, -less, expected + less, knockout});
  }

  // One row, keys from `key` on; `entry(j)` gives D, α and b − E of the j-th of them; all but `dominant`, by its place.
  template <typename Entry>
  void row(const Entry& entry, double expected, int64_t count, int64_t query, int64_t key, bool by_knockout,
           int64_t dominant) {
    const double limit[2] = {routed.threshold(), anti_routed.threshold()};
    for (int64_t j = 0; j < count; j++) {
      const auto [gradient, attention, less] = entry(j);
      const double knockout = -gradient / (1 - attention);
      if (j != dominant && (by_knockout ? std::abs(knockout) : std::abs(gradient)) > limit[gradient > 0])
        offer(query, key + j, gradient, attention, less, expected, knockout, by_knockout);
    }
  }

  void row(const Dominant& d, double expected, int64_t query, bool by_knockout) {
    if (d.key >= 0) offer(query, d.key, d.gradient, d.attention, d.less, expected, d.knockout, by_knockout);
  }

  template <typename T>
  void write(const Call& call, int64_t head) {
    const int64_t heads = call.batch * call.heads, plane = 2 * heads * call.capacity;
    int64_t* places = reinterpret_cast<int64_t*>(call.edge_places);
    T* numbers = reinterpret_cast<T*>(call.edge_numbers);
    for (int64_t side = 0; side < 2; side++) {
      const std::vector<Edge>& kept = (side ? anti_routed : routed).sorted();
      int64_t place = (side * heads + head) * call.capacity;
      for (const Edge& edge : kept) {
        places[place] = edge.query, places[plane + place] = edge.key;
        numbers[place] = edge.score_gradient, numbers[plane + place] = edge.attention;
        numbers[2 * plane + place] = edge.advantage, numbers[3 * plane + place] = edge.compatibility;
        numbers[4 * plane + place] = edge.knockout;
        place++;
      }
    }
  }
};

}  // namespace advantage_probe
