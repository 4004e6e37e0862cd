#include "cpu.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

namespace strata {

std::vector<std::string> cpu_flags() {
    std::vector<std::string> found;
#if defined(__x86_64__) || defined(__i386__)
    const auto add = [&found](const char* name, bool has) {
        if (has) found.emplace_back(name);
    };
    __builtin_cpu_init();
    add("avx2", __builtin_cpu_supports("avx2"));
    add("fma", __builtin_cpu_supports("fma"));
    // not every compiler's __builtin_cpu_supports knows this one
    unsigned a = 0, b = 0, c = 0, d = 0;
    add("f16c", __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1));
    const unsigned most = __get_cpuid_max(0, nullptr);
    if (most >= 7) {
        __cpuid_count(7, 0, a, b, c, d);
        const bool more = a >= 1;
        if (more) __cpuid_count(7, 1, a, b, c, d);
        add("avx_vnni", more && (a >> 4 & 1));
    }
    add("avx512f", __builtin_cpu_supports("avx512f"));
    add("avx512bw", __builtin_cpu_supports("avx512bw"));
    add("avx512vl", __builtin_cpu_supports("avx512vl"));
    add("avx512vnni", __builtin_cpu_supports("avx512vnni"));
#endif
    return found;
}

}  // namespace strata
