"""Compiled functions that compile nothing while they serve.

`declared` is what a user declares: names of sizes, their values, buckets. `calls` are those of what can be sealed,
`warming` compiles, calls and checks them ahead; its `Sealed` serves the calls.
"""
