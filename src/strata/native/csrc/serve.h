// The host's side of a window on a device: waits for the ring of a layer, computes the rows that the
// payload names, raises the word, and so on until the window's last ring. Layouts of words and payload:
// strata/kernels/words and strata/memory/handshake.py. Knows no Python.
#pragma once
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "pool.h"
#include "work.h"

namespace strata {

class Server {
  public:
    // words: ring, rows, rows_late, 64 bytes apart. ints: [counts 4 | expert R | start R + 1 | row R |
    // token R]. x [T, D], rows and late [R, D].
    Server(const uint32_t* words, const int32_t* ints, const float* x, float* rows, float* late, int d_model)
        : words_(const_cast<uint32_t*>(words)), ints_(ints), x_(x), out_{rows, late}, d_model_(d_model) {}

    // Experts of the next layer: their layout and the address of each blob (empty: a dense layer).
    void add_layer(const ExpertLayout* layout, std::vector<int64_t> addresses) {
        layers_.push_back({layout ? *layout : ExpertLayout{}, std::move(addresses)});
    }

    // Answers rings above ``last`` until one of at least ``done``; returns the last ring's value, which is
    // below ``done`` when none came for limit_us.
    int64_t serve(Pool& pool, const Backend& backend, const HomeMap& homes, int n_rows, int64_t last,
                  int64_t done, int64_t limit_us) {
        for (;;) {
            const int64_t value = next_ring(last, limit_us);
            if (value <= last) return last;
            last = value;
            if (value >= done) return value;
            answer(pool, backend, homes, static_cast<int>(value - 1), n_rows);
        }
    }

  private:
    static constexpr int WORD = 16;  // uint32 numbers between two words
    struct Layer {
        ExpertLayout layout;
        std::vector<int64_t> address;
    };

    int64_t next_ring(int64_t last, int64_t limit_us) const {
        const auto start = std::chrono::steady_clock::now();
        for (;;) {
            for (int i = 0; i < 256; i++) {
                const int64_t value = __atomic_load_n(words_, __ATOMIC_ACQUIRE);
                if (value > last) return value;
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
            }
            const auto spent = std::chrono::steady_clock::now() - start;
            if (std::chrono::duration_cast<std::chrono::microseconds>(spent).count() > limit_us) return last;
        }
    }

    // Late rows are started before those on time are waited for: the pool takes tasks on time first, and
    // late ones fill the gaps that the end of each phase leaves.
    void answer(Pool& pool, const Backend& backend, const HomeMap& homes, int layer, int n_rows) {
        const int32_t* counts = ints_;
        uint64_t ticket[2] = {0, 0};
        int group = 0, entry = 0;
        for (int late = 0; late < 2; late++) {
            const int n_groups = counts[2 * late], n_entries = counts[2 * late + 1];
            if (n_groups)
                ticket[late] = start(pool, backend, homes, layer, n_rows, group, n_groups, entry, n_entries, late);
            group += n_groups;
            entry += n_entries;
        }
        for (int late = 0; late < 2; late++) {
            if (ticket[late]) finish(pool, ticket[late], late ? 0 : ticket[1]);
            // what the workers wrote is visible to this thread, and so to the device before the word
            __atomic_store_n(words_ + (1 + late) * WORD, static_cast<uint32_t>(layer + 1), __ATOMIC_SEQ_CST);
        }
    }

    // After an error nothing may still write rows: ``other`` (0: none) is waited for, too.
    static void finish(Pool& pool, uint64_t ticket, uint64_t other) {
        try {
            pool.wait(ticket);
        } catch (const std::exception&) {
            if (other) {
                try {
                    pool.wait(other);
                } catch (const std::exception&) {
                    // the first one is told
                }
            }
            throw;
        }
    }

    uint64_t start(Pool& pool, const Backend& backend, const HomeMap& homes, int layer, int n_rows,
                   int first_group, int n_groups, int first_entry, int n_entries, bool late) {
        const int32_t* expert = ints_ + 4 + first_group;
        const int32_t* start = ints_ + 4 + n_rows + first_group;
        const int32_t* row = ints_ + 5 + 2 * n_rows + first_entry;
        const int32_t* token = row + n_rows;
        const Layer& at = layers_.at(layer);
        address_.clear();
        start_.clear();
        for (int g = 0; g < n_groups; g++) address_.push_back(at.address.at(expert[g]));
        for (int g = 0; g <= n_groups; g++) start_.push_back(start[g] - first_entry);
        const ExpertBatch batch{x_,           d_model_, n_groups, n_entries,   address_.data(), false,
                                start_.data(), row,     token,    out_[late], d_model_};
        auto work = std::make_unique<ExpertWork>(backend, pool.workers(), at.layout, batch, homes);
        work->layer = layer;
        return pool.submit(std::move(work), late ? Urgency::late : Urgency::on_time);
    }

    uint32_t* words_;
    const int32_t* ints_;
    const float* x_;
    float* out_[2];
    int d_model_;
    std::vector<Layer> layers_;
    std::vector<int64_t> address_;
    std::vector<int32_t> start_;
};

}  // namespace strata
