"""The words of version 0.1 are gone: tests/words.toml lists them, with what is said now."""

import io
import json
import re
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = tomllib.loads((ROOT / "tests/words.toml").read_text())
FOLDERS = ("src", "tests", "papers", "benchmarks", "examples", "docs", ".ci")
KINDS = {".py", ".pyi", ".md", ".toml", ".cpp", ".h", ".html", ".svg", ""}
# what explains the old words, or translates them
APART = {
    ROOT / name
    for name in ("docs/glossary.md", "docs/convert_results.py", "tests/words.toml", "CHANGELOG.md")
}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]+)")
SETTING = re.compile(r"--set[ =]'?([a-z_][\w.]*)=")
KEY = re.compile(r"""^\s*\[?\[?["']?([A-Za-z_][\w.]*)["']?\]?\]?\s*(?:=|$)""", re.MULTILINE)
TOML_BLOCK = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def texts():
    """Every text of the project that people read or write, by its path."""
    folders = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    paths = [*folders, *ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    hidden = ("egg-info", "__pycache__")
    return {
        path: path.read_text(encoding="utf-8")
        for path in sorted(paths)
        if path.is_file()
        and path.suffix in KINDS
        and path not in APART
        and not any(word in str(path) for word in hidden)
    }


TEXTS = texts()
RESULTS = [*ROOT.glob("docs/results/*.json"), *ROOT.glob("papers/*/results/*.json")]


def test_words_without_an_ordinary_meaning_are_found_nowhere():
    gone, may_stand = WORDS["gone"], WORDS["may_stand"]
    matches = []
    for path, text in TEXTS.items():
        for number, line in enumerate(text.splitlines(), 1):
            old = {word.lower() for word in WORD.findall(line)} & gone.keys()
            left = {word for word in old if not any(part in line for part in may_stand[word])}
            matches += [f"{path.relative_to(ROOT)}:{number} {word}" for word in sorted(left)]
    assert not matches


def python_names(path, text):
    """The names that a file of Python or C++ gives or uses."""
    if path.suffix in {".py", ".pyi"}:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.string
    elif path.suffix in {".cpp", ".h"}:
        for line in text.splitlines():
            yield from re.findall(r"[A-Za-z_]\w*", line.partition("//")[0])


def keys(path, text):
    """Options of the command line, and keys of TOML."""
    if path.suffix in {".py", ".md", ""}:
        for option in OPTION.findall(text):
            yield option.replace("-", "_")
        yield from SETTING.findall(text)
    tables = [text] if path.suffix == ".toml" else TOML_BLOCK.findall(text)
    for table in tables:
        yield from KEY.findall(table)


def result_keys(value):
    """All keys of a result, at any depth."""
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from result_keys(inner)


def parts(name):
    """The words of a name; that of a test is a sentence, and not one of our names."""
    words = [word.lower() for word in WORD.findall(name)]
    return [] if words[:1] == ["test"] else words


NAMES = {path: {*python_names(path, text)} for path, text in TEXTS.items()}
KEYS = {
    path: {part for key in keys(path, text) for part in key.split(".")}
    for path, text in TEXTS.items()
}
KEYS |= {path: {*result_keys(json.loads(path.read_text()))} for path in RESULTS}


def users(word, table, allowed):
    """Where a word is part of a name that is not allowed."""
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path, used in table.items()
        for name in sorted(used)
        if word in parts(name) and name not in allowed
    ]


@pytest.mark.parametrize("word", WORDS["names"])
def test_an_ordinary_word_with_an_old_meaning_is_in_no_name_and_no_key(word):
    """Apart from the names and keys in which it means something else, which are listed."""
    about = WORDS["names"][word]
    assert not users(word, NAMES, about["may_stand"])
    assert not users(word, KEYS, about.get("keys", []))


@pytest.mark.parametrize("word", WORDS["gone"])
def test_a_word_that_is_gone_is_in_no_key_of_a_result(word):
    results = {path: KEYS[path] for path in RESULTS}
    assert not users(word, results, [])


@pytest.mark.parametrize("name", WORDS["no_names"]["words"])
def test_a_participle_is_no_name(name):
    assert not [str(path.relative_to(ROOT)) for path, used in NAMES.items() if name in used]


@pytest.mark.parametrize("name", WORDS["classes"])
def test_a_class_of_0_1_is_gone_under_its_old_name(name):
    assert not [str(path.relative_to(ROOT)) for path, used in NAMES.items() if name in used]


def test_what_may_stand_is_still_there():
    """An exception that nothing needs any more is taken out of the list."""
    everything = "\n".join(TEXTS.values())
    stale = [
        part for parts in WORDS["may_stand"].values() for part in parts if part not in everything
    ]
    names = {name for used in NAMES.values() for name in used}
    all_keys = {key for used in KEYS.values() for key in used}
    assert not stale
    for about in WORDS["names"].values():
        assert names >= {*about["may_stand"]}
        assert all_keys >= {*about.get("keys", [])}
