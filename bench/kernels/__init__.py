"""Benchmarks of single ops on one GPU, in the form of the figures that they are compared with."""
