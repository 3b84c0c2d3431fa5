"""How fast glocal is, beside what else there is: `python -m benchmarks.run`."""
