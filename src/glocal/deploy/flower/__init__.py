"""The deployment over Flower; no other package imports it."""
