"""Rounds of federated learning, and what drives them: evaluation, selection, checkpoints, results."""
