"""Other simulators, each a script that runs in its own virtual environment."""
