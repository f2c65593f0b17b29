"""Benchmarks: ratios measured inside one run; absolute times mean something on one machine only."""
