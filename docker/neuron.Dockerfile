# trnpipe on Trainium: AWS's training image of Neuron SDK 2.29.1, the last one with PyTorch/XLA training, with our package
# and the packages it lacks in a virtual environment on top. Nothing of AWS's image is replaced: torch, torch-xla,
# torch-neuronx, neuronx-cc and numpy are the image's own, and the environment sees them.
# The host needs the Neuron driver (aws-neuronx-dkms) and, on several nodes, EFA's; there is none in the image.
#
# BASE_DIGEST pins the bytes behind the tag (make image BASE_DIGEST=sha256:...); docker buildx imagetools inspect <tag> shows it.
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
# Several nodes talk through EFA with RDMA; the first meeting goes over the task's own interface, eth0 in a container.
# FI_EFA_FORK_SAFE is for kernels before 5.15 and costs elsewhere: set it in job_environment for an Amazon Linux 2 host.
ENV PATH="/opt/trnpipe/bin:${PATH}" \
    PYTHONUNBUFFERED=1 \
    FI_PROVIDER=efa \
    FI_EFA_USE_DEVICE_RDMA=1 \
    CCOM_SOCKET_IFNAME=eth0
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
# Root, as in AWS's samples: who may open /dev/neuron* is up to the host's driver, and the health stage reads the kernel's
# log. To be checked on the first machine, with a group id that owns the devices: docker run --user 10001 ... neuron-ls
# hadolint ignore=DL3002
USER 0:0
# The image's asks a web server of SageMaker's.
HEALTHCHECK NONE
# The image's own entrypoint hands a job's words to the shell's eval. Here they are executed as they are; each job's begin
# with trnjobs-entry, which is a full PID 1 (signals, orphans).
ENTRYPOINT []
CMD ["trnpipe", "--help"]
