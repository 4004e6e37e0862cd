// Getters of the backends that this build does not have.
#include "backend.h"
#include "recode.h"

namespace strata {

#if !defined(STRATA_HAS_AVXVNNI)
const Backend* avxvnni_backend() { return nullptr; }
#endif
#if !defined(STRATA_HAS_X86)
const Backend* avx2_backend() { return nullptr; }
const Backend* avx512_backend() { return nullptr; }
Recode avx2_recode() { return nullptr; }
Recode avx512_recode() { return nullptr; }
#endif

}  // namespace strata
