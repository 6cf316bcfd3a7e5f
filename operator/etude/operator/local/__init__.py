"""The local runtime: the operator over the processes of one host."""
