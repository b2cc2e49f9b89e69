"""How `compare` and the benchmark suite run one model several ways: reference results, trials, isolation."""
