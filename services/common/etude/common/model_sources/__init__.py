"""Model folders at their sources, and their sealed copies in object stores."""
