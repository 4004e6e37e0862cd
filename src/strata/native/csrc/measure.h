// Work for measurements of the pool and the memory: an empty job, and reading.
#pragma once
#include <atomic>

#include "pool.h"

namespace strata {

// One task a thread, each of which ends when all have begun: done means that every worker took part.
class HandoverWork : public Work {
  public:
    explicit HandoverWork(int threads) : threads_(threads) {}
    int n_phases() const override { return 1; }
    int n_tasks(int) const override { return threads_; }
    Clock clock(int) const override { return Clock::compute; }
    void run(int phase, int task, Scratch& scratch) override;

  private:
    const int threads_;
    std::atomic<int> begun_{0};
};

// Reads memory once, front to back in pieces; sum() is of its 64-bit words, so that none is left out.
class ReadWork : public Work {
  public:
    ReadWork(const uint8_t* memory, int64_t n_bytes) : memory_(memory), n_bytes_(n_bytes) {}
    int n_phases() const override { return 1; }
    int n_tasks(int) const override { return static_cast<int>((n_bytes_ + PIECE - 1) / PIECE); }
    Clock clock(int) const override { return Clock::compute; }
    void run(int phase, int task, Scratch& scratch) override;
    uint64_t sum() const { return sum_.load(); }

  private:
    static constexpr int64_t PIECE = 256 << 10;
    const uint8_t* memory_;
    const int64_t n_bytes_;
    std::atomic<uint64_t> sum_{0};
};

}  // namespace strata
