"""A federation on real machines: its folders, its clients, its server, and their supervisor."""
