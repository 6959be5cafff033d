#!/usr/bin/env bash
# Compile the ranges of pyproject.toml into pinned requirement files: run by `make pins`. Those that are deployed carry
# hashes too: requirements.txt and requirements-build.txt, which the image is made of.
#
#   requirements.txt        the server and offline work on logs (pandas): what the image, `make serve` and operators install
#   requirements-build.txt  what compiles the package. Apart, because the image compiles in a stage that it throws away
#   requirements-dev.txt    the server, tests, linters, OpenEnv's client and validator, Ray, operator times: what
#                           contributors and CI install. One file, because the types and the tests need all of it
#   requirements-engine.txt vLLM for CPU, for the tests marked `engine`: scripts/install_engine.sh
#   requirements-site.txt   Zensical, which makes pages of the documents: `make site`, in an environment of its own
#   requirements-rl.txt     Stable-Baselines3 alone: it requires torch, of which the right build (CPU, CUDA, ROCm) differs
#                           from machine to machine. `make rl` installs torch before it
#
# The first three are complete and install as they are: `pip install -r FILE` in a fresh environment. The last does so
# after requirements-dev.txt and torch. A package has the same version in all of them: Gymnasium is as old as RLlib
# demands (`make gymnasium` tests the newest). The peer of benchmarks/speed/interfaces.py is `make peers`. Versions
# already pinned stay unless they no longer fit; `UPGRADE=1 make pins` takes the newest of everything.
set -euo pipefail
cd "$(dirname "$0")/.."

UV=${UV:-uv}
options=(
    --quiet --universal --python-version 3.11 --fork-strategy fewest --allow-unsafe
    --no-emit-index-url --no-emit-find-links --custom-compile-command "make pins"
)
if [ "${UPGRADE:-0}" = 1 ]; then
    options+=(--upgrade)
fi

compile() {
    local output=$1
    shift
    "$UV" pip compile "${options[@]}" --output-file "$output" "$@"
    echo "$output: $(grep -c '==' "$output") packages"
}

# The largest first: what it settles on binds the others.
server=(--extra serve --extra redis --extra tools)
compile requirements-dev.txt --overrides scripts/pins/without-torch.txt "${server[@]}" \
    --extra dev --extra hardware --extra live --extra openenv --extra report --extra ray --extra rl pyproject.toml scripts/pins/torch-needs.in
compile requirements.txt --generate-hashes --constraints requirements-dev.txt "${server[@]}" pyproject.toml
compile requirements-build.txt --generate-hashes --constraints requirements-dev.txt scripts/pins/build.in
# What it requires besides torch is in requirements-dev.txt.
compile requirements-rl.txt --no-deps scripts/pins/rl.in
compile requirements-site.txt scripts/pins/site.in
# The engine of the tests marked `engine`, in an environment of its own: another project's pins need not agree with ours.
"$UV" pip compile --quiet --python-version 3.11 --python-platform linux --allow-unsafe \
    --no-emit-index-url --no-emit-find-links --custom-compile-command "make pins" --output-file requirements-engine.txt \
    --overrides scripts/pins/engine-without.txt scripts/pins/engine.in scripts/pins/torch-needs.in
