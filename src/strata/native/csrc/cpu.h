// What this processor can do.
#pragma once
#include <string>
#include <vector>

namespace strata {

// Names of the instruction-set features found, of those that any backend asks for.
std::vector<std::string> cpu_flags();

}  // namespace strata
