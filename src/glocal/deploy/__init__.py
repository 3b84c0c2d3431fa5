"""A federation on real machines: its project folder, its devices, its server, and what supervises them."""
