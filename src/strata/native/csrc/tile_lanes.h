// The 16 rows of a tile as vectors: one of 16 lanes (AVX-512, portable) or two of 8 (AVX2). Loads of
// scales, and the exact integer dots of 16 or 32 columns.
#pragma once
#include "backend.h"
#include "scalar.h"
#include "tile_formats.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace strata {
namespace {

// What a kernel needs to know of a type while it is compiled. Its codes come as unsigned bytes u with
// c = mul * u - bias, or, where even one sum of two products would leave an int16, as signed bytes.
template <Type TYPE>
struct TileKind {
    static constexpr TypeInfo type = TYPE_INFO[static_cast<int>(TYPE)];
    static constexpr TileInfo form = tile_info(TYPE);
    static constexpr int BITS = form.bits, FIELDS = 8 / BITS, GROUPS = type.groups, N = 8 / GROUPS;
    static constexpr bool TABLE = form.table != nullptr, MIN = type.has_min;
#if STRATA_VNNI
    static constexpr bool SIGNED = false;
    static constexpr int BIAS = BITS == 8 || type.fit == 0 ? 128 : type.bias;
#else
    static constexpr bool SIGNED = type.fit == 0;
    static constexpr int BIAS = type.bias;
#endif
    // 8-bit tiles store c + 128
    static constexpr int DOWN = BITS == 8 ? 128 - BIAS : 0;
    static constexpr int RUN = type.fit == 0 ? 1 : type.fit < N ? type.fit : N;
    // added to table entries; what is left to multiply by, where entries must stay small
    static constexpr int LIFT = SIGNED ? 0 : BIAS;
    static constexpr int MUL = TABLE && STRATA_VNNI ? 1 : type.mul;
};

#if defined(__AVX512VNNI__)

constexpr int PARTS = 1, PART_ROWS = 16;
using Floats = __m512;
using Ints = __m512i;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fused_minus(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats all_of(const int32_t* p) { return _mm512_cvtepi32_ps(_mm512_set1_epi32(*p)); }
inline Floats load_halves(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline Ints load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(load_16(p)); }
inline Ints load_i8(const uint8_t* p) { return _mm512_cvtepi8_epi32(load_16(p)); }
inline Floats from_ue4m3(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load_16(p)), 7));
}
inline Floats from_e8m0(const uint8_t* p) {
    const Ints e = load_u8(p), one = _mm512_set1_epi32(1);
    const Ints small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
    return _mm512_castsi512_ps(_mm512_mask_slli_epi32(small, _mm512_cmpgt_epi32_mask(e, one), _mm512_sub_epi32(e, one), 23));
}

template <class K>
struct CodeTable {
    Ints v;
    CodeTable() {
        alignas(16) uint8_t entries[16] = {};
        if constexpr (K::TABLE)
            for (int i = 0; i < 16; i++) entries[i] = static_cast<uint8_t>((K::form.table[i] + K::LIFT) / K::MUL);
        v = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(entries)));
    }
};

template <int BITS>
inline Ints field(Ints w, int f) {
    if constexpr (BITS == 8) return w;
    if (f) w = _mm512_srli_epi16(w, static_cast<unsigned>(BITS * f));
    return _mm512_and_si512(w, _mm512_set1_epi8((1 << BITS) - 1));
}

// words: of the block. q: of each token, 32 bytes.
template <class K, int T>
inline void int_dots_16(const uint8_t* words, int g, const CodeTable<K>& table, const int8_t* const* q,
                        const int32_t* sum, Ints (*dots)[T]) {
    constexpr bool TWICE = K::MUL == 2;
    Ints* dot = dots[0];
    for (int t = 0; t < T; t++) dot[t] = TWICE || !K::BIAS ? _mm512_setzero_si512() : _mm512_set1_epi32(-K::BIAS * sum[t]);
    Ints w = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int n = 0; n < K::N; n++) {
        const int v = g * K::N + n;
        if (n % K::FIELDS == 0) w = _mm512_loadu_si512(words + 64 * (v / K::FIELDS));
        Ints u = field<K::BITS>(w, n % K::FIELDS);
        if constexpr (K::TABLE) u = _mm512_shuffle_epi8(table.v, u);
        for (int t = 0; t < T; t++)
            dot[t] = _mm512_dpbusd_epi32(dot[t], u, _mm512_set1_epi32(static_cast<int>(load_u32(q[t] + 4 * v))));
    }
    if constexpr (TWICE)
        for (int t = 0; t < T; t++)
            dot[t] = _mm512_sub_epi32(_mm512_add_epi32(dot[t], dot[t]), _mm512_set1_epi32(K::BIAS * sum[t]));
}

#define STRATA_MANY_ROWS 1

// Codes of a group, times MUL already: in registers while activation row after activation row passes.
template <class K>
struct GroupCodes {
    Ints u[K::N];
    STRATA_INLINE void load(const uint8_t* words, int g, const CodeTable<K>& table) {
        Ints w = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int n = 0; n < K::N; n++) {
            if (n % K::FIELDS == 0) w = _mm512_loadu_si512(words + 64 * ((g * K::N + n) / K::FIELDS));
            if constexpr (K::MUL == 2) u[n] = twice(w, n % K::FIELDS);
            else u[n] = field<K::BITS>(w, n % K::FIELDS);
            if constexpr (K::TABLE) u[n] = _mm512_shuffle_epi8(table.v, u[n]);
        }
    }
    static STRATA_INLINE Ints twice(Ints w, int f) {
        w = f ? _mm512_srli_epi16(w, static_cast<unsigned>(K::BITS * f - 1)) : _mm512_add_epi8(w, w);
        return _mm512_and_si512(w, _mm512_set1_epi8(2 * ((1 << K::BITS) - 1)));
    }
};

// R activation rows (q: 4 N bytes of each) with W tile rows, so that their chains of sums overlap and each
// word of an activation is spread over a register once.
template <class K, int W, int R>
STRATA_INLINE void group_dots(const GroupCodes<K> (&w)[W], const int8_t* const (&q)[R], const int32_t (&sum)[R],
                              Ints (&dot)[W][R]) {
    for (int r = 0; r < R; r++)
        for (int i = 0; i < W; i++)
            dot[i][r] = K::BIAS ? _mm512_set1_epi32(-K::BIAS * sum[r]) : _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int n = 0; n < K::N; n++)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const Ints four = _mm512_set1_epi32(static_cast<int>(load_u32(q[r] + 4 * n)));
            for (int i = 0; i < W; i++) dot[i][r] = _mm512_dpbusd_epi32(dot[i][r], w[i].u[n], four);
        }
}

#elif defined(__AVX2__)

constexpr int PARTS = 2, PART_ROWS = 8;
using Floats = __m256;
using Ints = __m256i;

// Keeps the compiler from putting sums off, which costs more registers than there are.
inline void in_order(Ints& x) { __asm__ volatile("" : "+x"(x)); }
inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats fused_minus(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline Floats all_of(const int32_t* p) { return _mm256_cvtepi32_ps(_mm256_set1_epi32(*p)); }
inline Floats load_halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline __m128i load_8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
inline Ints load_u8(const uint8_t* p) { return _mm256_cvtepu8_epi32(load_8(p)); }
inline Ints load_i8(const uint8_t* p) { return _mm256_cvtepi8_epi32(load_8(p)); }
inline Floats from_ue4m3(const uint8_t* p) { return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(load_8(p)), 7)); }
inline Floats from_e8m0(const uint8_t* p) {
    const Ints e = load_u8(p), one = _mm256_set1_epi32(1);
    const Ints small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    const Ints large = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(small, large, _mm256_cmpgt_epi32(e, one)));
}

template <class K>
struct CodeTable {
    Ints v;
    CodeTable() {
        alignas(16) uint8_t entries[16] = {};
        if constexpr (K::TABLE)
            for (int i = 0; i < 16; i++) entries[i] = static_cast<uint8_t>((K::form.table[i] + K::LIFT) / K::MUL);
        v = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(entries)));
    }
};

template <class K>
inline Ints codes_of(Ints w, int f, const CodeTable<K>& table) {
    if (K::BITS < 8) {
        if (f) w = _mm256_srli_epi16(w, K::BITS * f);
        w = _mm256_and_si256(w, _mm256_set1_epi8((1 << K::BITS) - 1));
    }
    if constexpr (K::TABLE) w = _mm256_shuffle_epi8(table.v, w);
    if constexpr (K::BITS == 8) w = _mm256_sub_epi8(w, _mm256_set1_epi8(static_cast<char>(K::DOWN)));
    return w;
}

#if STRATA_VNNI

// Both parts side by side, so that an activation word is spread over a register once.
template <class K, int T>
inline void int_dots_16(const uint8_t* words, int g, const CodeTable<K>& table, const int8_t* const* q,
                        const int32_t* sum, Ints (*dot)[T]) {
    constexpr bool TWICE = K::MUL == 2;
    for (int part = 0; part < PARTS; part++)
        for (int t = 0; t < T; t++)
            dot[part][t] = TWICE || !K::BIAS ? _mm256_setzero_si256() : _mm256_set1_epi32(-K::BIAS * sum[t]);
    Ints w[PARTS] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 8
    for (int n = 0; n < K::N; n++) {
        const int v = g * K::N + n;
        Ints u[PARTS];
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            if (n % K::FIELDS == 0)
                w[part] = _mm256_loadu_si256(reinterpret_cast<const Ints*>(words + 32 * part + 64 * (v / K::FIELDS)));
            u[part] = codes_of<K>(w[part], n % K::FIELDS, table);
        }
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) {
            const Ints four = _mm256_set1_epi32(static_cast<int>(load_u32(q[t] + 4 * v)));
            for (int part = 0; part < PARTS; part++) {
                dot[part][t] = _mm256_dpbusd_avx_epi32(dot[part][t], u[part], four);
                in_order(dot[part][t]);
            }
        }
    }
    if constexpr (TWICE)
        for (int part = 0; part < PARTS; part++)
            for (int t = 0; t < T; t++)
                dot[part][t] = _mm256_sub_epi32(_mm256_add_epi32(dot[part][t], dot[part][t]),
                                                _mm256_set1_epi32(K::BIAS * sum[t]));
}

#else

// Both parts side by side, so that an activation word is spread over a register once.
template <class K, int T>
inline void int_dots_16(const uint8_t* words, int g, const CodeTable<K>& table, const int8_t* const* q,
                        const int32_t* sum, Ints (*dot)[T]) {
    Ints w[PARTS] = {_mm256_setzero_si256(), _mm256_setzero_si256()}, run[PARTS][T];
    const Ints factor = _mm256_set1_epi16(static_cast<short>(K::type.mul));
#pragma GCC unroll 8
    for (int n = 0; n < K::N; n++) {
        const int v = g * K::N + n;
        Ints u[PARTS];
        [[maybe_unused]] Ints magnitude[PARTS];
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            if (n % K::FIELDS == 0)
                w[part] = _mm256_loadu_si256(reinterpret_cast<const Ints*>(words + 32 * part + 64 * (v / K::FIELDS)));
            u[part] = codes_of<K>(w[part], n % K::FIELDS, table);
            magnitude[part] = K::SIGNED ? _mm256_abs_epi8(u[part]) : u[part];
        }
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) {
            const Ints four = _mm256_set1_epi32(static_cast<int>(load_u32(q[t] + 4 * v)));
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) {
                const Ints pairs =
                    _mm256_maddubs_epi16(magnitude[part], K::SIGNED ? _mm256_sign_epi8(four, u[part]) : four);
                Ints& sum16 = run[part][t];
                sum16 = n % K::RUN == 0 ? pairs : _mm256_add_epi16(sum16, pairs);
                if (n % K::RUN == K::RUN - 1) {
                    const Ints exact = _mm256_madd_epi16(sum16, factor);
                    dot[part][t] = n < K::RUN ? exact : _mm256_add_epi32(dot[part][t], exact);
                    in_order(dot[part][t]);
                } else {
                    in_order(sum16);
                }
            }
        }
    }
    if constexpr (K::BIAS != 0 && !K::SIGNED)
        for (int t = 0; t < T; t++)
            for (int part = 0; part < PARTS; part++)
                dot[part][t] = _mm256_sub_epi32(dot[part][t], _mm256_set1_epi32(K::BIAS * sum[t]));
}

#endif

#else

constexpr int PARTS = 1, PART_ROWS = 16;
struct Floats { float v[16]; };
struct Ints { int32_t v[16]; };

template <class F>
inline Floats floats_by(F f) {
    Floats x;
    for (int i = 0; i < 16; i++) x.v[i] = f(i);
    return x;
}
inline Floats zeros() { return floats_by([](int) { return 0.0f; }); }
inline Floats all(float x) { return floats_by([=](int) { return x; }); }
inline Floats to_floats(const Ints& x) { return floats_by([&](int i) { return static_cast<float>(x.v[i]); }); }
inline Floats times(const Floats& a, const Floats& b) { return floats_by([&](int i) { return a.v[i] * b.v[i]; }); }
inline Floats plus(const Floats& a, const Floats& b) { return floats_by([&](int i) { return a.v[i] + b.v[i]; }); }
inline Floats fused(const Floats& a, const Floats& b, const Floats& c) {
    return floats_by([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
inline Floats fused_minus(const Floats& a, const Floats& b, const Floats& c) {
    return floats_by([&](int i) { return __builtin_fmaf(a.v[i], -b.v[i], c.v[i]); });
}
inline void store(float* p, const Floats& x) { std::memcpy(p, x.v, sizeof x.v); }
inline Floats load(const float* p) { return floats_by([=](int i) { return p[i]; }); }
inline Floats all_of(const int32_t* p) { return all(static_cast<float>(*p)); }
inline Floats load_halves(const uint8_t* p) { return floats_by([=](int i) { return half_at(p + 2 * i); }); }
inline Ints load_u8(const uint8_t* p) {
    Ints x;
    for (int i = 0; i < 16; i++) x.v[i] = p[i];
    return x;
}
inline Ints load_i8(const uint8_t* p) {
    Ints x;
    for (int i = 0; i < 16; i++) x.v[i] = static_cast<int8_t>(p[i]);
    return x;
}
inline Floats from_ue4m3(const uint8_t* p) {
    return floats_by([=](int i) { return half_to_float(static_cast<uint16_t>(p[i] << 7)); });
}
inline Floats from_e8m0(const uint8_t* p) {
    return floats_by([=](int i) { return tables.half_e8m0[p[i]]; });
}

template <class K>
struct CodeTable {
    int16_t code[256];  // of every stored code: mul * u - bias
    CodeTable() {
        for (int u = 0; u < 1 << K::BITS; u++)
            code[u] = K::TABLE ? K::form.table[u % 16] : K::BITS == 8 ? u - 128 : K::type.mul * u - K::type.bias;
    }
};

template <class K, int T>
inline void int_dots_16(const uint8_t* words, int g, const CodeTable<K>& table, const int8_t* const* q,
                        const int32_t*, Ints (*dots)[T]) {
    Ints* dot = dots[0];
    for (int t = 0; t < T; t++) dot[t] = Ints{};
    for (int n = 0; n < K::N; n++) {
        const int v = g * K::N + n, shift = K::BITS * (n % K::FIELDS);
        const uint8_t* w = words + 64 * (v / K::FIELDS);
        for (int i = 0; i < 64; i++) {
            const int code = table.code[w[i] >> shift & ((1 << K::BITS) - 1)];
            for (int t = 0; t < T; t++) dot[t].v[i / 4] += code * q[t][4 * v + i % 4];
        }
    }
}

#define STRATA_MANY_ROWS 1

template <class K>
struct GroupCodes {
    int16_t code[16][4 * K::N];
    void load(const uint8_t* words, int g, const CodeTable<K>& table) {
        for (int n = 0; n < K::N; n++) {
            const int v = g * K::N + n, shift = K::BITS * (n % K::FIELDS);
            const uint8_t* w = words + 64 * (v / K::FIELDS);
            for (int i = 0; i < 64; i++)
                code[i / 4][4 * n + i % 4] = table.code[w[i] >> shift & ((1 << K::BITS) - 1)];
        }
    }
};

template <class K, int W, int R>
inline void group_dots(const GroupCodes<K> (&w)[W], const int8_t* const (&q)[R], const int32_t (&)[R],
                       Ints (&dot)[W][R]) {
    for (int i = 0; i < W; i++)
        for (int r = 0; r < R; r++) {
            dot[i][r] = Ints{};
            for (int row = 0; row < 16; row++)
                for (int k = 0; k < 4 * K::N; k++) dot[i][r].v[row] += w[i].code[row][k] * q[r][k];
        }
}

#endif

}  // namespace
}  // namespace strata
