"""Code search by question: files in chunks, ranked by words (BM25) and by vectors."""
