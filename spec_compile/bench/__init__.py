"""Benchmarks of the runtime's kernels; `spec-compile bench` runs them."""
