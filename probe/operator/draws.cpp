// Poisson(1) weights of sequences, as `bootstrap.py` defines them: Philox 4x64-10 keyed on the sequence, then the inverse of a
// table of probabilities. A training step draws 200 for every sequence, which costs numpy more than a layer's statistics.
#include <cstdint>

namespace {

struct Block {
  uint64_t word[4];
};

inline void multiply(uint64_t a, uint64_t b, uint64_t& high, uint64_t& low) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  high = static_cast<uint64_t>(product >> 64), low = static_cast<uint64_t>(product);
}

Block philox(uint64_t counter, uint64_t key) {
  uint64_t c0 = counter, c1 = 0, c2 = 0, c3 = 0, k0 = key, k1 = 0;
  for (int round = 0; round < 10; round++) {
    uint64_t high0, low0, high1, low1;
    multiply(0xD2E7470EE14C6C93ull, c0, high0, low0), multiply(0xCA5A826395121157ull, c2, high1, low1);
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B97F4A7C15ull, k1 += 0xBB67AE8584CAA73Bull;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace

// weights (replicates, count) from keys (count,); `cumulative`: P(X ≤ k) for k = 0 … size − 1
extern "C" __attribute__((visibility("default"))) void advantage_probe_draws(const uint64_t* keys, int64_t count,
                                                                             int64_t replicates, const double* cumulative,
                                                                             int64_t size, double* weights) {
  for (int64_t s = 0; s < count; s++)
    for (int64_t r = 0; r < replicates; r += 4) {
      const Block block = philox(static_cast<uint64_t>(r / 4 + 1), keys[s]);  // numpy counts up before it draws
      for (int64_t w = 0; w < 4 && r + w < replicates; w++) {
        const double uniform = static_cast<double>(block.word[w] >> 11) * 0x1p-53;
        int64_t k = 0;
        while (k < size && cumulative[k] <= uniform) k++;
        weights[(r + w) * count + s] = static_cast<double>(k);
      }
    }
}
