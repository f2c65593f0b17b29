# multilora's image, one target for each kind of device:
#
#   docker build -t multilora .                         Ascend NPUs (Atlas A2); docs/ascend.md
#   docker build --target cpu -t multilora:cpu .
#   docker build --target cuda -t multilora:cuda .
#
# Build arguments:
#   NPU_BASE, CPU_BASE, CUDA_BASE  any Debian, Ubuntu or openEuler with python3.11; CANN's images end in
#                                  910b-ubuntu22.04-py3.11 (A2), a3-ubuntu22.04-py3.11 (A3), 910b-openeuler24.03-py3.11, ...
#   TORCH_INDEX_URL                index of torch alone (targets npu and cpu); empty: wherever pip looks by itself
#   NPU_PINS                       2.13, or 2.12 for the second set of pins (target npu; docs/ascend.md)
#   TRITON_INDEX_URL               index of triton-ascend alone (target npu); empty: wherever pip looks by itself
#   DRIVER_GID                     gid of the host's group HwHiAiUser (target npu)
# Another package index for everything else comes with your own configuration of pip, which is not kept in the image:
#   --secret id=pip,src=$HOME/.config/pip/pip.conf
#
# In each target the layers are ordered by how seldom they change: compiler and user, torch, dependencies, the source.
ARG NPU_BASE=quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.11
ARG CPU_BASE=docker.io/library/python:3.11-slim-bookworm
ARG CUDA_BASE=docker.io/library/python:3.11-slim-bookworm

FROM scratch AS source
COPY . /


FROM ${CPU_BASE} AS cpu
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY deploy/image/prepare.sh /opt/multilora/image/
RUN /opt/multilora/image/prepare.sh
ENV PATH=/opt/multilora/venv/bin:$PATH \
    HOME=/home/multilora \
    PYTHONUNBUFFERED=1 \
    MULTILORA_DEVICE=cpu \
    MULTILORA_HOST=0.0.0.0 \
    MULTILORA_STORE_DIR=/var/lib/multilora/adapters
COPY constraints.txt /opt/multilora/image/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir --no-deps --constraint /opt/multilora/image/constraints.txt \
        ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
COPY pyproject.toml deploy/image/dependencies.py /opt/multilora/image/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python /opt/multilora/image/dependencies.py /opt/multilora/image/pyproject.toml otel >/tmp/dependencies && \
    pip install --no-cache-dir --constraint /opt/multilora/image/constraints.txt --requirement /tmp/dependencies && \
    rm /tmp/dependencies
COPY --from=source / /opt/multilora/src
RUN pip install --no-cache-dir --no-deps --no-build-isolation --no-index --editable /opt/multilora/src && \
    pip check && \
    python -m compileall -q /opt/multilora/src && \
    install /opt/multilora/src/deploy/image/entrypoint.sh /usr/local/bin/multilora-entrypoint && \
    python /opt/multilora/src/deploy/image/smoke.py cpu /opt/multilora/src/constraints.txt
USER 10001
WORKDIR /var/lib/multilora
VOLUME ["/var/lib/multilora"]
EXPOSE 8000
# Healthy means ready: while the model loads and kernels compile, it is "starting", for at most the start period.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["/opt/multilora/venv/bin/python", "/opt/multilora/src/deploy/image/health.py"]
ENTRYPOINT ["multilora-entrypoint"]
CMD ["multilora", "serve"]


FROM ${CUDA_BASE} AS cuda
COPY deploy/image/prepare.sh /opt/multilora/image/
RUN /opt/multilora/image/prepare.sh --compiler
# The two of NVIDIA ask its container toolkit for the devices and for the driver's libraries.
ENV PATH=/opt/multilora/venv/bin:$PATH \
    HOME=/home/multilora \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    MULTILORA_DEVICE=cuda \
    MULTILORA_HOST=0.0.0.0 \
    MULTILORA_STORE_DIR=/var/lib/multilora/adapters \
    TRITON_CACHE_DIR=/var/cache/multilora/triton
COPY constraints.txt constraints-cuda.txt /opt/multilora/image/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir --constraint /opt/multilora/image/constraints.txt \
        --constraint /opt/multilora/image/constraints-cuda.txt torch
COPY pyproject.toml deploy/image/dependencies.py /opt/multilora/image/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python /opt/multilora/image/dependencies.py /opt/multilora/image/pyproject.toml otel >/tmp/dependencies && \
    pip install --no-cache-dir --constraint /opt/multilora/image/constraints.txt \
        --constraint /opt/multilora/image/constraints-cuda.txt --requirement /tmp/dependencies && \
    rm /tmp/dependencies
COPY --from=source / /opt/multilora/src
RUN pip install --no-cache-dir --no-deps --no-build-isolation --no-index --editable /opt/multilora/src && \
    pip check && \
    python -m compileall -q /opt/multilora/src && \
    install /opt/multilora/src/deploy/image/entrypoint.sh /usr/local/bin/multilora-entrypoint && \
    python /opt/multilora/src/deploy/image/smoke.py cuda \
        /opt/multilora/src/constraints.txt /opt/multilora/src/constraints-cuda.txt
USER 10001
WORKDIR /var/lib/multilora
VOLUME ["/var/lib/multilora", "/var/cache/multilora"]
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["/opt/multilora/venv/bin/python", "/opt/multilora/src/deploy/image/health.py"]
ENTRYPOINT ["multilora-entrypoint"]
CMD ["multilora", "serve"]


# The last target is the default one. CANN's images put directories of their own on PYTHONPATH: pip is kept from them.
FROM ${NPU_BASE} AS npu
ARG DRIVER_GID=1000
COPY deploy/image/prepare.sh /opt/multilora/image/
RUN /opt/multilora/image/prepare.sh --compiler --jemalloc --driver-gid "$DRIVER_GID"
ENV PATH=/opt/multilora/venv/bin:$PATH \
    HOME=/home/multilora \
    PYTHONUNBUFFERED=1 \
    MULTILORA_DEVICE=npu \
    MULTILORA_HOST=0.0.0.0 \
    MULTILORA_STORE_DIR=/var/lib/multilora/adapters \
    TRITON_CACHE_DIR=/var/cache/multilora/triton
COPY constraints-npu.txt constraints-npu-2.12.txt /opt/multilora/image/
ARG NPU_PINS=2.13
RUN if [ "$NPU_PINS" != 2.13 ]; then \
        sed -i -E '/^(torch|torch-npu|triton-ascend|setuptools)==/d' /opt/multilora/image/constraints-npu.txt && \
        cat "/opt/multilora/image/constraints-npu-$NPU_PINS.txt" >>/opt/multilora/image/constraints-npu.txt; \
    fi
# torch's build for the CPU: torch_npu refuses to live beside one for CUDA, which is what the default index has.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    PYTHONPATH='' pip install --no-cache-dir --no-deps --constraint /opt/multilora/image/constraints-npu.txt \
        ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
COPY pyproject.toml deploy/image/dependencies.py /opt/multilora/image/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python /opt/multilora/image/dependencies.py /opt/multilora/image/pyproject.toml npu >/tmp/dependencies && \
    PYTHONPATH='' pip install --no-cache-dir --constraint /opt/multilora/image/constraints-npu.txt \
        --requirement /tmp/dependencies && \
    rm /tmp/dependencies
# triton-ascend is imported as `triton`, like upstream's: it is installed last of all packages, alone, and patched.
COPY deploy/image/patch_triton_ascend.py /opt/multilora/image/
ARG TRITON_INDEX_URL=
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    PYTHONPATH='' pip install --no-cache-dir --no-deps --constraint /opt/multilora/image/constraints-npu.txt \
        ${TRITON_INDEX_URL:+--index-url "$TRITON_INDEX_URL"} triton-ascend && \
    PYTHONPATH='' python /opt/multilora/image/patch_triton_ascend.py
COPY --from=source / /opt/multilora/src
RUN export PYTHONPATH='' TORCH_DEVICE_BACKEND_AUTOLOAD=0 && \
    pip install --no-cache-dir --no-deps --no-build-isolation --no-index --editable /opt/multilora/src && \
    pip check && \
    python -m compileall -q /opt/multilora/src && \
    install /opt/multilora/src/deploy/image/entrypoint.sh /usr/local/bin/multilora-entrypoint && \
    python /opt/multilora/src/deploy/image/smoke.py npu /opt/multilora/image/constraints-npu.txt
USER 10001
WORKDIR /var/lib/multilora
VOLUME ["/var/lib/multilora", "/var/cache/multilora"]
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["/opt/multilora/venv/bin/python", "/opt/multilora/src/deploy/image/health.py"]
ENTRYPOINT ["multilora-entrypoint"]
CMD ["multilora", "serve"]
