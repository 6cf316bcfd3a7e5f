#!/usr/bin/env bash
# What cluster, microVM and gVisor tests need: Debian packages, and runsc built from its sources.
# Needs root, does nothing when all is there.
set -euo pipefail
here="$(dirname "$0")"
mapfile -t wanted < <(grep -hv '^#' "$here/testbed/debian-packages.txt" "$here/microvm-packages.txt")
missing=()
for package in "${wanted[@]}"; do
  dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ]; then
  echo "installing: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
bash "$here/runsc/install.sh"
