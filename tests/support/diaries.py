"""Texts of made-up people, in the form of a file of their moods."""

import numpy as np

from glocal.core.files import write_text

SECRET = "xylophonist"  # a word that no file and no output may hold
# a word that no file and no output may hold


def maps(path, rows, head="person,text,mood"):
    write_text(path, "\n".join([head, *rows, ""]))
    return path


def diary(path, sizes=(30, 20, 12, 3)):
    """People who write of good and bad days; the last of them has three texts."""
    generator, rows = np.random.default_rng(0), []
    for person, size in enumerate(sizes):
        for _ in range(size):
            mood = int(generator.integers(1, 101))
            words = ["bad", "sad", "so", "good", "glad"][(mood - 1) // 20]
            days = "day " * int(generator.integers(1, 9))
            rows.append(f'p{person},"{SECRET} {words} {words} {days}",{mood}')
    return maps(path, rows)
