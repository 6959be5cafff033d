#!/usr/bin/env bash
# Install the programs that tests start for real: a Redis server (sessions shared by several machines), nginx (the proxy
# before them), Chromium (the web page) and systemd-analyze (the unit in docs/deploy). Does nothing where they are
# there. On Debian and Ubuntu they are installed with apt, as root or with a sudo that asks for no password; elsewhere it names what is missing, and the tests that need
# it are skipped. With --check it installs nothing and only names what is missing; with TESTS_REFUSE_SKIPS=1 (CI) what
# stays missing is an error.
set -euo pipefail

missing() {
    packages=()
    command -v redis-server >/dev/null || packages+=(redis-server)
    [ -x /usr/sbin/nginx ] || command -v nginx >/dev/null || packages+=(nginx)
    command -v chromium >/dev/null || packages+=(chromium fonts-dejavu-core)
    command -v systemd-analyze >/dev/null || packages+=(systemd)
}

missing
if [ ${#packages[@]} -eq 0 ]; then
    exit 0
fi
if [ "${1:-}" != --check ] && command -v apt-get >/dev/null; then
    as_root=()
    if [ "$(id -u)" != 0 ]; then
        as_root=(sudo -n)
    fi
    if "${as_root[@]}" true 2>/dev/null; then
        echo "Installing what the tests start, with apt: ${packages[*]} (once)"
        # The index may be stale or another package's source down: what counts is whether the programs are there after.
        "${as_root[@]}" apt-get update -qq || true
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null || true
        missing
    fi
fi
if [ ${#packages[@]} -gt 0 ]; then
    echo "This machine lacks programs that tests start, and those tests are skipped: ${packages[*]}" >&2
    echo "Debian, Ubuntu: sudo scripts/install_test_servers.sh. Elsewhere: install them by hand." >&2
    [ "${TESTS_REFUSE_SKIPS:-0}" != 1 ]
fi
