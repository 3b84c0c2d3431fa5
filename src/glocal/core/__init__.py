"""What one client does: data, model, split, optimizer, training; randomness, files, errors."""
