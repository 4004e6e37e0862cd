// The extension module: addresses and sizes in, checked by the Python face.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "table.h"

namespace nb = nanobind;
using namespace strata;

namespace strata {

#if !defined(STRATA_HAS_X86)
const FusedTable* avx2_fused() { return nullptr; }
#endif

float* fused_scratch(int64_t n_floats) {
    static thread_local std::unique_ptr<float[]> memory;
    static thread_local int64_t size = 0;
    if (n_floats > size) {
        memory.reset(new float[n_floats]);
        size = n_floats;
    }
    return memory.get();
}

}  // namespace strata

namespace {

struct Ops {
    const FusedTable* table;

    explicit Ops(const std::string& isa) : table(isa == "portable" ? portable_fused() : avx2_fused()) {
        if (!table || (isa != "portable" && isa != "avx2"))
            throw std::invalid_argument("no fused operations for instruction set " + isa + " in this build");
    }
};

// What Python passes for an argument: an address for a pointer, the number itself otherwise.
template <class T> struct Wire {
    using Type = T;
    static T read(T value) { return value; }
};
template <class T> struct Wire<T*> {
    using Type = uintptr_t;
    static T* read(uintptr_t address) { return reinterpret_cast<T*>(address); }
};

// Windows take microseconds, less than getting the interpreter lock back can cost; chunks release it.
constexpr int64_t MANY_TOKENS = 16;

template <class R, class... A>
void def(nb::class_<Ops>& ops, const char* name, R (*FusedTable::*member)(int64_t, A...)) {
    ops.def(name, [member](const Ops& self, int64_t n, typename Wire<A>::Type... args) {
        std::optional<nb::gil_scoped_release> release;
        if (n > MANY_TOKENS) release.emplace();
        return (self.table->*member)(n, Wire<A>::read(args)...);
    });
}

// (fast groups, fast rows, other groups, other rows); see route.h for `lists` and `place`
std::tuple<int64_t, int64_t, int64_t, int64_t> group_rows(const Ops& self, int64_t n_rows, uintptr_t expert,
                                                          int64_t n_active, uintptr_t fast,
                                                          int64_t n_experts, int64_t fast_place,
                                                          int64_t other_place, uintptr_t lists,
                                                          uintptr_t place) {
    const int32_t* of_row = Wire<const int32_t*>::read(expert);
    int64_t groups[2], rows[2];
    const int64_t wrong = self.table->group_rows(n_rows, of_row, n_active, Wire<const int64_t*>::read(fast),
                                                 n_experts, fast_place, other_place,
                                                 Wire<int32_t*>::read(lists), Wire<int8_t*>::read(place),
                                                 groups, rows);
    if (wrong >= 0)
        throw std::invalid_argument("row " + std::to_string(wrong) + " is routed to expert " +
                                    std::to_string(of_row[wrong]) + " of " + std::to_string(n_experts));
    return {groups[0], rows[0], groups[1], rows[1]};
}

}  // namespace

NB_MODULE(_fused, m) {
    m.doc() = "Small operations between products; strata.native.fused is the typed face.";
    m.def("has_avx2", [] { return avx2_fused() != nullptr; });
    nb::class_<Ops> ops(m, "Ops");
    ops.def(nb::init<const std::string&>());
    def(ops, "rms_norm", &FusedTable::rms_norm);
    def(ops, "read_gates", &FusedTable::read_gates);
    def(ops, "stream_mix", &FusedTable::stream_mix);
    def(ops, "stream_write", &FusedTable::stream_write);
    def(ops, "silu_times", &FusedTable::silu_times);
    def(ops, "sigmoid_times", &FusedTable::sigmoid_times);
    def(ops, "gated_norm", &FusedTable::gated_norm);
    def(ops, "combine", &FusedTable::combine);
    def(ops, "gdn_inputs", &FusedTable::gdn_inputs);
    def(ops, "ngram_gate", &FusedTable::ngram_gate);
    def(ops, "ngram_conv", &FusedTable::ngram_conv);
    def(ops, "head_rotary", &FusedTable::head_rotary);
    def(ops, "block_keys", &FusedTable::block_keys);
    def(ops, "ring_store", &FusedTable::ring_store);
    def(ops, "select_blocks", &FusedTable::select_blocks);
    def(ops, "token_mask", &FusedTable::token_mask);
    def(ops, "route", &FusedTable::route);
    def(ops, "copy_rows", &FusedTable::copy_rows);
    ops.def("group_rows", &group_rows);
}
