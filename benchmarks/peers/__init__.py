"""Other simulators, each a script of its own that runs in its own virtual environment."""
