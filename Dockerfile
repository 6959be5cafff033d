# InferenceGym's server: CPU only, no compiler in the final image and no pip in its environment, runs as an unprivileged
# user on a read-only file system.
#
#   docker build -t inferencegym . && docker run -p 7860:7860 inferencegym

FROM python:3.11-slim AS builder

# Debian keeps one version of each package: a pinned one would stop building with its next release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src

# The requirements change seldom, so their layers are built once.
COPY requirements-build.txt requirements.txt ./
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --no-compile --require-hashes -r requirements-build.txt
# Files are byte-compiled here, because the running server may not write. The packages' own tests, and Arrow's headers
# and network protocols are dead weight.
RUN python3 -m venv --without-pip /opt/venv \
    && /opt/build/bin/uv pip install --python /opt/venv/bin/python --no-cache --compile-bytecode --require-hashes \
        -r requirements.txt \
    && find /opt/venv/lib -type d -name tests -prune -exec rm -rf {} + \
    && find /opt/venv/lib/python3.11/site-packages/pyarrow -maxdepth 1 \
        "(" -name include -o -name src -o -name "*flight*" -o -name "*s3*" ")" -exec rm -rf {} +

COPY pyproject.toml setup.py LICENSE README.md openenv.yaml ./
COPY inferencegym/ inferencegym/
COPY simulator/ simulator/
COPY env/ env/
COPY grader/ grader/
COPY agents/ agents/
COPY ops/ ops/
COPY live/ live/
COPY server/ server/
COPY cli/ cli/
RUN /opt/build/bin/uv build --python /opt/build/bin/python --no-cache --no-build-isolation --wheel --out-dir /opt/wheel \
    && /opt/build/bin/uv pip install --python /opt/venv/bin/python --no-cache --compile-bytecode --no-deps --no-index \
        /opt/wheel/*.whl


# What docker-compose.yml uses for development: the compiler stays, the checkout is mounted on /src and built in place.
FROM builder AS development

RUN /opt/build/bin/uv pip install --python /opt/venv/bin/python --no-cache --require-hashes -r requirements-build.txt
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
EXPOSE 7860
CMD ["sh", "-c", "python setup.py --quiet build_ext --inplace && exec python -m uvicorn server.app:app --host 0.0.0.0 --port 7860 --reload"]


FROM python:3.11-slim

# Spaces run containers as user 1000; nothing in the image belongs to it.
RUN useradd --uid 1000 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin gym

COPY --from=builder /opt/venv /opt/venv
# Cloud providers of OpenEnv look for the manifest here and start the server from this directory. The package's own
# manifest names the application as it is installed.
COPY --from=builder /opt/venv/lib/python3.11/site-packages/inferencegym/openenv.yaml /app/env/
COPY README.md /app/env/
WORKDIR /app/env

# OpenEnv's providers expect port 8000, Spaces expect 7860: the server listens on both. The web page is always on;
# `openenv push` adds the last variable when a Dockerfile does not mention it.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    INFERENCEGYM_HOST=0.0.0.0 \
    INFERENCEGYM_PORT=7860 \
    INFERENCEGYM_ALSO_PORT=8000 \
    ENABLE_WEB_INTERFACE=true

USER 1000
EXPOSE 7860 8000

HEALTHCHECK --interval=15s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ['INFERENCEGYM_PORT']}/health\", timeout=4)"]

CMD ["inferencegym", "serve"]
