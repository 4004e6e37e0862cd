// Eight float lanes for code that must give the same bits on every instruction set: only +, -, *, / on
// lanes, no fused operation, sums in a fixed order.
#pragma once
#include "backend.h"
#include "scalar.h"

namespace strata {
namespace {

typedef float Lanes8 __attribute__((vector_size(32)));

// Element types of caches: how eight of them become floats.
struct F32Element {
    using Stored = float;
    static Lanes8 load(const Stored* p) { Lanes8 v; std::memcpy(&v, p, sizeof v); return v; }
    static float one(const Stored* p) { return *p; }
};

struct F16Element {
    using Stored = uint16_t;
    static float one(const Stored* p) { return half_to_float(*p); }
    static Lanes8 load(const Stored* p) {
#if defined(__F16C__)
        return reinterpret_cast<Lanes8>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
        Lanes8 v;
        for (int i = 0; i < 8; i++) v[i] = half_to_float(p[i]);
        return v;
#endif
    }
};

struct BF16Element {
    using Stored = uint16_t;
    static float one(const Stored* p) { return bf16_to_float(*p); }
    static Lanes8 load(const Stored* p) {
        Lanes8 v;
        for (int i = 0; i < 8; i++) v[i] = bf16_to_float(p[i]);
        return v;
    }
};

inline Lanes8 load8(const float* p) { return F32Element::load(p); }
inline void store8(float* p, Lanes8 v) { std::memcpy(p, &v, sizeof v); }

// n < 8 elements, the rest 0
template <class Element>
inline Lanes8 load_few(const typename Element::Stored* p, int n) {
    Lanes8 v = {};
    for (int i = 0; i < n; i++) v[i] = Element::one(p + i);
    return v;
}

inline float fold_lanes(Lanes8 v) {
    float p[8];
    std::memcpy(p, &v, sizeof v);
    for (int half = 4; half > 0; half /= 2)
        for (int i = 0; i < half; i++) p[i] += p[i + half];
    return p[0];
}

// 32 partial sums by index mod 32, folded in halves.
template <class Element>
inline float dot_lanes(const float* a, const typename Element::Stored* b, int n) {
    Lanes8 p[4] = {};
    int i = 0;
    for (; i + 32 <= n; i += 32)
        for (int c = 0; c < 4; c++) p[c] += load8(a + i + 8 * c) * Element::load(b + i + 8 * c);
    int c = 0;
    for (; i + 8 <= n; i += 8) p[c++] += load8(a + i) * Element::load(b + i);
    if (i < n) p[c] += load_few<F32Element>(a + i, n - i) * load_few<Element>(b + i, n - i);
    return fold_lanes((p[0] + p[2]) + (p[1] + p[3]));
}

}  // namespace
}  // namespace strata
