// Vectors of bytes: loads, nibbles, single bits and 16-entry tables.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace strata {
namespace {

typedef uint8_t Bytes32 __attribute__((vector_size(32)));
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint8_t Bytes4 __attribute__((vector_size(4)));

inline Bytes32 load32(const uint8_t* p) { Bytes32 v; std::memcpy(&v, p, 32); return v; }
inline void store32(uint8_t* p, Bytes32 v) { std::memcpy(p, &v, 32); }

// 16 bytes -> low halves of all, then high halves of all
inline Bytes32 nibbles_32(const uint8_t* p) {
#if defined(__AVX2__)
    const __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i both = _mm256_blend_epi32(v, _mm256_srli_epi16(v, 4), 0xf0);
    return reinterpret_cast<Bytes32>(_mm256_and_si256(both, _mm256_set1_epi8(15)));
#else
    Bytes16 packed;
    std::memcpy(&packed, p, 16);
    const Bytes16 low = packed & 15, high = packed >> 4;
    Bytes32 both;
    std::memcpy(&both, &low, 16);
    std::memcpy(reinterpret_cast<uint8_t*>(&both) + 16, &high, 16);
    return both;
#endif
}

// byte i is 0xff where bit i is set
inline Bytes32 bits_32(uint32_t bits) {
#if defined(__AVX2__)
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                            2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i one = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), spread);
    return reinterpret_cast<Bytes32>(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, one), one));
#else
    Bytes32 v;
    for (int i = 0; i < 32; i++) v[i] = bits >> i & 1 ? 0xff : 0;
    return v;
#endif
}

// table: 16 bytes; index: 0..15
inline Bytes32 look_up(const void* table, Bytes32 index) {
#if defined(__AVX2__)
    const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(table)));
    return reinterpret_cast<Bytes32>(_mm256_shuffle_epi8(t, reinterpret_cast<__m256i>(index)));
#else
    Bytes32 v;
    for (int i = 0; i < 32; i++) v[i] = static_cast<const uint8_t*>(table)[index[i]];
    return v;
#endif
}

}  // namespace
}  // namespace strata
