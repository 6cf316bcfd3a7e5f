#!/usr/bin/env bash
# Builds gVisor's runsc of the release that go.sum pins, and installs it where root's programs are.
# Debian bookworm's package is of 2022, and refuses calls that ls and stat of its coreutils make.
# Does nothing where a program of this release is there; without Go, says so and does nothing.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
target="${1:-/usr/local/bin/runsc}"
release="$(sed -n 's/^require gvisor.dev\/gvisor v0\.0\.0-\([0-9]\{8\}\).*/\1/p' "$here/go.mod")"
if "$target" --version 2>/dev/null | grep -q "$release"; then
  exit 0
fi
if ! command -v go >/dev/null; then
  echo "gVisor is not installed: there is no go to build it with"
  exit 0
fi
echo "building runsc of $release: a minute, and a download of 30 MiB"
made="$(mktemp -d)"
trap 'rm -rf "$made"' EXIT
version="-X gvisor.dev/gvisor/runsc/version.version=$release.0"
if ! (cd "$here" && CGO_ENABLED=0 GOFLAGS=-mod=readonly GOWORK=off \
  go build -trimpath -ldflags="-s -w $version" -o "$made/runsc" gvisor.dev/gvisor/runsc); then
  echo "gVisor is not installed: it could not be downloaded or built"
  exit 0
fi
install -m 755 "$made/runsc" "$target"
