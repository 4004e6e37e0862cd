"""Tiny random checkpoints of every family with reference numbers from transformers (CPU, float32).

``make`` writes config.json and model.safetensors in the layout of a released checkpoint (bfloat16,
with every weight exactly representable) and returns the numbers of a float32 forward over those
weights, read back by transformers' own loader; ``cached`` does so once per process. Nothing here
uses this project's code.
"""

from tests.oracle.build import Options, Reference, cached, make
from tests.oracle.families import FAMILIES, SIZES

__all__ = ["FAMILIES", "SIZES", "Options", "Reference", "cached", "make"]
