// The pieces of work that the pool is given: products with a matrix, experts, attention, recurrence.
#pragma once
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "backend.h"
#include "pool.h"

namespace strata {

// 64-byte aligned memory of one work.
class Buffer {
  public:
    explicit Buffer(size_t n_bytes = 0);
    uint8_t* data() { return memory_.get(); }

  private:
    struct Free { void operator()(uint8_t* p) const; };
    std::unique_ptr<uint8_t, Free> memory_;
};

// Activation rows in the form a weight type wants: quantized, or f32 padded to whole 32s.
class Activations {
  public:
    // Row r is x[index ? index[r] : r] of [.., n_cols], rows `stride` floats apart. x and index must
    // live until row r is prepared. Float rows that need no padding are used where they are, unless
    // `copy`.
    Activations(const Backend& backend, Type type, const float* x, int64_t stride, int n_rows, int n_cols,
                const int32_t* index = nullptr, bool copy = false);
    bool in_place() const { return in_place_; }
    void prepare(int first, int count);
    const void* row(int r) const;

  private:
    const Backend& backend_;
    const bool quantized_, in_place_;
    const float* x_;
    const int32_t* index_;
    const int64_t stride_;
    const int n_rows_, n_cols_;
    const size_t row_bytes_;
    Buffer memory_;
};

// Rows 0 .. n - 1 of activations, prepared by many threads.
class PrepareWork : public Work {
  public:
    PrepareWork(Activations& rows, int n) : rows_(rows), n_(n) {}
    int n_phases() const override { return 1; }
    int n_tasks(int) const override { return (n_ + ROWS - 1) / ROWS; }
    Clock clock(int) const override { return Clock::quantize; }
    void run(int, int task, Scratch&) override {
        rows_.prepare(ROWS * task, std::min(ROWS, n_ - ROWS * task));
    }

  private:
    static constexpr int ROWS = 8;
    Activations& rows_;
    const int n_;
};

struct Matrix {
    Type type;
    const uint8_t* rows;  // or tiles
    int n_rows, n_cols;
    float scale;
    bool tiles;

    size_t row_bytes() const { return info(type).row_bytes(n_cols); }
    int64_t n_bytes() const { return static_cast<int64_t>(row_bytes()) * n_rows; }
};

// Products of the same activations with one or several matrices of one width.
class LinearWork : public Work {
  public:
    // outs[i][t * n_rows + n] = row n of matrix i . x[t] * scale
    LinearWork(const Backend& backend, int workers, const std::vector<Matrix>& matrices, const float* x,
               int n_tokens, float* const* outs);
    // Weight bytes times tokens: what the products cost.
    int64_t cost() const { return cost_; }
    int n_phases() const override { return 2; }
    int n_tasks(int phase) const override;
    Clock clock(int phase) const override { return phase == 0 ? Clock::quantize : Clock::compute; }
    void run(int phase, int task, Scratch& scratch) override;

  private:
    static constexpr int PREPARE_TOKENS = 8;
    void read_activations(const Matrix& m, const float* x);

    const Backend& backend_;
    const int n_tokens_;
    int64_t cost_;
    std::optional<Activations> x_[2];        // as f32, quantized
    std::vector<const void*> rows_in_[2];    // [T] each
    std::vector<float*> rows_out_;           // [matrices, T]
    std::vector<RowsArgs> args_;             // [matrices]
    std::vector<int> chunk_, first_task_;    // [matrices], [matrices + 1]
};

struct ExpertLayout {
    int d_model, d_expert;
    Type gate_type, up_type, down_type;
    int64_t gate_offset, up_offset, down_offset;
    int64_t gate_bias_offset, up_bias_offset, down_bias_offset;  // -1: none
    int64_t scale_offset;                                        // -1: none
    bool swiglu_oai;
    float limit;
    bool gate_tiles, up_tiles, down_tiles;                       // not rows one after the other
};

struct ExpertBatch {
    const float* x;         // [.., D]; read while the work is made, not later
    int64_t x_stride;
    int n_groups, n_entries;
    const int64_t* address;  // [G]: blobs; or, apart, [G][4]: bases of gate, up, down, and the rest
    bool apart;
    const int32_t* start;    // [G + 1]
    const int32_t* row;      // [n]
    const int32_t* token;    // [n]
    float* out;              // [.., D]
    int64_t out_stride;
};

// Which memory lies on which NUMA node; what is not listed counts as home 0.
class HomeMap {
  public:
    void add(uintptr_t first, int64_t n_bytes, int home);
    int of(const void* p) const;
    int n_homes() const { return n_homes_; }

  private:
    struct Range { uintptr_t first, end; int home; };
    std::vector<Range> ranges_;  // ascending, apart
    int n_homes_ = 1;
};

// Three phases: gate and up rows with the activation; the middle quantized; down rows. With few entries
// a group whoever ends its gate and up rows quantizes them: there is nothing in between, and a group's
// down rows wait for that group alone.
class ExpertWork : public Work {
  public:
    // share: runs a work that has to be done now on many threads; none: this thread prepares all rows.
    ExpertWork(const Backend& backend, int workers, const ExpertLayout& layout, const ExpertBatch& batch,
               const HomeMap& homes, const std::function<void(Work&)>& share = {});
    int n_phases() const override { return 3; }
    int n_tasks(int phase) const override;
    int n_homes(int phase) const override { return phase == 1 ? 1 : static_cast<int>(home_start_.size()) - 1; }
    int first_task(int phase, int home) const override;
    // Of quantizing the activations alone, while the work was made.
    int64_t read_ns() const { return read_ns_; }
    bool follows(int phase) const override { return phase == 2 && gate_up_left_; }
    bool ready(int phase, int task) const override;
    Clock clock(int phase) const override { return phase == 1 ? Clock::quantize : Clock::compute; }
    void run(int phase, int task, Scratch& scratch) override;

  private:
    class GroupEnd;
    int group_of(int phase, int task) const { return order_[static_cast<size_t>(task / per_group(phase))]; }
    void sort_by_home(const HomeMap& homes);
    int per_group(int phase) const;
    void read_activations(const ExpertBatch& batch, const std::function<void(Work&)>& share);
    void gate_up(int group, int first, int count, Scratch& scratch);
    void down(int group, int first, int count, Scratch& scratch);
    // What the layout's offsets of a part count from: 0 gate, 1 up, 2 down, 3 biases and scales.
    const uint8_t* base(int group, int part) const { return base_[4 * static_cast<size_t>(group) + part]; }
    float scale_of(int group, int piece) const;
    const uint8_t* bias_of(int group, int64_t offset, int first) const;

    const Backend& backend_;
    const ExpertLayout layout_;
    const int n_groups_, n_entries_;
    std::vector<const uint8_t*> base_;    // [G][4]
    std::vector<int32_t> start_;          // [G + 1]
    std::vector<int> order_, home_start_;  // groups by home [G]; where each home's begin [homes + 1]
    std::vector<std::unique_ptr<Activations>> x_;  // one, or gate's and up's
    std::vector<const void*> gate_in_, up_in_, down_in_;  // [n]
    std::vector<float*> gate_out_, up_out_, down_out_;    // [n]
    Buffer gate_, up_;                    // [n, padded F]
    std::unique_ptr<Activations> middle_;
    int chunk_f_, chunk_d_;
    static constexpr int MOST_QUANTIZED_ALONE = 16, MOST_READ_ALONE = 32;
    struct alignas(64) Left {
        std::atomic<int> tasks;      // of gate and up
        std::atomic<bool> ready;     // the middle is quantized
    };
    std::unique_ptr<Left[]> gate_up_left_;  // [G], or null: a phase of its own
    int64_t read_ns_ = 0;
};

class AttentionWork : public Work {
  public:
    AttentionWork(const Backend& backend, int workers, const AttentionArgs& args);
    int n_phases() const override { return 1; }
    int n_tasks(int) const override { return args_.n_tokens * tasks_per_token_; }
    Clock clock(int) const override { return Clock::compute; }
    void run(int phase, int task, Scratch& scratch) override;

  private:
    const Backend& backend_;
    const AttentionArgs args_;
    int heads_per_task_, tasks_per_token_;
};

class GdnWork : public Work {
  public:
    GdnWork(const Backend& backend, const GdnArgs& args) : backend_(backend), args_(args) {}
    int n_phases() const override { return 1; }
    int n_tasks(int) const override { return args_.n_value_heads * columns(); }
    Clock clock(int) const override { return Clock::compute; }
    void run(int phase, int task, Scratch& scratch) override;

  private:
    int columns() const { return (args_.dv + GDN_COLUMNS - 1) / GDN_COLUMNS; }
    const Backend& backend_;
    const GdnArgs args_;
};

}  // namespace strata
