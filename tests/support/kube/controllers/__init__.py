"""Stand-ins for other projects' controllers: each does what the real one's documentation says.

The real ones cannot be built here. A stand-in is a loop over a real API server with CRDs written
from the documented types (`tests/data/crds`); its docstring is the contract that it keeps. What a
test proves with one is that the operator keeps its own side of that contract.
"""
