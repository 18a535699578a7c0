# trnpipe on NVIDIA GPUs, for parity with Trainium and for teams that train there:
#   docker run --rm --gpus all --shm-size 8g trnpipe:cuda-<revision> trnjobs-entry -- trnpipe health --workspace /workspace/a --cycle first
# PyTorch's wheels bring CUDA's libraries, the host its driver; torch-xla is not needed by this backend and left out.
#
# BASE_DIGEST pins the bytes behind the tag (make image BASE_DIGEST=sha256:...); docker buildx imagetools inspect <tag> shows it.
ARG BASE_DIGEST=""
FROM public.ecr.aws/docker/library/python:3.11.14-slim-bookworm${BASE_DIGEST:+@${BASE_DIGEST}} AS base

FROM base AS wheel
WORKDIR /src
COPY docker/build.lock docker/
RUN pip install --no-cache-dir --no-deps --require-hashes --requirement docker/build.lock
COPY pyproject.toml README.md LICENSE ./
COPY pipeline/ pipeline/
COPY jobs/ jobs/
COPY trnpipe/ trnpipe/
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM base AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/trnpipe
COPY docker/cuda.lock docker/
RUN pip --python /opt/trnpipe/bin/python install --no-cache-dir --no-deps --require-hashes --requirement docker/cuda.lock
COPY --from=wheel /wheels/ /wheels/
RUN pip --python /opt/trnpipe/bin/python install --no-cache-dir --no-deps --no-index /wheels/*.whl
COPY docker/verify.py docker/
RUN PATH="/opt/trnpipe/bin:${PATH}" python docker/verify.py --expect torch==2.11.0 --without torch-xla

# torch.compile, which training and embedding use on GPUs, needs a C compiler at run time.
FROM base AS runtime
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

FROM runtime AS image
COPY --from=build /opt/trnpipe/ /opt/trnpipe/
COPY configs/ /srv/trnpipe/configs/
# Any user id can run it (docker run --user): nothing is written but /tmp, the home and the workspace.
RUN useradd --uid 10001 --user-group --create-home trnpipe \
 && install --directory --mode=1777 /workspace \
 && chmod 1777 /home/trnpipe
# NVIDIA's container runtime looks at two of them: all devices that docker run --gpus allows, for computing and nvidia-smi.
# With TRNPIPE_BACKEND, a container that was given no GPU says so instead of falling back to its CPU.
ENV PATH="/opt/trnpipe/bin:${PATH}" \
    HOME=/home/trnpipe \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRNPIPE_BACKEND=cuda
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=""
ENV TRN_REVISION="${REVISION}"
LABEL org.opencontainers.image.title="trnpipe, CUDA" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /srv/trnpipe
USER 10001:10001
HEALTHCHECK NONE
# A job's words are executed as they are; each begins with trnjobs-entry, which is a full PID 1 (signals, orphans).
ENTRYPOINT []
CMD ["trnpipe", "--help"]
