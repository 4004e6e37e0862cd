// Why kernels are as fast as they are: tiles from memory by how far ahead they prefetch, file rows by
// decoder. One set of threads, each with memory of its own, reading it and computing from it in turns.
//
//   g++ -O3 -std=c++17 -ffp-contract=off -march=native -pthread -DSTRATA_TILE_AHEAD=4096
//       -Isrc/strata/native/csrc bench/cpu_study.cpp src/strata/native/csrc/tables.cpp -o study
//   ./study THREADS MIB_PER_THREAD HUGE(0|1) tiles|rows
//
// Weights are bytes of a simple generator; the grids of the IQ types are made up, so codes are wrong and
// speed is right. Prints GB/s of weight bytes, and as a share of what reading reached in the same turns.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "decode_avx512.h"
#include "decode_grids.h"
#include "decode_lookup_x86.h"
#include "decode_x86.h"
#include "dot.h"
#include "quantize.h"
#include "tile.h"
#include "tile_rows.h"

using namespace strata;

namespace {

constexpr int K = 2560, TURNS = 7;
using Time = std::chrono::steady_clock;

struct Team {
    int n;
    // seconds until the last of n threads has run work(i)
    double run(const std::function<void(int)>& work) const {
        std::atomic<int> ready{0};
        std::atomic<bool> go{false};
        std::vector<std::thread> threads;
        for (int i = 0; i < n; i++)
            threads.emplace_back([&, i] {
                ready++;
                while (!go.load()) {}
                work(i);
            });
        while (ready.load() < n) {}
        const auto start = Time::now();
        go.store(true);
        for (auto& t : threads) t.join();
        return std::chrono::duration<double>(Time::now() - start).count();
    }
};

double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

void read_all(const uint8_t* p, size_t n) {
    typedef long long Words __attribute__((vector_size(64)));
    Words s[4] = {};
    for (size_t i = 0; i < n; i += 256)
        for (int j = 0; j < 4; j++) s[j] += *reinterpret_cast<const Words*>(p + i + 64 * j);
    volatile long long sink = (s[0] + s[1] + s[2] + s[3])[0];
    (void)sink;
}

// The compiler must believe that these are read.
void use(const float* y) { __asm__ volatile("" ::"r"(y) : "memory"); }

struct Setup {
    Team team;
    std::vector<uint8_t*> memory;
    size_t n_bytes;  // of each thread
    std::vector<const void*> x;
};

void report(const char* name, const char* what, int T, size_t bytes, int n_weights, const Setup& s,
            const std::function<void(int)>& compute) {
    std::vector<double> mine, reading;
    for (int turn = 0; turn < TURNS; turn++) {
        reading.push_back(s.team.run([&](int i) { read_all(s.memory[i], bytes / 256 * 256); }));
        mine.push_back(s.team.run(compute));
    }
    const double t = median(mine), all = static_cast<double>(bytes) * s.team.n;
    printf("%-8s %-8s rows %d threads %2d  %6.1f GB/s  %6.1f Gw/s  %3.0f %% of %.1f\n", name, what, T, s.team.n,
           all / t * 1e-9, static_cast<double>(n_weights) * T * s.team.n / t * 1e-9, 100 * median(reading) / t,
           all / median(reading) * 1e-9);
    fflush(stdout);
}

template <Type TYPE, int T>
void tiles(const Setup& s) {
    const int n = static_cast<int>(s.n_bytes / (tile_planes(TYPE, 16000, K).n_bytes / 1000)) * 16 - 16;
    const TilePlanes planes = tile_planes(TYPE, n, K);
    report(TYPE_INFO[static_cast<int>(TYPE)].name, "tiles", T, planes.n_bytes, n * K, s, [&](int i) {
        float y[T * TILE_ROWS];
        for (int r = 0; r < n; r += TILE_ROWS)
            tile_row<TYPE, T>(tile_row_at(planes, s.memory[i], r), K / 32, tile_info(TYPE).block_shift, s.x.data(), y);
        use(y);
    });
}

template <Type TYPE>
void file_rows(const Setup& s, const char* what, void (*decode)(const uint8_t*, const Tile&, uint8_t*)) {
    const TypeInfo& t = info(TYPE);
    const int n = static_cast<int>(s.n_bytes / t.row_bytes(K)) - 8;
    for (const int T : {1, 4}) {
        const DotTile dot = dot_of(t, T);
        report(t.name, what, T, t.row_bytes(K) * n, n * K, s, [&, dot](int i) {
            alignas(64) static thread_local uint8_t scratch[64 << 10];
            float y[4];
            const Tile tile(t, K, scratch);
            for (int r = 0; r < n; r++) {
                decode(s.memory[i] + t.row_bytes(K) * r, tile, scratch + (32 << 10));
                dot(tile, s.x.data(), t.mul, t.bias, y);
                use(y);
            }
        });
    }
}

template <class Lookup, class Decode>
void grid_rows(const Setup& s) {
    file_rows<Lookup::type>(s, "plain", decode_row<Decode>);
    file_rows<Lookup::type>(s, "lookup", decode_row_lookup<Lookup>);
#if defined(__AVX512VNNI__)
    if constexpr (Lookup::type == Type::IQ3_S || Lookup::type == Type::IQ3_XXS)
        if (has_vbmi()) file_rows<Lookup::type>(s, "vbmi", decode_row_vbmi<Lookup>);
#endif
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 5) return fprintf(stderr, "study THREADS MIB_PER_THREAD HUGE(0|1) tiles|rows\n"), 2;
    Setup s{{atoi(argv[1])}, {}, static_cast<size_t>(atoi(argv[2])) << 20, {}};
    for (int i = 0; i < s.team.n; i++) {
        const size_t size = s.n_bytes + (4 << 20);
        void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) return perror("mmap"), 1;
        madvise(p, size, atoi(argv[3]) ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
        s.memory.push_back(reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + (2 << 20) - 1) >> 21 << 21));
    }
    s.team.run([&](int i) {
        for (size_t k = 0; k < s.n_bytes; k++) s.memory[i][k] = (k * 2654435761u >> 9) & 0x3f;
    });
    std::vector<float> x(4 * K);
    for (auto& v : x) v = static_cast<float>(rand() % 2001 - 1000) / 500.0f;
    static QuantizedStep q[4][K / 256];
    for (int t = 0; t < 4; t++) {
        quantize_row(x.data() + K * t, K, q[t]);
        s.x.push_back(q[t]);
    }
    if (!strcmp(argv[4], "tiles")) {
        printf("prefetch %d bytes ahead, huge pages %s\n", TILE_AHEAD_BYTES, argv[3]);
        tiles<Type::Q8_0, 1>(s), tiles<Type::Q8_0, 4>(s);
        tiles<Type::IQ3_S, 1>(s), tiles<Type::IQ3_S, 4>(s);
        tiles<Type::Q4_K, 1>(s), tiles<Type::Q4_K, 4>(s);
        tiles<Type::IQ4_NL, 1>(s), tiles<Type::IQ4_NL, 4>(s);
    } else {
        grid_rows<LookupIQ3_S, DecodeIQ3_S>(s);
        grid_rows<LookupIQ3_XXS, DecodeIQ3_XXS>(s);
        grid_rows<LookupIQ2_S, DecodeIQ2_S>(s);
        grid_rows<LookupIQ2_XXS, DecodeIQ2_XXS>(s);
    }
}
