// Small helpers over ATen's vector type: the same operations, in the same order, as the kernels that torch was built with.
#pragma once
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

extern "C" {
void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*, const float*,
            const int*, const float*, float*, const int*);
void dgemm_(const char*, const char*, const int*, const int*, const int*, const double*, const double*, const int*,
            const double*, const int*, const double*, double*, const int*);
}

namespace advantage_probe {

template <typename T>
using Vec = at::vec::Vectorized<T>;

inline void blas(const char* a, const char* b, const int* m, const int* n, const int* k, const float* alpha, const float* x,
                 const int* ldx, const float* y, const int* ldy, const float* beta, float* z, const int* ldz) {
  sgemm_(a, b, m, n, k, alpha, x, ldx, y, ldy, beta, z, ldz);
}
inline void blas(const char* a, const char* b, const int* m, const int* n, const int* k, const double* alpha, const double* x,
                 const int* ldx, const double* y, const int* ldy, const double* beta, double* z, const int* ldz) {
  dgemm_(a, b, m, n, k, alpha, x, ldx, y, ldy, beta, z, ldz);
}

// Column-major product, with leading dimensions of single rows and columns set as torch sets them.
template <typename T>
inline void product(char a, char b, int64_t m, int64_t n, int64_t k, T alpha, const T* x, int64_t ldx, const T* y, int64_t ldy,
                    T beta, T* z, int64_t ldz) {
  if (n == 1) ldz = m;
  if (a != 'N') {
    if (m == 1) ldx = k;
  } else if (k == 1) {
    ldx = m;
  }
  if (b != 'N') {
    if (k == 1) ldy = n;
  } else if (n == 1) {
    ldy = k;
  }
  const int m_ = m, n_ = n, k_ = k, ldx_ = ldx, ldy_ = ldy, ldz_ = ldz;
  blas(&a, &b, &m_, &n_, &k_, &alpha, x, &ldx_, y, &ldy_, &beta, z, &ldz_);
}

template <typename T>
inline T row_dot(const T* x, const T* y, int64_t size) {
  return at::vec::map2_reduce_all<T>([](Vec<T> a, Vec<T> b) { return a * b; }, [](Vec<T> a, Vec<T> b) { return a + b; }, x, y,
                                     size);
}

inline double total(const Vec<float>& v) {
  return at::vec::vec_reduce_all<float>([](Vec<float>& a, Vec<float>& b) { return a + b; }, v);
}
inline double total(const Vec<double>& v) {
  double lanes[Vec<double>::size()], sum = 0;
  v.store(lanes);
  for (double lane : lanes) sum += lane;
  return sum;
}
inline double least(const Vec<float>& v) {
  return at::vec::vec_reduce_all<float>([](Vec<float>& a, Vec<float>& b) { return at::vec::clamp_max(a, b); }, v);
}
inline double least(const Vec<double>& v) {
  double lanes[Vec<double>::size()];
  v.store(lanes);
  return *std::min_element(lanes, lanes + Vec<double>::size());
}

// all bits set in the first `count` lanes
template <typename T>
inline Vec<T> lanes(int64_t count) {
  return Vec<T>::arange(T(0), T(1)) < Vec<T>(static_cast<T>(count));
}

template <typename T>
inline Vec<T> load(const T* data, int64_t count) {
  return count == Vec<T>::size() ? Vec<T>::loadu(data) : Vec<T>::loadu(data, count);
}
template <typename T>
inline void save(const Vec<T>& v, T* data, int64_t count) {
  count == Vec<T>::size() ? v.store(data) : v.store(data, count);
}

// Memory that starts on a cache line, as torch's does: BLAS may round differently elsewhere.
template <typename T>
struct Buffer {
  T* data;
  explicit Buffer(int64_t size)
      : data(static_cast<T*>(std::aligned_alloc(64, std::max<int64_t>(1, (size * sizeof(T) + 63) / 64) * 64))) {
    if (!data) throw std::bad_alloc();
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
};

}  // namespace advantage_probe
