// Persistent workers that run the tasks of several pieces of work at once.
//
// A Work is a list of phases; the tasks of a phase may run in any order on any thread, and a phase
// begins when all tasks of the one before are done, or follows it task by task. Every worker has a share
// of a phase's tasks, one after the other in memory, whose cursor only it touches until it is done and
// takes tasks of others. Tasks may have a home, a NUMA node whose memory they read: they are the shares of
// workers there, and workers help their own node first.
// Workers take tasks of the most urgent work first, spin for a bounded time when there are none, then
// sleep. A thread that waits for a work runs its tasks too. Knows no weights, no Python.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "parking.h"

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
    // Tasks first_task(phase, h) .. first_task(phase, h + 1) - 1 are at home on node h; with one home
    // they are at home everywhere. At most Pool::HOMES.
    virtual int n_homes(int) const { return 1; }
    virtual int first_task(int phase, int home) const { return home ? n_tasks(phase) : 0; }
    // Tasks of this phase need not wait for the end of the one before, each only until it is ready();
    // tasks of the one before wait for nothing.
    virtual bool follows(int) const { return false; }
    virtual bool ready(int, int) const { return true; }
    virtual Clock clock(int phase) const = 0;
    virtual void run(int phase, int task, Scratch& scratch) = 0;
    int layer = -1;  // whose counters grow, too
    std::atomic<int64_t> quantize_ns{0};  // time inside tasks of Clock::compute that was quantizing
};

// Lower is more urgent: what a caller waits for at once, rows of this layer, rows joined later.
enum class Urgency : int { now, on_time, late };

class Pool {
  public:
    static constexpr int HOMES = 8;

    // workers threads compute, the waiting thread among them: workers - 1 are started, pinned to
    // cpus[1], cpus[2], ... (empty: not pinned), at home on homes[1], ... (empty: 0). Of all threads at
    // most max_spinners spin when idle.
    Pool(int workers, std::vector<int> cpus, std::vector<int> homes, int spin_us, int max_spinners);
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
    // Also count by layer, 0 .. n - 1, from now on.
    void count_layers(int n);
    int counted_layers() const { return n_layers_.load(); }
    enum Count { PLAN_NS, QUANTIZE_NS, COMPUTE_NS, WAIT_NS, WORKS, TASKS, STRAYS, SLEEPS, N_COUNTS };
    // Of a layer, or of everything (-1): sums over the threads.
    int64_t counted(Count what, int layer = -1) const;
    void count_plan(int layer, int64_t plan_ns, int64_t quantize_ns);

  private:
    struct alignas(64) Share {
        // sequence number 24 bits | tasks 20 | next task 20
        std::atomic<uint64_t> state{0};
        // n[0] tasks of the phase from first[0] on, then n[1] of the one that follows it
        int first[2] = {0, 0}, n[2] = {0, 0};
    };
    struct alignas(64) Slot {
        alignas(64) std::atomic<uint32_t> left{0};
        alignas(64) std::atomic<uint64_t> ticket{0};
        std::atomic<uint64_t> finished{0};  // ticket of the last work that ended here
        std::atomic<int> n_homes{1}, layer{-1};
        Work* work = nullptr;
        std::unique_ptr<Work> owned;
        int phase[2] = {0, -1};  // in turn, and the one that follows it task by task or -1
        Urgency urgency = Urgency::now;
        std::unique_ptr<Share[]> shares;
    };
    struct alignas(64) Counters {
        std::atomic<int64_t> of[N_COUNTS] = {};
    };
    static_assert(sizeof(Counters) == 64);
    struct Place {
        Slot* slot;
        int share;
    };
    static constexpr int SLOTS = 64, MOST_LAYERS = 511, MOST_SHARES = 64;
    Counters* counters_of(int thread) const { return counters_.get() + static_cast<size_t>(thread) * (MOST_LAYERS + 1); }
    // Sleepers woken by one thread; each of them wakes as many.
    static constexpr int FAN = 4;

    uint64_t start(Work& work, std::unique_ptr<Work> owned, Urgency urgency);
    void begin_phase(Slot& slot, int phase);
    void finish(Slot& slot);
    void divide(Slot& slot, int part);
    void divide(Slot& slot, int part, int first, int last, const std::vector<int>& among);
    // thread: 0 is every thread but the workers.
    bool run_task(Slot& slot, int share, int thread);
    void run_claimed(Slot& slot, const Share& share, int i, int thread);
    void help_until_ready(Slot& slot, int phase, int task, int thread);
    enum class Look { own, all };  // at a thread's own shares, or at those of others too
    bool run_task_of(Slot& slot, int thread, Look look);
    bool run_any(int thread, Look look);
    Place most_urgent(int thread, Look look);
    int claimable(const Slot& slot, int thread, Look look) const;
    static bool at_home(const Work& work, int phase, int task, int home);
    template <class Ready>
    bool spin_until(Ready ready) const;
    // A thread's own share, those of its node, the others.
    const std::vector<int>& order_of(int thread) const { return order_[static_cast<size_t>(thread) % order_.size()]; }
    void count(int thread, int layer, Count what, int64_t by);
    int home_of(int thread) const { return homes_.empty() ? 0 : homes_[static_cast<size_t>(thread) % homes_.size()]; }
    void worker_main(int index);
    void check_usable() const;

    Slot slots_[SLOTS];
    std::atomic<uint64_t> active_[3];  // bit per slot, by urgency
    std::atomic<uint64_t> next_ticket_{1};
    std::atomic<bool> stop_{false};
    Parking idle_, waiting_;  // workers; threads in wait()
    std::mutex start_mutex_, error_mutex_;
    std::map<uint64_t, std::string> errors_;
    std::atomic<bool> any_error_{false};
    std::vector<std::thread> threads_;
    std::unique_ptr<Counters[]> counters_;  // [workers][1 + MOST_LAYERS]
    std::atomic<int> n_layers_{0};
    const std::vector<int> homes_;
    std::vector<std::vector<int>> order_, shares_of_;  // [shares], [homes]: shares
    std::vector<int> all_shares_;
    const int workers_, spin_us_, max_spinners_;
    const int64_t process_;
};

}  // namespace strata
