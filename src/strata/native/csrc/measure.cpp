#include "measure.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace strata {

void HandoverWork::run(int, int, Scratch&) {
    begun_.fetch_add(1);
    // the rest may need this processor
    for (int spins = 1; begun_.load() < threads_; spins++)
        if (spins % 128 == 0) std::this_thread::yield();
}

void ReadWork::run(int, int task, Scratch&) {
    typedef uint64_t Words __attribute__((vector_size(16)));
    constexpr int64_t LINE = 64;
    const int64_t first = PIECE * task, n = std::min(PIECE, n_bytes_ - first);
    const uint8_t* p = memory_ + first;
    Words sum[4] = {};
    int64_t i = 0;
    for (; i + LINE <= n; i += LINE)
        for (int j = 0; j < 4; j++) {
            Words w;
            std::memcpy(&w, p + i + 16 * j, sizeof w);
            sum[j] += w;
        }
    uint64_t all = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t w;
        std::memcpy(&w, p + i, sizeof w);
        all += w;
    }
    for (const Words& s : sum) all += s[0] + s[1];
    sum_.fetch_add(all, std::memory_order_relaxed);
}

}  // namespace strata
