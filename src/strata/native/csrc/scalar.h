// Small loads and conversions. Everything is `static inline`: this header is compiled once per
// instruction set, and the linker must never merge those copies.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "tables.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "weight blocks are little-endian");

namespace strata {

static inline uint16_t load_u16(const void* p) { uint16_t v; std::memcpy(&v, p, 2); return v; }
static inline uint32_t load_u32(const void* p) { uint32_t v; std::memcpy(&v, p, 4); return v; }
static inline uint64_t load_u64(const void* p) { uint64_t v; std::memcpy(&v, p, 8); return v; }
static inline float load_f32(const void* p) { float v; std::memcpy(&v, p, 4); return v; }
static inline void store_u32(void* p, uint32_t v) { std::memcpy(p, &v, 4); }
static inline void store_u64(void* p, uint64_t v) { std::memcpy(p, &v, 8); }

static inline float float_from_bits(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
static inline uint32_t bits_of(float f) { uint32_t b; std::memcpy(&b, &f, 4); return b; }

static inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    if (exponent == 0) {
        const float value = static_cast<float>(mantissa) * 0x1p-24f;
        return float_from_bits(bits_of(value) | sign);
    }
    if (exponent == 31) return float_from_bits(sign | 0x7f800000 | mantissa << 13);
    return float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
#endif
}

static inline float half_at(const void* p) { return half_to_float(load_u16(p)); }
static inline float bf16_to_float(uint16_t h) { return float_from_bits(static_cast<uint32_t>(h) << 16); }

}  // namespace strata
