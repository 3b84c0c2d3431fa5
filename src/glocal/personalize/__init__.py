"""On top of training: new clients, how much to share, mixing, and what a local model may learn from."""
