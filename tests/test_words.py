"""The words of version 0.1 are gone: tests/words.toml lists them, with what is said now."""

import io
import re
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = tomllib.loads((ROOT / "tests/words.toml").read_text())
FOLDERS = ("src", "tests", "papers", "benchmarks", "examples", "docs", ".ci")
KINDS = {".py", ".pyi", ".md", ".toml", ".cpp", ".h", ".html", ".svg"}
# what explains the old words, or translates them
APART = {
    ROOT / name
    for name in ("docs/glossary.md", "docs/convert_results.py", "tests/words.toml", "CHANGELOG.md")
}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]+)")
KEY = re.compile(r"^\s*\[?\[?([A-Za-z_.]+)\]?\]?\s*(?:=|$)", re.MULTILINE)


def texts():
    """Every text of the project that people read or write, by its path."""
    folders = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    paths = [*folders, *ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    hidden = ("egg-info", "__pycache__")
    return {
        path: path.read_text(encoding="utf-8")
        for path in sorted(paths)
        if path.is_file()
        and (path.suffix in KINDS or path.name == "Makefile")
        and path not in APART
        and not any(word in str(path) for word in hidden)
    }


TEXTS = texts()


def test_words_without_an_ordinary_meaning_are_found_nowhere():
    gone, may_stand = WORDS["gone"], WORDS["may_stand"]
    matches = []
    for path, text in TEXTS.items():
        for number, line in enumerate(text.splitlines(), 1):
            old = {word.lower() for word in WORD.findall(line)} & gone.keys()
            left = {word for word in old if not any(part in line for part in may_stand[word])}
            matches += [f"{path.relative_to(ROOT)}:{number} {word}" for word in sorted(left)]
    assert not matches


def names(path, text):
    """The names that a file gives or uses: of Python, keys of TOML, options of the command line."""
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.string
            elif token.type == tokenize.STRING:
                yield from (option.replace("-", "_") for option in OPTION.findall(token.string))
    elif path.suffix == ".toml":
        yield from (part for key in KEY.findall(text) for part in key.split("."))
    elif path.suffix == ".md":
        yield from (option.replace("-", "_") for option in OPTION.findall(text))
        for block in re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            yield from (part for key in KEY.findall(block) for part in key.split("."))


def parts(name):
    """The words of a name; that of a test is a sentence, and not one of our names."""
    words = [word.lower() for word in WORD.findall(name)]
    return [] if words[:1] == ["test"] else words


NAMES = {path: {*names(path, text)} for path, text in TEXTS.items()}


@pytest.mark.parametrize("word", WORDS["names"])
def test_an_ordinary_word_with_an_old_meaning_is_in_no_name(word):
    """Apart from the names in which it means something else, which are listed."""
    allowed = {*WORDS["names"][word]["may_stand"]}
    matches = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, used in NAMES.items()
        for name in sorted(used)
        if word in parts(name) and name not in allowed
    ]
    assert not matches


@pytest.mark.parametrize("name", WORDS["no_names"]["words"])
def test_a_participle_is_no_name(name):
    users = {str(path.relative_to(ROOT)) for path, used in NAMES.items() if name in used}
    assert not users - {*WORDS["no_names"]["may_stand_in"]}


def test_what_may_stand_is_still_there():
    """An exception that nothing needs any more is taken out of the list."""
    everything = "\n".join(TEXTS.values())
    stale = [
        part for parts in WORDS["may_stand"].values() for part in parts if part not in everything
    ]
    used = {name for each in NAMES.values() for name in each}
    listed = [name for about in WORDS["names"].values() for name in about["may_stand"]]
    assert not stale
    assert not [name for name in listed if name not in used]
