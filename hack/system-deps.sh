#!/usr/bin/env bash
# Debian packages that cluster and microVM tests need; needs root, does nothing when all are there.
set -euo pipefail
here="$(dirname "$0")"
mapfile -t wanted < <(grep -hv '^#' "$here/testbed/debian-packages.txt" "$here/microvm-packages.txt")
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
