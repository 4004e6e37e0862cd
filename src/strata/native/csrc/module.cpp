// The extension module: addresses and sizes in, checked by the Python face; every call that works or
// waits gives up the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "backend.h"
#include "cpu.h"
#include "measure.h"
#include "pool.h"
#include "recode.h"
#include "serve.h"
#include "tables.h"
#include "tile_formats.h"
#include "work.h"

namespace nb = nanobind;
using namespace strata;

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) { return reinterpret_cast<T*>(address); }

const Backend& backend_of(const std::string& isa) {
    for (const Backend* b : {portable_backend(), avx2_backend(), avxvnni_backend(), avx512_backend()})
        if (b && isa == b->name) return *b;
    throw std::invalid_argument("no kernels for instruction set " + isa + " in this build");
}

std::vector<std::string> built_isas() {
    std::vector<std::string> names;
    for (const Backend* b : {portable_backend(), avx2_backend(), avxvnni_backend(), avx512_backend()})
        if (b) names.emplace_back(b->name);
    return names;
}

Type type_of(const std::string& name) {
    for (int i = 0; i < static_cast<int>(Type::count); i++)
        if (name == TYPE_INFO[i].name) return static_cast<Type>(i);
    throw std::invalid_argument("no row kernels for weight type " + name);
}

std::vector<std::tuple<std::string, int, int, int, bool>> type_table() {
    std::vector<std::tuple<std::string, int, int, int, bool>> rows;
    for (const TypeInfo& t : TYPE_INFO)
        rows.emplace_back(t.name, t.block_weights, t.block_bytes, t.groups ? 32 / t.groups : 0, t.has_min);
    return rows;
}

void dequantize(const std::string& isa, const std::string& type_name, Address raw, int64_t n_rows,
                int n_cols, Address out) {
    const Backend& backend = backend_of(isa);
    const Type type = type_of(type_name);
    const nb::gil_scoped_release release;
    Scratch scratch;
    uint8_t* memory = scratch.get(backend.scratch_bytes(type, n_cols, 1));
    for (int64_t r = 0; r < n_rows; r++)
        backend.dequantize(type, at<uint8_t>(raw) + info(type).row_bytes(n_cols) * r, n_cols,
                           at<float>(out) + n_cols * r, memory);
}

// x [T, K] -> q int8 [T, K], scale f32 [T, K / 32], half sums int32 [T, K / 16]
void quantize(const std::string& isa, Address x, int64_t n_rows, int n_cols, Address q, Address scale,
              Address half) {
    const Backend& backend = backend_of(isa);
    const nb::gil_scoped_release release;
    const int L = n_steps(n_cols), n_blocks = n_cols / 32;
    Scratch scratch;
    QuantizedStep* row = reinterpret_cast<QuantizedStep*>(scratch.get(sizeof(QuantizedStep) * L));
    for (int64_t r = 0; r < n_rows; r++) {
        backend.quantize(at<float>(x) + n_cols * r, n_cols, row);
        for (int b = 0; b < n_blocks; b++) {
            const int s = b / L, j = b % L;
            for (int i = 0; i < 32; i++)
                at<int8_t>(q)[n_cols * r + 32 * b + i] = row[j].q[i / 4 * 32 + 4 * s + i % 4];
            at<float>(scale)[n_blocks * r + b] = row[j].scale[s];
            for (int h = 0; h < 2; h++) at<int32_t>(half)[2 * (n_blocks * r + b) + h] = row[j].half[h][s];
        }
    }
}

void check_index(const char* name, const int32_t* index, int n, int end) {
    for (int i = 0; i < n; i++)
        if (index[i] < 0 || index[i] >= end)
            throw std::invalid_argument(std::string("experts: ") + name + " holds " + std::to_string(index[i]) +
                                        ", allowed is 0 .. " + std::to_string(end - 1));
}

// The indices become addresses, so each of them is looked at.
void check_batch(const ExpertBatch& b, int n_x, int n_out) {
    bool whole = b.start[0] == 0 && b.start[b.n_groups] == b.n_entries;
    for (int g = 0; g < b.n_groups; g++) whole = whole && b.start[g] <= b.start[g + 1];
    if (!whole)
        throw std::invalid_argument("experts: start does not cut " + std::to_string(b.n_entries) +
                                    " entries into " + std::to_string(b.n_groups) + " groups");
    check_index("token", b.token, b.n_entries, n_x);
    check_index("row", b.row, b.n_entries, n_out);
}

// rows [n_rows, n_cols] as tiles; offsets: of codes, scales, minimums, supers in out [n_bytes]
void recode_rows(const std::string& isa, const std::string& type_name, Address rows, int n_rows,
                 int n_cols, int bits, Address stored, Address out, int64_t n_bytes,
                 const std::vector<int64_t>& offsets) {
    const std::string name = backend_of(isa).name;
    const Recode recode = name == "avx512" ? avx512_recode() : name == "portable" ? portable_recode() : avx2_recode();
    const Type type = type_of(type_name);
    const nb::gil_scoped_release release;
    Scratch scratch;
    std::memset(at<uint8_t>(out), 0, static_cast<size_t>(n_bytes));
    const RecodeArgs args{type, at<uint8_t>(rows), n_rows, n_cols, bits, at<uint8_t>(stored), at<uint8_t>(out),
                          offsets.at(0), offsets.at(1), offsets.at(2), offsets.at(3),
                          scratch.get(static_cast<size_t>(n_cols))};
    if (!recode(args)) throw std::invalid_argument("no tiles for weight type " + type_name);
}

void check_tiles(Type type) {
    if (!tile_info(type).bits)
        throw std::invalid_argument(std::string("no tiles for weight type ") + info(type).name);
}

// Offsets of codes, scales, minimums, supers (-1: none) and the size of a matrix in tiles.
std::vector<int64_t> tile_offsets(const std::string& type_name, int n_rows, int n_cols) {
    const Type type = type_of(type_name);
    check_tiles(type);
    const TilePlanes p = tile_planes(type, n_rows, n_cols);
    return {p.codes, p.scales, p.minimums, p.supers, p.n_bytes};
}

// Matrices of one width that are multiplied with the same rows.
struct Matrices {
    static constexpr size_t MOST = 16;
    std::vector<Matrix> list;

    void add(const std::string& type_name, Address rows, int n_rows, int n_cols, float scale, bool tiles) {
        const Type type = type_of(type_name);
        if (tiles) check_tiles(type);
        if (list.size() == MOST) throw std::invalid_argument("linear: at most 16 matrices at once");
        if (!list.empty() && list[0].n_cols != n_cols)
            throw std::invalid_argument("linear: matrices of " + std::to_string(list[0].n_cols) + " and " +
                                        std::to_string(n_cols) + " columns at once");
        list.push_back({type, at<uint8_t>(rows), n_rows, n_cols, scale, tiles});
    }
};

// A pool with the kernels of one instruction set.
class PoolFace {
  public:
    PoolFace(const std::string& isa, int workers, std::vector<int> cpus, std::vector<int> homes, int spin_us,
             int max_spinners)
        : backend_(backend_of(isa)),
          pool_(std::make_unique<Pool>(workers, std::move(cpus), std::move(homes), spin_us, max_spinners)) {}
    ~PoolFace() {
        // in a forked child the workers do not exist, and the locks they held can never be given back
        if (!pool_->in_own_process()) pool_.release();
    }

    void linears(const Matrices& matrices, Address x, int n_tokens, const std::vector<Address>& outs) {
        if (outs.size() != matrices.list.size()) throw std::invalid_argument("linear: one out per matrix");
        float* to[Matrices::MOST];
        for (size_t i = 0; i < outs.size(); i++) to[i] = at<float>(outs[i]);
        const nb::gil_scoped_release release;
        LinearWork work(backend_, pool_->workers(), matrices.list, at<float>(x), n_tokens, to);
        run_sized(work, work.cost());
    }

    // apart: four addresses a group instead of one (work.h)
    template <bool apart>
    uint64_t submit_experts(const ExpertLayout& layout, Address x, int64_t x_stride, int n_x, int n_groups,
                            Address address, Address start, int n_entries, Address row, Address token,
                            Address out, int64_t out_stride, int n_out, bool late, int layer) {
        const nb::gil_scoped_release release;
        const ExpertBatch batch{at<float>(x),        x_stride,           n_groups,
                                n_entries,           at<int64_t>(address), apart,
                                at<int32_t>(start),  at<int32_t>(row),   at<int32_t>(token),
                                at<float>(out),      out_stride};
        std::unique_ptr<ExpertWork> work;
        const int64_t ns = ns_of([&] {
            check_batch(batch, n_x, n_out);
            const auto share = [this](Work& now) { pool_->run(now); };
            work = std::make_unique<ExpertWork>(backend_, pool_->workers(), layout, batch, homes_, share);
        });
        work->layer = layer;
        pool_->count_plan(layer, ns - work->read_ns(), work->read_ns());
        return pool_->submit(std::move(work), late ? Urgency::late : Urgency::on_time);
    }

    void attention(const AttentionArgs& args) {
        const nb::gil_scoped_release release;
        AttentionWork work(backend_, pool_->workers(), args);
        run_sized(work, args.n_tokens * (args.start + args.n_tokens) * args.n_heads * (args.dk + args.dv));
    }

    void gdn(const GdnArgs& args) {
        const nb::gil_scoped_release release;
        GdnWork work(backend_, args);
        run_sized(work, int64_t{4} * args.n_tokens * args.n_value_heads * args.dk * args.dv);
    }

    void wait(uint64_t ticket) {
        const nb::gil_scoped_release release;
        pool_->wait(ticket);
    }

    bool done(uint64_t ticket) const { return pool_->done(ticket); }

    // Server::serve, with this pool's kernels.
    int64_t serve(Server& server, int n_rows, int64_t last, int64_t done, int64_t limit_us) {
        const nb::gil_scoped_release release;
        return server.serve(*pool_, backend_, homes_, n_rows, last, done, limit_us);
    }

    // Nanoseconds from giving an empty job away until every worker has done its part, n times, with a
    // pause before each.
    std::vector<int64_t> handovers(int n, int pause_us) {
        const nb::gil_scoped_release release;
        std::vector<int64_t> times;
        for (int i = 0; i < n; i++) {
            if (pause_us) std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
            HandoverWork work(pool_->workers());
            times.push_back(ns_of([&] { pool_->run(work); }));
        }
        return times;
    }

    // (nanoseconds, sum of the 64-bit words) of reading n_bytes once with all workers
    std::tuple<int64_t, uint64_t> read(Address memory, int64_t n_bytes) {
        const nb::gil_scoped_release release;
        ReadWork work(at<uint8_t>(memory), n_bytes);
        const int64_t ns = ns_of([&] { pool_->run(work); });
        return {ns, work.sum()};
    }

    void close() {
        const nb::gil_scoped_release release;
        pool_->close();
    }

    // Memory whose experts workers of that home take first. Not while works are in flight.
    void add_home(Address memory, int64_t n_bytes, int home) {
        if (home < 0 || home >= Pool::HOMES) throw std::invalid_argument("a pool has at most 8 homes");
        homes_.add(memory, n_bytes, home);
    }

    void count_layers(int n) { pool_->count_layers(n); }

    nb::dict counters() const { return dict_of(-1); }

    nb::list layer_counters() const {
        nb::list all;
        for (int i = 0; i < pool_->counted_layers(); i++) all.append(dict_of(i));
        return all;
    }

  private:
    nb::dict dict_of(int layer) const {
        static constexpr const char* NAMES[Pool::N_COUNTS] = {"plan_ns", "quantize_ns", "compute_ns", "wait_ns",
                                                              "works",   "tasks",       "strays",     "sleeps"};
        nb::dict d;
        for (int i = 0; i < Pool::N_COUNTS; i++) d[NAMES[i]] = pool_->counted(static_cast<Pool::Count>(i), layer);
        return d;
    }

    // below about this many bytes read, handing over costs more than it saves
    static constexpr int64_t ALONE_BYTES = 64 << 10;

    template <class Call>
    static int64_t ns_of(Call call) {
        const auto start = std::chrono::steady_clock::now();
        call();
        return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
    }

    void run_sized(Work& work, int64_t n_bytes) {
        if (n_bytes <= ALONE_BYTES || pool_->workers() == 1) pool_->run_alone(work);
        else pool_->run(work);
    }

    const Backend& backend_;
    std::unique_ptr<Pool> pool_;
    HomeMap homes_;
};

ExpertLayout make_layout(int d_model, int d_expert, const std::string& gate, const std::string& up,
                         const std::string& down, const std::vector<int64_t>& offsets, bool swiglu_oai,
                         float limit, const std::vector<bool>& tiles) {
    if (offsets.size() != 7) throw std::invalid_argument("an expert layout has seven offsets");
    const Type types[3] = {type_of(gate), type_of(up), type_of(down)};
    for (int i = 0; i < 3; i++)
        if (tiles.at(i)) check_tiles(types[i]);
    return {d_model,    d_expert,   types[0],   types[1],   types[2],   offsets[0], offsets[1], offsets[2], offsets[3],
            offsets[4], offsets[5], offsets[6], swiglu_oai, limit,      tiles[0],   tiles[1],   tiles[2]};
}

AttentionArgs make_attention(Address q, Address k, Address v, int kind,
                             const std::vector<int64_t>& strides, const std::vector<int>& sizes, int64_t start, float scale,
                             int64_t window_tokens, Address sinks, Address selected, Address out) {
    return {at<float>(q), at<void>(k), at<void>(v), static_cast<FloatKind>(kind),
            strides.at(0), strides.at(1), strides.at(2), strides.at(3), sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3), sizes.at(4), start, scale, window_tokens,
            at<float>(sinks), at<uint8_t>(selected), at<float>(out)};
}

GdnArgs make_gdn(Address q, Address k, Address v, Address keep, Address beta, Address key_head,
                 Address state_in, Address state_out, Address out, const std::vector<int>& sizes) {
    for (int j = 0; j < sizes.at(2); j++)
        if (at<int32_t>(key_head)[j] < 0 || at<int32_t>(key_head)[j] >= sizes.at(1))
            throw std::invalid_argument("gdn: key_head holds " + std::to_string(at<int32_t>(key_head)[j]) +
                                        ", allowed is 0 .. " + std::to_string(sizes.at(1) - 1));
    return {at<float>(q), at<float>(k), at<float>(v), at<float>(keep), at<float>(beta),
            at<int32_t>(key_head), at<float>(state_in), at<float>(state_out), at<float>(out),
            sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3), sizes.at(4)};
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Row kernels and CPU pool; strata.native is the typed face.";
    m.def("cpu_flags", &cpu_flags);
    m.def("built_isas", &built_isas);
    m.def("type_table", &type_table, "(name, block_weights, block_bytes, group, has_min) of every type");
    m.def("set_grid", [](const std::string& name, Address points, int64_t n_bytes) {
        return set_grid(name.c_str(), at<int8_t>(points), n_bytes);
    });
    m.def("dequantize", &dequantize);
    m.def("quantize", &quantize);
    m.def("recode", &recode_rows);
    m.def("tile_offsets", &tile_offsets);
    nb::class_<ExpertLayout>(m, "ExpertLayout");
    m.def("expert_layout", &make_layout);
    nb::class_<AttentionArgs>(m, "AttentionArgs");
    m.def("attention_args", &make_attention);
    nb::class_<GdnArgs>(m, "GdnArgs");
    m.def("gdn_args", &make_gdn);
    nb::class_<Matrices>(m, "Matrices").def(nb::init<>()).def("add", &Matrices::add);
    nb::class_<Server>(m, "Server")
        .def("__init__",
             [](Server* self, Address words, Address ints, Address x, Address rows, Address late, int d_model) {
                 new (self) Server(at<uint32_t>(words), at<int32_t>(ints), at<float>(x), at<float>(rows),
                                   at<float>(late), d_model);
             })
        .def("add_dense", [](Server& self) { self.add_layer(nullptr, {}); })
        .def("add_layer", [](Server& self, const ExpertLayout& layout, std::vector<int64_t> addresses) {
            self.add_layer(&layout, std::move(addresses));
        });
    nb::class_<PoolFace>(m, "Pool")
        .def(nb::init<const std::string&, int, std::vector<int>, std::vector<int>, int, int>())
        .def("linears", &PoolFace::linears)
        .def("submit_experts", &PoolFace::submit_experts<false>)
        .def("submit_experts_apart", &PoolFace::submit_experts<true>)
        .def("attention", &PoolFace::attention)
        .def("gdn", &PoolFace::gdn)
        .def("wait", &PoolFace::wait)
        .def("serve", &PoolFace::serve)
        .def("done", &PoolFace::done)
        .def("counters", &PoolFace::counters)
        .def("count_layers", &PoolFace::count_layers)
        .def("layer_counters", &PoolFace::layer_counters)
        .def("add_home", &PoolFace::add_home)
        .def("handovers", &PoolFace::handovers)
        .def("read", &PoolFace::read)
        .def("close", &PoolFace::close);
}
