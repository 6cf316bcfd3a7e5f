"""One module per verb, or per group of verbs."""
