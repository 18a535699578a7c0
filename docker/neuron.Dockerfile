# trnpipe on Trainium: AWS's training image of Neuron SDK 2.29.1, the last one with PyTorch/XLA training, with our package
# and the packages it lacks in a virtual environment on top. Nothing of AWS's image is replaced: torch, torch-xla,
# torch-neuronx, neuronx-cc and numpy are the image's own, and the environment sees them.
# The host needs the Neuron driver (aws-neuronx-dkms) and, on several nodes, EFA's; there is none in the image.
#
# BASE_DIGEST pins the bytes behind the tag (make image BASE_DIGEST=sha256:...); docker buildx imagetools inspect <tag> shows it.
# Without it two builds may differ: the tag can move, and what pip brought into the image when AWS built it (CUDA's torch, a
# numpy of 1.26 or 2) is told by no tag. verify.py checks versions, not bytes.
ARG BASE_DIGEST=""
FROM public.ecr.aws/neuron/pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.29.1-ubuntu24.04${BASE_DIGEST:+@${BASE_DIGEST}} AS base

FROM base AS wheel
WORKDIR /src
# An environment of its own: the image's packages need their older setuptools.
RUN python3.12 -m venv /opt/build
COPY docker/build.lock docker/
RUN /opt/build/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement docker/build.lock
COPY pyproject.toml README.md LICENSE ./
COPY pipeline/ pipeline/
COPY jobs/ jobs/
COPY trnpipe/ trnpipe/
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM base AS build
WORKDIR /src
RUN python3.12 -m venv --system-site-packages --without-pip /opt/trnpipe
COPY docker/neuron.lock docker/
RUN python3.12 -m pip --python /opt/trnpipe/bin/python install --no-cache-dir --no-deps --require-hashes --requirement docker/neuron.lock
COPY --from=wheel /wheels/ /wheels/
RUN python3.12 -m pip --python /opt/trnpipe/bin/python install --no-cache-dir --no-deps --no-index /wheels/*.whl
COPY docker/verify.py docker/
# Without a device: is it all there, is it the image's, does it import, and does it fit together?
RUN PATH="/opt/trnpipe/bin:${PATH}" python docker/verify.py --expect torch==2.9.* --expect torch-xla==2.9.* --load torch_xla \
      --expect torch-neuronx==2.9.* --expect neuronx-cc==2.24.* \
      --outside torch --outside torch-xla --outside torch-neuronx --outside neuronx-cc --outside numpy

FROM base AS image
COPY --from=build /opt/trnpipe/ /opt/trnpipe/
COPY configs/ /srv/trnpipe/configs/
RUN useradd --uid 10001 --user-group --create-home trnpipe \
 && install --directory --mode=1777 /workspace
# No variable of EFA or of an interface (FI_*, CCOM_SOCKET_IFNAME) is set here: a job on one node is on the host's network,
# which has no eth0, and without EFA's devices. Jobs of several nodes get theirs with the job.
# Stated, since they change graphs and cache keys, or numbers: functionalization is off, as torch-neuronx has it by default;
# rounding is to nearest, as the master weights are fp32. 64 arenas: without a bound the memory of 32 processes grows with
# every checkpoint (AWS's training samples set the same).
ENV PATH="/opt/trnpipe/bin:${PATH}" \
    PYTHONUNBUFFERED=1 \
    XLA_DISABLE_FUNCTIONALIZATION=1 \
    NEURON_RT_STOCHASTIC_ROUNDING_EN=0 \
    MALLOC_ARENA_MAX=64
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=""
ENV TRN_REVISION="${REVISION}"
LABEL org.opencontainers.image.title="trnpipe, Neuron" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /srv/trnpipe
# Root, as in AWS's samples: who may open /dev/neuron* is up to the host's driver. To be checked on the first machine, with a group id that owns the devices: docker run --user 10001 ... neuron-ls
# hadolint ignore=DL3002
USER 0:0
# The image's asks a web server of SageMaker's.
HEALTHCHECK NONE
# The image's own entrypoint hands a job's words to the shell's eval. Here they are executed as they are; each job's begin
# with trnjobs-entry, which is a full PID 1 (signals, orphans).
ENTRYPOINT []
CMD ["trnpipe", "--help"]
