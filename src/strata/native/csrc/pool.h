// Persistent workers that run the tasks of several pieces of work at once.
//
// A Work is a list of phases; the tasks of a phase may run in any order on any thread, and a phase
// begins when all tasks of the one before are done. Workers take tasks of the most urgent work first,
// spin for a bounded time when there are none, then sleep. A thread that waits for a work runs its
// tasks too. Knows no weights, no Python.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace strata {

// Memory of one thread, kept between tasks. 64-byte aligned.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch();
    uint8_t* get(size_t n_bytes);

  private:
    uint8_t* memory_ = nullptr;
    size_t size_ = 0;
};

enum class Clock : int { quantize, compute };

class Work {
  public:
    virtual ~Work() = default;
    virtual int n_phases() const = 0;
    virtual int n_tasks(int phase) const = 0;
    virtual Clock clock(int phase) const = 0;
    virtual void run(int phase, int task, Scratch& scratch) = 0;
};

// Lower is more urgent: what a caller waits for at once, rows of this layer, rows joined later.
enum class Urgency : int { now, on_time, late };

struct Counters {
    std::atomic<int64_t> quantize_ns{0}, compute_ns{0}, wait_ns{0};
    std::atomic<int64_t> works{0}, tasks{0}, sleeps{0};
};

class Pool {
  public:
    // workers threads compute, the waiting thread among them: workers - 1 are started, pinned to
    // cpus[1], cpus[2], ... (empty: not pinned). Of all threads at most max_spinners spin when idle.
    Pool(int workers, std::vector<int> cpus, int spin_us, int max_spinners);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // Start and return at once; the pool owns the work. Runs tasks itself only while too many works
    // are in flight.
    uint64_t submit(std::unique_ptr<Work> work, Urgency urgency);
    // Run the work's tasks until it is done. Throws std::runtime_error if one of its tasks failed.
    void wait(uint64_t ticket);
    bool done(uint64_t ticket) const;
    // Run now and return when done.
    void run(Work& work);
    // Run on this thread alone: for work too small to share.
    void run_alone(Work& work);
    void close();

    int workers() const { return workers_; }
    // False in a forked child, where the workers do not exist.
    bool in_own_process() const;
    Counters counters;

  private:
    struct alignas(64) Slot {
        // sequence number 24 bits | tasks of the phase 20 | next task 20
        std::atomic<uint64_t> state{0};
        std::atomic<uint32_t> left{0};
        std::atomic<uint64_t> ticket{0};
        std::atomic<uint64_t> finished{0};  // ticket of the last work that ended here
        Work* work = nullptr;
        std::unique_ptr<Work> owned;
        int phase = 0;
        Urgency urgency = Urgency::now;
    };
    static constexpr int SLOTS = 64;

    uint64_t start(Work& work, std::unique_ptr<Work> owned, Urgency urgency);
    void begin_phase(Slot& slot, int phase);
    void finish(Slot& slot);
    bool run_task(Slot& slot);
    bool run_any();
    Slot* most_urgent();
    bool claimable(const Slot& slot) const;
    template <class Ready>
    void sleep_until(Ready ready);
    void wake();
    void worker_main(int index);
    void check_usable() const;

    Slot slots_[SLOTS];
    std::atomic<uint64_t> active_[3];  // bit per slot, by urgency
    std::atomic<uint64_t> next_ticket_{1};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::mutex start_mutex_, sleep_mutex_, error_mutex_;
    std::condition_variable sleep_;
    std::map<uint64_t, std::string> errors_;
    std::atomic<bool> any_error_{false};
    std::vector<std::thread> threads_;
    const int workers_, spin_us_, max_spinners_;
    const int64_t process_;
};

}  // namespace strata
