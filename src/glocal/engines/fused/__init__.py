"""Faster training steps for the most common layers: compiled C++ on a CPU, Triton on a GPU."""
