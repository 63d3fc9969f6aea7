"""Other people's procedures, written anew for the benchmarks, and calls into their packages."""
