#!/usr/bin/env bash
# Compile the ranges of pyproject.toml into pinned, hashed requirement files: run by `make pins`.
#
#   requirements-build.txt  what builds the package
#   requirements.txt        the server: no torch, no pandas, no gradio
#   requirements-dev.txt    the server, its tests and its linters
#   requirements-rl.txt     the above and what trains agents, except torch itself (scripts/pins/without-torch.txt)
#   requirements-ray.txt    the above and Ray with RLlib
#   requirements-bench.txt  the server, its tests and the peer of benchmarks/bench_speed.py
#
# Each file is complete, so it installs with `pip install --no-deps --require-hashes -r FILE`. Versions already pinned
# stay unless they no longer fit; `UPGRADE=1 make pins` takes the newest of everything.
set -euo pipefail
cd "$(dirname "$0")/.."

UV=${UV:-uv}
options=(
    --quiet --generate-hashes --universal --python-version 3.11 --fork-strategy fewest
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

drop() { printf -- '--overrides scripts/pins/without-%s.txt ' "$@"; }

extras=(--extra redis)
compile requirements-build.txt --allow-unsafe scripts/pins/build.in
# shellcheck disable=SC2046  # one word per option is meant
{
    compile requirements.txt $(drop demo) "${extras[@]}" pyproject.toml
    extras+=(--extra dev --constraints requirements-build.txt --constraints requirements.txt --allow-unsafe)
    compile requirements-dev.txt $(drop gradio) "${extras[@]}" pyproject.toml
    extras+=(--constraints requirements-dev.txt)
    compile requirements-bench.txt $(drop gradio) "${extras[@]}" --extra bench pyproject.toml
    extras+=(--extra rl)
    compile requirements-rl.txt $(drop gradio torch) "${extras[@]}" pyproject.toml scripts/pins/torch-needs.in
    extras+=(--extra ray --constraints requirements-rl.txt --overrides scripts/pins/gymnasium-for-rllib.txt)
    compile requirements-ray.txt $(drop gradio torch) "${extras[@]}" pyproject.toml scripts/pins/torch-needs.in
}
