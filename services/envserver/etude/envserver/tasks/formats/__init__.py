"""Importers of other projects' tasks: Harbor, SWE-bench, verifiers."""
