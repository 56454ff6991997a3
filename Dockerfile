# medseg with its trained weights, as a user without rights.
#   CPU:   docker build -t medseg .
#   CUDA:  docker build -t medseg:cuda --build-arg DEVICE=cuda .
#   Use:   docker run --rm -v "$PWD:/data" --user "$(id -u):$(id -g)" medseg predict ct.nii.gz -o lungs.nii.gz        (CUDA: add --gpus all)
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# cpu: torch without CUDA libraries. cuda: torch of the package index, whose wheels bring them; the host needs the driver only.
ARG DEVICE=cpu
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/medseg
WORKDIR /source
COPY constraints.txt ./
# Its own layer: torch changes less often than medseg.
RUN case "$DEVICE" in \
        cpu) set -- --index-url "$CPU_INDEX" ;; \
        cuda) set -- ;; \
        *) echo "DEVICE: expected cpu or cuda, but got $DEVICE" >&2; exit 2 ;; \
    esac \
    && /opt/medseg/bin/pip install "$@" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY conf conf
COPY medseg medseg
RUN /opt/medseg/bin/pip install -c constraints.txt '.[openvino]'

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="medseg" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/medseg /opt/medseg
# Caches go to /tmp, which any user of the container may write to.
ENV PATH=/opt/medseg/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/tmp/cache MPLCONFIGDIR=/tmp/matplotlib
RUN useradd --create-home --uid 1000 medseg && mkdir /data && chown 1000 /data
USER 1000
WORKDIR /data
ENTRYPOINT ["medseg"]
CMD ["--help"]
