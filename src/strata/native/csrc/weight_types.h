// The weight types by number, and how their codes are held while a row is computed.
#pragma once
#include <cstddef>
#include <cstdint>

// Headers are compiled once per instruction set; a function that is always inlined leaves no copy
// for the linker to merge across the sets.
#define STRATA_INLINE inline __attribute__((always_inline))

// Products of unsigned with signed bytes summed to int32 by one instruction.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define STRATA_VNNI 1
#else
#define STRATA_VNNI 0
#endif

namespace strata {

enum class Type : int {
    F32, F16, BF16, F64, F8_E4M3, F8_E5M2, F8_E4M3_B128,
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K,
    IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ4_NL, IQ3_S, IQ2_S, IQ4_XS, IQ1_M,
    TQ1_0, TQ2_0, MXFP4, NVFP4, Q2_0,
    count
};

// A decoder gives unsigned codes u; the contract's code is c = mul * u - bias.
//   groups: scales per 32 weights, 0 for float types
//   fit:    how many products u0 * q0 + u1 * q1 with |q| <= 127 an int16 lane can sum, at most 8;
//           0: codes are signed bytes (mul 1, bias 0)
struct TypeInfo {
    const char* name;
    int block_weights;
    int block_bytes;
    int groups;
    bool has_min;
    int mul;
    int bias;
    int fit;

    STRATA_INLINE bool quantized() const { return groups > 0; }
    STRATA_INLINE size_t row_bytes(int64_t n_cols) const { return n_cols / block_weights * block_bytes; }
};

inline constexpr TypeInfo TYPE_INFO[] = {
    {"F32", 1, 4, 0, false, 0, 0, 0},
    {"F16", 1, 2, 0, false, 0, 0, 0},
    {"BF16", 1, 2, 0, false, 0, 0, 0},
    {"F64", 1, 8, 0, false, 0, 0, 0},
    {"F8_E4M3", 1, 1, 0, false, 0, 0, 0},
    {"F8_E5M2", 1, 1, 0, false, 0, 0, 0},
    {"F8_E4M3_B128", 128, 132, 0, false, 0, 0, 0},
    {"Q4_0", 32, 18, 1, false, 1, 8, 8},
    {"Q4_1", 32, 20, 1, true, 1, 0, 8},
    {"Q5_0", 32, 22, 1, false, 1, 16, 4},
    {"Q5_1", 32, 24, 1, true, 1, 0, 4},
    {"Q8_0", 32, 34, 1, false, 1, 0, 0},
    {"Q2_K", 256, 84, 2, true, 1, 0, 8},
    {"Q3_K", 256, 110, 2, false, 1, 4, 8},
    {"Q4_K", 256, 144, 1, true, 1, 0, 8},
    {"Q5_K", 256, 176, 1, true, 1, 0, 4},
    {"Q6_K", 256, 210, 2, false, 1, 32, 2},
    {"IQ2_XXS", 256, 66, 1, false, 1, 43, 1},
    {"IQ2_XS", 256, 74, 2, false, 1, 43, 1},
    {"IQ3_XXS", 256, 98, 1, false, 2, 62, 2},
    {"IQ1_S", 256, 50, 1, false, 1, 9, 4},
    {"IQ4_NL", 32, 18, 1, false, 1, 0, 0},
    {"IQ3_S", 256, 110, 1, false, 2, 15, 8},
    {"IQ2_S", 256, 82, 2, false, 1, 43, 1},
    {"IQ4_XS", 256, 136, 1, false, 1, 0, 0},
    {"IQ1_M", 256, 56, 2, false, 1, 9, 4},
    {"TQ1_0", 256, 54, 1, false, 1, 1, 8},
    {"TQ2_0", 256, 66, 1, false, 1, 1, 8},
    {"MXFP4", 32, 17, 1, false, 1, 12, 4},
    {"NVFP4", 64, 36, 2, false, 1, 12, 4},
    {"Q2_0", 64, 18, 1, false, 1, 1, 8},
};
static_assert(sizeof(TYPE_INFO) / sizeof(TypeInfo) == static_cast<size_t>(Type::count));

STRATA_INLINE const TypeInfo& info(Type t) { return TYPE_INFO[static_cast<int>(t)]; }

}  // namespace strata
