# shoal serve as an image (docs/deploy.md):
#
#   docker build --tag shoal .                                     a CPU
#   docker build --tag shoal:cuda --build-arg DEVICE=cuda .        NVIDIA GPUs: several gigabytes of CUDA's libraries
ARG PYTHON_VERSION=3.12
ARG DEVICE=cpu

FROM python:${PYTHON_VERSION}-slim-bookworm AS wheel
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY scripts/carried_kernels.py scripts/
COPY src src
# The wheel carries kernels, by which a container computes until its own are compiled
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON_VERSION}-slim-bookworm AS environment
ENV VIRTUAL_ENV=/opt/shoal UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never
RUN pip install --no-cache-dir uv==0.13.9 && uv venv --python /usr/local/bin/python /opt/shoal
COPY constraints.txt /opt/shoal/

# uv knows where PyTorch keeps its builds for CPUs; those of the main registry bring CUDA's libraries and Triton along
FROM environment AS torch-cpu
RUN uv pip install --constraint /opt/shoal/constraints.txt --torch-backend=cpu torch

FROM environment AS torch-cuda
RUN uv pip install --constraint /opt/shoal/constraints.txt torch

# hadolint ignore=DL3006
FROM torch-${DEVICE} AS installed
COPY --from=wheel /wheels /wheels
RUN uv pip install --constraint /opt/shoal/constraints.txt "$(ls /wheels/shoal-*.whl)[serve,syntax]"

FROM python:${PYTHON_VERSION}-slim-bookworm AS serve
# A C compiler: kernels are compiled for the processor on which the container runs. tini passes signals on while a model is loading.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home shoal \
    && install --directory --owner=shoal --group=shoal /var/cache/shoal
COPY --from=installed /opt/shoal /opt/shoal
# Models, compiled kernels and Triton's, in a folder that a volume can keep
ENV PATH=/opt/shoal/bin:$PATH \
    HF_HOME=/var/cache/shoal/huggingface \
    XDG_CACHE_HOME=/var/cache/shoal \
    TRITON_CACHE_DIR=/var/cache/shoal/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /home/shoal
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=30s --timeout=10s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=8)"]
ENTRYPOINT ["tini", "--", "shoal"]
CMD ["serve", "--host", "0.0.0.0"]
