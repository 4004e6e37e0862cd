// The row product of the numerics contract, section 3: one tile against up to four activation rows.
#pragma once
#include "tile.h"

namespace strata {
namespace {

inline constexpr int MAX_TOKENS = 4;

#if defined(__AVX2__)

// y = ((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7))
inline float fold(__m256 p) {
    const __m256 pairs = _mm256_add_ps(p, _mm256_shuffle_ps(p, p, 0xb1));
    const __m256 quads = _mm256_add_ps(pairs, _mm256_shuffle_ps(pairs, pairs, 0x4e));
    return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
}

// Exact integer dots of vectors first .. first + N - 1 of a step with each token's q, not yet biased.
// FIT as in TypeInfo; 0: signed codes.
template <int FIT, int N, int T>
inline void int_dots(const __m256i* w, const QuantizedStep* const* x, int first, int mul, __m256i* dot) {
    [[maybe_unused]] const auto q = [&](int t, int v) {
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(x[t]->q) + first + v);
    };
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    // two vectors at a time; their sums meet at the end
    __m512i wide[T];
    for (int t = 0; t < T; t++) wide[t] = _mm512_setzero_si512();
    for (int v = 0; v < N; v += 2) {
        __m512i u = _mm512_load_si512(w + first + v);
        if constexpr (FIT == 0) u = _mm512_xor_si512(u, _mm512_set1_epi8(-128));
        for (int t = 0; t < T; t++)
            wide[t] = _mm512_dpbusd_epi32(wide[t], u, _mm512_load_si512(x[t]->q + 32 * (first + v)));
    }
    for (int t = 0; t < T; t++)
        dot[t] = _mm256_add_epi32(_mm512_castsi512_si256(wide[t]), _mm512_extracti64x4_epi64(wide[t], 1));
    for (int t = 0; t < T; t++) dot[t] = _mm256_sll_epi32(dot[t], _mm_cvtsi32_si128(mul - 1));
#elif STRATA_VNNI
    for (int t = 0; t < T; t++) dot[t] = _mm256_setzero_si256();
    for (int v = 0; v < N; v++) {
        __m256i u = _mm256_load_si256(w + first + v);
        if constexpr (FIT == 0) u = _mm256_xor_si256(u, _mm256_set1_epi8(-128));
        for (int t = 0; t < T; t++) dot[t] = _mm256_dpbusd_avx_epi32(dot[t], u, q(t, v));
    }
    for (int t = 0; t < T; t++) dot[t] = _mm256_sll_epi32(dot[t], _mm_cvtsi32_si128(mul - 1));
#else
    const __m256i factor = _mm256_set1_epi16(static_cast<short>(mul));
    constexpr int RUN = FIT == 0 ? 1 : FIT < N ? FIT : N;
    for (int v0 = 0; v0 < N; v0 += RUN) {
        __m256i run[T];
        for (int v = v0; v < v0 + RUN; v++) {
            const __m256i u = _mm256_load_si256(w + first + v);
            [[maybe_unused]] const __m256i magnitude = _mm256_abs_epi8(u);
            for (int t = 0; t < T; t++) {
                const __m256i pairs = FIT == 0
                                          ? _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(q(t, v), u))
                                          : _mm256_maddubs_epi16(u, q(t, v));
                run[t] = v == v0 ? pairs : _mm256_add_epi16(run[t], pairs);
            }
        }
        for (int t = 0; t < T; t++) {
            const __m256i sum = _mm256_madd_epi16(run[t], factor);
            dot[t] = v0 == 0 ? sum : _mm256_add_epi32(dot[t], sum);
        }
    }
#endif
}

template <int FIT, int GROUPS, bool MIN, int T>
void dot_tile(const Tile& tile, const void* const* rows, int mul, int bias, float* y) {
#if STRATA_VNNI
    if constexpr (FIT == 0) bias = 128;
    constexpr bool BIASED = !MIN;
#else
    constexpr bool BIASED = !MIN && FIT != 0;
#endif
    constexpr int N = 8 / GROUPS, W_BYTES = Tile::bytes_of_step(GROUPS, MIN);
    __m256 p[T];
    const QuantizedStep* x[T];
    for (int t = 0; t < T; t++) {
        p[t] = _mm256_setzero_ps();
        x[t] = static_cast<const QuantizedStep*>(rows[t]);
    }
    const __m256i biases = _mm256_set1_epi32(bias);
    const uint8_t* w = tile.steps;
    for (int j = 0; j < tile.L; j++, w += W_BYTES) {
        const float* scale = reinterpret_cast<const float*>(w + STEP_BYTES);
        for (int g = 0; g < GROUPS; g++) {
            __m256i dot[T];
            int_dots<FIT, N, T>(reinterpret_cast<const __m256i*>(w), x, N * g, mul, dot);
            const __m256 s_w = _mm256_load_ps(scale + LANES * g);
            for (int t = 0; t < T; t++) {
                const __m256 s_x = _mm256_load_ps(x[t]->scale);
                const int32_t* q_sum = GROUPS == 1 ? x[t]->sum[0] : x[t]->half[g];
                const __m256i sum = _mm256_load_si256(reinterpret_cast<const __m256i*>(q_sum));
                // |sum| <= 4064 sits in the low int16 of its lane, and the high half of a bias is 0
                if constexpr (BIASED) dot[t] = _mm256_sub_epi32(dot[t], _mm256_madd_epi16(sum, biases));
                p[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[t]), _mm256_mul_ps(s_x, s_w), p[t]);
                if constexpr (MIN) {
                    const __m256 m = _mm256_mul_ps(s_x, _mm256_load_ps(scale + LANES * (GROUPS + g)));
                    p[t] = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(sum), m, p[t]);
                }
            }
        }
        for (int t = 0; t < T; t++) x[t]++;
    }
    for (int t = 0; t < T; t++) y[t] = fold(p[t]);
}

#else

template <int FIT, int GROUPS, bool MIN, int T>
void dot_tile(const Tile& tile, const void* const* rows, int mul, int bias, float* y) {
    constexpr int N = 8 / GROUPS;
    for (int t = 0; t < T; t++) {
        const QuantizedStep* x = static_cast<const QuantizedStep*>(rows[t]);
        float p[LANES] = {};
        for (int j = 0; j < tile.L; j++, x++)
            for (int g = 0; g < GROUPS; g++) {
                const uint8_t* w = tile.codes(j) + 32 * N * g;
                const float *scale = tile.scale(j) + LANES * g, *minimum = scale + LANES * GROUPS;
                const int32_t* sum = GROUPS == 1 ? x->sum[0] : x->half[g];
                int32_t dot[LANES] = {};
                for (int i = 0; i < 32 * N; i++) {
                    const int code = FIT == 0 ? static_cast<int8_t>(w[i]) : w[i];
                    dot[i / 4 % LANES] += code * x->q[32 * N * g + i];
                }
                for (int s = 0; s < LANES; s++) {
                    const int32_t exact = mul * dot[s] - bias * sum[s];
                    p[s] = __builtin_fmaf(static_cast<float>(exact), x->scale[s] * scale[s], p[s]);
                    if constexpr (MIN)
                        p[s] = __builtin_fmaf(static_cast<float>(sum[s]), -(x->scale[s] * minimum[s]), p[s]);
                }
            }
        y[t] = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
    }
}

#endif

using DotTile = void (*)(const Tile&, const void* const*, int, int, float*);

template <int FIT, int GROUPS, bool MIN>
DotTile dot_of(int n_tokens) {
    switch (n_tokens) {
        case 1: return dot_tile<FIT, GROUPS, MIN, 1>;
        case 2: return dot_tile<FIT, GROUPS, MIN, 2>;
        case 3: return dot_tile<FIT, GROUPS, MIN, 3>;
        default: return dot_tile<FIT, GROUPS, MIN, 4>;
    }
}

inline DotTile dot_of(const TypeInfo& t, int n_tokens) {
    const bool halves = t.groups == 2;
    switch (t.fit) {
        case 0: return dot_of<0, 1, false>(n_tokens);
        case 1: return halves ? dot_of<1, 2, false>(n_tokens) : dot_of<1, 1, false>(n_tokens);
        case 2: return halves ? dot_of<2, 2, false>(n_tokens) : dot_of<2, 1, false>(n_tokens);
        case 4:
            if (halves) return dot_of<4, 2, false>(n_tokens);
            return t.has_min ? dot_of<4, 1, true>(n_tokens) : dot_of<4, 1, false>(n_tokens);
        default:
            if (halves) return t.has_min ? dot_of<8, 2, true>(n_tokens) : dot_of<8, 2, false>(n_tokens);
            return t.has_min ? dot_of<8, 1, true>(n_tokens) : dot_of<8, 1, false>(n_tokens);
    }
}

}  // namespace
}  // namespace strata
