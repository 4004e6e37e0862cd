// From router logits to experts and weights, and the grouping of routed rows by expert.
#pragma once
#include "math.h"

namespace strata {
namespace {

// NaN stands above every number, as in torch's sort.
inline bool above(float a, float b) { return a > b || (a != a && b == b); }

// Indices of the n highest scores, highest first, of equal ones the lower index.
inline void top(const float* score, int64_t count, int64_t n, int32_t* best) {
    int64_t held = 0;
    for (int64_t e = 0; e < count; e++) {
        if (held == n && !above(score[e], score[best[n - 1]])) continue;
        int64_t at = held < n ? held++ : n - 1;
        for (; at > 0 && above(score[e], score[best[at - 1]]); at--) best[at] = best[at - 1];
        best[at] = static_cast<int32_t>(e);
    }
}

enum Scoring : int64_t { SOFTMAX, SIGMOID, SOFTMAX_TOPK };

struct RouteRule {
    int64_t n_experts, n_active;
    Scoring scoring;
    bool normalize;
    float scale;
    const float* correction;
    int64_t n_groups, groups_kept;
};

// -inf outside the groups whose two best scores have the highest sums; memory: 2 * n_groups numbers.
inline void best_groups_only(const RouteRule& rule, float* choice, float* memory) {
    const int64_t size = rule.n_experts / rule.n_groups;
    float* group_score = memory;
    int32_t* kept = reinterpret_cast<int32_t*>(memory + rule.n_groups);
    for (int64_t g = 0; g < rule.n_groups; g++) {
        int32_t two[2] = {};
        const int64_t n = size < 2 ? size : 2;
        top(choice + g * size, size, n, two);
        group_score[g] = choice[g * size + two[0]];
        if (n == 2) group_score[g] += choice[g * size + two[1]];
    }
    top(group_score, rule.n_groups, rule.groups_kept, kept);
    for (int64_t g = 0; g < rule.n_groups; g++) {
        bool dropped = true;
        for (int64_t i = 0; i < rule.groups_kept; i++) dropped = dropped && kept[i] != g;
        for (int64_t i = 0; dropped && i < size; i++) choice[g * size + i] = -__builtin_inff();
    }
}

inline float sum_of_power(const float* logit, int64_t n, float most) {
    Sums8d total;
    for (int64_t i = 0; i < n; i += 8) {
        float e[8] = {};
        for (int j = 0; j < 8 && i + j < n; j++) e[j] = exp_c(logit[i + j] - most);
        total.add(e);
    }
    return static_cast<float>(total.fold());
}

// Weights before normalisation and their divisor; 1 where there is none.
inline float softmax_weights(const RouteRule& rule, const float* logit, int32_t* expert, float* weight) {
    top(logit, rule.n_experts, rule.n_active, expert);
    const float most = logit[expert[0]];  // NaN if there is one
    float total = 0.0f;
    for (int64_t j = 0; j < rule.n_active; j++) {
        weight[j] = exp_c(logit[expert[j]] - most);
        total += weight[j];
    }
    const bool chosen_only = rule.normalize || rule.scoring == SOFTMAX_TOPK;
    return chosen_only ? total : sum_of_power(logit, rule.n_experts, most);
}

inline float sigmoid_weights(const RouteRule& rule, const float* logit, float* memory, int32_t* expert,
                             float* weight) {
    float *score = memory, *choice = memory + rule.n_experts;
    for (int64_t e = 0; e < rule.n_experts; e++) score[e] = sigmoid_c(logit[e]);
    for (int64_t e = 0; e < rule.n_experts; e++)
        choice[e] = rule.correction ? score[e] + rule.correction[e] : score[e];
    if (rule.n_groups > 1) best_groups_only(rule, choice, choice + rule.n_experts);
    top(choice, rule.n_experts, rule.n_active, expert);
    float total = 0.0f;
    for (int64_t j = 0; j < rule.n_active; j++) {
        weight[j] = score[expert[j]];
        total += weight[j];
    }
    return rule.normalize ? total + 1e-20f : 1.0f;
}

// bias and correction may be null. expert, weight: [T, n_active]
void route(int64_t n_tokens, const float* logits, const float* bias, int64_t n_experts, int64_t n_active,
           int64_t scoring, bool normalize, double scale, const float* correction, int64_t n_groups,
           int64_t groups_kept, int32_t* expert, float* weight) {
    const RouteRule rule{n_experts, n_active, static_cast<Scoring>(scoring), normalize,
                         static_cast<float>(scale), correction, n_groups, groups_kept};
    float* biased = fused_scratch(3 * n_experts + 2 * n_groups);
    for (int64_t t = 0; t < n_tokens; t++, logits += n_experts, expert += n_active, weight += n_active) {
        const float* logit = logits;
        if (bias) {
            for (int64_t e = 0; e < n_experts; e++) biased[e] = logits[e] + bias[e];
            logit = biased;
        }
        const float total = rule.scoring == SIGMOID
                                ? sigmoid_weights(rule, logit, biased + n_experts, expert, weight)
                                : softmax_weights(rule, logit, expert, weight);
        for (int64_t j = 0; j < n_active; j++) weight[j] = weight[j] / total * rule.scale;
    }
}

// Copies rows of `width` numbers: out[index[i]] = from[index[i]]. Returns the first i whose index is not
// below n_rows, else -1; then nothing is copied.
int64_t copy_rows(int64_t n, const int32_t* index, const float* from, float* out, int64_t n_rows,
                  int64_t width) {
    for (int64_t i = 0; i < n; i++)
        if (index[i] < 0 || index[i] >= n_rows) return i;
    for (int64_t i = 0; i < n; i++)
        std::memcpy(out + index[i] * width, from + index[i] * width, sizeof(float) * width);
    return -1;
}

// Rows by distinct expert in order of first appearance, experts with a fast address apart from the others.
// lists: for fast, then for the others, one after the other: expert [G], start [G + 1], row [n], token [n].
// groups, rows: G and n of fast, G and n of the others. place [R]: fast_place or other_place.
// Returns the first row whose expert does not exist, else -1.
int64_t group_rows(int64_t n_rows, const int32_t* expert, int64_t n_active, const int64_t* fast,
                   int64_t n_experts, int64_t fast_place, int64_t other_place, int32_t* lists, int8_t* place,
                   int64_t* groups, int64_t* rows) {
    int32_t* group_of = reinterpret_cast<int32_t*>(fused_scratch(n_experts + 3 * n_rows));
    int32_t *first = group_of + n_experts, *next = first + n_rows, *last = next + n_rows;
    std::memset(group_of, 0xff, sizeof(int32_t) * n_experts);
    for (int64_t r = 0; r < n_rows; r++)
        if (expert[r] < 0 || expert[r] >= n_experts) return r;
    int64_t n_groups = 0;
    groups[0] = groups[1] = rows[0] = rows[1] = 0;
    for (int64_t r = 0; r < n_rows; r++) {
        const int32_t e = expert[r];
        const bool is_fast = fast[e] != 0;
        place[r] = static_cast<int8_t>(is_fast ? fast_place : other_place);
        rows[is_fast ? 0 : 1]++;
        next[r] = -1;
        if (group_of[e] < 0) {
            groups[is_fast ? 0 : 1]++;
            group_of[e] = static_cast<int32_t>(n_groups);
            first[n_groups] = static_cast<int32_t>(r);
            n_groups++;
        } else {
            next[last[group_of[e]]] = static_cast<int32_t>(r);
        }
        last[group_of[e]] = static_cast<int32_t>(r);
    }
    for (int half = 0; half < 2; half++) {
        const int64_t n = rows[half];
        int32_t *ids = lists, *start = ids + groups[half], *row = start + groups[half] + 1, *token = row + n;
        lists = token + n;
        int32_t filled = 0;
        for (int64_t g = 0; g < n_groups; g++) {
            const int32_t e = expert[first[g]];
            if ((fast[e] != 0) != (half == 0)) continue;
            *ids++ = e;
            *start++ = filled;
            for (int32_t r = first[g]; r >= 0; r = next[r], filled++) {
                row[filled] = r;
                token[filled] = static_cast<int32_t>(r / n_active);
            }
        }
        *start = filled;
    }
    return -1;
}

}  // namespace
}  // namespace strata
