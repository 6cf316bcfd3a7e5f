"""Search in code by question: files in chunks, words and meaning, one order from both."""
