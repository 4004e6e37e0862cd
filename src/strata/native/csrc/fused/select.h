// Block selection of query-sparse attention: keys of blocks, the best blocks of a query, its tokens.
#pragma once
#include "conv.h"
#include "heads.h"

namespace strata {
namespace {

// Keys of n_blocks blocks of r tokens from block first_block on: mean of the raw keys (tokens ascending),
// norm, rotary at the block's first position. Raw keys as in Columns.
void block_keys(int64_t n_blocks, const float* ring, int64_t entries, int64_t start, const float* raw,
                int64_t d, int64_t first_block, int64_t r, const float* weight, double eps,
                const float* cos, const float* sin, int64_t pairs, bool halves, int64_t kind, uint8_t* out) {
    const Columns columns{raw, const_cast<float*>(ring), entries, start, 0, d, nullptr};
    const Rotary rotary{cos, sin, pairs, r, halves};
    const FloatKind to = static_cast<FloatKind>(kind);
    float* key = fused_scratch(d);
    for (int64_t b = 0; b < n_blocks; b++) {
        const int64_t position = (first_block + b) * r;
        std::memcpy(key, columns.at(position), sizeof(float) * d);
        for (int64_t i = 1; i < r; i++) {
            const float* column = columns.at(position + i);
            for (int64_t j = 0; j < d; j++) key[j] += column[j];
        }
        for (int64_t j = 0; j < d; j++) key[j] /= static_cast<float>(r);
        scale_row(key, inverse_rms(key, d, eps), weight, d, key);
        rotary.turn(key, b);
        store_row(key, d, to, out + b * d * element_bytes(to));
    }
}

// Stores the window's columns [T, n] in the ring.
void ring_store(int64_t n_tokens, float* ring, int64_t entries, int64_t start, const float* x, int64_t n) {
    Columns{x, ring, entries, start, n_tokens, n, nullptr}.store();
}

// Order of scores as integers: scores are not negative, and NaN stands above all.
inline uint32_t rank_of(float score) { return bits_of(score) & 0x7fffffff; }

template <class Element>
inline void block_scores(const float* q, int64_t heads, int64_t d, const typename Element::Stored* keys,
                         int64_t n_blocks, float root, uint32_t* rank) {
    for (int64_t b = 0; b < n_blocks; b++, keys += d) {
        float total = 0.0f;
        for (int64_t i = 0; i < heads; i++) {
            const float dot = dot_lanes<Element>(q + i * d, keys, static_cast<int>(d));
            total += dot < 0.0f ? 0.0f : dot;
        }
        rank[b] = rank_of(total / root);
    }
}

// The n-th largest of the ranks: bit by bit from the top, so that no order of equal ones matters.
inline uint32_t nth_largest(const uint32_t* rank, int64_t count, int64_t n) {
    uint32_t found = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t seen[256] = {};
        const uint32_t above = shift == 24 ? 0 : ~0u << (shift + 8);
        for (int64_t i = 0; i < count; i++)
            if ((rank[i] & above) == found) seen[rank[i] >> shift & 255]++;
        int digit = 255;
        while (n > seen[digit]) n -= seen[digit--];
        found |= static_cast<uint32_t>(digit) << shift;
    }
    return found;
}

// Ascending indices of the n largest; of equal ones the lower index comes first.
inline void best_blocks(const uint32_t* rank, int64_t count, int64_t n, int32_t* kept) {
    const uint32_t least = nth_largest(rank, count, n);
    int64_t above = 0, written = 0;
    for (int64_t i = 0; i < count; i++) above += rank[i] > least;
    int64_t ties = n - above;
    for (int64_t i = 0; i < count && written < n; i++)
        if (rank[i] > least || (rank[i] == least && ties-- > 0)) kept[written++] = static_cast<int32_t>(i);
}

// kept [T, budget]: each token's blocks ascending, then -1. q [T, heads, d], keys [blocks, d].
void select_blocks(int64_t n_tokens, const float* q, int64_t heads, int64_t d, const void* keys,
                   int64_t kind, int64_t start, int64_t r, int64_t budget, int32_t* kept) {
    const float root = static_cast<float>(__builtin_sqrt(static_cast<double>(d)));
    uint32_t* rank = reinterpret_cast<uint32_t*>(fused_scratch((start + n_tokens) / r));
    for (int64_t t = 0; t < n_tokens; t++, q += heads * d, kept += budget) {
        const int64_t n_blocks = (start + t + 1) / r;
        for (int64_t i = 0; i < budget; i++) kept[i] = i < n_blocks ? static_cast<int32_t>(i) : -1;
        if (n_blocks <= budget) continue;
        const auto* halves = static_cast<const uint16_t*>(keys);
        if (kind == 0) block_scores<F32Element>(q, heads, d, static_cast<const float*>(keys), n_blocks, root, rank);
        else if (kind == 1) block_scores<F16Element>(q, heads, d, halves, n_blocks, root, rank);
        else block_scores<BF16Element>(q, heads, d, halves, n_blocks, root, rank);
        best_blocks(rank, n_blocks, budget, kept);
    }
}

// seen [T, n]: 1 for tokens of the kept blocks and of the incomplete block, up to the token itself.
void token_mask(int64_t n_tokens, const int32_t* kept, int64_t budget, int64_t start, int64_t n, int64_t r,
                uint8_t* seen) {
    for (int64_t t = 0; t < n_tokens; t++, kept += budget, seen += n) {
        const int64_t end = start + t + 1;
        std::memset(seen, 0, n);
        for (int64_t i = 0; i < budget && kept[i] >= 0; i++) {
            const int64_t first = kept[i] * r, last = first + r < end ? first + r : end;
            if (first < last) std::memset(seen + first, 1, last - first);
        }
        std::memset(seen + end / r * r, 1, end % r);
    }
}

}  // namespace
}  // namespace strata
