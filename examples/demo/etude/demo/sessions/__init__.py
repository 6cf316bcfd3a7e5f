"""Session tasks: under-specified requests whose cause lies elsewhere and spans several files."""
