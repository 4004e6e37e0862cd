#include "pool.h"

#include <algorithm>
#include <cfenv>
#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace strata {

namespace {

using Time = std::chrono::steady_clock;

int64_t ns_since(Time::time_point start) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Time::now() - start).count();
}

int64_t process_id() {
#if defined(__unix__) || defined(__APPLE__)
    return static_cast<int64_t>(getpid());
#else
    return 0;
#endif
}

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#else
    std::this_thread::yield();
#endif
}

void pin_to(int cpu) {
#if defined(__linux__)
    cpu_set_t* set = CPU_ALLOC(cpu + 1);
    if (!set) return;
    CPU_ZERO_S(CPU_ALLOC_SIZE(cpu + 1), set);
    CPU_SET_S(cpu, CPU_ALLOC_SIZE(cpu + 1), set);
    // a CPU that went away since the plan was made costs speed, not correctness
    pthread_setaffinity_np(pthread_self(), CPU_ALLOC_SIZE(cpu + 1), set);
    CPU_FREE(set);
#else
    (void)cpu;
#endif
}

// Default rounding and denormals kept, whatever the calling thread has set.
class FloatRules {
  public:
    FloatRules() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~FloatRules() { std::fesetenv(&saved_); }

  private:
    std::fenv_t saved_;
};

constexpr uint64_t NEXT_MASK = (1u << 20) - 1;
constexpr uint64_t MAX_TASKS = NEXT_MASK;

uint64_t next_of(uint64_t state) { return state & NEXT_MASK; }
uint64_t tasks_of(uint64_t state) { return state >> 20 & NEXT_MASK; }

Scratch& thread_scratch() {
    thread_local Scratch scratch;
    return scratch;
}

// Takes the next task of a share below its task number ``below``; -1: there is none.
int claim(std::atomic<uint64_t>& of, uint64_t below) {
    uint64_t state = of.load(std::memory_order_acquire);
    do {
        if (next_of(state) >= tasks_of(state) || next_of(state) >= below) return -1;
    } while (!of.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel));
    return static_cast<int>(next_of(state));
}

}  // namespace

Scratch::~Scratch() { std::free(memory_); }

uint8_t* Scratch::get(size_t n_bytes) {
    if (n_bytes > size_) {
        const size_t size = (n_bytes + n_bytes / 4 + 4095) / 4096 * 4096;
        std::free(memory_);
        memory_ = static_cast<uint8_t*>(std::aligned_alloc(64, size));
        size_ = memory_ ? size : 0;
        if (!memory_) throw std::bad_alloc();
    }
    return memory_;
}

Pool::Pool(int workers, std::vector<int> cpus, std::vector<int> homes, int spin_us, int max_spinners)
    : homes_(std::move(homes)),
      workers_(workers),
      spin_us_(spin_us),
      max_spinners_(max_spinners),
      process_(process_id()) {
    for (auto& mask : active_) mask.store(0);
    const int n_shares = std::min(workers, MOST_SHARES);
    for (auto& slot : slots_) slot.shares = std::make_unique<Share[]>(static_cast<size_t>(n_shares));
    shares_of_.resize(HOMES);
    for (int i = 0; i < n_shares; i++) {
        all_shares_.push_back(i);
        shares_of_[static_cast<size_t>(home_of(i))].push_back(i);
        order_.emplace_back();
        for (const bool own : {true, false})
            for (int k = 0; k < n_shares; k++)
                if (const int j = (i + k) % n_shares; own == (home_of(j) == home_of(i))) order_.back().push_back(j);
    }
    counters_ = std::make_unique<Counters[]>(static_cast<size_t>(workers) * (MOST_LAYERS + 1));
    threads_.reserve(workers - 1);
    for (int i = 1; i < workers; i++) {
        const int cpu = cpus.empty() ? -1 : cpus[i % cpus.size()];
        threads_.emplace_back([this, i, cpu] {
            if (cpu >= 0) pin_to(cpu);
            worker_main(i);
        });
    }
}

Pool::~Pool() { close(); }

bool Pool::in_own_process() const { return process_id() == process_; }

void Pool::check_usable() const {
    if (!in_own_process())
        throw std::runtime_error(
            "this CPU pool was made before the process forked and its workers stayed in the parent; "
            "make a new CpuPool in the child");
    if (stop_.load()) throw std::runtime_error("this CPU pool is closed; make a new CpuPool");
}

void Pool::close() {
    if (!in_own_process() || stop_.load()) return;
    for (auto& slot : slots_)
        try {
            if (slot.ticket.load()) wait(slot.ticket.load());
        } catch (const std::exception&) {
            // nobody is left to hear of it
        }
    stop_.store(true);
    idle_.unpark();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
}

uint64_t Pool::start(Work& work, std::unique_ptr<Work> owned, Urgency urgency) {
    for (int p = 0; p < work.n_phases(); p++)
        if (static_cast<uint64_t>(work.n_tasks(p)) > MAX_TASKS)
            throw std::runtime_error("a piece of work has over a million tasks; give it in parts");
    for (;;) {
        {
            const std::lock_guard<std::mutex> lock(start_mutex_);
            for (int i = 0; i < SLOTS; i++) {
                Slot& slot = slots_[i];
                if (slot.finished.load() != slot.ticket.load()) continue;
                const uint64_t ticket = next_ticket_.fetch_add(1) * SLOTS + i;
                slot.work = &work;
                slot.owned = std::move(owned);
                slot.urgency = urgency;
                for (auto& mask : active_)  // see begin_phase
                    if (mask.load() >> i & 1) mask.fetch_and(~(1ull << i));
                slot.layer.store(work.layer);
                slot.ticket.store(ticket);
                count(0, work.layer, WORKS, 1);
                begin_phase(slot, 0);
                return ticket;
            }
        }
        // every slot is taken: help until one is free
        if (!run_any(0, Look::all)) std::this_thread::yield();
    }
}

uint64_t Pool::submit(std::unique_ptr<Work> work, Urgency urgency) {
    check_usable();
    const FloatRules rules;
    Work& reference = *work;
    return start(reference, std::move(work), urgency);
}

void Pool::begin_phase(Slot& slot, int phase) {
    const Work& work = *slot.work;
    const bool begins = phase == 0;
    const auto with_tasks = [&work](int p) {
        while (p < work.n_phases() && work.n_tasks(p) == 0) p++;
        return p;
    };
    phase = with_tasks(phase);
    if (phase == work.n_phases()) {
        finish(slot);
        return;
    }
    const Urgency urgency = slot.urgency;
    const int then = with_tasks(phase + 1);
    slot.phase[0] = phase;
    slot.phase[1] = then < work.n_phases() && work.follows(then) ? then : -1;
    int n_tasks = 0;
    for (int part = 0; part < 2; part++) {
        if (slot.phase[part] >= 0) n_tasks += work.n_tasks(slot.phase[part]);
        divide(slot, part);
    }
    slot.n_homes.store(work.n_homes(phase));
    slot.left.store(static_cast<uint32_t>(n_tasks), std::memory_order_relaxed);
    // only now: whoever has a task may look at all shares
    for (const int s : all_shares_) {
        Share& share = slot.shares[s];
        const uint64_t sequence = (share.state.load(std::memory_order_relaxed) >> 40) + 1;
        share.state.store(sequence << 40 | static_cast<uint64_t>(share.n[0] + share.n[1]) << 20,
                          std::memory_order_release);
    }
    // idle workers look at the shares as soon as they see the bit: not while they are written, which would
    // take them away line by line. A worker that was still looking at this slot may even have ended the work
    // by now; the bit then stays without tasks behind it until the slot's next work begins.
    if (begins) active_[static_cast<int>(urgency)].fetch_or(1ull << (&slot - slots_));
    std::atomic_thread_fence(std::memory_order_seq_cst);  // tasks first, then a look at who sleeps
    idle_.unpark(FAN < n_tasks ? FAN : n_tasks);
    waiting_.unpark();
}

// A phase's tasks over the workers: each home's over those there, or all over all.
void Pool::divide(Slot& slot, int part) {
    for (const int s : all_shares_) slot.shares[s].n[part] = 0;
    const int phase = slot.phase[part];
    if (phase < 0) return;
    const Work& work = *slot.work;
    const int n_homes = work.n_homes(phase);
    bool everywhere = n_homes > 1;
    for (int h = 0; h < n_homes; h++) everywhere = everywhere && !shares_of_[static_cast<size_t>(h)].empty();
    if (!everywhere) {
        divide(slot, part, 0, work.n_tasks(phase), all_shares_);
        return;
    }
    for (int h = 0; h < n_homes; h++)
        divide(slot, part, work.first_task(phase, h), work.first_task(phase, h + 1), shares_of_[static_cast<size_t>(h)]);
}

void Pool::divide(Slot& slot, int part, int first, int last, const std::vector<int>& among) {
    const int64_t n = last - first, m = static_cast<int64_t>(among.size());
    for (int64_t i = 0; i < m; i++) {
        Share& share = slot.shares[among[static_cast<size_t>(i)]];
        const int64_t from = n * i / m;
        share.first[part] = first + static_cast<int>(from);
        share.n[part] = static_cast<int>(n * (i + 1) / m - from);
    }
}

void Pool::finish(Slot& slot) {
    const uint64_t bit = 1ull << (&slot - slots_);
    active_[static_cast<int>(slot.urgency)].fetch_and(~bit);
    if (const int64_t ns = slot.work->quantize_ns.load(std::memory_order_relaxed)) {
        count(0, slot.work->layer, QUANTIZE_NS, ns);
        count(0, slot.work->layer, COMPUTE_NS, -ns);
    }
    const std::unique_ptr<Work> owned = std::move(slot.owned);  // freed when nobody waits for it any more
    slot.finished.store(slot.ticket.load());
    waiting_.unpark();
}

// A share of the slot with a task to take, the thread's own if it has one; -1: none.
int Pool::claimable(const Slot& slot, int thread, Look look) const {
    for (const int s : order_of(thread)) {
        const uint64_t state = slot.shares[s].state.load();
        if (next_of(state) < tasks_of(state)) return s;
        if (look == Look::own) return -1;
    }
    return -1;
}

void Pool::count(int thread, int layer, Count what, int64_t by) {
    Counters* mine = counters_of(thread);
    mine->of[what].fetch_add(by, std::memory_order_relaxed);
    if (layer >= 0 && layer < n_layers_.load(std::memory_order_relaxed))
        mine[layer + 1].of[what].fetch_add(by, std::memory_order_relaxed);
}

void Pool::count_plan(int layer, int64_t plan_ns, int64_t quantize_ns) {
    count(0, layer, PLAN_NS, plan_ns);
    count(0, layer, QUANTIZE_NS, quantize_ns);
}

void Pool::count_layers(int n) {
    if (n < 0 || n > MOST_LAYERS)
        throw std::invalid_argument("counters of " + std::to_string(n) + " layers; a pool has room for " +
                                    std::to_string(MOST_LAYERS));
    n_layers_.store(n);
}

int64_t Pool::counted(Count what, int layer) const {
    int64_t sum = 0;
    for (int i = 0; i < workers_; i++) sum += counters_of(i)[layer + 1].of[what].load(std::memory_order_relaxed);
    return sum;
}

bool Pool::at_home(const Work& work, int phase, int task, int home) {
    return work.n_homes(phase) == 1 ||
           (task >= work.first_task(phase, home) && task < work.first_task(phase, home + 1));
}

bool Pool::run_task(Slot& slot, int s, int thread) {
    const int i = claim(slot.shares[s].state, MAX_TASKS);
    if (i < 0) return false;
    run_claimed(slot, slot.shares[s], i, thread);
    return true;
}

// A claimed task keeps its work, its phases and all shares in place until it is counted as done.
void Pool::run_claimed(Slot& slot, const Share& share, int i, int thread) {
    Work& work = *slot.work;
    const int part = i >= share.n[0], phase = slot.phase[part], layer = work.layer;
    const int task = share.first[part] + i - (part ? share.n[0] : 0);
    if (part) help_until_ready(slot, phase, task, thread);
    const bool quantizes = work.clock(phase) == Clock::quantize;
    const bool stray = !at_home(work, phase, task, home_of(thread));
    const auto start = Time::now();
    try {
        work.run(phase, task, thread_scratch());
    } catch (const std::exception& error) {
        const std::lock_guard<std::mutex> lock(error_mutex_);
        errors_.emplace(slot.ticket.load(), error.what());
        any_error_.store(true);
    }
    count(thread, layer, quantizes ? QUANTIZE_NS : COMPUTE_NS, ns_since(start));
    count(thread, layer, TASKS, 1);
    if (stray) count(thread, layer, STRAYS, 1);
    const int last = std::max(slot.phase[0], slot.phase[1]);
    if (slot.left.fetch_sub(1, std::memory_order_acq_rel) == 1) begin_phase(slot, last + 1);
}

// Runs what the task waits for while any of it is left; the rest is in other threads' hands.
void Pool::help_until_ready(Slot& slot, int phase, int task, int thread) {
    for (int spins = 1; !slot.work->ready(phase, task); spins++) {
        int i = -1, from = -1;
        for (const int s : order_of(thread)) {
            i = claim(slot.shares[s].state, static_cast<uint64_t>(slot.shares[s].n[0]));
            if (i >= 0) {
                from = s;
                break;
            }
        }
        if (i >= 0) run_claimed(slot, slot.shares[from], i, thread);
        else if (spins % 64 == 0) std::this_thread::yield();
        else pause_cpu();
    }
}

bool Pool::run_task_of(Slot& slot, int thread, Look look) {
    const int s = claimable(slot, thread, look);
    return s >= 0 && run_task(slot, s, thread);
}

// Of the most urgent works with tasks the oldest that has some for this thread's home, else the oldest.
Pool::Place Pool::most_urgent(int thread, Look look) {
    const int home = home_of(thread);
    for (auto& mask : active_) {
        Place best{nullptr, -1};
        bool best_own = false;
        for (uint64_t bits = mask.load(); bits; bits &= bits - 1) {
            Slot& slot = slots_[__builtin_ctzll(bits)];
            const int s = claimable(slot, thread, look);
            if (s < 0) continue;
            const bool own = home_of(s) == home || slot.n_homes.load() == 1;
            const bool older = !best.slot || slot.ticket.load() < best.slot->ticket.load();
            if (own == best_own ? older : own) best = {&slot, s}, best_own = own;
        }
        if (best.slot) return best;
    }
    return {nullptr, -1};
}

bool Pool::run_any(int thread, Look look) {
    const Place place = most_urgent(thread, look);
    return place.slot && run_task(*place.slot, place.share, thread);
}

// Spins until ready(look) or the time is over; true when ready. Looks at the thread's own shares, and only
// now and then at all: idle threads that read the shares of a new work take them from their owners, line by
// line. Lets others have the processor now and then: the one waited for may be among them.
template <class Ready>
bool Pool::spin_until(Ready ready) const {
    constexpr int ROUNDS = 8, LOOKS = 16;
    const auto start = Time::now();
    for (int round = 1;; round++) {
        for (int i = 0; i < 32; i++) {
            if (ready(i % LOOKS == LOOKS - 1 ? Look::all : Look::own)) return true;
            pause_cpu();
        }
        if (ns_since(start) >= spin_us_ * 1000ll) return false;
        if (round % ROUNDS == 0) std::this_thread::yield();
    }
}

void Pool::worker_main(int index) {
    const FloatRules rules;
    const auto ready = [this, index](Look look) { return stop_.load() || most_urgent(index, look).slot; };
    while (!stop_.load()) {
        if (run_any(index, Look::own)) continue;
        if (index >= max_spinners_ || !spin_until(ready)) {
            idle_.park_until([&] { return ready(Look::all); }, [this, index] { count(index, -1, SLEEPS, 1); });
            if (most_urgent(index, Look::all).slot) idle_.unpark(FAN);
        }
        run_any(index, Look::all);
    }
}

bool Pool::done(uint64_t ticket) const {
    return slots_[ticket % SLOTS].finished.load() >= ticket;
}

void Pool::wait(uint64_t ticket) {
    check_usable();
    if (ticket / SLOTS == 0 || ticket / SLOTS >= next_ticket_.load())
        throw std::invalid_argument("ticket " + std::to_string(ticket) + " was never given out by this pool");
    const FloatRules rules;
    Slot& slot = slots_[ticket % SLOTS];
    const int layer = slot.layer.load();
    const auto ready = [&](Look look) {
        return done(ticket) || (slot.ticket.load() == ticket && claimable(slot, 0, look) >= 0);
    };
    while (!done(ticket)) {
        if (slot.ticket.load() == ticket && run_task_of(slot, 0, Look::own)) continue;
        const auto start = Time::now();
        if (max_spinners_ == 0 || !spin_until(ready))
            waiting_.park_until([&] { return ready(Look::all); }, [this] { count(0, -1, SLEEPS, 1); });
        count(0, layer, WAIT_NS, ns_since(start));
        if (slot.ticket.load() == ticket) run_task_of(slot, 0, Look::all);
    }
    if (!any_error_.load()) return;
    const std::lock_guard<std::mutex> lock(error_mutex_);
    const auto found = errors_.find(ticket);
    if (found == errors_.end()) return;
    const std::string message = found->second;
    errors_.erase(found);
    throw std::runtime_error(message);
}

void Pool::run(Work& work) {
    check_usable();
    const FloatRules rules;
    wait(start(work, nullptr, Urgency::now));
}

void Pool::run_alone(Work& work) {
    check_usable();
    const FloatRules rules;
    for (int phase = 0; phase < work.n_phases(); phase++) {
        const bool quantizes = work.clock(phase) == Clock::quantize;
        const auto start = Time::now();
        for (int task = 0; task < work.n_tasks(phase); task++) work.run(phase, task, thread_scratch());
        count(0, work.layer, quantizes ? QUANTIZE_NS : COMPUTE_NS, ns_since(start));
        count(0, work.layer, TASKS, work.n_tasks(phase));
    }
    count(0, work.layer, WORKS, 1);
}

}  // namespace strata
