"""Exceptions to the rules of test_terms.py. These lists may only shrink."""

CLASSES: frozenset[str] = frozenset()
"""Class names in more than two modules."""

NAMES = frozenset(
    {
        # Verbs: a create-only put of an object store, and PUT of Firecracker's API.
        "etude.common.blobs.memory:put",
        "etude.common.blobs.obstore_client:put",
        "etude.common.blobs.store:put",
        "etude.envserver.drivers.vm.firecracker.api_client:put",
        "etude.envserver.read_grants.granted_store:put",
        # Machine words of tensors.
        "etude.common.weights.tensors.words",
        # To be renamed.
        "etude.common.blobs.range_reader:_Wanted",
        "etude.common.weights.coding.codecs.l2:_Found",
        "etude.trainer.export.touched",
    }
)
"""Modules, classes and functions named by a bare participle, adverb or pronoun."""

DOCSTRINGS = frozenset(
    {
        # The file runs inside sandboxes and is kept byte for byte.
        "etude.agent.minitest:Verdict",
    }
)
"""Definitions whose docstring begins with a question word."""

WORDS = frozenset({"etude.agent.minitest by itself"})
"""Definitions whose docstring has an archaic word, with the word."""
