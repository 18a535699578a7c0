# trnpipe on XLA:CPU: the jobs of the CPU queue, and a whole cycle on one machine:
#   make image IMAGE=cpu && docker run --rm --volume trnpipe:/workspace trnpipe:cpu-<revision>
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
COPY docker/torch-cpu.lock docker/cpu.lock docker/
RUN pip --python /opt/trnpipe/bin/python install --no-cache-dir --no-deps --require-hashes \
      --index-url https://download.pytorch.org/whl/cpu --requirement docker/torch-cpu.lock \
 && pip --python /opt/trnpipe/bin/python install --no-cache-dir --no-deps --require-hashes --requirement docker/cpu.lock
COPY --from=wheel /wheels/ /wheels/
RUN pip --python /opt/trnpipe/bin/python install --no-cache-dir --no-deps --no-index /wheels/*.whl
COPY docker/verify.py docker/
RUN PATH="/opt/trnpipe/bin:${PATH}" python docker/verify.py --expect torch==2.9.1 --expect torch-xla==2.9.0 --load torch_xla

FROM base AS image
COPY --from=build /opt/trnpipe/ /opt/trnpipe/
COPY configs/ /srv/trnpipe/configs/
# Any user id can run it (docker run --user): nothing is written but /tmp, the home and the workspace.
RUN useradd --uid 10001 --user-group --create-home trnpipe \
 && install --directory --mode=1777 /workspace \
 && chmod 1777 /home/trnpipe
ENV PATH="/opt/trnpipe/bin:${PATH}" \
    HOME=/home/trnpipe \
    PYTHONUNBUFFERED=1 \
    PJRT_DEVICE=CPU
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=""
ENV TRN_REVISION="${REVISION}"
LABEL org.opencontainers.image.title="trnpipe, XLA:CPU" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /srv/trnpipe
USER 10001:10001
HEALTHCHECK NONE
# A job's words are executed as they are; each begins with trnjobs-entry, which is a full PID 1 (signals, orphans).
ENTRYPOINT []
# What `make cycle` runs.
CMD ["trnjobs-entry", "--", "trnjobs", "submit", "--target", "local", "--config", "configs/quickstart.toml", "--workspace", "/workspace/quickstart", "--cycle", "first"]
