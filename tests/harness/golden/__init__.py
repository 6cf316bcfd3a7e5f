"""Over 200 tool calls whose results are the same bytes wherever they run."""
