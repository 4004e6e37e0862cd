"""The C++ CPU pool and its row kernels, and their typed Python face.

CpuPool        products with a matrix, experts' rows (asynchronous), attention, gated delta rule
available_isas instruction sets that can run here; results have the same bits on all of them
dequantize, quantize_activations   single steps, for tests and tools
"""

from strata.native.isa import available_isas
from strata.native.pool import CpuPool
from strata.native.rows import dequantize, quantize_activations

__all__ = ["CpuPool", "available_isas", "dequantize", "quantize_activations"]
