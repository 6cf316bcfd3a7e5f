#!/bin/bash
# PID 1 of a cluster's namespaces. Killing it ends every process of the cluster, and the kernel
# then frees the mounts, links and namespaces. Arguments: run folder, folders to make private.
set -eu
run=$1
shift
mount --make-rshared /
number=0
for folder in "$@"; do
  private="$run/private/$number"
  mkdir -p "$private"
  mount --bind "$private" "$folder"
  number=$((number + 1))
done
# kubelet finds the kernel settings that it wants, and does not change the machine's.
pretend() {
  local file="$run/proc/$1"
  mkdir -p "$(dirname "$file")"
  echo "$2" >"$file"
  mount --bind "$file" "/proc/sys/$1"
}
pretend vm/overcommit_memory 1
pretend vm/panic_on_oom 0
pretend kernel/panic 10
pretend kernel/panic_on_oops 1
pretend kernel/keys/root_maxkeys 1000000
pretend kernel/keys/root_maxbytes 25000000
echo 1 >/proc/sys/net/ipv4/ip_forward
ip link set lo up
touch "$run/inside"
trap 'exit 0' TERM
while :; do
  sleep 3600 &
  wait $! # bash reaps what is orphaned
done
