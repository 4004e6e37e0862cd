// One instruction set's re-coder. Compiled once per set with its flags and STRATA_RECODE = its getter.
#include "recode.h"

#include "decode_grids.h"

namespace strata {
namespace {

constexpr int ROWS = 16, SUPER_COLS = 256;

// Unconverted scale fields of one block: `small` bytes or f16 bits, and the f16 above them.
struct Fields {
    uint16_t half[2];      // scale, minimum of types whose scale is an f16
    uint8_t small[2][16];  // sub-scales and sub-minima, or whole scales of one byte
    uint16_t d[2];         // the f16 above them
};

inline void odd_nibbles(const uint8_t* packed, int n, uint8_t* out) {
    for (int i = 0; i < n; i++) out[i] = 2 * (packed[i / 2] >> 4 * (i % 2) & 15) + 1;
}

void fields_q3_k(const uint8_t* b, Fields& f) {
    for (int g = 0; g < 16; g++) {
        const int low = b[96 + g % 8] >> (g < 8 ? 0 : 4) & 15;
        const int top = b[104 + g % 4] >> 2 * (g / 4) & 3;
        f.small[0][g] = static_cast<uint8_t>((low | top << 4) - 32);
    }
    f.d[0] = load_u16(b + 108);
}

void fields_q4_k(const uint8_t* b, Fields& f) {
    const uint8_t* s = b + 4;
    for (int i = 0; i < 4; i++) {
        f.small[0][i] = s[i] & 63;
        f.small[0][i + 4] = (s[i + 8] & 15) | s[i] >> 6 << 4;
        f.small[1][i] = s[i + 4] & 63;
        f.small[1][i + 4] = s[i + 8] >> 4 | s[i + 4] >> 6 << 4;
    }
    f.d[0] = load_u16(b);
    f.d[1] = load_u16(b + 2);
}

void fields_iq1_m(const uint8_t* b, Fields& f) {
    f.d[0] = 0;
    for (int i = 0; i < 4; i++) f.d[0] |= load_u16(b + 48 + 2 * i) >> 12 << 4 * i;
    for (int g = 0; g < 16; g++)
        f.small[0][g] = 2 * (load_u16(b + 48 + 2 * (g / 4)) >> 3 * (g % 4) & 7) + 1;
}

void fields_of(Type type, const uint8_t* b, Fields& f) {
    constexpr uint16_t SIGN = 0x8000;
    f.d[0] = load_u16(b);
    switch (type) {
        case Type::TQ1_0: f.half[0] = load_u16(b + 52); break;
        case Type::TQ2_0: f.half[0] = load_u16(b + 64); break;
        case Type::Q4_1: case Type::Q5_1: f.half[1] = load_u16(b + 2) ^ SIGN; [[fallthrough]];
        case Type::Q4_0: case Type::Q5_0: case Type::Q8_0: case Type::Q2_0: case Type::IQ4_NL:
            f.half[0] = load_u16(b);
            break;
        case Type::MXFP4: f.small[0][0] = b[0]; break;
        case Type::NVFP4:
            // the file's exceptions: 0x7f reads as 0, a set top bit does not count
            for (int g = 0; g < 4; g++) f.small[0][g] = b[g] == 0x7f ? 0 : b[g] & 0x7f;
            break;
        case Type::Q2_K:
            for (int g = 0; g < 16; g++) f.small[0][g] = b[g] & 15, f.small[1][g] = b[g] >> 4;
            f.d[0] = load_u16(b + 80);
            f.d[1] = load_u16(b + 82);
            break;
        case Type::Q3_K: fields_q3_k(b, f); break;
        case Type::Q4_K: case Type::Q5_K: fields_q4_k(b, f); break;
        case Type::Q6_K:
            std::memcpy(f.small[0], b + 192, 16);
            f.d[0] = load_u16(b + 208);
            break;
        case Type::IQ1_S:
            for (int i = 0; i < 8; i++) f.small[0][i] = 2 * (load_u16(b + 34 + 2 * i) >> 12 & 7) + 1;
            break;
        case Type::IQ1_M: fields_iq1_m(b, f); break;
        case Type::IQ2_XXS:
            for (int i = 0; i < 8; i++) f.small[0][i] = 2 * (b[9 + 8 * i] >> 4) + 1;
            break;
        case Type::IQ2_XS: odd_nibbles(b + 66, 16, f.small[0]); break;
        case Type::IQ2_S: odd_nibbles(b + 74, 16, f.small[0]); break;
        case Type::IQ3_XXS:
            for (int i = 0; i < 8; i++) f.small[0][i] = 2 * (b[69 + 4 * i] >> 4) + 1;
            break;
        case Type::IQ3_S: odd_nibbles(b + 106, 8, f.small[0]); break;
        case Type::IQ4_XS:
            for (int i = 0; i < 8; i++) {
                const int s = (b[4 + i / 2] >> 4 * (i % 2) & 15) | (load_u16(b + 2) >> 2 * i & 3) << 4;
                f.small[0][i] = static_cast<uint8_t>(s - 32);
            }
            break;
        default: break;
    }
}

// Where one row's values of a plane [tile row][n][16] begin, and putting value i of it there.
template <class T>
struct Lane {
    uint8_t* first;
    Lane(uint8_t* plane, int n, int row)
        : first(plane + sizeof(T) * (static_cast<size_t>(row / ROWS) * n * ROWS + row % ROWS)) {}
    void put(int i, T value) const { std::memcpy(first + sizeof(T) * ROWS * static_cast<size_t>(i), &value, sizeof(T)); }
};

void put_scales(const RecodeArgs& a, const uint8_t* row, int r) {
    const TypeInfo& t = info(a.type);
    const int n_blocks = a.n_cols / t.block_weights;
    const bool super = a.supers >= 0, bytes = super || a.type == Type::MXFP4 || a.type == Type::NVFP4;
    const int per_block = bytes ? t.block_weights / 32 * t.groups : 1, units = n_blocks * per_block;
    const int n_kinds = t.has_min ? 2 : 1, n_supers = a.n_cols / SUPER_COLS;
    const int64_t tile_rows = (a.n_rows + ROWS - 1) / ROWS;
    Fields f{};
    for (int i = 0; i < n_blocks; i++, row += t.block_bytes) {
        fields_of(a.type, row, f);
        for (int kind = 0; kind < n_kinds; kind++) {
            uint8_t* plane = a.out + (kind ? a.minimums : a.scales);
            if (!bytes) {
                Lane<uint16_t>(plane, units, r).put(i, f.half[kind]);
                continue;
            }
            const Lane<uint8_t> lane(plane, units, r);
            for (int g = 0; g < per_block; g++) lane.put(per_block * i + g, f.small[kind][g]);
            uint8_t* supers = a.out + a.supers + 2 * ROWS * n_supers * tile_rows * kind;
            if (super) Lane<uint16_t>(supers, n_supers, r).put(i, f.d[kind]);
        }
    }
}

// Words of BITS-bit fields; the fields of a byte are four codes apart.
template <int BITS>
void put_codes(const RecodeArgs& a, const uint8_t* u, int r) {
    constexpr int FIELDS = 8 / BITS;
    const int n_words = a.n_cols / 32 * BITS;
    const Lane<uint32_t> lane(a.out + a.codes, n_words, r);
    for (int w = 0; w < n_words; w++, u += 4 * FIELDS) {
        uint32_t word = 0;
        for (int k = 0; k < FIELDS; k++) word |= load_u32(u + 4 * k) << BITS * k;
        lane.put(w, word);
    }
}

template <class Decoder>
bool recode_type(const RecodeArgs& a) {
    constexpr TypeInfo t = TYPE_INFO[static_cast<int>(Decoder::type)];
    uint8_t stored[256];  // by the decoder's own code u
    for (int u = 0; u < 256; u++) {
        const int c = t.fit == 0 ? u : t.mul * u - t.bias;
        stored[u] = a.stored[static_cast<uint8_t>(c)];
    }
    uint8_t* const codes = a.scratch;
    const size_t row_bytes = t.row_bytes(a.n_cols);
    for (int r = 0; r < a.n_rows; r++) {
        const uint8_t* row = a.rows + row_bytes * r;
        float scale[16], minimum[16];
        for (int i = 0; i < a.n_cols / t.block_weights; i++)
            Decoder::block(row + static_cast<size_t>(t.block_bytes) * i, codes + t.block_weights * i, scale, minimum);
        for (int k = 0; k < a.n_cols; k++) codes[k] = stored[codes[k]];
        if (a.bits == 8) put_codes<8>(a, codes, r);
        else if (a.bits == 4) put_codes<4>(a, codes, r);
        else put_codes<2>(a, codes, r);
        put_scales(a, row, r);
    }
    return true;
}

bool recode(const RecodeArgs& a) {
    switch (a.type) {
#define STRATA_CASE(NAME) case Type::NAME: return recode_type<Decode##NAME>(a);
        STRATA_CASE(Q4_0) STRATA_CASE(Q4_1) STRATA_CASE(Q5_0) STRATA_CASE(Q5_1) STRATA_CASE(Q8_0)
        STRATA_CASE(Q2_K) STRATA_CASE(Q3_K) STRATA_CASE(Q4_K) STRATA_CASE(Q5_K) STRATA_CASE(Q6_K)
        STRATA_CASE(IQ1_S) STRATA_CASE(IQ1_M) STRATA_CASE(IQ2_XXS) STRATA_CASE(IQ2_XS) STRATA_CASE(IQ2_S)
        STRATA_CASE(IQ3_XXS) STRATA_CASE(IQ3_S) STRATA_CASE(IQ4_NL) STRATA_CASE(IQ4_XS)
        STRATA_CASE(TQ1_0) STRATA_CASE(TQ2_0) STRATA_CASE(MXFP4) STRATA_CASE(NVFP4) STRATA_CASE(Q2_0)
#undef STRATA_CASE
        default: return false;
    }
}

}  // namespace

Recode STRATA_RECODE() { return recode; }

}  // namespace strata
