"""What one client does: its data, model, split, optimizer and training loop; randomness, files and errors."""
