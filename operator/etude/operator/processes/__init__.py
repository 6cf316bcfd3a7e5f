"""The local runtime's kubelet: pods as processes of this host."""
