"""The same algorithms on real devices, over Flower; the only part that imports it. Its names are imported from their files."""
