// The gated delta rule, column by column: columns of a head's state never meet, tokens follow each other.
//   M = keep * M;   u = beta * (v - M^T k);   M = M + k u^T;   o = M^T q
#pragma once
#include "lanes.h"

namespace strata {
namespace {

// A few columns of a state: row i begins at p + i * stride.
struct Columns {
    float* p;
    int64_t stride;
};

inline void gdn_token(const float* q, const float* k, const float* v, float keep, float beta, int dk,
                      Columns from, Columns kept, Columns to, float* out) {
    constexpr int N = GDN_COLUMNS / 8;
    Lanes8 seen[N] = {}, u[N], o[N] = {};
    for (int i = 0; i < dk; i++)
        for (int c = 0; c < N; c++) {
            const Lanes8 m = load8(from.p + i * from.stride + 8 * c) * keep;
            store8(kept.p + i * kept.stride + 8 * c, m);
            seen[c] += m * k[i];
        }
    for (int c = 0; c < N; c++) u[c] = (load8(v + 8 * c) - seen[c]) * beta;
    for (int i = 0; i < dk; i++)
        for (int c = 0; c < N; c++) {
            const Lanes8 m = load8(kept.p + i * kept.stride + 8 * c) + u[c] * k[i];
            store8(to.p + i * to.stride + 8 * c, m);
            o[c] += m * q[i];
        }
    for (int c = 0; c < N; c++) store8(out + 8 * c, o[c]);
}

// The same for the last, narrow columns.
inline void gdn_token_few(const float* q, const float* k, const float* v, float keep, float beta, int dk,
                          int width, Columns from, Columns kept, Columns to, float* out) {
    for (int c = 0; c < width; c++) {
        float seen = 0.0f, o = 0.0f;
        for (int i = 0; i < dk; i++) {
            const float m = from.p[i * from.stride + c] * keep;
            kept.p[i * kept.stride + c] = m;
            seen += m * k[i];
        }
        const float u = (v[c] - seen) * beta;
        for (int i = 0; i < dk; i++) {
            const float m = kept.p[i * kept.stride + c] + u * k[i];
            to.p[i * to.stride + c] = m;
            o += m * q[i];
        }
        out[c] = o;
    }
}

// scratch: dk * GDN_COLUMNS floats, the state's columns between the first and the last token.
void gdn_columns(const GdnArgs& a, int head, int first_col, uint8_t* scratch) {
    const int64_t state = static_cast<int64_t>(head) * a.dk * a.dv + first_col;
    const int width = a.dv - first_col < GDN_COLUMNS ? a.dv - first_col : GDN_COLUMNS;
    const Columns in{const_cast<float*>(a.state_in) + state, a.dv}, out{a.state_out + state, a.dv};
    const Columns kept{reinterpret_cast<float*>(scratch), GDN_COLUMNS};
    for (int t = 0; t < a.n_tokens; t++) {
        const int64_t key = (static_cast<int64_t>(t) * a.n_key_heads + a.key_head[head]) * a.dk;
        const int64_t gate = static_cast<int64_t>(t) * a.n_value_heads + head;
        const int64_t value = gate * a.dv + first_col;
        const Columns from = t == 0 ? in : kept, to = t == a.n_tokens - 1 ? out : kept;
        if (width == GDN_COLUMNS)
            gdn_token(a.q + key, a.k + key, a.v + value, a.keep[gate], a.beta[gate], a.dk, from, kept, to,
                      a.out + value);
        else
            gdn_token_few(a.q + key, a.k + key, a.v + value, a.keep[gate], a.beta[gate], a.dk, width, from,
                          kept, to, a.out + value);
    }
}

}  // namespace
}  // namespace strata
