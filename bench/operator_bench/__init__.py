"""The operator on a real API server with nodes of KWOK, measured."""
