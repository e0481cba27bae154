# The framework in a container. Two arguments decide what it runs on:
#   docker build -t fedbc .                                                                           a CPU
#   docker build -t fedbc --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 --build-arg TORCH_INDEX= .   a GPU
# The same two commands as outside; the run folders go to the mounted folder (with a GPU: docker run --gpus all ...):
#   docker run --rm -v "$PWD/runs:/app/runs" fedbc fit --config digits.yaml
#   docker run --rm -v "$PWD/runs:/app/runs" -p 6006:6006 --entrypoint tensorboard fedbc --logdir runs --bind_all
ARG BASE=ubuntu:24.04
FROM ${BASE}
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv g++ \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
# Without this index, pip takes the newest torch with CUDA, which has five gigabytes.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY . /src
RUN pip install ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} /src && rm -rf /src
WORKDIR /app
ENTRYPOINT ["fedbc-cli"]
CMD ["--help"]
