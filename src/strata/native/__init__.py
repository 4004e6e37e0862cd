"""The C++ CPU pool and row kernels, and their typed Python face."""
