"""Faster ways to take the steps of gradient descent, for the layers that people use most."""
