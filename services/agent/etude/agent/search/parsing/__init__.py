"""Parser process of code search: cuts files along their syntax."""
