// Look-up tables shared by all instruction sets. Grids come from strata.formats at import.
#pragma once
#include <cstdint>

namespace strata {

struct Tables {
    float e4m3[256];
    float e5m2[256];
    float half_e8m0[256];    // 2^(e - 128)
    float half_ue4m3[256];   // half the value of an NVFP4 scale byte
    uint64_t signs7[128];    // byte j is 0xff where weight j is negative; the eighth makes parity even
    uint64_t signs8[256];
    uint64_t iq2_xxs[256];   // 8 magnitudes
    uint64_t iq2_xs[512];
    uint64_t iq2_s[1024];
    uint32_t iq3_xxs[256];   // 4 halved magnitudes
    uint32_t iq3_s[512];     // 4 codes (15 + magnitude) / 2
    uint64_t iq1[2048];      // 8 codes 8 * (1 + point)
    // Points cut into two planes of bytes, as numbers of levels of 4 bits.
    uint8_t iq3_xxs_levels[2][256];
    uint8_t iq3_s_levels[2][512];
};

extern Tables tables;

inline constexpr int8_t IQ4_CODES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                         1, 13, 25, 38, 53, 69, 89, 113};
// e2m1 values doubled, plus 12
inline constexpr uint8_t FP4_CODES_12[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                             12, 11, 10, 9, 8, 6, 4, 0};

// Stores a grid given as signed bytes [entries, 4 or 8]; false when name or size is not known.
bool set_grid(const char* name, const int8_t* points, int64_t n_bytes);

}  // namespace strata
