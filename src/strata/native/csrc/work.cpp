#include "work.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

namespace strata {

namespace {

// Rows of one task: whole cache lines of output (two for many activation rows, which take two tile rows at
// once), enough tasks for everyone, none too long to balance.
int rows_per_task(int n_rows, size_t row_bytes, int n_groups, int workers, int n_tokens) {
    const int line = n_tokens > 4 ? 32 : 16;
    constexpr size_t MOST_BYTES = 64 << 10;
    const int tasks = std::max(1, 4 * workers / std::max(1, n_groups));
    const size_t by_share = (n_rows + tasks - 1) / tasks;
    const size_t by_bytes = MOST_BYTES / std::max<size_t>(1, row_bytes);
    const size_t rows = std::max<size_t>(1, std::min(by_share, by_bytes));
    return static_cast<int>((rows + line - 1) / line * line);
}

int pieces(int n, int size) { return (n + size - 1) / size; }

int64_t ns_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

void Buffer::Free::operator()(uint8_t* p) const { std::free(p); }

Buffer::Buffer(size_t n_bytes) {
    if (!n_bytes) return;
    memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, (n_bytes + 63) / 64 * 64)));
    if (!memory_) throw std::bad_alloc();
}

Activations::Activations(const Backend& backend, Type type, const float* x, int64_t stride, int n_rows,
                         int n_cols, const int32_t* index, bool copy)
    : backend_(backend),
      quantized_(info(type).quantized()),
      in_place_(!copy && !quantized_ && padded_32(n_cols) == n_cols),
      x_(x),
      index_(index),
      stride_(stride),
      n_rows_(n_rows),
      n_cols_(n_cols),
      row_bytes_(quantized_ ? sizeof(QuantizedStep) * n_steps(n_cols)
                            : (sizeof(float) * padded_32(n_cols) + 63) / 64 * 64),
      memory_(in_place_ ? 0 : row_bytes_ * n_rows) {}

const void* Activations::row(int r) const {
    if (in_place_) return x_ + stride_ * r;
    return const_cast<Buffer&>(memory_).data() + row_bytes_ * r;
}

void Activations::prepare(int first, int count) {
    for (int r = first; r < std::min(first + count, n_rows_) && !in_place_; r++) {
        uint8_t* to = memory_.data() + row_bytes_ * r;
        const float* from = x_ + stride_ * (index_ ? index_[r] : r);
        if (quantized_) {
            backend_.quantize(from, n_cols_, reinterpret_cast<QuantizedStep*>(to));
            continue;
        }
        std::memcpy(to, from, sizeof(float) * n_cols_);
        std::memset(to + sizeof(float) * n_cols_, 0, sizeof(float) * (padded_32(n_cols_) - n_cols_));
    }
}

LinearWork::LinearWork(const Backend& backend, int workers, const std::vector<Matrix>& matrices,
                       const float* x, int n_tokens, float* const* outs)
    : backend_(backend), n_tokens_(n_tokens), first_task_{0} {
    int64_t total = 0;
    for (const Matrix& m : matrices) total += m.n_bytes();
    cost_ = total * n_tokens;
    for (const Matrix& m : matrices) read_activations(m, x);
    rows_out_.reserve(matrices.size() * n_tokens);
    for (const Matrix& m : matrices) {
        float* out = *outs++;
        const int share = static_cast<int>(total / std::max<int64_t>(1, m.n_bytes()));
        chunk_.push_back(rows_per_task(m.n_rows, m.row_bytes(), share, workers, n_tokens));
        first_task_.push_back(first_task_.back() + (n_tokens ? pieces(m.n_rows, chunk_.back()) : 0));
        args_.push_back({m.type, m.rows, m.row_bytes(), m.n_rows, m.n_cols,
                         rows_in_[info(m.type).quantized()].data(), n_tokens, m.scale, nullptr,
                         rows_out_.data() + rows_out_.size(), 0, m.tiles ? m.n_rows : 0});
        for (int t = 0; t < n_tokens; t++) rows_out_.push_back(out + static_cast<int64_t>(t) * m.n_rows);
    }
}

// The form of x that the matrix needs, unless another matrix needed it before.
void LinearWork::read_activations(const Matrix& m, const float* x) {
    const bool quantized = info(m.type).quantized();
    std::optional<Activations>& form = x_[quantized];
    if (form) return;
    form.emplace(backend_, m.type, x, m.n_cols, n_tokens_, m.n_cols);
    for (int t = 0; t < n_tokens_; t++) rows_in_[quantized].push_back(form->row(t));
}

int LinearWork::n_tasks(int phase) const {
    if (phase == 1) return first_task_.back();
    const auto to_prepare = [](const std::optional<Activations>& form) { return form && !form->in_place(); };
    return to_prepare(x_[0]) || to_prepare(x_[1]) ? pieces(n_tokens_, PREPARE_TOKENS) : 0;
}

void LinearWork::run(int phase, int task, Scratch& scratch) {
    if (phase == 0) {
        for (auto& form : x_)
            if (form) form->prepare(PREPARE_TOKENS * task, PREPARE_TOKENS);
        return;
    }
    size_t i = 0;
    while (task >= first_task_[i + 1]) i++;
    RowsArgs args = args_[i];
    const int first = (task - first_task_[i]) * chunk_[i];
    if (!args.tiled_rows) args.rows += args.row_bytes * first;
    args.n_rows = std::min(chunk_[i], args_[i].n_rows - first);
    args.first_col = first;
    backend_.rows(args, scratch.get(backend_.scratch_bytes(args.type, args.n_cols, args.n_tokens)));
}

void HomeMap::add(uintptr_t first, int64_t n_bytes, int home) {
    const Range range{first, first + static_cast<uintptr_t>(n_bytes), home};
    const auto at = std::lower_bound(ranges_.begin(), ranges_.end(), first,
                                     [](const Range& r, uintptr_t p) { return r.end <= p; });
    if (at != ranges_.end() && at->first < range.end)
        throw std::invalid_argument("memory is placed on a node twice");
    ranges_.insert(at, range);
    n_homes_ = std::max(n_homes_, home + 1);
}

int HomeMap::of(const void* p) const {
    const auto address = reinterpret_cast<uintptr_t>(p);
    const auto at = std::upper_bound(ranges_.begin(), ranges_.end(), address,
                                     [](uintptr_t a, const Range& r) { return a < r.end; });
    return at != ranges_.end() && at->first <= address ? at->home : 0;
}

ExpertWork::ExpertWork(const Backend& backend, int workers, const ExpertLayout& layout,
                       const ExpertBatch& batch, const HomeMap& homes, const std::function<void(Work&)>& share)
    : backend_(backend),
      layout_(layout),
      n_groups_(batch.n_groups),
      n_entries_(batch.n_entries),
      start_(batch.start, batch.start + batch.n_groups + 1) {
    const int D = layout.d_model, F = layout.d_expert;
    const size_t padded = padded_32(F), h_bytes = sizeof(float) * padded * n_entries_;
    gate_ = Buffer(h_bytes);
    up_ = Buffer(h_bytes);
    base_.reserve(4 * static_cast<size_t>(n_groups_));
    for (auto* rows : {&gate_in_, &up_in_, &down_in_}) rows->reserve(static_cast<size_t>(n_entries_));
    for (auto* rows : {&gate_out_, &up_out_, &down_out_}) rows->reserve(static_cast<size_t>(n_entries_));
    for (int i = 0; i < 4 * n_groups_; i++)
        base_.push_back(reinterpret_cast<const uint8_t*>(batch.address[batch.apart ? i : i / 4]));
    sort_by_home(homes);
    read_activations(batch, share);
    float* gate = reinterpret_cast<float*>(gate_.data());
    float* up = reinterpret_cast<float*>(up_.data());
    middle_ = std::make_unique<Activations>(backend, layout.down_type, gate, padded, n_entries_,
                                            info(layout.down_type).quantized() ? F : padded);
    for (int i = 0; i < n_entries_; i++) {
        gate_out_.push_back(gate + padded * i);
        up_out_.push_back(up + padded * i);
        std::fill(gate + padded * i + F, gate + padded * (i + 1), 0.0f);
        down_in_.push_back(middle_->row(i));
        down_out_.push_back(batch.out + batch.out_stride * batch.row[i]);
    }
    const size_t gate_up_bytes = info(layout.gate_type).row_bytes(D) + info(layout.up_type).row_bytes(D);
    int most = 0;
    for (int g = 0; g < n_groups_; g++) most = std::max(most, start_[g + 1] - start_[g]);
    chunk_f_ = rows_per_task(F, gate_up_bytes, n_groups_, workers, most);
    chunk_d_ = rows_per_task(D, info(layout.down_type).row_bytes(F), n_groups_, workers, most);
    if (most > MOST_QUANTIZED_ALONE || middle_->in_place()) return;
    gate_up_left_ = std::make_unique<Left[]>(static_cast<size_t>(n_groups_));
    for (int g = 0; g < n_groups_; g++) gate_up_left_[g].tasks.store(per_group(0), std::memory_order_relaxed);
}

// Every distinct token once per form. Copies even what could be used in place: the caller may overwrite
// its tensor as soon as the batch is submitted.
void ExpertWork::read_activations(const ExpertBatch& batch, const std::function<void(Work&)>& share) {
    std::vector<int32_t> tokens(batch.token, batch.token + n_entries_);
    std::sort(tokens.begin(), tokens.end());
    tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
    const int n = static_cast<int>(tokens.size());
    const auto read = [&](Type type, std::vector<const void*>& in) {
        auto form = std::make_unique<Activations>(backend_, type, batch.x, batch.x_stride, n,
                                                  layout_.d_model, tokens.data(), true);
        if (share && n > MOST_READ_ALONE) {
            PrepareWork prepare(*form, n);
            share(prepare);
        } else {
            const auto start = std::chrono::steady_clock::now();
            form->prepare(0, n);
            read_ns_ += ns_since(start);
        }
        for (int i = 0; i < n_entries_; i++) {
            const auto at = std::lower_bound(tokens.begin(), tokens.end(), batch.token[i]);
            in.push_back(form->row(static_cast<int>(at - tokens.begin())));
        }
        x_.push_back(std::move(form));
    };
    read(layout_.gate_type, gate_in_);
    if (info(layout_.gate_type).quantized() == info(layout_.up_type).quantized()) up_in_ = gate_in_;
    else read(layout_.up_type, up_in_);
}

// Groups in their order, one home after the other.
void ExpertWork::sort_by_home(const HomeMap& homes) {
    order_.reserve(static_cast<size_t>(n_groups_));
    home_start_.push_back(0);
    for (int h = 0; h < homes.n_homes(); h++) {
        for (int g = 0; g < n_groups_; g++)
            if (homes.n_homes() == 1 || homes.of(base(g, 0)) == h) order_.push_back(g);
        home_start_.push_back(static_cast<int>(order_.size()));
    }
}

int ExpertWork::per_group(int phase) const {
    return phase == 0 ? pieces(layout_.d_expert, chunk_f_) : pieces(layout_.d_model, chunk_d_);
}

int ExpertWork::first_task(int phase, int home) const {
    if (phase == 1) return home ? n_tasks(1) : 0;
    return home_start_[static_cast<size_t>(home)] * per_group(phase);
}

int ExpertWork::n_tasks(int phase) const {
    if (phase == 1) return middle_->in_place() || gate_up_left_ ? 0 : n_entries_;
    return n_groups_ * per_group(phase);
}

bool ExpertWork::ready(int phase, int task) const {
    return phase != 2 || !gate_up_left_ || gate_up_left_[group_of(2, task)].ready.load(std::memory_order_acquire);
}

// The end of a task of gate and up rows, also by an error: down rows wait for every one. The last one
// quantizes the middle.
class ExpertWork::GroupEnd {
  public:
    GroupEnd(ExpertWork& work, int group) : work_(work), group_(group) {}
    ~GroupEnd() {
        Left& left = work_.gate_up_left_[group_];
        if (left.tasks.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        const auto start = std::chrono::steady_clock::now();
        work_.middle_->prepare(work_.start_[group_], work_.start_[group_ + 1] - work_.start_[group_]);
        work_.quantize_ns.fetch_add(ns_since(start), std::memory_order_relaxed);
        left.ready.store(true, std::memory_order_release);
    }

  private:
    ExpertWork& work_;
    const int group_;
};

void ExpertWork::run(int phase, int task, Scratch& scratch) {
    if (phase == 1) {
        middle_->prepare(task, 1);
        return;
    }
    const int n_rows = phase == 0 ? layout_.d_expert : layout_.d_model;
    const int chunk = phase == 0 ? chunk_f_ : chunk_d_;
    const int group = group_of(phase, task), first = task % per_group(phase) * chunk;
    const int count = std::min(chunk, n_rows - first);
    if (phase == 2) {
        down(group, first, count, scratch);
        return;
    }
    std::optional<GroupEnd> end;
    if (gate_up_left_) end.emplace(*this, group);
    gate_up(group, first, count, scratch);
}

float ExpertWork::scale_of(int group, int piece) const {
    if (layout_.scale_offset < 0) return 1.0f;
    float scale;
    std::memcpy(&scale, base(group, 3) + layout_.scale_offset + 4 * piece, 4);
    return scale;
}

const uint8_t* ExpertWork::bias_of(int group, int64_t offset, int first) const {
    return offset < 0 ? nullptr : base(group, 3) + offset + 4 * static_cast<int64_t>(first);
}

void ExpertWork::gate_up(int group, int first, int count, Scratch& scratch) {
    const int e0 = start_[group], n = start_[group + 1] - e0, D = layout_.d_model;
    if (n == 0) return;
    const size_t need = std::max(backend_.scratch_bytes(layout_.gate_type, D, n),
                                 backend_.scratch_bytes(layout_.up_type, D, n));
    uint8_t* memory = scratch.get(need);
    const auto rows = [&](Type type, bool tiles, int64_t offset, int piece, int64_t bias,
                          const void* const* in, float* const* out) {
        const size_t row_bytes = info(type).row_bytes(D), skip = tiles ? 0 : row_bytes * first;
        backend_.rows({type, base(group, piece) + offset + skip, row_bytes, count, D, in, n,
                       scale_of(group, piece), bias_of(group, bias, first), out, first,
                       tiles ? layout_.d_expert : 0},
                      memory);
    };
    rows(layout_.gate_type, layout_.gate_tiles, layout_.gate_offset, 0, layout_.gate_bias_offset,
         gate_in_.data() + e0, gate_out_.data() + e0);
    rows(layout_.up_type, layout_.up_tiles, layout_.up_offset, 1, layout_.up_bias_offset,
         up_in_.data() + e0, up_out_.data() + e0);
    for (int i = e0; i < e0 + n; i++)
        backend_.activate({layout_.swiglu_oai, layout_.limit, up_out_[i] + first, gate_out_[i] + first, count});
}

void ExpertWork::down(int group, int first, int count, Scratch& scratch) {
    const int e0 = start_[group], n = start_[group + 1] - e0, F = layout_.d_expert;
    if (n == 0) return;
    const size_t row_bytes = info(layout_.down_type).row_bytes(F);
    const size_t skip = layout_.down_tiles ? 0 : row_bytes * first;
    backend_.rows({layout_.down_type, base(group, 2) + layout_.down_offset + skip, row_bytes, count, F,
                   down_in_.data() + e0, n, scale_of(group, 2),
                   bias_of(group, layout_.down_bias_offset, first), down_out_.data() + e0, first,
                   layout_.down_tiles ? layout_.d_model : 0},
                  scratch.get(backend_.scratch_bytes(layout_.down_type, F, n)));
}

AttentionWork::AttentionWork(const Backend& backend, int workers, const AttentionArgs& args)
    : backend_(backend), args_(args) {
    // heads of one key/value head together, so that its rows are read from the cache, unless that
    // leaves workers idle
    constexpr int MOST = 16;
    const int per_group = args.n_heads / args.n_groups;
    const int wanted = 2 * workers / std::max(1, args.n_tokens * args.n_groups);
    heads_per_task_ = std::max(1, std::min(MOST, per_group / std::max(1, wanted)));
    while (per_group % heads_per_task_) heads_per_task_--;
    tasks_per_token_ = args.n_heads / heads_per_task_;
}

void AttentionWork::run(int, int task, Scratch& scratch) {
    const int t = task / tasks_per_token_, first = task % tasks_per_token_ * heads_per_task_;
    backend_.attention(args_, t, first, heads_per_task_,
                       scratch.get(backend_.attention_scratch_bytes(args_, heads_per_task_)));
}

void GdnWork::run(int, int task, Scratch& scratch) {
    backend_.gdn(args_, task / columns(), task % columns() * GDN_COLUMNS,
                 scratch.get(sizeof(float) * GDN_COLUMNS * args_.dk));
}

}  // namespace strata
