#!/usr/bin/env bash
# Debian packages that the cluster tests need; needs root, does nothing when all are there.
set -euo pipefail
list="$(dirname "$0")/testbed/debian-packages.txt"
mapfile -t wanted < <(grep -v '^#' "$list")
missing=()
for package in "${wanted[@]}"; do
  dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
if [ "${#missing[@]}" -eq 0 ]; then
  exit 0
fi
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
