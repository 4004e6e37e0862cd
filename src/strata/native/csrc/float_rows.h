// Rows of float weights: numerics contract, section 4.
#pragma once
#include "backend.h"
#include "scalar.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace strata {
namespace {

inline void widen_e4m3(const uint8_t* in, int n, float scale, float* w) {
    int i = 0;
#if defined(__F16C__)
    // as f16 bits the number is 2^-8 of its value, also when subnormal; only NaN needs care
    const __m256i low7 = _mm256_set1_epi32(127);
    for (; i + 8 <= n; i += 8) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(in + i));
        const __m128i words = _mm_cvtepu8_epi16(bytes);
        const __m128i number = _mm_slli_epi16(_mm_and_si128(words, _mm_set1_epi16(127)), 7);
        const __m128i sign = _mm_slli_epi16(_mm_and_si128(words, _mm_set1_epi16(128)), 8);
        __m256 v = _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(number, sign)), _mm256_set1_ps(256.0f));
        const __m256i nan = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_cvtepu8_epi32(bytes), low7), low7);
        v = _mm256_or_ps(v, _mm256_castsi256_ps(nan));
        _mm256_storeu_ps(w + i, _mm256_mul_ps(v, _mm256_set1_ps(scale)));
    }
#endif
    for (; i < n; i++) w[i] = tables.e4m3[in[i]] * scale;
}

// Widen one row to f32 [padded_32(n_cols)]; the padding is 0.
inline void widen_row(Type type, const uint8_t* row, int n_cols, float* w) {
    switch (type) {
        case Type::F32: std::memcpy(w, row, 4 * static_cast<size_t>(n_cols)); break;
        case Type::F16: {
            int i = 0;
#if defined(__F16C__)
            for (; i + 8 <= n_cols; i += 8) {
                const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * i));
                _mm256_storeu_ps(w + i, _mm256_cvtph_ps(h));
            }
#endif
            for (; i < n_cols; i++) w[i] = half_at(row + 2 * i);
            break;
        }
        case Type::BF16:
            for (int i = 0; i < n_cols; i++) w[i] = bf16_to_float(load_u16(row + 2 * i));
            break;
        case Type::F64:
            for (int i = 0; i < n_cols; i++) {
                double d;
                std::memcpy(&d, row + 8 * i, 8);
                w[i] = static_cast<float>(d);
            }
            break;
        case Type::F8_E4M3: widen_e4m3(row, n_cols, 1.0f, w); break;
        case Type::F8_E5M2:
            for (int i = 0; i < n_cols; i++) w[i] = tables.e5m2[row[i]];
            break;
        default:  // F8_E4M3_B128
            for (int b = 0; b < n_cols / 128; b++, row += 132)
                widen_e4m3(row, 128, load_f32(row + 128), w + 128 * b);
    }
    for (int i = n_cols; i < padded_32(n_cols); i++) w[i] = 0.0f;
}

#if defined(__AVX2__)

inline float fold_32(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 p8 = _mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d));
    const __m128 p4 = _mm_add_ps(_mm256_castps256_ps128(p8), _mm256_extractf128_ps(p8, 1));
    const __m128 p2 = _mm_add_ps(p4, _mm_movehl_ps(p4, p4));
    return _mm_cvtss_f32(_mm_add_ss(p2, _mm_shuffle_ps(p2, p2, 1)));
}

template <int T>
void dot_float(const float* w, int n, const void* const* rows, float* y) {
    const float* x[T];
    __m256 p[T][4];
    for (int t = 0; t < T; t++) {
        x[t] = static_cast<const float*>(rows[t]);
        for (int i = 0; i < 4; i++) p[t][i] = _mm256_setzero_ps();
    }
    for (int k = 0; k < n; k += 32)
        for (int i = 0; i < 4; i++) {
            const __m256 weight = _mm256_loadu_ps(w + k + 8 * i);
            for (int t = 0; t < T; t++)
                p[t][i] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(x[t] + k + 8 * i), p[t][i]);
        }
    for (int t = 0; t < T; t++) y[t] = fold_32(p[t][0], p[t][1], p[t][2], p[t][3]);
}

#else

template <int T>
void dot_float(const float* w, int n, const void* const* rows, float* y) {
    for (int t = 0; t < T; t++) {
        const float* x = static_cast<const float*>(rows[t]);
        float p[32] = {};
        for (int k = 0; k < n; k += 32)
            for (int i = 0; i < 32; i++) p[i] = __builtin_fmaf(w[k + i], x[k + i], p[i]);
        for (int half = 16; half > 0; half /= 2)
            for (int i = 0; i < half; i++) p[i] += p[i + half];
        y[t] = p[0];
    }
}

#endif

inline constexpr int MAX_FLOAT_TOKENS = 3;

// How many of the tokens left to take together: four go as two and two.
inline int float_tokens(int left) { return left == 4 ? 2 : left < MAX_FLOAT_TOKENS ? left : MAX_FLOAT_TOKENS; }

inline void dot_floats(const float* w, int n, const void* const* rows, int n_tokens, float* y) {
    if (n_tokens == 1) dot_float<1>(w, n, rows, y);
    else if (n_tokens == 2) dot_float<2>(w, n, rows, y);
    else dot_float<3>(w, n, rows, y);
}

}  // namespace
}  // namespace strata
