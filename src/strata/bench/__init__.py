"""Measurements behind ``strata bench`` and ``strata doctor``: they drive the engine through its
public functions and change nothing in it."""
