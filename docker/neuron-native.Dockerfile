# trnpipe on Trn2 and Trn3 with PyTorch's native Neuron device: AWS's training image of Neuron SDK 2.33 or later (TorchNeuron,
# torch-neuronx 2.14), with our package and the packages it lacks in a virtual environment on top. Nothing of AWS's image is
# replaced: torch, torch-neuronx, neuronx-cc and numpy are the image's own, and the environment sees them.
# The host needs the Neuron driver (aws-neuronx-dkms) and, on several nodes, EFA's; there is none in the image.
#
# BASE_IMAGE, repository and tag, has no default: AWS's pages of SDK 2.33 name such an image (setup/pytorch/dlc) and leave its tag
# to the list in github.com/aws-neuron/deep-learning-containers, of which no copy with 2.33 was at hand. Tags end in
# py314-sdk2.33.0-ubuntu26.04 there, by AWS's page on updating containers (setup/pytorch/update-dlc).
#   make image IMAGE=neuron-native BASE_IMAGE=public.ecr.aws/neuron/<repository>:<tag> BASE_DIGEST=sha256:...
# BASE_DIGEST pins the bytes behind the tag; docker buildx imagetools inspect <tag> shows it.
ARG BASE_IMAGE
ARG BASE_DIGEST=""
FROM ${BASE_IMAGE}${BASE_DIGEST:+@${BASE_DIGEST}} AS base

FROM base AS wheel
WORKDIR /src
# An environment of its own: the image's packages may need another setuptools.
RUN python3 -m venv /opt/build
COPY docker/build.lock docker/
RUN /opt/build/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement docker/build.lock
COPY pyproject.toml README.md LICENSE ./
COPY pipeline/ pipeline/
COPY jobs/ jobs/
COPY trnpipe/ trnpipe/
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM base AS build
WORKDIR /src
RUN python3 -m venv --system-site-packages --without-pip /opt/trnpipe
COPY docker/neuron-native.lock docker/
RUN python3 -m pip --python /opt/trnpipe/bin/python install --no-cache-dir --no-deps --require-hashes --requirement docker/neuron-native.lock
COPY --from=wheel /wheels/ /wheels/
RUN python3 -m pip --python /opt/trnpipe/bin/python install --no-cache-dir --no-deps --no-index /wheels/*.whl
COPY docker/verify.py docker/
# Without a device: is it all there, is it the image's, does it import, and does it fit together? An image whose packages lie in
# an environment of their own, which ours would not see, ends the build here.
RUN PATH="/opt/trnpipe/bin:${PATH}" python docker/verify.py --expect torch==2.14.* --expect torch-neuronx==2.14.* --expect neuronx-cc==2.* --without torch-xla \
      --outside torch --outside torch-neuronx --outside neuronx-cc --outside numpy

FROM base AS image
COPY --from=build /opt/trnpipe/ /opt/trnpipe/
COPY configs/ /srv/trnpipe/configs/
RUN useradd --uid 10001 --user-group --create-home trnpipe \
 && install --directory --mode=1777 /workspace
# No variable of EFA or of an interface (FI_*, CCOM_SOCKET_IFNAME) is set here: a job on one node is on the host's network,
# which has no eth0, and without EFA's devices. Jobs of several nodes get theirs with the job.
# Rounding is stated, since it changes numbers: to nearest, as the master weights are fp32. 64 arenas: without a bound the memory
# of many processes grows with every checkpoint. What runs on the host instead of the device is stated too: an operator that the
# device does not have, which training names; never a program or an operator that failed. With TRNPIPE_BACKEND a container that was given no core says so instead of
# falling back to its CPU.
ENV PATH="/opt/trnpipe/bin:${PATH}" \
    PYTHONUNBUFFERED=1 \
    NEURON_RT_STOCHASTIC_ROUNDING_EN=0 \
    TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION=1 \
    TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS=1 \
    MALLOC_ARENA_MAX=64 \
    TRNPIPE_BACKEND=neuron
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=""
ENV TRN_REVISION="${REVISION}"
LABEL org.opencontainers.image.title="trnpipe, native Neuron" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /srv/trnpipe
# Root, as in neuron.Dockerfile: who may open /dev/neuron* is up to the host's driver, and the health stage reads the kernel's log.
# hadolint ignore=DL3002
USER 0:0
HEALTHCHECK NONE
# The image's own entrypoint may hand a job's words to a shell. Here they are executed as they are; each job's begin with
# trnjobs-entry, which is a full PID 1 (signals, orphans).
ENTRYPOINT []
CMD ["trnpipe", "--help"]
