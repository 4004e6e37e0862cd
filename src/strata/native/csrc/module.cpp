#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "Row kernels and CPU pool; see strata.native for the typed face.";
}
