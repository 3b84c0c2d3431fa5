"""The speed of glocal compared with other tools: `python -m benchmarks.run`."""
