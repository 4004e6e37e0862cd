#include "tables.h"

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>

namespace strata {

namespace {

float fp8(int byte, int exponent_bits) {
    const int mantissa_bits = 7 - exponent_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = (byte & 127) >> mantissa_bits;
    const int mantissa = byte & ((1 << mantissa_bits) - 1);
    const float fraction = static_cast<float>(mantissa) / (1 << mantissa_bits) + (exponent > 0);
    float value = std::ldexp(fraction, (exponent > 0 ? exponent : 1) - bias);
    const bool top = exponent == (1 << exponent_bits) - 1;
    if (exponent_bits == 4 && (byte & 127) == 127) value = std::numeric_limits<float>::quiet_NaN();
    if (exponent_bits == 5 && top)
        value = mantissa ? std::numeric_limits<float>::quiet_NaN()
                         : std::numeric_limits<float>::infinity();
    return byte & 128 ? -value : value;
}

float half_ue4m3(int byte) {
    // ggml reads 0x7f as 0 and otherwise ignores the top bit
    if (byte == 0x7f) return 0.0f;
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    return exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 8)
                    : std::ldexp(static_cast<float>(mantissa), -10);
}

Tables make_tables() {
    Tables t{};
    for (int i = 0; i < 256; i++) {
        t.e4m3[i] = fp8(i, 4);
        t.e5m2[i] = fp8(i, 5);
        t.half_e8m0[i] = std::ldexp(1.0f, i - 128);
        t.half_ue4m3[i] = half_ue4m3(i);
        for (int j = 0; j < 8; j++)
            if (i >> j & 1) t.signs8[i] |= 0xffull << 8 * j;
    }
    for (int i = 0; i < 128; i++) {
        int ones = 0;
        for (int j = 0; j < 7; j++) ones += i >> j & 1;
        t.signs7[i] = t.signs8[i | (ones & 1) << 7];
    }
    return t;
}

template <class Word>
bool fill(Word* out, size_t n_words, const int8_t* points, int64_t n_bytes, int add, int mul, int div) {
    if (n_bytes != static_cast<int64_t>(n_words * sizeof(Word))) return false;
    for (size_t i = 0; i < n_words; i++) {
        uint8_t bytes[sizeof(Word)];
        for (size_t j = 0; j < sizeof(Word); j++)
            bytes[j] = static_cast<uint8_t>((points[i * sizeof(Word) + j] + add) * mul / div);
        std::memcpy(out + i, bytes, sizeof(Word));
    }
    return true;
}

// planes [2][n]: byte i of plane p holds the levels of the p-th half of point i
void cut(uint8_t* planes, const int8_t* points, int64_t n_bytes, std::initializer_list<int> levels) {
    for (int64_t i = 0; i < n_bytes; i++) {
        uint8_t level = 0;
        for (const int* at = levels.begin(); at != levels.end() && *at != points[i]; at++) level++;
        planes[i % 4 / 2 * (n_bytes / 4) + i / 4] |= level << 4 * (i % 2);
    }
}

}  // namespace

Tables tables = make_tables();

bool set_grid(const char* name, const int8_t* points, int64_t n_bytes) {
    const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
    const auto iq3 = [=](uint32_t* out, uint8_t* planes, size_t n, int add, std::initializer_list<int> levels) {
        if (!fill(out, n, points, n_bytes, add, 1, 2)) return false;
        cut(planes, points, n_bytes, levels);
        return true;
    };
    if (is("IQ2_XXS")) return fill(tables.iq2_xxs, 256, points, n_bytes, 0, 1, 1);
    if (is("IQ2_XS")) return fill(tables.iq2_xs, 512, points, n_bytes, 0, 1, 1);
    if (is("IQ2_S")) return fill(tables.iq2_s, 1024, points, n_bytes, 0, 1, 1);
    if (is("IQ3_XXS")) return iq3(tables.iq3_xxs, tables.iq3_xxs_levels[0], 256, 0, {4, 12, 20, 28, 36, 44, 52, 62});
    if (is("IQ3_S")) return iq3(tables.iq3_s, tables.iq3_s_levels[0], 512, 15, {1, 3, 5, 7, 9, 11, 13, 15});
    if (is("IQ1")) return fill(tables.iq1, 2048, points, n_bytes, 1, 8, 1);
    return false;
}

}  // namespace strata
