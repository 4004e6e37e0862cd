// Where threads sleep until something may have changed: an event count (a futex on Linux).
//
// A sleeper counts itself, reads the epoch and looks whether it is needed; only then it sleeps, and not
// if the epoch has moved. Whoever makes work publishes it first and then looks for sleepers, so one of
// the two sees the other.
#pragma once
#include <atomic>
#include <climits>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace strata {

class Parking {
  public:
    // Sleeps until ready(), which is looked at again whenever unpark was called; counts each sleep.
    template <class Ready, class Count>
    void park_until(Ready ready, Count count) {
        sleepers_.fetch_add(1);
        for (;;) {
            const uint32_t epoch = epoch_.load();
            if (ready()) break;
            count();
            park(epoch);
        }
        sleepers_.fetch_sub(1);
    }

    // Wakes up to n sleepers. Costs a load where nobody sleeps.
    void unpark(int n = INT_MAX) {
        if (sleepers_.load() == 0) return;
#if defined(__linux__)
        epoch_.fetch_add(1);
        syscall(SYS_futex, word(), FUTEX_WAKE_PRIVATE, n, nullptr, nullptr, 0);
#else
        (void)n;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            epoch_.fetch_add(1);
        }
        changed_.notify_all();
#endif
    }

  private:
    void park(uint32_t epoch) {
#if defined(__linux__)
        syscall(SYS_futex, word(), FUTEX_WAIT_PRIVATE, epoch, nullptr, nullptr, 0);
#else
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return epoch_.load() != epoch; });
#endif
    }

#if defined(__linux__)
    uint32_t* word() { return reinterpret_cast<uint32_t*>(&epoch_); }
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
#else
    std::mutex mutex_;
    std::condition_variable changed_;
#endif
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<int> sleepers_{0};
};

}  // namespace strata
