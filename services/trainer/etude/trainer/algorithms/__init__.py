"""Policy-gradient algorithms, one file each, and the estimators that they combine."""
