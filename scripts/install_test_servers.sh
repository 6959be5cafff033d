#!/usr/bin/env bash
# Install the programs that tests start for real, on a Debian or Ubuntu machine, as root: a Redis server (sessions shared
# by several machines) and Chromium (the web page). Does nothing when they are there; with --check, it only says what
# is missing.
set -euo pipefail

packages=()
command -v redis-server >/dev/null || packages+=(redis-server)
command -v chromium >/dev/null || packages+=(chromium fonts-dejavu-core)
if [ ${#packages[@]} -eq 0 ]; then
    exit 0
fi
if [ "${1:-}" = --check ] || [ "$(id -u)" != 0 ]; then
    echo "The tests start programs that this machine lacks: ${packages[*]}" >&2
    echo "Debian, Ubuntu: sudo scripts/install_test_servers.sh. Elsewhere: install them by hand." >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
