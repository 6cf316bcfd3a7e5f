"""Exceptions to the rules of test_terms.py. These lists may only shrink."""

CLASSES: frozenset[str] = frozenset()
"""Class names in more than two modules."""

NAMES: frozenset[str] = frozenset()
"""Modules, classes and functions named by a bare participle, adverb or pronoun."""

DOCSTRINGS: frozenset[str] = frozenset()
"""Definitions whose docstring begins with a question word."""

WORDS: frozenset[str] = frozenset()
"""Definitions whose docstring has an archaic word, with the word."""
