# Headsmith on a machine with an NVIDIA GPU, whose driver takes CUDA 13:
#   docker build -t headsmith .
#   docker run --gpus all --ipc host -v "$PWD:/project" headsmith headsmith train eagle target.path=MODEL
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
# The compiler and Python.h are for torch.compile and for DeepSpeed's operators.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH HF_HOME=/project/.cache/huggingface
# Before the sources, so that a change of them does not load torch again.
RUN pip install --no-cache-dir torch==2.11.0 transformers==5.17.0
COPY . /src
RUN pip install --no-cache-dir /src && rm -rf /src
WORKDIR /project
CMD ["headsmith", "--help"]
