"""Rounds, and what drives them: evaluation, selection of a round, checkpoints, results."""
