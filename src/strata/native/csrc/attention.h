// Softmax attention of one token over the cached keys and values. A token's bits depend on nothing
// but its own query and the positions it sees.
#pragma once
#include "activate.h"
#include "lanes.h"

namespace strata {
namespace {

constexpr int POSITION_BLOCK = 64;

// Which positions a token sees: a range, or the selected ones of it listed in `index`.
struct Seen {
    int64_t first;
    int64_t count;
    const int32_t* index;  // null: first, first + 1, ...

    int64_t at(int64_t i) const { return index ? index[i] : first + i; }
};

inline Seen seen_by(const AttentionArgs& a, int t, int32_t* index) {
    const int64_t end = a.start + t + 1;
    const int64_t first = a.window_tokens > 0 && end > a.window_tokens ? end - a.window_tokens : 0;
    if (!a.selected) return {first, end - first, nullptr};
    const uint8_t* selected = a.selected + (a.start + a.n_tokens) * t;
    int64_t count = 0;
    for (int64_t i = first; i < end; i++)
        if (selected[i]) index[count++] = static_cast<int32_t>(i);
    return {first, count, index};
}

// scores -> exp(score - top), returns their sum (with the sink's share)
inline float soft_weights(float* score, int64_t n, const float* sink) {
    float top = sink ? *sink : -__builtin_inff();
    for (int64_t i = 0; i < n; i++) top = score[i] > top ? score[i] : top;
    Lanes8 total = {};
    for (int64_t i = 0; i < n; i += 8) {
        const int width = n - i < 8 ? static_cast<int>(n - i) : 8;
        float e[8] = {};
        for (int j = 0; j < width; j++) e[j] = score[i + j] - top;
        for (int j = 0; j < 8; j++) e[j] = exp_c(e[j]);
        for (int j = width; j < 8; j++) e[j] = 0.0f;
        std::memcpy(score + i, e, sizeof(float) * width);
        total += load8(e);
    }
    const float sum = fold_lanes(total);
    return sink ? sum + exp_c(*sink - top) : sum;
}

// acc[0..width) += sum over i ascending of weight[i] * value row i
template <class Element>
inline void add_values(const AttentionArgs& a, const typename Element::Stored* v, const Seen& seen,
                       int64_t i0, int64_t i1, const float* weight, float* acc) {
    int d = 0;
    for (; d + 32 <= a.dv; d += 32) {
        Lanes8 sum[4];
        for (int c = 0; c < 4; c++) sum[c] = load8(acc + d + 8 * c);
        for (int64_t i = i0; i < i1; i++) {
            const auto* row = v + seen.at(i) * a.v_stride + d;
            for (int c = 0; c < 4; c++) sum[c] += weight[i] * Element::load(row + 8 * c);
        }
        for (int c = 0; c < 4; c++) store8(acc + d + 8 * c, sum[c]);
    }
    for (; d < a.dv; d++)
        for (int64_t i = i0; i < i1; i++)
            acc[d] += weight[i] * Element::one(v + seen.at(i) * a.v_stride + d);
}

template <class Element>
void attend(const AttentionArgs& a, int t, int first_head, int n_heads, uint8_t* scratch) {
    using Stored = typename Element::Stored;
    const int64_t n_cache = a.start + a.n_tokens;
    float* scores = reinterpret_cast<float*>(scratch);
    const Seen seen = seen_by(a, t, reinterpret_cast<int32_t*>(scores + n_heads * n_cache));
    const int64_t group = first_head / (a.n_heads / a.n_groups);
    const Stored* k = static_cast<const Stored*>(a.k) + group * a.k_head_stride;
    const Stored* v = static_cast<const Stored*>(a.v) + group * a.v_head_stride;
    const int64_t row = static_cast<int64_t>(t) * a.n_heads + first_head;
    const float* q = a.q + row * a.dk;
    float* out = a.out + row * a.dv;
    for (int64_t i0 = 0; i0 < seen.count; i0 += POSITION_BLOCK) {
        const int64_t i1 = i0 + POSITION_BLOCK < seen.count ? i0 + POSITION_BLOCK : seen.count;
        for (int h = 0; h < n_heads; h++)
            for (int64_t i = i0; i < i1; i++)
                scores[h * n_cache + i] =
                    dot_lanes<Element>(q + h * a.dk, k + seen.at(i) * a.k_stride, a.dk) * a.scale;
    }
    float total[64];
    for (int h = 0; h < n_heads; h++) {
        total[h] = soft_weights(scores + h * n_cache, seen.count, a.sinks ? a.sinks + first_head + h : nullptr);
        std::memset(out + h * a.dv, 0, sizeof(float) * a.dv);
    }
    for (int64_t i0 = 0; i0 < seen.count; i0 += POSITION_BLOCK) {
        const int64_t i1 = i0 + POSITION_BLOCK < seen.count ? i0 + POSITION_BLOCK : seen.count;
        for (int h = 0; h < n_heads; h++)
            add_values<Element>(a, v, seen, i0, i1, scores + h * n_cache, out + h * a.dv);
    }
    for (int h = 0; h < n_heads; h++)
        for (int d = 0; d < a.dv; d++) out[h * a.dv + d] /= total[h];
}

size_t attention_scratch_bytes(const AttentionArgs& a, int n_heads) {
    return (n_heads + 1) * static_cast<size_t>(a.start + a.n_tokens) * sizeof(float);
}

void attention_rows(const AttentionArgs& a, int t, int first_head, int n_heads, uint8_t* scratch) {
    if (a.kind == FloatKind::f32) attend<F32Element>(a, t, first_head, n_heads, scratch);
    else if (a.kind == FloatKind::f16) attend<F16Element>(a, t, first_head, n_heads, scratch);
    else attend<BF16Element>(a, t, first_head, n_heads, scratch);
}

}  // namespace
}  // namespace strata
