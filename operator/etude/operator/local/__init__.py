"""The local runtime: the same loop over the processes of one machine."""
